#!/usr/bin/env python3
"""The gated delta rule token by token, gdn_rule, through the C ABI against float64: any head size, decode, and what only
GDN_RECURRENT takes. check_chunk.py has the chunk forms.

An error is ||x - ref|| / ||ref||.
"""
import ctypes as C
import math

import harness
import torch
from abi import ALGO_NAMES, AUTO, BAD_ALGO, CHUNKED_SM80, CODES, DECODE, GATES_READY, RECURRENT, RECURRENT_128
from cases import CONSTANTS, every, rows
from harness import Launch, Output, expect, group, null_params, one_by_one, report, verify
from rule_case import REPEATS, RuleCase, rule

UNALIGNED = (RECURRENT, AUTO)       # what takes rows at any address
MIXED = [0, 3, 65, 0, 1, 17, 130, 0]
IO = ["f32", "bf16", "f16"]
# Elements before the rows of q, k, v and of o, and columns after each.
FRAMES = {"fused": (0, 0), "padded": (8, 8), "odd": (1, 3), "apart": (0, 0)}
HEADS = [(16, 16), (16, 32), (16, 48), (16, 64), (2, 8), (1, 8), (4, 8)]


def tokens(lib, layout="fused", slots="identity", **case):
    """A launch of any head size and length."""
    frame = FRAMES[layout]
    return rule(lib, x_frame=frame, o_frame=frame, apart=layout == "apart", slots="moved" if slots == "odd" else slots,
                slot_gap=1 if slots == "odd" else 4, **case)


def by_algos(cases):
    """The cases, each by all kernels that take it, or by its `algos`."""
    for seed, case in enumerate(cases):
        case = {"seed": seed, **case}
        fast = [RECURRENT_128] * ({case.get(x, 128) for x in "kv"} == {128})
        for algo in case.pop("algos", None) or [RECURRENT, AUTO, *fast]:
            yield {**case, "algo": algo}


def any_size():
    yield from every(io=IO, lens=[[n] * 2 for n in (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 1000)])
    yield from every(rows("hk hv", (2, 2), (2, 4), (1, 3), (2, 8), (1, 8)), io=IO, lens=[[33, 20]])
    yield from every(rows("k v", (96, 192), (64, 128), (128, 64), (32, 32), (256, 256), (40, 72), (1, 1), (7, 3), (129, 250)),
                     io=IO, lens=[MIXED], hk=1, hv=2)
    for layout in FRAMES:
        yield from every(io=IO, lens=[[65, 7]], layout=layout, algos=UNALIGNED if layout == "odd" else None)
        yield from every(io=IO, lens=[[65, 7]], layout=layout, k=40, v=72)
    for slots in ("moved", "odd", "shared"):
        yield from every(rows("lens", MIXED, [1] * 9, [0] * 3), io=IO, slots=slots, algos=UNALIGNED if slots == "odd" else None)
        yield from every(io=IO, lens=[MIXED], slots=slots, k=96, v=192)
    yield from every(io=IO, lens=[[64] * 3], varlen=True)
    yield from every(rows("io qk_size", ("f32", 1e3), ("bf16", 1e3), ("f16", 1e2)), lens=[[130]])
    # Repeated keys; with beta 2 each token negates the read-out of the one key: a key whose norm is off adds up token by token.
    yield from every(io=IO, lens=[[130, 64]], keys="repeated", beta=12.0, decay="none", beta_scale=[1.0, 2.0])
    yield from every([dict(beta_scale=2.0), dict(decay="strong")], io=IO, lens=[[130, 64]])
    yield from every([dict(lens=[130, 300], decay="mixed, 64"), dict(lens=[1000], decay="none"), dict(lens=[130], qk_size=1e-3),
                      dict(lens=[130, 31], l2norm=False)], io=IO)
    yield from every(CONSTANTS, rows("k v", (128, 128), (96, 192)), io=IO, lens=[[33, 20]])
    yield from every(gate=IO, io=["f32", "bf16"], lens=[[33]])
    yield dict(lens=[1] * 70000, hk=1, hv=1, k=8, v=8, algos=(RECURRENT,))
    yield dict(lens=[i % 3 for i in range(66000)], hk=1, hv=1, k=8, v=4, algos=(RECURRENT,))
    yield from every(rows("lens", [50] * 20, [1] * 300, [1] * 20), hk=4, hv=8)
    yield dict(lens=[50], hk=1, hv=1)
    yield from every(rows("lens", [4] * 3, [5] * 3), io="f32", slots="shared")
    yield from every(rows("lens", [1] * 5, [300, 20, 65]), slots="moved", ways=REPEATS)


QUICK = [*every([dict(lens=[1] * 3), dict(lens=[0, 3, 37, 1, 16], slots="moved")], io=["f32", "bf16"]),
         dict(lens=[5, 33], k=40, v=72, layout="odd", slots="odd"), dict(lens=[19, 0], k=256, v=256, hk=1, hv=1)]


