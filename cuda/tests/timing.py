"""The clocks, used alike for every kernel and every peer, and the rates that their times are held against. All times are
in microseconds a call.

What is timed is a list of calls, one a set of buffers. They are called in turn, so that with enough sets no call finds its
buffers in the L2 cache.
"""
import math
import statistics
import time

import torch


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
    it has ended counts from there on. Where the calls launched differently, the calls cannot be separated: then the
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


# ---- calls of the kernels ----

def cold_sets(nbytes, least=3, most=64):
    """How many sets of so many bytes pass the L2 cache several times."""
    return max(least, min(most, int(3e8 / nbytes) + 1))


def often(calls, least=24):
    """So many calls at least, in whole turns."""
    return calls * max(1, least // len(calls))


def heading(text):
    """Prints what all tables begin with; the copy rate in bytes a second."""
    rate = copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; {text}", flush=True)
    return rate


def by_kernel(calls):
    """The short name and the median us of each kernel of these calls, in words."""
    found = {}
    for e in device_events(lambda: [call() for call in calls]):
        if "_kernel" in e.name:
            name = e.name.split("_kernel")[0].split("::")[-1].split(" ")[-1]
            found.setdefault(name + ", down" * ("false" in e.name or "(bool)0" in e.name), []).append(e.time_range.elapsed_us())
    return ", ".join(f"{name} {statistics.median(t):.1f}" for name, t in found.items())


def compare(lib, title, make, table, label):
    """Prints times. make(lib, seed=.., **case) of each case of the table is a harness.Launch; so many of them take turns that no call
    finds its memory in the L2 cache. label(case): its name."""
    rate = heading(f"{title}, cold L2\n  us a call: kernels (CUPTI) / in a graph, share of the copy rate; the floor is the bytes at that rate")
    for case in table:
        before = torch.cuda.memory_allocated()
        first = make(lib, **{"seed": 0, **case})
        held = max(torch.cuda.memory_allocated() - before, 1)
        try:
            first.run()
        except AssertionError as e:
            print(f"  {label(case):40s} {e}", flush=True)
            continue
        # A launch may hold far more than it reads: all experts, of which a few are chosen.
        count = max(2, min(cold_sets(max(first.nbytes, 1)), int(0.7 * torch.cuda.mem_get_info()[0] / held)))
        sets = [first] + [make(lib, **{**case, "seed": seed}) for seed in range(1, count)]
        floor, found = first.nbytes / rate * 1e6, []
        for overlap in (0, 1) if first.overlaps else (0,):
            for x in sets:
                x.set_overlap(overlap)
            calls = often([x.run for x in sets])
            kernels = span_us(calls)
            found.append(f"{'overlapped ' * overlap}{kernels:.2f} / {graph_us(calls, 5):.2f} ({100 * floor / kernels:.0f} %)")
        print(f"  {label(case):40s} floor {floor:8.2f}   {'   '.join(found)}   {by_kernel(calls[:12])}", flush=True)
        del sets, first, calls, x
        torch.cuda.empty_cache()
