"""All clocks at once, for the records of the contenders. All times are in microseconds a call."""
import itertools
import math
import statistics
import time

import torch
from timing import ahead_of, best_rate, capture, copy_rate, device_activities, elapsed_us, one_line, spans

COLD = 3                    # measure(): a buffer is used again only after this many times L2 has been touched
MAX_SETS = 512
GPU_BUDGET, EVENT_BUDGET, CALL_BUDGET, WALL_BUDGET = 0.08, 0.12, 0.08, 0.08     # seconds of calls for each clock of measure()
WARM_UP = 0.01              # seconds of calls before each of them
QUEUED = 512                # launches that the driver surely keeps for a GPU that waits: past a thousand or so the host waits for it
GRAPH_US, GRAPH_CALLS = 1000, 8     # a graph is at least this long: its own start is part of what is timed


def event_us(graph):
    """Of a replay. Another one runs ahead of it and hides the time that the host needs."""
    graph.replay()
    return elapsed_us(graph.replay)


def sets_for(touched, l2, l2_bytes):
    """How many sets of buffers a workload rotates over, from the bytes that one call touches."""
    return 1 if l2 == "warm" else max(2, min(MAX_SETS, -(-COLD * l2_bytes // touched)))


def spread(values):
    """The record's form of many timings."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def call_us(call):
    """Between two events around one call with the GPU idle before: what the host needs for the launch is in it."""
    torch.cuda.synchronize()
    return elapsed_us(call)


def wall_and_host_us(call):
    """(until the GPU is done, until the call returned) of one call with the GPU idle before."""
    start = time.perf_counter_ns()
    call()
    returned = time.perf_counter_ns()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e3, (returned - start) / 1e3


def clamp(x, low, high):
    return max(low, min(high, int(x)))


def measure(calls):
    """A dict of gpu, event, call, wall, host, launches and note. The calls go on where the last clock stopped."""
    turn = itertools.cycle(calls)
    row = {"gpu": None, "event": None, "call": None, "wall": None, "host": None, "launches": None, "note": ""}
    notes = []

    def go(n):
        for _ in range(n):
            next(turn)()

    def warm_up():
        end = time.perf_counter() + WARM_UP
        while time.perf_counter() < end:
            go(3)
            torch.cuda.synchronize()

    # Whatever compiles, tunes itself or allocates at first use has run; host or GPU, the slower one sets the pace.
    go(min(3, len(calls)))
    torch.cuda.synchronize()
    start = time.perf_counter()
    go(3)
    host = (time.perf_counter() - start) / 3
    torch.cuda.synchronize()
    pace = (time.perf_counter() - start) / 3

    warm_up()
    each = math.ceil(len(device_activities(lambda: go(3), ahead_of(host, 3))) / 3)
    n = min(clamp(GPU_BUDGET / pace, 5, 60), QUEUED // max(each, 1))
    events = device_activities(lambda: go(n), ahead_of(host, n)) if n else []
    if not n:
        row["launches"] = each
        notes.append("gpu: not timed, a call has more launches than the driver queues, so that a slow host would appear as gaps")
    elif events:
        launches, times = spans(events, n)
        row["launches"], row["gpu"] = launches, spread(times)
        if launches is None:
            notes.append(f"gpu is a mean: launches differ from call to call, {len(events) / n:.1f} on average")
    else:
        notes.append("CUPTI saw nothing on the GPU")

    warm_up()
    row["call"] = spread([call_us(next(turn)) for _ in range(clamp(CALL_BUDGET / pace, 5, 100))])

    warm_up()
    n = clamp(WALL_BUDGET / pace, 5, 100)
    both = [wall_and_host_us(next(turn)) for _ in range(n)]
    row["wall"], row["host"] = spread([wall for wall, _ in both]), spread([host for _, host in both])

    kernel_us = max(row["gpu"]["median"] if events else pace * 1e6, 0.5)
    # At least 8 calls, but no more than let five replays, and as many ahead of them, fit the budget.
    least = clamp(EVENT_BUDGET * 1e6 / (10 * kernel_us), 1, GRAPH_CALLS)
    wanted = min(max(GRAPH_US / kernel_us, least), MAX_SETS)
    rounds = max(1, math.ceil(wanted / len(calls)))
    try:
        graph = capture(calls * rounds)
        n = len(calls) * rounds
        graph.replay()
        torch.cuda.synchronize()
        replays = clamp(EVENT_BUDGET * 1e6 / (2 * n * kernel_us), 5, 20)
        row["event"] = spread([event_us(graph) / n for _ in range(replays)])
        del graph
    except Exception as e:
        torch.cuda.synchronize()    # a broken GPU is not a missing clock
        notes.append(f"event: no CUDA graph ({one_line(e)})")
    row["note"] = "; ".join(notes)
    return row


def matmul_rate(n=8192, repeats=12):
    """FLOP/s of a large bf16 matrix product of random numbers."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return best_rate(lambda: torch.mm(a, b, out=out), 2 * n ** 3, repeats)


def ceilings():
    """The record's ceilings: GB/s read plus written by a copy, and TFLOP/s of the matrix product."""
    rates = {"copy_gb_s": round(copy_rate() / 1e9, 1)}
    torch.cuda.empty_cache()
    rates["matmul_tflop_s"] = round(matmul_rate() / 1e12, 1)
    torch.cuda.empty_cache()
    return rates
