#!/usr/bin/env python3
"""Checks gdn_rule, gdn_conv and gdn_norm, through the C ABI, against float64.

An error is ||x - ref|| / ||ref|| over the whole tensor. All outputs, and the state slots to be written, hold NaN before a
launch; whatever a launch must not touch is compared bit by bit afterwards.
"""
import ctypes as C
import math

import harness
import reference
import torch
from abi import (ALGO_NAMES, AUTO, BAD_ALGO, CODES, GATES_READY, NULL_POINTER, OK, RECURRENT, RECURRENT_128, ConvParams,
                 NormParams, columns, fill, heads, ptr, sequences, slots, stream)
from harness import (O_BOUND, STATE_BOUND, TYPES, bf16, call, cu_seqlens, expect, launch, normal, one_by_one, only_inside, place, refused,
                     report, rows_of, same_outside)
from reference import relative
from rule_case import RuleCase, rule_calls
from timing import calls_of, cold_sets, graph_us, heading, often, span_us

UNALIGNED = [RECURRENT, AUTO]       # what takes rows at any address
MIXED = [0, 3, 65, 0, 1, 17, 130, 0]

# ---- gated delta rule ----

# Elements before the rows of q, k, v and of o, and columns behind each.
FRAMES = {"fused": (0, 0), "padded": (8, 8), "odd": (1, 3), "apart": (0, 0)}
# [(name, keywords)] of inputs for every type.
INPUTS = [
    ("repeated keys, beta 1, no decay", dict(lens=[130, 64], keys="repeated", beta=12.0, decay="none")),
    # Each token negates the read-out of the one key: a key whose norm is off adds up token by token.
    ("repeated keys, beta 2, no decay", dict(lens=[130, 64], keys="repeated", beta=12.0, decay="none", beta_scale=2.0)),
    ("beta 2", dict(lens=[130, 64], beta_scale=2.0)),
    ("strong decay", dict(lens=[130, 64], decay="strong")),
    ("mixed decay", dict(lens=[130, 300], decay="mixed, 64")),
    ("no decay", dict(lens=[1000], decay="none")),
    ("small norms", dict(lens=[130], qk_size=1e-3)),
    ("no l2norm", dict(lens=[130, 31], l2norm=False)),
]


def algos_of(k, v):
    return [RECURRENT, AUTO] + ([RECURRENT_128] if (k, v) == (128, 128) else [])


