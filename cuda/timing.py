"""Times of the kernels beside the measured copy rate: `python3 cuda/check.py --time` or `--only-time`."""
import ctypes as C
import math

import torch
from abi import (ALGO_NAMES, AUTO, CHUNKED, OK, RECURRENT, RECURRENT_128, ConvParams, Heads, NormParams, RuleParams,
                 Sequences, Slots, stream)


def kernel_us(calls):
    """Median over calls of the GPU time of all the kernels of a call (CUPTI)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
        for call in calls:
            call()
        torch.cuda.synchronize()
    events = sorted((e for e in prof.events() if e.device_type == DeviceType.CUDA), key=lambda e: e.time_range.start)
    each = len(events) // len(calls)
    if each == 0 or len(events) != each * len(calls):
        return math.nan
    times = sorted(sum(e.time_range.elapsed_us() for e in events[i:i + each]) for i in range(0, len(events), each))
    return times[len(times) // 2]


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


def rule_calls(lib, batch, tokens, hk, hv, dim, algo, sets):
    """Calls that each touch other memory than the last: `sets` is enough of them to pass the L2 cache."""
    calls, keep = [], []
    t = batch * tokens
    shared = torch.rand(hv, device="cuda"), torch.randn(hv, device="cuda") - 4
    for _ in range(sets):
        qkv = torch.randn(t, (2 * hk + hv) * dim, device="cuda").bfloat16()
        ba = torch.randn(t, 2 * hv, device="cuda").bfloat16()
        o = torch.empty(t, hv * dim, device="cuda", dtype=torch.bfloat16)
        state = torch.randn(batch, hv, dim, dim, device="cuda") * 0.1
        view = lambda x, first, size: Heads(x.data_ptr() + first * x.element_size(), tokens * x.stride(0), x.stride(0), size)
        slots = Slots(None, batch, hv * dim * dim)
        p = RuleParams(view(qkv, 0, dim), view(qkv, hk * dim, dim), view(qkv, 2 * hk * dim, dim), view(ba, hv, 1),
                       view(ba, 0, 1), shared[0].data_ptr(), shared[1].data_ptr(), view(o, 0, dim), state.data_ptr(),
                       state.data_ptr(), None, slots, slots, Sequences(None, batch, tokens, tokens), hk, hv, dim, dim, 1, 1, 0, 1,
                       algo, 1e-6, dim ** -0.5, 1.0)
        keep.append((qkv, ba, o, state, p, shared))
        def call(p=p):
            status = lib.gdn_rule(C.byref(p), stream())
            assert status == OK, lib.gdn_status_string(status)
        calls.append(call)
    calls[0].keep = keep
    return calls


def times(lib, small):
    rate = copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; µs: kernel time (CUPTI) / graph replay a call")
    print("decode, HK/HV 16/32, K = V = 128, bf16, cold L2")
    for batch in (1, 4, 8, 32, 64, 128, 256):
        nbytes = batch * 32 * 128 * 128 * 4 * 2
        sets = max(3, min(96, int(3e8 / nbytes) + 1))
        calls = rule_calls(lib, batch, 1, 16, 32, 128, AUTO, sets)
        k, g = kernel_us(calls * (1 if sets > 20 else 4)), graph_us(calls)
        floor = nbytes / rate * 1e6
        print(f"  B={batch:4d}  {k:7.2f} / {g:7.2f}   floor {floor:6.1f}   {100 * floor / k:4.0f} % of the copy rate", flush=True)
    print("prefill, HK/HV 16/32, K = V = 128, bf16")
    shapes = [(1, 16), (1, 64), (1, 512), (1, 2048), (1, 8192), (4, 2048), (8, 1024)]
    for batch, tokens in shapes[:4] if small else shapes:
        row = []
        for algo in (RECURRENT_128, RECURRENT, CHUNKED):
            calls = rule_calls(lib, batch, tokens, 16, 32, 128, algo, 8 if batch * tokens <= 2048 else 2)
            row.append(f"{ALGO_NAMES[algo]} {kernel_us(calls * 2):8.1f} / {graph_us(calls, 5):8.1f}")
        print(f"  {batch}x{tokens:<6d} " + "   ".join(row), flush=True)
    for hk, hv, dim in ((4, 8, 128), (16, 64, 128), (16, 16, 256), (30, 30, 96)):
        row = []
        for algo in (RECURRENT, CHUNKED, AUTO):
            calls = rule_calls(lib, 1, 2048, hk, hv, dim, algo, 3)
            row.append(f"{ALGO_NAMES[algo]} {kernel_us(calls * 2):8.1f}")
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
                           Sequences(None, batch, tokens, tokens), 8192, 4, 1, 1, 1)
            keep.append((x, y, state, w))
            calls.append(lambda p=p: lib.gdn_conv(C.byref(p), stream()))
        nbytes = batch * 8192 * 2 * (2 * tokens + 6) + 8192 * 8
        k = kernel_us(calls * (1 if len(calls) > 20 else 4))
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
        k = kernel_us(calls * (1 if len(calls) > 20 else 4))
        print(f"  T={tokens:<6d} {k:7.2f} / {graph_us(calls):7.2f}   floor {tokens * 24576 / rate * 1e6:6.2f}", flush=True)
