#!/usr/bin/env python3
"""Checks gdn_moe, through the C ABI, against a mixture of experts in float64.

An error is the largest over tokens of ||y - ref|| / ||ref||. Outputs hold NaN before a launch, as does everything around
them, around x and in the workspace. Tokens whose k-th and next logit differ by less than f32 can tell do not count, but where
they are equal.
"""
import ctypes as C

import common    # noqa: F401 - the path of cuda/tests
import harness
import torch
from abi import (MOE_EXPERTS, MOE_FEW, MOE_FEW_TOKENS, MOE_MANY, MOE_PACKED_INPUTS, MOE_PACKED_TOKENS, MOE_TOP_K, NULL_POINTER)
from cases import every, rows, drawn
from check_residual import residual_params
from harness import ONCE, WAYS, Launch, Output, call, chain_repeats, expect, group, null_params, one_by_one, report
from moe_case import Case

# Rounding of y, at most 2^-7 / sqrt(12) of it in bf16, and as much of silu(gate) * up before the last product; MOE_MANY
# rounds each expert's output too. Narrow cases average little. Weights in e4m3 are exact, for MOE_MANY rounded as the
# reference's are.
BOUND = {"bf16": 6e-3, "f16": 8e-4}
IO = ["bf16", "f16"]
REPEATED = (*WAYS, (-1, True))


def moe(lib, broken=(), **case):
    """Broken tokens must show their NaN, and no others."""
    c = Case(broken=broken, **{"shared": 256 if case.get("packed") else 64, **case})
    c.pack(lib)
    broken = list(broken)

    def outputs():
        want, sure = c.reference()
        sure[broken] = False

        def error(got):
            y = got.double()
            errors = ((y - want).norm(dim=1) / want.norm(dim=1))[sure]
            worst = errors.max().item() if errors.numel() else 0.0
            shown = bool(y[broken].isnan().all())
            fine = worst <= BOUND[c.io] and bool(errors.isfinite().all()) and shown
            return fine, f"{worst:.1e}, {int(sure.sum())} of {c.tokens} tokens{'' if shown else ' hides a NaN'}"

        return [Output("y", c.y.buffer, c.y.index, error=error)]

    return Launch(lib.gdn_moe, c.params(lib), outputs, replays=2, nbytes=c.nbytes(), keep=c)


def algos_of(cases):
    """Each case by all algorithms that there are for its tokens."""
    return [{**case, "algo": algo} for case in cases for algo in ((MOE_FEW, MOE_MANY) if case["tokens"] <= MOE_FEW_TOKENS else (MOE_MANY,))]


SIZES = rows("experts k hidden inner shared", (16, 4, 256, 64, 64), (8, 8, 128, 128, 0), (60, 3, 320, 192, 64), (300, 10, 192, 64, 320))
PACKED = (("q4_K",) * 4, ("q8_0",) * 4, ("q6_K",) * 4, ("q4_K", "q6_K", "q8_0", "q8_0"), ("q8_0", "q4_K", "q4_K", "q6_K"))
GAPS = tuple((8 * (i % 3), i % 4) for i in range(12))