def check_rule(lib, quick):
    def case(name, lens, layout="fused", slots="identity", algos=None, **kw):
        frame, how = FRAMES[layout], "moved" if slots == "odd" else slots
        c = RuleCase(lens, x_frame=frame, o_frame=frame, apart=layout == "apart", slots=how,
                     slot_gap=1 if slots == "odd" else 4, **kw)
        c.check(lib, algos or algos_of(c.k, c.v), f"rule {name}")

    if quick:
        for io in ("f32", "bf16"):
            case("decode", [1] * 3, io=io)
            case("varlen moved", [0, 3, 37, 1, 16], io=io, slots="moved")
        case("odd", [5, 33], k=40, v=72, layout="odd", slots="odd")
        case("256", [19, 0], k=256, v=256, hk=1, hv=1)
        return
    for io in ("f32", "bf16", "f16"):
        for length in (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 1000):
            case(f"T={length}", [length] * 2, io=io)
        for hk, hv in ((2, 2), (2, 4), (1, 3), (2, 8), (1, 8)):
            case(f"heads {hk}/{hv}", [33, 20], hk=hk, hv=hv, io=io)
        for k, v in ((96, 192), (64, 128), (128, 64), (32, 32), (256, 256), (40, 72), (1, 1), (7, 3), (129, 250)):
            case(f"K={k} V={v}", MIXED, hk=1, hv=2, k=k, v=v, io=io)
        for layout in FRAMES:
            case(f"layout {layout}", [65, 7], io=io, layout=layout, algos=UNALIGNED if layout == "odd" else None)
            case(f"layout {layout} K=40 V=72", [65, 7], k=40, v=72, io=io, layout=layout)
        for how in ("moved", "odd", "shared"):
            for name, lens in (("varlen", MIXED), ("decode", [1] * 9), ("empty", [0] * 3)):
                case(f"slots {how} {name}", lens, io=io, slots=how, algos=UNALIGNED if how == "odd" else None)
            case(f"slots {how} K=96 V=192", MIXED, k=96, v=192, io=io, slots=how)
        case("varlen equal lengths", [64] * 3, io=io, varlen=True)
        case("large norms", [130], io=io, qk_size=1000.0 if io != "f16" else 100.0)
        for name, kw in INPUTS:
            case(name, io=io, **kw)
    for gate in ("f32", "bf16", "f16"):
        for io in ("f32", "bf16"):
            case(f"gates {gate}", [33], io=io, gate=gate)
    case("many sequences", [1] * 70000, hk=1, hv=1, k=8, v=8, algos=[RECURRENT])
    case("many sequences varlen", [i % 3 for i in range(66000)], hk=1, hv=1, k=8, v=4, algos=[RECURRENT])
    case("many heads", [50] * 20, hk=4, hv=8)
    case("few heads", [50], hk=1, hv=1)
    case("decode B=300", [1] * 300, hk=4, hv=8)
    case("decode B=20", [1] * 20, hk=4, hv=8)
    for tokens in (4, 5):
        case(f"decode of {tokens}", [tokens] * 3, io="f32", slots="shared")

    for lens in ([1] * 5, [300, 20, 65]):
        c = RuleCase(lens, slots="moved", slot_gap=4)
        for algo in algos_of(128, 128):
            c.check_repeats(lib, algo, f"rule of up to {max(lens)} tokens")


# What GDN_RECURRENT alone takes, by itself and together.
OPTIONS = (("zeros",), ("read only",), ("counts",), ("gaps",), ("ready",), ("dt_bias",),
           ("zeros", "counts", "gaps", "ready"), ("read only", "gaps", "dt_bias"), ("zeros", "read only"))


