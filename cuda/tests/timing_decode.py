"""Times of the decode kernels: `python3 cuda/check_decode.py --time`."""
import ctypes as C

import torch
from abi import (DECODE_128, OK, RECURRENT_128, ConvParams, Heads, LinearParams, NormParams, Slots, sequences, stream,
                 workspace)
from timing import copy_rate, graph_us, span_us

DIM = 128


def calls_of(lib, f, params):
    def make(p):
        def call():
            status = f(C.byref(p), stream())
            assert status == OK, lib.gdn_status_string(status).decode()
        return call
    return [make(p) for p in params]


def sets(nbytes):
    """Enough of them to pass the L2 cache."""
    return max(3, min(64, int(2.6e8 / nbytes) + 1))


def times(lib):
    from check_decode import Case
    rate = copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; µs of kernel time (CUPTI), cold L2, bf16 inputs")
    print("| HK/HV | B | floor | rule | step | step / rule | conv + rule + norm | rule, bf16 state | of f32 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for hk, hv in ((16, 32), (16, 48), (2, 8)):
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256) if hv == 32 else (1, 4, 16, 64):
            nbytes = 2 * batch * hv * DIM * DIM * 4
            rule, step, conv, norm, narrow, keep = [], [], [], [], [], []
            for i in range(sets(nbytes)):
                c = Case([1] * batch, hk, hv, seed=i)
                b = c.buffers()
                rule.append(c.rule_params(0, b[0], b[1], b[4], None))
                step.append(c.step_params(0, *b))
                slots = Slots(None, batch, c.conv_size)
                seqs = sequences([1] * batch)
                y = torch.empty(batch, c.channels, device="cuda", dtype=torch.bfloat16)
                conv.append(ConvParams(Heads(c.x.data_ptr(), c.x.stride(0), 0, 0), Heads(y.data_ptr(), c.channels, 0, 0),
                                       c.conv_weight.data_ptr(), b[2].data_ptr(), b[2].data_ptr(), slots, slots, seqs,
                                       c.channels, 4, 1, 1, 1))
                o = Heads(b[4].data_ptr(), 0, hv * DIM, DIM)
                z = Heads(c.x.data_ptr() + 2 * c.channels, 0, c.x.stride(0), DIM)
                norm.append(NormParams(o, z, o, c.norm_weight.data_ptr(), batch, hv, DIM, 1, 0, 0, 1e-6))
                h = Case([1] * batch, hk, hv, state="bf16", seed=i)
                hb = h.buffers()
                narrow.append(h.rule_params(0, hb[0], hb[1], hb[4], None))
                keep.append((c, b, y, h, hb))
            workspace(lib, *rule)
            workspace(lib, *narrow)
            t = {}
            for name, f, params in (("rule", lib.gdn_rule, rule), ("step", lib.gdn_step, step), ("conv", lib.gdn_conv, conv),
                                    ("norm", lib.gdn_norm, norm), ("bf16", lib.gdn_rule, narrow)):
                calls = calls_of(lib, f, params)
                t[name] = span_us(calls * max(1, 60 // len(calls)))
            print(f"| {hk}/{hv} | {batch} | {nbytes / rate * 1e6:.2f} | {t['rule']:.2f} | {t['step']:.2f} | "
                  f"{t['step'] / t['rule']:.2f} | {t['conv'] + t['rule'] + t['norm']:.2f} | {t['bf16']:.2f} | "
                  f"{t['bf16'] / t['rule']:.2f} |", flush=True)
    times_tokens(lib)
    times_layer(lib)


def times_tokens(lib):
    from check_decode import Case
    print("\nseveral tokens, HK/HV 16/32: rule by decode_128 / recurrent_128; step")
    for batch in (1, 4, 16, 64):
        row = []
        for tokens in (1, 2, 4, 8, 16):
            params = {name: [] for name in ("d", "r", "s")}
            keep = []
            for i in range(min(24, sets(2 * batch * 32 * DIM * DIM * 4))):
                c = Case([tokens] * batch, 16, 32, seed=i)
                b = c.buffers()
                params["d"].append(c.rule_params(DECODE_128, b[0], b[1], b[4], None))
                params["r"].append(c.rule_params(RECURRENT_128, b[0], b[1], b[4], None))
                params["s"].append(c.step_params(0, *b))
                keep.append((c, b))
            workspace(lib, *params["d"], *params["r"])
            t = {k: span_us(calls_of(lib, lib.gdn_step if k == "s" else lib.gdn_rule, p) * 2) for k, p in params.items()}
            row.append(f"T={tokens} {t['d']:.2f} / {t['r']:.2f}; {t['s']:.2f}")
        print(f"  B={batch:3d}  " + "   ".join(row), flush=True)


def times_layer(lib, hidden=2048, hk=16, hv=32, layers=6):
    """Whole layers, one after the other with weights and states of their own, in one graph."""
    from check_decode import Case
    print(f"\nlayer, hidden {hidden}, HK/HV {hk}/{hv}, bf16: µs a layer in a graph of {layers}: projections by gdn_linear"
          " (or cuBLAS) and the step; launches overlapped or not")
    width, value = (2 * hk + hv) * DIM + hv * DIM + 2 * hv, hv * DIM
    w_in = [torch.randn(width, hidden, device="cuda").bfloat16() * 0.02 for _ in range(layers)]
    w_out = [torch.randn(hidden, value, device="cuda").bfloat16() * 0.02 for _ in range(layers)]
    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        cases = [Case([1] * batch, hk, hv, seed=i) for i in range(layers)]
        bufs = [c.buffers() for c in cases]
        x = [torch.randn(batch, hidden, device="cuda").bfloat16() for _ in range(layers + 1)]
        proj = torch.empty(batch, width, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(batch, value, device="cuda", dtype=torch.bfloat16)

        def linear(a, w, y, ours, overlap):
            if not ours:
                torch.matmul(a, w.t(), out=y)
                return
            p = LinearParams(a.data_ptr(), w.data_ptr(), y.data_ptr(), a.stride(0), w.stride(0), y.stride(0), batch,
                             w.shape[1], w.shape[0], 1, overlap)
            status = lib.gdn_linear(C.byref(p), stream())
            assert status == OK, lib.gdn_status_string(status).decode()

        def layer(i, ours, overlap):
            c, b = cases[i], bufs[i]
            linear(x[i], w_in[i], proj, ours[0], overlap)
            p = c.step_params(0, *b, overlap=overlap)
            size = 2
            p.x = Heads(proj.data_ptr(), width, width, 0)
            p.z = Heads(proj.data_ptr() + c.channels * size, width, width, DIM)
            p.b = Heads(proj.data_ptr() + (c.channels + value) * size, width, width, 1)
            p.a = Heads(proj.data_ptr() + (c.channels + value + hv) * size, width, width, 1)
            p.out = Heads(out.data_ptr(), value, value, DIM)
            status = lib.gdn_step(C.byref(p), stream())
            assert status == OK, lib.gdn_status_string(status).decode()
            linear(out, w_out[i], x[i + 1], ours[1], overlap)

        row = []
        for name, ours, overlap in (("cuBLAS", (False, False), 0), ("cuBLAS, overlapped", (False, False), 1), ("ours", (True, True), 0),
                                    ("ours, overlapped", (True, True), 1), ("cuBLAS in, ours out, overlapped", (False, True), 1)):
            if any(ours) and batch > 32:
                continue
            row.append(f"{name} {graph_us([lambda i=i: layer(i, ours, overlap) for i in range(layers)]):.1f}")
        print(f"  B={batch:3d}  " + "; ".join(row), flush=True)
