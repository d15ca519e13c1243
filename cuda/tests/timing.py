"""The clocks, used alike for every kernel and every peer, and the rates that their times are held against. All times are
in microseconds a call.

What is timed is a list of calls, one a set of buffers. They are called in turn, so that with enough sets no call finds its
buffers in the L2 cache.
"""
import ctypes as C
import itertools
import math
import statistics
import time

import torch
from abi import OK, stream

COLD = 3                    # measure(): a buffer is used again only after this many times L2 has been touched
MAX_SETS = 512
GPU_BUDGET, EVENT_BUDGET, CALL_BUDGET, WALL_BUDGET = 0.08, 0.12, 0.08, 0.08     # seconds of calls for each clock of measure()
WARM_UP = 0.01              # seconds of calls before each of them
GRAPH_US, GRAPH_CALLS = 1000, 8     # a graph is at least this long: its own start is part of what is timed


# ---- the time between a call's first kernel and its last (CUPTI) ----

def device_events(run, ahead=0.0):
    """What the GPU did during run(), by CUPTI: kernels, and copies and fills too. The GPU first waits `ahead` seconds, in
    which the host gets ahead of it: else a slow host would show as gaps between the kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
        if ahead:
            torch.cuda._sleep(int(ahead * 2e9))     # cycles
        run()
        torch.cuda.synchronize()
    # With the CUDA activity alone the host's side of a launch is listed too, as an event of the CPU.
    events = sorted((e for e in prof.events() if e.device_type == DeviceType.CUDA), key=lambda e: e.time_range.start)
    return events[1:] if ahead else events


def device_activities(run, ahead=0.0):
    """(start, duration) in µs of each, in order of start."""
    return sorted((e.time_range.start, e.time_range.elapsed_us()) for e in device_events(run, ahead))


def spans(events, calls):
    """(launches a call, [µs of each call]) of what the GPU did during equal calls one after the other.

    A call lasts from the begin of its first activity to the end of its last: kernels that overlap (programmatic dependent
    launch) are counted once, gaps between them count. Nothing counts for two calls: one that begins before the one before
    it has ended counts from there on. Where the calls launched differently no call can be told from the next: then the
    number of launches is None and the only time the mean of what the GPU was busy.
    """
    events = sorted(events)
    launches, rest = divmod(len(events), calls)
    whole = launches > 0 and rest == 0
    each, end = launches if whole else 1, -math.inf
    times = []
    for i in range(0, len(events), each):
        begin = max(events[i][0], end)
        end = max(end, *(start + duration for start, duration in events[i:i + each]))
        times.append(end - begin)
    return (launches, times) if whole else (None, [sum(times) / calls])


def host_seconds(calls):
    """Of the host in one of these calls, after a warm-up."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in calls[:3]:
            call()
        host = (time.perf_counter() - start) / len(calls[:3])
    torch.cuda.synchronize()
    return host


def ahead_of(host, calls):
    """Seconds that the GPU waits for a host that takes `host` seconds a call, and longer when it is watched."""
    return 3 * host * calls + 1e-3


def span_us(calls):
    """Median over calls of the GPU time of a call, see spans()."""
    ahead = ahead_of(host_seconds(calls), len(calls))
    launches, times = spans(device_activities(lambda: [call() for call in calls], ahead), len(calls))
    return statistics.median(times) if launches else math.nan


# ---- CUDA graphs and events ----

def capture(calls):
    """A CUDA graph of the calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def elapsed_us(run):
    """Between two events around run()."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def graph_us(calls, replays=7):
    """Median over replays of a CUDA graph of all the calls, per call: kernels back to back, launch gaps included."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = capture(calls)
    return sorted(elapsed_us(graph.replay) / len(calls) for _ in range(replays))[replays // 2]


def event_us(graph):
    """Of a replay. Another one runs ahead of it and hides the time that the host needs."""
    graph.replay()
    return elapsed_us(graph.replay)


# ---- all clocks at once ----

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
    n = clamp(GPU_BUDGET / pace, 5, 60)
    events = device_activities(lambda: go(n), ahead_of(host, n))
    if events:
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


def one_line(e, width=160):
    text = " ".join(f"{type(e).__name__}: {e}".split())
    return text if len(text) <= width else text[:width - 1] + "…"


# ---- rates ----

def best_rate(run, amount, repeats):
    """Amount a second of run(), the best of several times four."""
    return max(4 * amount / (elapsed_us(lambda: [run() for _ in range(4)]) * 1e-6) for _ in range(repeats))


def copy_rate():
    """Bytes read plus written a second by a large copy, the best of several ways."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    return max(best_rate(copy, 2 * x.numel() * 4, 5) for copy in (lambda: y.copy_(x), lambda: torch.add(x, 1.0, out=y)))


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


# ---- calls of the kernels ----

def cold_sets(nbytes, least=3, most=64):
    """How many sets of so many bytes pass the L2 cache several times."""
    return max(least, min(most, int(3e8 / nbytes) + 1))


def calls_of(lib, launches):
    """A call for each (function, params) or list of these."""
    def make(several):
        several = several if isinstance(several, list) else [several]

        def call():
            for f, params in several:
                status = f(C.byref(params), stream())
                assert status == OK, lib.gdn_status_string(status).decode()
        return call
    return [make(several) for several in launches]


def stamped(lib, calls, events):
    """The same calls of a library built with -DGDN_PROFILE, each of which records so many events a warp at most; all into one
    buffer."""
    room = torch.zeros(1 << 31, dtype=torch.uint8, device="cuda")

    def make(call):
        def run():
            status = lib.gdn_profile_set(room.data_ptr(), room.numel(), events)
            assert status == OK, lib.gdn_status_string(status).decode()
            call()
            lib.gdn_profile_set(None, 0, 0)
        return run
    return [make(call) for call in calls]


def often(calls, least=24):
    """So many calls at least, in whole turns."""
    return calls * max(1, least // len(calls))


def heading(text):
    """Prints what all tables begin with; the copy rate in bytes a second."""
    rate = copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; {text}", flush=True)
    return rate


def compare(title, table):
    """Prints times. A row of the table is (label, the bytes that a call has to move, {name: calls, or words}); after each row its
    memory is freed. A list of lists of calls is a cycle: the mean over the lists of the median of each counts."""
    rate = heading(f"{title}\n  us a call: kernels (CUPTI) / in a graph, share of the copy rate; the floor is all bytes at that rate")
    for label, nbytes, variants in table:
        floor, found, kinds = nbytes / rate * 1e6, [], None
        for name, calls in variants.items():
            try:
                if not isinstance(calls, str):
                    kinds = calls if isinstance(calls[0], list) else [calls]
                    kernels = statistics.mean(span_us(often(kind)) for kind in kinds)
                    in_graph = graph_us([call for turn in zip(*kinds) for call in turn], 5)
                    calls = f"{kernels:.2f} / {in_graph:.2f} ({100 * floor / kernels:.0f} %)"
            except RuntimeError as e:       # where torch has no memory or no kernel for it
                calls = one_line(e, 40)
            found.append(f"{name} {calls}")
        print(f"  {label:32s} floor {floor:8.2f}   " + "   ".join(found), flush=True)
        del variants, calls, kinds
        torch.cuda.empty_cache()