def check_option(lib, options, lens, **kw):
    """Next to the reference for what the options say; float gates, so that ready ones are as exact as raw ones."""
    c = RuleCase(lens, gate="f32", slots="moved", slot_gap=8, **kw)
    if "zeros" in options:
        c.pool[c.in_slots(), :c.size] = 0
    if "dt_bias" in options:
        c.dt_bias = c.dt_bias.bfloat16().float()
    b = c.buffers()
    p = c.params(b, AUTO)
    keep = []
    if "ready" in options:
        b_raw, a_raw = c.ba[:, :c.hv].double(), c.ba[:, c.hv:2 * c.hv].double()
        ready = torch.cat([c.beta_scale * torch.sigmoid(b_raw), reference.log_decay(a_raw, c.a_log, c.dt_bias)], 1).float()
        p.b, p.a = (columns(ready[c.margin:], first, 1, c.per_seq) for first in (0, c.hv))
        p.gates, p.a_log, p.dt_bias = GATES_READY, None, None
        keep.append(ready)
    if "dt_bias" in options:
        keep.append(c.dt_bias.bfloat16())
        p.dt_bias, p.dt_bias_dtype = ptr(keep[-1]), CODES["bf16"]
    if "counts" in options:
        counts = [max(length - 1 - i % 2, 0) for i, length in enumerate(lens)]
        keep.append(torch.tensor(counts, dtype=torch.int32, device="cuda"))
        p.counts = ptr(keep[-1])
        c.lens = counts
        c.tokens = c.rows_of(range(len(counts)))
    if "gaps" in options:       # the same states, further apart
        stride = c.v * c.k + 4
        spread = lambda pool: torch.cat([pool[:, :c.size].view(-1, c.hv, c.v * c.k), torch.full_like(pool[:, :c.hv * 4], math.nan)
                                         .view(-1, c.hv, 4)], 2).contiguous()
        wide_in, wide_out = spread(b.state_in), spread(b.state_out)
        keep += [wide_in, wide_out]
        p.state_in, p.state_out, p.head_stride = ptr(wide_in), ptr(wide_out), stride
        p.in_slots.slot_stride = p.out_slots.slot_stride = c.hv * stride
    if "zeros" in options:
        p.state_in = None
    if "read only" in options:
        p.state_out = None
    chosen, refused = C.c_int32(-1), C.c_int32(-1)
    lib.gdn_rule_choice(C.byref(p), C.byref(chosen))
    p.algo = RECURRENT_128
    status = lib.gdn_rule_choice(C.byref(p), C.byref(refused))
    p.algo = AUTO
    wrong = [] if (chosen.value, status) == (RECURRENT, BAD_ALGO) else ["chose another kernel"]
    b.overrun = False
    status = call(lib.gdn_rule, p)
    torch.cuda.synchronize()
    if "gaps" in options:
        if not wide_out[:, :, c.v * c.k:].isnan().all():
            wrong.append("wrote between heads")
        b.state_out[:, :c.size] = wide_out[:, :, :c.v * c.k].reshape(-1, c.size)
    if "read only" in options:
        same_outside(b.state_out, b.before["state_out"], torch.ones_like(b.state_out, dtype=torch.bool)) or wrong.append("wrote states")
        b.state_out[c.out_slots, :c.size] = c.reference().final.reshape(-1, c.size).to(b.state_out.dtype)
    errors, more = c.judge(b)
    bounds = {"o": O_BOUND[c.io], "state": {"f32": STATE_BOUND, "bf16": 2e-3, "f16": 3e-4}[c.state]}
    ok = status == OK and not wrong + more and all(whole <= bounds[name] for name, (whole, _) in errors.items())
    text = " ".join(f"{name} {whole:.1e}" for name, (whole, _) in errors.items())
    report(f"{' + '.join(options)} K={c.k} V={c.v} {c.io}/{c.state} {lens}", ok, ", ".join([text, *wrong, *more]))


def check_options(lib):
    for lens in ([1] * 3, [5] * 3, [7, 0, 20]):
        for k, v in ((128, 128), (48, 20)):
            for options in OPTIONS:
                check_option(lib, options, lens, k=k, v=v)
            for io in ("f32", "bf16", "f16"):
                check_option(lib, ("counts", "ready"), lens, k=k, v=v, io=io, state="f16")


def check_status(lib):
    c = RuleCase([4, 4])
    b = c.buffers()
    expect("rule", lib.gdn_rule, lambda: c.params(b, AUTO), {
        "OK": [{}, dict(seqs__num_seqs=0, q__ptr=None), dict(seqs__tokens_per_seq=0, q__ptr=None)],
        "BAD_DTYPE": one_by_one(io_dtype=[3], gate_dtype=[-1], state_dtype=[3], dt_bias_dtype=[3], gates=[2]),
        "BAD_HEADS": one_by_one(num_k_heads=[3], num_v_heads=[0]),
        "BAD_HEAD_DIM": one_by_one(head_k=[257], head_v=[0]),
        "BAD_LENGTH": one_by_one(seqs__num_seqs=[-1, 0x7FFFFFFF], seqs__tokens_per_seq=[-1], in_slots__num_slots=[-1]),
        "BAD_STRIDE": one_by_one(out_slots__slot_stride=[-1], q__token_stride=[-1], head_stride=[-1, 128 * 128 - 1]),
        "BAD_ALGO": one_by_one(algo=[len(ALGO_NAMES), -1]) + [
            dict(algo=RECURRENT_128, state_in=None), dict(algo=RECURRENT_128, gates=GATES_READY),
            dict(algo=RECURRENT_128, head_k=64), dict(algo=RECURRENT_128, state_in=b.state_in.data_ptr() + 4)],
        "NULL_POINTER": one_by_one(q__ptr=[None], dt_bias=[None], a_log=[None])})
    report("status null params", lib.gdn_rule(None, stream()) == NULL_POINTER)
    report("status text", lib.gdn_status_string(1000 + 2).decode() != lib.gdn_status_string(12345678).decode())


