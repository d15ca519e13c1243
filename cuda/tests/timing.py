"""Times of the kernels beside the measured copy rate: `python3 cuda/check.py --time` or `--only-time`."""
import ctypes as C
import math
import statistics
import time

import torch
from abi import (ALGO_NAMES, AUTO, CHUNKED, OK, RECURRENT, RECURRENT_128, ConvParams, Heads, NormParams, Slots, ptr,
                 rule_params, sequences, stream, workspace)


def device_activities(run, ahead=0.0):
    """(start, duration) in µs of everything the GPU did during run(), in order of start: kernels, and copies and fills
    too, as CUPTI tells. The GPU first waits `ahead` seconds, in which the host gets ahead of it: else a slow host would
    show as gaps between the kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
        if ahead:
            torch.cuda._sleep(int(ahead * 2e9))     # cycles
        run()
        torch.cuda.synchronize()
    # With the CUDA activity alone the host's side of a launch is listed too, as an event of the CPU.
    events = sorted((e.time_range.start, e.time_range.elapsed_us()) for e in prof.events()
                    if e.device_type == DeviceType.CUDA)
    return events[1:] if ahead else events


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
    """Median over calls of the GPU time of a call (CUPTI), see spans()."""
    ahead = ahead_of(host_seconds(calls), len(calls))
    launches, times = spans(device_activities(lambda: [call() for call in calls], ahead), len(calls))
    return statistics.median(times) if launches else math.nan


def graph_us(calls, replays=7):
    """Median over replays of a CUDA graph of all the calls, per call: kernels back to back, launch gaps included."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for call in calls:
            call()
    out = []
    for _ in range(replays):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        out.append(a.elapsed_time(b) * 1e3 / len(calls))
    return sorted(out)[len(out) // 2]


def copy_rate():
    """Bytes read plus written a second by a large copy, the best of several ways."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    best = 0.0
    for copy in (lambda: y.copy_(x), lambda: torch.add(x, 1.0, out=y)):
        for _ in range(5):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(4):
                copy()
            b.record()
            torch.cuda.synchronize()
            best = max(best, 4 * 2 * x.numel() * 4 / (a.elapsed_time(b) * 1e-3))
    return best


def rule_calls(lib, batch, tokens, hk, hv, dim, algo, sets, segments=0):
    """Calls that each touch other memory than the last, but for the workspace: `sets` is enough of them to pass the L2
    cache. A call's `params` and `o` are its own; its states are updated in place."""
    calls = []
    t = batch * tokens
    shared = torch.rand(hv, device="cuda"), torch.randn(hv, device="cuda") - 4
    for _ in range(sets):
        qkv = torch.randn(t, (2 * hk + hv) * dim, device="cuda").bfloat16()
        ba = torch.randn(t, 2 * hv, device="cuda").bfloat16()
        o = torch.empty(t, hv * dim, device="cuda", dtype=torch.bfloat16)
        state = torch.randn(batch, hv, dim, dim, device="cuda") * 0.1
        view = lambda x, first, size: Heads(ptr(x) + first * x.element_size(), tokens * x.stride(0), x.stride(0), size)
        slots = Slots(None, batch, hv * dim * dim)
        p = rule_params(q=view(qkv, 0, dim), k=view(qkv, hk * dim, dim), v=view(qkv, 2 * hk * dim, dim), a=view(ba, hv, 1),
                        b=view(ba, 0, 1), a_log=shared[0], dt_bias=shared[1], o=view(o, 0, dim), state_in=state,
                        state_out=state, in_slots=slots, out_slots=slots, seqs=sequences([tokens] * batch), num_k_heads=hk,
                        num_v_heads=hv, head_k=dim, head_v=dim, io_dtype=1, gate_dtype=1, l2norm=1, algo=algo,
                        segments=segments)
        def call(p=p, keep=(qkv, ba, state, shared)):
            status = lib.gdn_rule(C.byref(p), stream())
            assert status == OK, lib.gdn_status_string(status)
        call.params, call.o, call.state = p, o, state
        calls.append(call)
    workspace(lib, *(call.params for call in calls))
    return calls


def times(lib, small):
    rate = copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; µs: kernel time (CUPTI) / graph replay a call")
    print("decode, HK/HV 16/32, K = V = 128, bf16, cold L2")
    for batch in (1, 4, 8, 32, 64, 128, 256):
        nbytes = batch * 32 * 128 * 128 * 4 * 2
        sets = max(3, min(96, int(3e8 / nbytes) + 1))
        calls = rule_calls(lib, batch, 1, 16, 32, 128, AUTO, sets)
        k, g = span_us(calls * (1 if sets > 20 else 4)), graph_us(calls)
        floor = nbytes / rate * 1e6
        print(f"  B={batch:4d}  {k:7.2f} / {g:7.2f}   floor {floor:6.1f}   {100 * floor / k:4.0f} % of the copy rate", flush=True)
    print("prefill, HK/HV 16/32, K = V = 128, bf16")
    shapes = [(1, 16), (1, 64), (1, 512), (1, 2048), (1, 8192), (4, 2048), (8, 1024)]
    for batch, tokens in shapes[:4] if small else shapes:
        row = []
        for algo in (RECURRENT_128, RECURRENT, CHUNKED):
            calls = rule_calls(lib, batch, tokens, 16, 32, 128, algo, 8 if batch * tokens <= 2048 else 2)
            row.append(f"{ALGO_NAMES[algo]} {span_us(calls * 2):8.1f} / {graph_us(calls, 5):8.1f}")
        print(f"  {batch}x{tokens:<6d} " + "   ".join(row), flush=True)
    for hk, hv, dim in ((4, 8, 128), (16, 64, 128), (16, 16, 256), (30, 30, 96)):
        row = []
        for algo in (RECURRENT, CHUNKED, AUTO):
            calls = rule_calls(lib, 1, 2048, hk, hv, dim, algo, 3)
            row.append(f"{ALGO_NAMES[algo]} {span_us(calls * 2):8.1f}")
        print(f"  1x2048 heads {hk}/{hv} K=V={dim}: " + "   ".join(row), flush=True)

    times_conv(lib, rate)
    times_norm(lib, rate)


def times_conv(lib, rate):
    print("convolution, 8192 channels, width 4, bf16, in place")
    for batch, tokens in ((1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (1, 64), (1, 512), (1, 2048), (1, 8192), (8, 1024)):
        calls, keep = [], []
        for _ in range(max(2, min(64, int(3e8 / (batch * (tokens * 32768 + 100000))) + 1))):
            x = torch.randn(batch, tokens, 12288, device="cuda").bfloat16()
            y = torch.empty(batch, tokens, 8192, device="cuda", dtype=torch.bfloat16)
            state = torch.randn(batch, 3, 8192, device="cuda").bfloat16()
            w = torch.randn(8192, 4, device="cuda").bfloat16()
            slots = Slots(None, batch, 3 * 8192)
            p = ConvParams(Heads(x.data_ptr(), x.stride(0), x.stride(1), 0), Heads(y.data_ptr(), y.stride(0), y.stride(1), 0),
                           w.data_ptr(), state.data_ptr(), state.data_ptr(), slots, slots,
                           sequences([tokens] * batch), 8192, 4, 1, 1, 1)
            keep.append((x, y, state, w))
            calls.append(lambda p=p: lib.gdn_conv(C.byref(p), stream()))
        nbytes = batch * 8192 * 2 * (2 * tokens + 6) + 8192 * 8
        k = span_us(calls * (1 if len(calls) > 20 else 4))
        print(f"  {batch}x{tokens:<6d} {k:7.2f} / {graph_us(calls):7.2f}   floor {nbytes / rate * 1e6:6.2f}", flush=True)


def times_norm(lib, rate):
    print("gated norm, 32 heads of 128, bf16")
    for tokens in (1, 8, 32, 128, 512, 2048, 8192):
        calls, keep = [], []
        for _ in range(max(2, min(64, int(3e8 / (tokens * 24576)) + 1))):
            x, z, out = (torch.randn(tokens, 4096, device="cuda").bfloat16() for _ in range(3))
            w = torch.randn(128, device="cuda")
            h = lambda t: Heads(t.data_ptr(), 0, 4096, 128)
            p = NormParams(h(x), h(z), h(out), w.data_ptr(), tokens, 32, 128, 1, 0, 0, 1e-6)
            keep.append((x, z, out, w))
            calls.append(lambda p=p: lib.gdn_norm(C.byref(p), stream()))
        k = span_us(calls * (1 if len(calls) > 20 else 4))
        print(f"  T={tokens:<6d} {k:7.2f} / {graph_us(calls):7.2f}   floor {tokens * 24576 / rate * 1e6:6.2f}", flush=True)