SIZES = rows("k v", (64, 64), (96, 96), (96, 192), (192, 192), (256, 256))     # of GDN_DECODE beside 128
DECODE_QUICK = [dict(lens=[1] * 3, hk=16, hv=32, slots="moved"), *every(lens=[[1]], state=["f32", "bf16"]), dict(lens=[5] * 3),
                dict(lens=[5, 0, 16], slots="shared"), *every(SIZES, lens=[[1] * 3], hv=3, hk=1, slots="moved", state=["f32", "bf16"]),
                *every(lens=[[5, 0, 16]], k=96, v=192, slots="moved", state=["f32", "bf16"])]


def decode(lib, **case):
    """A launch of up to 16 tokens a sequence."""
    return rule(lib, kind=Decode, slot_gap=8, **case)


def decodes():
    yield from [dict(lens=[1] * 40, hk=16, hv=32, slots="moved"), *DECODE_QUICK]
    types = every(io=IO, state=["f32", "bf16"])
    batches = [dict(lens=[1]), dict(lens=[1] * 2, beta_scale=2.0), dict(lens=[1] * 5, slots="shared"), dict(lens=[1] * 9, l2norm=False)]
    yield from every(types, rows("hk hv", *HEADS), batches)
    yield from every(types, lens=[[n] * 3 for n in (2, 3, 4, 8, 15, 16)], slots="moved")
    yield from every(types, lens=[[0, 1, 16, 7, 0]], hv=6, slots="moved")
    yield from every(types, lens=[[1] * 3], slots="shared")
    yield from every(types, CONSTANTS, rows("k v", (128, 128), (96, 192)), lens=[[1] * 3, [5, 0, 16]])
    yield from every(CONSTANTS, lens=[[1] * 3], k=64, v=64)
    yield from every(rows("io gate", ("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16"), ("f32", "bf16")), lens=[[1] * 4])
    yield from every(lens=[[1], [1] * 9, [1] * 64, [4] * 8], hk=16, hv=32, ways=REPEATS)
    # Few, some and many heads, on 132 multiprocessors: each a shape of its own.
    for (k, v), batches in {(64, 64): (3, 150, 250), (96, 96): (3, 70, 120), (96, 192): (3, 35, 60), (192, 192): (3, 16, 30), (256, 256): (3, 10, 20)}.items():
        yield from every(types, rows("lens l2norm", *(([1] * n, n != batches[2]) for n in batches)), k=k, v=v, hk=3, hv=6, slots="moved")
    yield from every(rows("k v", (256, 32), (64, 256), (128, 192)), lens=[[1] * n for n in (3, 80)], state=["f32", "bf16"], slots="shared")
    yield from every(types, lens=[[n] * 3 for n in (2, 5, 16)] + [[0, 1, 16, 7, 0]], k=96, v=192, hk=3, hv=3, slots="moved")
    yield from every(lens=[[1] * 9, [4] * 8], hk=30, hv=30, k=96, v=192, ways=REPEATS)


class Decode(RuleCase):
    by_sequence = True


def by_decoders(cases):
    """The cases, each by all kernels that support it: GDN_DECODE requires the gates of one token in f32 or in the type of q, k and v."""
    for seed, case in enumerate(cases):
        fast = [DECODE] * (case.get("gate", "f32") in ("f32", case.get("io", "bf16")))
        of_128 = [RECURRENT_128] * ({case.get(x, 128) for x in "kv"} == {128})
        yield from ({"seed": seed, **case, "algo": algo} for algo in (*fast, AUTO, *of_128, RECURRENT))


# ---- what GDN_RECURRENT alone takes, by itself and together ----

OPTIONS = [("zeros",), ("read only",), ("counts",), ("gaps",), ("ready",), ("dt_bias",), ("zeros", "counts", "gaps", "ready"),
           ("read only", "gaps", "dt_bias"), ("zeros", "read only")]


def check_option(lib, options, lens, **kw):
    """Float gates, so that ready ones are as exact as raw ones. The chunk forms support two of the options (check_chunk.py)."""
    c = RuleCase(lens, gate="f32", slots="moved", slot_gap=8, ready="ready" in options, zeros="zeros" in options, **kw)
    if "dt_bias" in options:
        c.dt_bias = c.dt_bias.bfloat16().float()
    if "counts" in options:
        counts = [max(length - 1 - i % 2, 0) for i, length in enumerate(lens)]
    c.buffers()
    p = c.params(lib, RECURRENT)
    if "counts" in options:
        p.counts = torch.tensor(counts, dtype=torch.int32)
        c.lens = counts
    if "dt_bias" in options:
        p.dt_bias, p.dt_bias_dtype = c.dt_bias.bfloat16(), CODES["bf16"]
    o, state, *rest = c.outputs(RECURRENT)
    if "gaps" in options:       # the same states, further apart
        apart = [wide(c, x) for x in (c.state_in, c.state_out)]
        p.state_in, p.state_out, p.head_stride = *apart, c.v * c.k + 4
        p.in_slots__slot_stride = p.out_slots__slot_stride = c.hv * p.head_stride
        state = Output("state", apart[1], (c.out_slots, slice(None), slice(c.v * c.k)), c.reference()[2], harness.STATE_BOUND[c.state])
        rest = [Output("input states", apart[0])]
    if "zeros" in options:
        p.state_in = None
    if "read only" in options:
        state, p.state_out = Output("state", state.buffer), None
    name = f"{' + '.join(options)} K={c.k} V={c.v} {c.io}/{c.state} {lens}"
    chosen, refused = C.c_int32(-1), C.c_int32(-1)
    p.algo = AUTO
    lib.gdn_rule_choice(C.byref(p), C.byref(chosen))
    p.algo = RECURRENT_128
    status = lib.gdn_rule_choice(C.byref(p), C.byref(refused))
    p.algo = RECURRENT
    fine = chosen.value == RECURRENT or chosen.value >= CHUNKED_SM80 and {"zeros", "ready"}.issuperset(options)
    report(f"choice of {name}", fine and status == BAD_ALGO, f"{ALGO_NAMES[chosen.value]}, status {status}")
    verify(lib, name, Launch(lib.gdn_rule, p, lambda: [o, state, *rest], after=c.after))