# ---- convolution ----

def check_conv_case(lib, name, lens, channels, width, io="bf16", w_dtype=None, silu=True, odd=False, moved=False, seed=0):
    randn, dt, w_dtype = normal(seed), TYPES[io], w_dtype or io
    n, total, t = len(lens), sum(lens), max(lens)
    varlen = len(set(lens)) > 1
    gap, offset = (3, 1) if odd else (16, 8)
    buf = randn(offset + max(total, 1) * (channels + gap)).to(dt)
    inside = lambda buf: buf[offset:].view(-1, channels + gap)[:, :channels]
    x, y_buf = inside(buf), torch.full_like(buf, math.nan)
    y = inside(y_buf)
    weight = randn(channels, width).to(TYPES[w_dtype])
    rows = (width - 1) * channels
    slot_gap = (5 if odd else 8) if moved else 0
    where = place(n, "moved" if moved else "identity", seed)
    pool = randn(where.count, rows + slot_gap).to(dt)
    live = [i for i in range(n) if i not in where.padding]
    past = pool[[where.ins[i] for i in live], :rows].view(len(live), width - 1, channels)

    if total == n == len(live) and not varlen:    # all at once
        ref, kept = reference.conv(past, x[:total, None], weight, silu)
        ref, kept = ref[:, 0], list(kept)
    else:
        ref, kept, tokens = torch.zeros(total, channels, dtype=torch.float64, device="cuda"), [], rows_of(lens)
        for old, i in zip(past, live):
            ref[tokens[i]], new = reference.conv(old, x[tokens[i]], weight, silu)
            kept.append(new)

    state_in = pool.clone()
    state_out = state_in if not moved else torch.randn(where.count, rows + slot_gap, device="cuda").to(dt)
    written = [where.outs[i] for i in live]
    if moved:
        state_out[written, :rows] = math.nan
    before = state_out.clone()
    in_slots, out_slots = (slots(numbers, where.count, rows + slot_gap) for numbers in where.tensors)
    cu = cu_seqlens(lens) if varlen else None
    view = lambda x: columns(x, 0, 0, 0 if varlen else t)
    p = fill(ConvParams, x=view(x), y=view(y), weight=weight, state_in=state_in, state_out=state_out, in_slots=in_slots,
             out_slots=out_slots, seqs=sequences(lens, cu), channels=channels, width=width, io_dtype=CODES[io],
             weight_dtype=CODES[w_dtype], silu=int(silu))
    label = f"conv {name} {io}"
    if refused(lib, label, launch(lambda: call(lib.gdn_conv, p))):
        return
    left = torch.ones_like(state_out, dtype=torch.bool)
    left[written, :rows] = False
    inside = only_inside(y_buf, y[:total]) and same_outside(state_out, before, left)
    equal = torch.equal(state_out[written, :rows].view(-1, width - 1, channels), torch.stack(kept))
    err = relative(y[:total], ref) if total else 0.0
    report(label, err <= O_BOUND[io] and inside and equal, f"y {err:.1e}, state equal {equal}, wrote only its own {inside}")