def cases():
    yield from drawn(algos_of(every([*SIZES, dict(experts=1, k=1, hidden=64, inner=64, shared=64)],
                                           tokens=[*range(1, 34), 40, 63, 64, 65, 100, 128, 129, 200, 257], io=IO)),
                            router=("f32", "bf16"), normalise=(True, False, True), gaps=GAPS)
    # Several tokens a warp of choose_kernel.
    yield from every(rows("experts k router", (16, 4, "f32"), (300, 10, "bf16")), io=IO, tokens=4100)
    options = [dict(ties=True), dict(ties=True, experts=33, k=16), dict(favour=5), dict(favour=15, k=1), dict(experts=1000, k=16, hidden=64),
               dict(experts=512, k=10, shared=0), dict(hidden=2112, inner=64), dict(hidden=4096), dict(hidden=2048, inner=512, shared=512),
               dict(inner=320, shared=576), dict(scale=20.0)]
    for tokens in (1, 2, 7, 8, 9, 32, 33, 64, 128, 150):
        broken = [dict(broken=(0,)), dict(broken=(tokens - 1,)), dict(broken=tuple(range(tokens))),
                  dict(broken=(tokens // 2,), shared=128, normalise=False)]
        yield from algos_of(every([*options, *broken], tokens=tokens, io=IO))


def models():
    """The shapes that matter, and that every launch gives the same bits."""
    sizes = dict(hidden=2048, inner=512, shared=512, ways=REPEATED)
    yield from drawn(every(rows("experts k", (256, 8), (512, 10)), tokens=[1, 2, 4, 8, 16, 31, 32, 33, 64, 65, 96, 512, 2048], **sizes),
                            router=("bf16", "f32"))
    yield from every(tokens=[1, 2, 8, 32, 33, 128, 512], experts=512, k=10, e4m3=128, **sizes)
    yield from every(tokens=[1, 2, 8, 16], experts=256, k=8, packed=PACKED[3], **sizes)


def e4m3():
    yield from drawn(algos_of(every([*SIZES, dict(experts=8, k=2, hidden=2112, inner=64, shared=64)],
                                           tokens=[*range(1, 18), 31, 32, 33, 64, 100, 128, 129, 257], io=IO)), gaps=GAPS, e4m3=(128, 64, 16, 1),
                     broken=((), (), (0,)))
    # x of two blocks a multiprocessor in shared memory, and x that has no place there.
    yield from every(hidden=[4096, 8192], experts=8, k=2, inner=64, shared=64, tokens=[1, 9, 33], io=IO, e4m3=16)
    # Tiles of 64, 128, 192 and 256 rows, whole and not, of experts with few and with many rows.
    yield from drawn(every([*SIZES, dict(experts=9, k=2, hidden=2112, inner=64, shared=64)], tokens=[190, 300, 700, 830, 1100, 1400], io=IO),
                     gaps=GAPS, e4m3=(128, 64, 16, 1), broken=((), (3,), ()))


def packed():
    sizes = rows("experts k hidden inner shared", (16, 4, 256, 256, 256), (8, 8, 512, 512, 0), (60, 3, 1280, 256, 512), (300, 10, 256, 768, 256),
                 (1, 1, 256, 256, 1280), (8, 2, 4096, 256, 256))
    tokens = list(range(1, MOE_PACKED_TOKENS + 1))
    yield from drawn(every(sizes, tokens=tokens, io=IO), normalise=(True, False, True), ways=(REPEATED, ONCE, ONCE, ONCE), packed=PACKED,
                            gaps=GAPS)
    for n in tokens:
        yield from drawn(every([dict(favour=5), dict(ties=True), dict(broken=(0,)), dict(broken=(n - 1,), shared=512)], tokens=n, inner=256,
                                      io=IO), packed=PACKED)
    yield from every(inner=[128, 384], shared=128, tokens=5, hidden=384, packed=PACKED[1])      # of q8_0 alone


def quick():
    yield from every(io=IO, algo=[MOE_FEW, MOE_MANY], tokens=[1, 3, 11])
    yield from every(io=IO, tokens=[70, 200])
    yield from every(rows("tokens algo", (1, MOE_FEW), (50, MOE_FEW), (3, MOE_MANY), (200, MOE_MANY), (1100, MOE_MANY)), io=IO, e4m3=32)
    yield from every(rows("tokens packed", (1, PACKED[3]), (3, ("q8_0", "q8_0", "q4_K", "q6_K")), (11, ("q6_K", "q4_K", "q6_K", "q4_K"))),
                     io=IO, inner=256, shared=256)


def check_chain(lib, args):
    """As the layers of a model, each with a residual and a norm after it, and with one workspace."""
    for tokens in () if args.quick else (1, 2, 8, 32, 64, 100):
        layers = [Case(tokens, 512, 64, 6, 128, 128, router="bf16", seed=i) for i in range(4)]
        room, ones = layers[0].params(lib), torch.ones(512)
        between = [torch.empty(tokens, 512, dtype=torch.bfloat16) for _ in range(4)]

        def link(i, x, y, overlap):
            mid, total = between[i % 2], between[2 + i % 2]
            p = layers[i % 4].fields(x=x, y=mid, overlap=overlap)
            p.workspace, p.workspace_bytes = room.workspace, room.workspace_bytes
            return call(lib.gdn_moe, p) or call(lib.gdn_residual, residual_params(mid, x, total, y, ones, "bf16", max(overlap, 0)))

        chain_repeats(f"chain T={tokens}", link, layers[0].x.view.contiguous(), reference_overlap=-1)


def check_status(lib, args):
    case = Case(4)
    expect("moe", lib.gdn_moe, lambda: case.params(lib), {
        "NULL_POINTER": one_by_one(x=[None], router=[None], gate_up=[None], down=[None], shared_gate_up=[None],
                                   shared_down=[None], y=[None]),
        "BAD_DTYPE": one_by_one(io_dtype=[0, 7]),
        "BAD_LENGTH": one_by_one(tokens=[-1, 1 << 30], hidden=[0], num_experts=[0, MOE_EXPERTS + 1, 3], inner=[0],
                                 top_k=[0, MOE_TOP_K + 1], shared_inner=[-64], router_parts=[0, 4]) + [dict(top_k=17, num_experts=16)],
        "BAD_ALGO": one_by_one(hidden=[96], inner=[40], shared_inner=[32], x=[case.x.view.data_ptr() + 2], x_stride=[260],
                               gate_up=[case.gate_up.data_ptr() + 8], algo=[3, -1]) + [
                                   dict(algo=MOE_FEW, tokens=MOE_FEW_TOKENS + 1)],
        "BAD_STRIDE": one_by_one(x_stride=[-8], y_stride=[-1]),
        "BAD_WORKSPACE": one_by_one(workspace=[None], workspace_bytes=[64]),
        "OK": [dict(tokens=0, x=None)]})
    scaled = Case(4, e4m3=64)
    expect("moe in e4m3", lib.gdn_moe, lambda: scaled.params(lib), {
        "NULL_POINTER": one_by_one(gate_up_scales__ptr=[None], down_scales__ptr=[None], shared_gate_up_scales__ptr=[None],
                                   shared_down_scales__ptr=[None]),
        "BAD_ALGO": one_by_one(down_scales__rows=[0, 48]), "BAD_STRIDE": one_by_one(down_scales__stride=[-1])})
    blocks = Case(4, inner=256, shared=256, packed=PACKED[3])
    blocks.pack(lib)
    expect("moe packed", lib.gdn_moe, lambda: blocks.params(lib), {
        "BAD_DTYPE": one_by_one(gate_up_type=[-1, 3], down_type=[3], shared_gate_up_type=[-1], shared_down_type=[7]),
        "NULL_POINTER": one_by_one(gate_up=[None], shared_down=[None]),
        "BAD_ALGO": one_by_one(algo=[MOE_MANY], tokens=[MOE_PACKED_TOKENS + 1], hidden=[128, MOE_PACKED_INPUTS // 2], inner=[128],
                               down=[blocks.stored["down"].data_ptr() + 16], gate_up_scales__ptr=[blocks.x.view.data_ptr()])})
    null_params(lib.gdn_moe)
    report("workspace of null", lib.gdn_moe_workspace(None, C.byref(C.c_int64(-1))) == NULL_POINTER)


def times(args):
    """Qwen3.5-35B-A3B and Qwen3-Next-80B."""
    sizes = every(rows("experts k", (256, 8), (512, 10)), hidden=2048, inner=512, shared=512, router="bf16")
    return [("few tokens, bf16", moe, every(sizes, tokens=[1, 2, 4, 8, 16, 32, 64], algo=[MOE_FEW, MOE_MANY])),
            ("many tokens, bf16", moe, every(sizes, tokens=[128, 512, 2048, 8192])),
            ("experts in e4m3", moe, every(sizes, tokens=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192], e4m3=128)),
            ("packed experts", moe, [case for types in PACKED[:4] for case in every(sizes, tokens=[1, 2, 4, 8, 16], packed=types)])]


GROUPS = {"cases": group(moe, cases, list(quick())), "e4m3": group(moe, e4m3), "packed": group(moe, packed), "models": group(moe, models),
          "quick": group(moe, quick), "chain": check_chain, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, models=True)