def wide(c, pool):
    """A pool with NaN between the heads."""
    heads = pool[:, :c.size].reshape(-1, c.hv, c.v * c.k)
    return torch.cat([heads, torch.full_like(heads[..., :4], math.nan)], 2)


def check_options(lib, args):
    if args.quick:
        return
    for lens in ([1] * 3, [5] * 3, [7, 0, 20]):
        for k, v in ((128, 128), (48, 20)):
            for options in OPTIONS:
                check_option(lib, options, lens, k=k, v=v)
            for io in ("f32", "bf16", "f16"):
                check_option(lib, ("counts", "ready"), lens, k=k, v=v, io=io, state="f16")


def check_status(lib, args):
    c = RuleCase([4, 4])
    c.buffers()
    expect("rule", lib.gdn_rule, lambda: c.params(lib, AUTO), {
        "OK": [{}, dict(num_seqs=0, q__ptr=None), dict(tokens_per_seq=0, q__ptr=None)],
        "BAD_DTYPE": one_by_one(io_dtype=[3], gate_dtype=[-1], state_dtype=[3], dt_bias_dtype=[3], gates=[2]),
        "BAD_HEADS": one_by_one(num_k_heads=[3], num_v_heads=[0]),
        "BAD_HEAD_DIM": one_by_one(head_k=[257], head_v=[0]),
        "BAD_LENGTH": one_by_one(num_seqs=[-1, 0x7FFFFFFF], tokens_per_seq=[-1], in_slots__num_slots=[-1]),
        "BAD_STRIDE": one_by_one(out_slots__slot_stride=[-1], q__token_stride=[-1], head_stride=[-1, 128 * 128 - 1]),
        "BAD_ALGO": one_by_one(algo=[len(ALGO_NAMES), -1]) + [
            dict(algo=RECURRENT_128, state_in=None), dict(algo=RECURRENT_128, gates=GATES_READY),
            dict(algo=RECURRENT_128, head_k=64), dict(algo=DECODE, head_k=96), dict(algo=DECODE, head_k=160, tokens_per_seq=1),
            dict(algo=DECODE, head_v=48, tokens_per_seq=1), dict(algo=RECURRENT_128, state_in=c.state_in.data_ptr() + 4)],
        "NULL_POINTER": one_by_one(q__ptr=[None], dt_bias=[None], a_log=[None])})
    null_params(lib.gdn_rule)
    report("status text", lib.gdn_status_string(1000 + 2).decode() != lib.gdn_status_string(12345678).decode())


def times(args):
    batches = [[1] * n for n in (1, 4, 8, 32, 64, 128, 256)]
    decode_shapes = every(lens=batches, hk=16, hv=32, state=["f32", "bf16"])
    sizes = every(SIZES, state=["f32", "bf16"], lens=batches, hk=30, hv=30)
    shapes = every(lens=[[16], [64], [512], [2048], [8192], [2048] * 4, [1024] * 8], hk=16, hv=32, algo=[RECURRENT, RECURRENT_128, AUTO]) + every(
        rows("hk hv k v", (4, 8, 128, 128), (16, 64, 128, 128), (16, 16, 256, 256), (30, 30, 96, 96)), lens=[[2048]], algo=[RECURRENT, AUTO])
    several = every(lens=[[t] * n for n in (1, 4, 16, 64) for t in (2, 4, 8, 16)], hk=16, hv=32, algo=[DECODE, RECURRENT_128])
    several += every(lens=[[t] * n for n in (1, 4, 16, 64) for t in (2, 4, 8, 16)], hk=30, hv=30, k=96, v=192, algo=[DECODE, RECURRENT])
    return [("decode, bf16", rule, decode_shapes), ("decode, other sizes", rule, sizes), ("several tokens", rule, several), ("prefill, bf16", rule, shapes)]


GROUPS = {"rule": group(tokens, lambda: by_algos(any_size()), list(by_algos(QUICK))),
          "decode": group(decode, lambda: by_decoders(decodes()), list(by_decoders(DECODE_QUICK))),
          "options": check_options, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times)