def check_conv(lib, quick):
    case = lambda *args, **kw: check_conv_case(lib, *args, **kw)
    if quick:
        case("quick", [0, 2, 40, 1], 64, 4, moved=True)
        case("quick in place", [1] * 3, 40, 4, io="f32")
        case("quick odd", [1, 2, 3, 9], 21, 8, odd=True)
        return
    for io in ("f32", "bf16", "f16"):
        for width in range(2, 9):
            for moved in (False, True):
                for odd in (False, True):
                    case(f"W={width}{' moved' if moved else ''}{' odd' if odd else ''}", [*MIXED[:-1], 2], 53 if odd else 104,
                         width, io=io, moved=moved, odd=odd, silu=width != 3)
            # Enough work for the kernels that take 16 bytes of channels at a time.
            case(f"W={width} wide", [300, 0, 5, 1500], 8192, width, io=io, moved=width % 2 == 0)
        for length in (0, 1, 2, 3, 8, 9, 64, 65, 1000):
            case(f"T={length}", [length] * 3, 512, 4, io=io)
        case("decode wide", [1] * 64, 8192, 4, io=io, w_dtype="f32", moved=True)
        case("weights f32", [70], 256, 4, io=io, w_dtype="f32")
    case("many sequences", [1] * 70000, 8, 4)
    expect("conv", lib.gdn_conv, ConvParams, {"BAD_CONV_WIDTH": [dict(width=9)]})


# ---- gated norm ----

def check_norm_case(lib, name, tokens, hv, dim, io="bf16", w_dtype=None, sigmoid=False, odd=False, seed=0):
    randn, w_dtype = normal(seed), w_dtype or io
    gap, offset = (3, 1) if odd else (8, 8)
    width = hv * dim

    def strided():
        buf = (2 * randn(offset + tokens * (width + gap))).to(TYPES[io])
        return buf, buf[offset:].view(tokens, width + gap)[:, :width].unflatten(1, (hv, dim))
    (_, x), (_, z), (out_buf, out) = strided(), strided(), strided()
    out_buf.fill_(math.nan)
    weight = randn(dim).to(TYPES[w_dtype])
    p = fill(NormParams, x=heads(x), z=heads(z), out=heads(out), weight=weight, tokens=tokens, heads=hv, head_v=dim,
             io_dtype=CODES[io], weight_dtype=CODES[w_dtype], sigmoid=int(sigmoid), eps=1e-6)
    label = f"norm {name} {io}"
    if refused(lib, label, launch(lambda: call(lib.gdn_norm, p))):
        return
    inside, err = only_inside(out_buf, out), relative(out, reference.gated_norm(x, z, weight, sigmoid))
    report(label, err <= O_BOUND[io] and inside, f"out {err:.1e}, wrote only its own {inside}")


def check_norm(lib, quick):
    case = lambda *args, **kw: check_norm_case(lib, *args, **kw)
    for io in ("bf16",) if quick else ("f32", "bf16", "f16"):
        for dim in (128, 40) if quick else (1, 7, 32, 40, 64, 96, 128, 192, 250, 256):
            for odd in (False, True):
                case(f"V={dim}{' odd' if odd else ''}", 13, 5, dim, io=io, odd=odd, sigmoid=dim == 64)
        if not quick:
            case("long", 3000, 32, 128, io=io, w_dtype="f32")
            case("one row", 1, 1, 128, io=io)
    if not quick:
        case("many rows", 200000, 8, 8)
        expect("norm", lib.gdn_norm, NormParams, {"OK": [dict(head_v=8)], "BAD_HEAD_DIM": [dict(head_v=300)]})


# ---- times ----

def times(lib, args):
    rate = heading("µs: kernel time (CUPTI) / graph replay a call")
    print("decode, HK/HV 16/32, K = V = 128, bf16, cold L2; kernel time with ready gates, which GDN_RECURRENT takes")
    for batch in (1, 4, 8, 32, 64, 128, 256):
        nbytes = batch * 32 * 128 * 128 * 4 * 2
        calls = rule_calls(lib, batch, 1, 16, 32, 128, AUTO, cold_sets(nbytes, most=96))
        k, g = span_us(often(calls)), graph_us(calls)
        floor = nbytes / rate * 1e6
        for c in calls:
            c.params.gates = GATES_READY
        ready = span_us(often(calls))
        print(f"  B={batch:4d}  {k:7.2f} / {g:7.2f}   floor {floor:6.1f}   {100 * floor / k:4.0f} % of the copy rate   ready {ready:7.2f}",
              flush=True)
    print("prefill, HK/HV 16/32, K = V = 128, bf16")
    for batch, tokens in ((1, 16), (1, 64), (1, 512), (1, 2048), (1, 8192), (4, 2048), (8, 1024)):
        row = []
        for algo in (RECURRENT_128, RECURRENT, AUTO):
            calls = rule_calls(lib, batch, tokens, 16, 32, 128, algo, 8 if batch * tokens <= 2048 else 2)
            row.append(f"{ALGO_NAMES[algo]} {span_us(calls * 2):8.1f} / {graph_us(calls, 5):8.1f}")
        print(f"  {batch}x{tokens:<6d} " + "   ".join(row), flush=True)
    for hk, hv, dim in ((4, 8, 128), (16, 64, 128), (16, 16, 256), (30, 30, 96)):
        row = []
        for algo in (RECURRENT, AUTO):
            calls = rule_calls(lib, 1, 2048, hk, hv, dim, algo, 3)
            row.append(f"{ALGO_NAMES[algo]} {span_us(calls * 2):8.1f}")
        print(f"  1x2048 heads {hk}/{hv} K=V={dim}: " + "   ".join(row), flush=True)
    times_conv(lib, rate)
    times_norm(lib, rate)


def timed(lib, label, f, params, nbytes, rate):
    calls = calls_of(lib, [(f, p) for p in params])
    print(f"  {label:8s} {span_us(often(calls)):7.2f} / {graph_us(calls):7.2f}   floor {nbytes / rate * 1e6:6.2f}", flush=True)


def times_conv(lib, rate):
    print("convolution, 8192 channels, width 4, bf16, in place")
    for batch, tokens in ((1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (1, 64), (1, 512), (1, 2048), (1, 8192), (8, 1024)):
        def params():
            state, where = bf16(batch, 3, 8192), slots(None, batch, 3 * 8192)
            return fill(ConvParams, x=columns(bf16(batch * tokens, 12288), 0, 0, tokens),
                        y=columns(bf16(batch * tokens, 8192), 0, 0, tokens), weight=bf16(8192, 4), state_in=state,
                        state_out=state, in_slots=where, out_slots=where, seqs=sequences([tokens] * batch), channels=8192,
                        width=4, io_dtype=CODES["bf16"], weight_dtype=CODES["bf16"], silu=1)
        sets = cold_sets(batch * (tokens * 32768 + 100000), least=2)
        timed(lib, f"{batch}x{tokens}", lib.gdn_conv, [params() for _ in range(sets)],
              batch * 8192 * 2 * (2 * tokens + 6) + 8192 * 8, rate)


def times_norm(lib, rate):
    print("gated norm, 32 heads of 128, bf16")
    for tokens in (1, 8, 32, 128, 512, 2048, 8192):
        def params():
            x, z, out = (columns(bf16(tokens, 4096), 0, 128) for _ in range(3))
            return fill(NormParams, x=x, z=z, out=out, weight=torch.randn(128, device="cuda"), tokens=tokens, heads=32,
                        head_v=128, io_dtype=CODES["bf16"], weight_dtype=CODES["f32"], eps=1e-6)
        sets = cold_sets(tokens * 24576, least=2)
        timed(lib, f"T={tokens}", lib.gdn_norm, [params() for _ in range(sets)], tokens * 24576, rate)


def check(lib, args):
    check_rule(lib, args.quick)
    check_conv(lib, args.quick)
    check_norm(lib, args.quick)
    if not args.quick:
        check_options(lib)
        check_status(lib)


def main():
    harness.program(__doc__, check, times)


if __name__ == "__main__":
    main()
