#!/usr/bin/env python3
"""The backward pass through the C ABI against torch's autograd in float64: gates, convolution, gated norm and the rule by every kernel.

    CANDLE_GDN_GOLDENS=goldens python3 cuda/tests/check_backward.py    # compares with op_grads.safetensors too

An error is ||x - ref|| / ||ref||.
"""
import ctypes as C
import itertools
import json
import os

import torch

import harness
from abi import AUTO, CHUNKED_SM80, CHUNKED_SM90, OK, RECURRENT
from backward_case import BOUND, EXACT, Conv, Golden, Rule, conv, norm, ready_gates, rule, safetensors
from cases import CONSTANTS, every, rows
from harness import add, call, expect, group, launch, null_params, one_by_one, report, same
from reference import relative
from rule_case import REPEATS

IO = ["f32", "bf16", "f16"]
MIXED = [0, 3, 65, 0, 1, 17, 130, 64, 0]
NAMES = {RECURRENT: "recurrent", CHUNKED_SM80: "chunked_sm80", CHUNKED_SM90: "chunked_sm90", AUTO: "auto"}

# ---- gates ----

GATES = [*every(gate=IO, backward=[False, True], tokens=[1, 9, 300], hv=[5, 32], beta_scale=[1.0, 2.0]),
         *every(backward=[False, True], tokens=[0, 7, 40000], seqs=3, gate="f32"), *every(gate=["f32", "bf16"], tokens=100, decay=[-10.0, 2.5], ways=[REPEATS])]
GATES_QUICK = every(backward=[False, True], tokens=[0, 70], seqs=[1, 2], hv=40)

# ---- convolution ----

CONV_QUICK = [dict(lens=[0, 2, 70, 1], channels=64, width=4), dict(lens=[3] * 2, channels=40, width=4, io="f32"), dict(lens=[1, 2, 3, 9], channels=21, width=8, odd=True)]


def convs():
    sizes = [dict(channels=136), dict(channels=53, odd=True)]
    yield from every(sizes, io=IO, width=[2, 3, 4, 5, 6, 7, 8], lens=[MIXED], ways=[REPEATS])
    yield from every(io=IO, lens=[[n] * 3 for n in (0, 1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 200)], channels=128, width=4)
    yield from every(io=IO, lens=[[70, 5]], channels=264, width=4, silu=[True, False], state=[True, False], w_dtype=["f32", "bf16"])
    yield from every(lens=[[n] for n in (1, 2, 3)], packed=True, channels=64, width=[4, 8], io="f32")
    yield from every(lens=[[1500, 300, 0, 250], [1000] * 2], channels=8192, width=4, io=["f32", "bf16"], ways=[REPEATS])
    yield dict(lens=[i % 4 for i in range(3000)], channels=16, width=4)


# ---- gated norm ----

# A head of one value is its sign: its dx is the rounding of its terms.
NORMS = [*every(io=IO, dim=[2, 7, 32, 40, 96, 128, 192, 250, 256], odd=[False, True], tokens=13, hv=5, sigmoid=[False, True]),
         *every(io=IO, tokens=[0, 1, 3000], hv=32, dim=128, ways=[REPEATS]), *every(io=IO, tokens=9, hv=3, dim=64, in_place=True),
         *every(w_dtype=IO, tokens=40, hv=3, dim=128), dict(tokens=100000, hv=8, dim=8)]
NORM_QUICK = every(dim=[128, 40], odd=[False, True], tokens=13, hv=5)

# ---- the rule ----

# (sequences, key heads, value heads), with which gradients begin beside the walks of whole sequences: one of 32 chunks, and up to 49 blocks
# of a walk, where a sequence of no tokens counts too.
BESIDE = [([2100], 8, 16), ([2100, 0, 300], 2, 4), ([i % 3 * 1050 for i in range(12)], 1, 1), ([4096], 8, 24), ([4096] * 2, 4, 8), ([8192], 16, 16), ([32768], 8, 16)]
WIDE_BESIDE = [([2100, 70], 4, 4, 96, 192), ([2100], 3, 6, 128, 256), ([2100], 8, 24, 40, 40)]


def algos_here(lib, case):
    """The kernels that support the case on this card; all of them are checked, and what AUTO takes is one of them."""
    found = []
    c = Rule(**{name: value for name, value in case.items() if name != "ways"})
    for algo in (RECURRENT, CHUNKED_SM80, CHUNKED_SM90):
        p, chosen = c.params(lib, algo), C.c_int32(0)
        if lib.gdn_rule_backward_choice(C.byref(p), C.byref(chosen)) == OK:
            found.append(algo)
    return found


def rules():
    yield from every(io=IO, lens=[[1] * 3, [2] * 2, [63] * 2, [64] * 2, [65] * 2, [130] * 2, MIXED, [0] * 3])
    yield from every(rows("hk hv", (2, 2), (1, 3), (2, 8), (1, 1)), io=IO, lens=[[70, 20]])
    yield from every(rows("k v", (64, 64), (96, 192), (32, 40), (40, 72), (7, 3), (129, 250), (256, 256), (128, 64), (128, 256), (40, 136)), io=IO, lens=[[0, 70, 1, 37]], hk=1, hv=2)
    yield from every(io=IO, decay=["none", "weak", "fast", "strong", "thirty", "mixed"], lens=[[130, 64]], beta_scale=[1.0, 2.0])
    yield from every(io=IO, lens=[[0, 70, 1]], hk=1, hv=2, k=1, v=1, l2norm=False)
    yield from every(io=["f32", "bf16"], keys=["zeros", "repeated"], lens=[[100, 30]], decay=["none", "usual"], beta_scale=[1.0, 2.0])
    yield from every(io=IO, lens=[[90, 3]], l2norm=False, state=[True, False], d_state=[True, False])
    yield from every(CONSTANTS, rows("k v", (128, 128), (96, 192)), io=IO, lens=[[130, 64]])
    yield from every(io=IO, lens=[[70, 5]], odd=True, k=[128, 40], v=[128, 24])
    yield from every(io=["f32", "bf16"], lens=[[64] * 3, [150]], packed=[True, False], recompute=[False, True])
    yield from every(io=["f32", "bf16"], lens=[[700], [300, 1000, 64]], recompute=[False, True], hk=1, hv=2, ways=[REPEATS])
    yield from every(io=["f32", "bf16"], lens=[[300]], recompute=True, hk=1, hv=1, k=200, v=40)
    # Segments side by side: those that are asked for, and those that are chosen for long sequences of few heads.
    yield from every(lens=[MIXED, [700], [300] * 2], segments=[2, 3, 7], hk=1, hv=2, ways=[REPEATS])
    yield from every(rows("k v", (96, 192), (128, 256), (64, 40), (40, 136)), io=["bf16", "f16"], lens=[[500, 0, 130]], segments=[3], hk=1, hv=2)
    yield from every(lens=[[400]], segments=[4], state=[True, False], d_state=[True, False], l2norm=[True, False], decay=["none", "mixed"])
    yield from every(rows("hk hv k v", (1, 2, 128, 128), (1, 1, 96, 192)), lens=[[2600]], ways=[REPEATS])
    yield dict(lens=[2400, 1100, 70], hk=1, hv=2)
    yield from every(lens=[[2600], [1000, 300, 0, 2000]], segments=[2, 7, 64], decay=["none", "weak", "mixed"], hk=1, hv=2, io=["bf16", "f16"])
    yield from every(rows("lens hk hv", ([2100], 8, 16), ([32768], 4, 8)), io=["bf16", "f16"], ways=[REPEATS])
    # Gradients beside the walks: BESIDE, as the card with 132 multiprocessors chooses.
    yield from every(rows("lens hk hv", *BESIDE[:3]), segments=[0, 1], io=["bf16", "f16"], ways=[REPEATS])
    yield from every(rows("lens hk hv", BESIDE[1]), rows("state d_state", (True, False), (False, True), (False, False)))
    yield from every(rows("lens hk hv k v", *WIDE_BESIDE), segments=[0, 1])
    # Value rows in two parts.
    wide = dict(k=96, v=192)
    yield from every(io=IO, decay=["none", "strong", "mixed"], lens=[[130, 64, 5]], hk=2, hv=2, beta_scale=[1.0, 2.0], **wide)
    yield from every(keys=["zeros", "repeated"], lens=[[100, 30]], hk=1, hv=3, **wide)
    yield from every(lens=[[700], [200] * 3], recompute=[False, True], hk=1, hv=2, packed=[True, False], ways=[REPEATS], **wide)
    yield from every(rows("k v", (128, 192), (96, 256), (128, 200)), io=["bf16", "f16"], lens=[[300, 65]], state=[True, False], hk=2, hv=4, ways=[REPEATS])


RULE_QUICK = [dict(lens=[0, 5, 70, 1], hk=1, hv=2), dict(lens=[65] * 2, io="f32", hk=1, hv=1), dict(lens=[40], k=200, v=136, hk=1, hv=2, odd=True),
              dict(lens=[200, 70], hk=1, hv=1, k=40, v=24, io="f32", recompute=True), dict(lens=[200, 0, 70], hk=1, hv=2, segments=3), dict(lens=[200, 0, 70], hk=2, hv=4)]


def check_rule(lib, args):
    cases = RULE_QUICK if args.quick else list(rules())
    cases = [{"seed": i, **case} for i, case in enumerate(cases)]
    # AUTO's choice is one of the kernels; it is launched by itself in one case alone.
    table = [{**case, "algo": algo} for case in cases for algo in algos_here(lib, case)] + [{**cases[0], "algo": AUTO}]
    group(rule, table, table)(lib, args)


def left(lib, case, run):
    """What a launch of a case leaves, by sequence: the rows of each gradient, and its state's."""
    status = launch(lambda: call(run, case.last))
    assert status == OK, status
    return [[x[case.spots.of(i)].clone() for x in case.written] + [case.ds[i].clone()] for i in range(len(case.lens))]


def prepare(lib, case, algo=None):
    if algo is None:
        case.last = case.launch(lib).params
        case.written = [case.dx.view]
    else:
        case.fresh()
        case.last, case.written = case.params(lib, algo), [case.dx.view, case.d_gates.view]
    return case


def check_packing(lib, args):
    """Packed sequences leave the bits that each leaves alone, in as many segments; one of NaN changes no other."""
    lens = [65, 2, 0, 130, 1, 64]
    kinds = [("conv", lib.gdn_conv_backward, lambda lens: Conv(lens, 264, 4, packed=True), None)]
    for k, v in ((128, 128), (96, 192)):
        for algo, n in itertools.product(algos_here(lib, dict(lens=lens, hk=1, hv=2, k=k, v=v)), (1, 3)):
            make = lambda lens, k=k, v=v, n=n: Rule(lens, hk=1, hv=2, k=k, v=v, packed=True, segments=n)
            kinds.append((f"rule {NAMES[algo]} {k} {v} segments {n}", lib.gdn_rule_backward, make, algo))
    for name, run, make, algo in kinds:
        packed = prepare(lib, make(lens), algo)
        together = left(lib, packed, run)
        for i, length in enumerate(lens):
            alone = make([length])
            for field in ("x", "dy", "do", "gates", "weight", "state", "d_state"):      # the same values as in the packed case
                value = getattr(packed, field, None)
                if field == "weight" and value is not None:
                    alone.weight = value
                elif field in ("state", "d_state") and value is not None:
                    setattr(alone, field, value[i:i + 1].clone())
                elif value is not None:
                    getattr(alone, field).view.copy_(value.view[packed.spots.of(i)])
            report(f"{name}: sequence {i} packed and alone", same(left(lib, prepare(lib, alone, algo), run)[0], together[i]))
        packed.x.view[packed.spots.of(3)] = float("nan")
        packed.state[3] = float("nan")
        spoilt = left(lib, prepare(lib, packed, algo), run)
        report(f"{name}: NaN in one sequence", all(same(spoilt[i], together[i]) for i in range(len(lens)) if i != 3))


def check_segments(lib, args):
    """Segments leave the bits of none where no state is forgotten: without decays, and with keys that make it longer than decays make it
    shorter. Elsewhere what they leave out is a rounding of f32, which now and then turns one of f16, and that others: all below f16's own."""
    cases = [("bits", dict(decay="none")), ("bits", dict(l2norm=False)), ("about", dict(decay="weak")), ("about", dict(decay="weak", beta_scale=2.0))]
    for (kind, case), n in itertools.product(cases, (2, 40)):
        x = Rule([1500 if args.quick else 6000, 70, 0, 900], hk=1, hv=2, packed=True, io="f16", **case)
        if not case.get("l2norm", True):
            x.x.view[:, x.widths[0]:2 * x.widths[0]].normal_().mul_(0.25)      # beta k k is 4 on average
        for algo in (algo for algo in algos_here(lib, dict(lens=[70, 5])) if algo != RECURRENT):
            whole, parts = [], []
            for x.segments, made in ((1, whole), (n, parts)):
                made += [y for each in left(lib, prepare(lib, x, algo), lib.gdn_rule_backward) for y in each]
            error = max(relative(a, b.double()) for a, b in zip(parts, whole) if b.numel())
            report(f"{n} segments {case} {NAMES[algo]}", same(*(torch.cat([y.flatten() for y in made]) for made in (parts, whole))) if kind == "bits" else error < 2.0 ** -11,
                   f"{error:.1e}")


def check_beside(lib, args):
    """Gradients beside the walks leave the bits of the sections of `recompute`, which have the gradients kernel behind them, each time."""
    cases = rows("lens hk hv k v", *[(*sizes, 128, 128) for sizes in BESIDE], *WIDE_BESIDE)
    for i, case in enumerate(every(cases[:1] if args.quick else cases, io=["bf16", "f16"])):
        x = Rule(seed=i, packed=True, recompute=True, segments=1, **case)
        apart = left(lib, prepare(lib, x, AUTO), lib.gdn_rule_backward)
        x.recompute = False
        for repeat in range(1 if args.quick else 5):
            beside = left(lib, prepare(lib, x, AUTO), lib.gdn_rule_backward)
            report(f"beside the walks {case}, run {repeat}", all(same(a, b) for a, b in zip(apart, beside)))


def check_small(lib, args):
    """Without an eps the chunk forms have one of their own: keys of zeros leave nothing infinite."""
    for algo in (algo for algo in algos_here(lib, dict(lens=[70, 5])) if algo != RECURRENT):
        case, results = Rule([70, 5], keys="zeros"), []
        for eps in (0.0, 2.0 ** -100):
            prepare(lib, case, algo).last.l2_eps = eps
            results.append([x for parts in left(lib, case, lib.gdn_rule_backward) for x in parts])
        ok = same(*results) and all(bool(x.isfinite().all()) for x in results[0])
        report(f"keys of zeros without an eps {NAMES[algo]}", ok, "differs, or is not finite")


def check_goldens(lib, args):
    folder = os.environ.get("CANDLE_GDN_GOLDENS")
    path = os.path.join(folder, "op_grads.safetensors") if folder else ""
    if not os.path.exists(path):
        print("goldens: skipped, CANDLE_GDN_GOLDENS names no folder with op_grads.safetensors")
        return
    about, tensors = safetensors(path)
    for i, case in enumerate(json.loads(about["cases"])):
        mine = {name.split(".", 1)[1]: x for name, x in tensors.items() if name.startswith(f"{i}.")}
        for io in ("f32", "bf16"):
            for algo in (RECURRENT, AUTO) if io == "bf16" else (RECURRENT,):
                golden = Golden(mine, case, io)
                status = 0
                for f, p in golden.launches(lib, RECURRENT, algo):      # check_chunk.py has the forward pass in chunks
                    status = status or launch(lambda: call(f, p))
                errors = {name: relative(x, want) for name, x, want in golden.results() if want.numel()}
                bound = EXACT if io == "f32" else BOUND["bf16"]
                worst = max(errors, key=errors.get)
                report(f"golden {i} {io} {NAMES[algo]}", status == OK and errors[worst] <= bound, f"status {status}, {worst} {errors[worst]:.1e} of {bound:.0e}",
                       quiet=False)


def check_status(lib, args):
    expect("gates backward", lib.gdn_ready_gates_backward, lambda: ready_gates(lib, tokens=9).params,
           {"OK": [{}, dict(gates__heads=0)], "BAD_DTYPE": [dict(gate_dtype=3)], "BAD_WORKSPACE": one_by_one(workspace=[None, add(8)], workspace_bytes=[add(-1)]),
            "NULL_POINTER": one_by_one(d_a_log=[None], gates__a__ptr=[None]), "BAD_STRIDE": [dict(d_a__token_stride=-1)]})
    expect("conv backward", lib.gdn_conv_backward, lambda: conv(lib, lens=[70, 3], channels=64, width=4).params,
           {"OK": [{}, dict(d_state_in=None)], "BAD_CONV_WIDTH": [dict(width=9)], "BAD_WORKSPACE": one_by_one(workspace=[None, add(8)], workspace_bytes=[add(-1)]),
            "NULL_POINTER": one_by_one(weight=[None], d_weight=[None], x__ptr=[None])})
    expect("norm backward", lib.gdn_norm_backward, lambda: norm(lib, tokens=9, hv=2, dim=64).params,
           {"OK": [{}], "BAD_HEAD_DIM": [dict(head_v=300)], "BAD_LENGTH": [dict(tokens=-1), dict(tokens=1 << 31)],
            "BAD_WORKSPACE": one_by_one(workspace=[None, add(8)], workspace_bytes=[add(-1)]), "NULL_POINTER": one_by_one(d_weight=[None], d_x__ptr=[None])})
    expect("rule backward", lib.gdn_rule_backward, lambda: Rule([70, 3]).params(lib, RECURRENT),
           {"OK": [{}, dict(d_state_in=None), dict(num_seqs=0, q__ptr=None)], "BAD_DTYPE": one_by_one(gate_dtype=[1], state_dtype=[1], io_dtype=[3]),
            "BAD_HEAD_DIM": [dict(head_k=257)], "BAD_ALGO": one_by_one(algo=[-1, 2, 9]), "BAD_STRIDE": [dict(d_q__token_stride=-1)],
            "BAD_LENGTH": one_by_one(segments=[-1, 65]),
            "BAD_WORKSPACE": one_by_one(workspace=[None, add(8)], workspace_bytes=[add(-1)]), "NULL_POINTER": one_by_one(d_v__ptr=[None], d_o__ptr=[None])})
    null_params(lib.gdn_ready_gates_backward, lib.gdn_conv_backward, lib.gdn_norm_backward, lib.gdn_rule_backward)


def times(args):
    lens = [[512], [2048], [8192], [2048] * 4]
    shapes = every(lens=lens, hk=16, hv=32, algo=[RECURRENT]) + every(rows("lens k v io", ([2048], 128, 128, "f32"), ([2048], 256, 256, "bf16"), ([2048], 64, 64, "bf16")),
                                                                       hk=16, hv=16, algo=[RECURRENT])
    shapes += every(lens=[*lens, [4096] * 8, [32768]], hk=16, hv=32) + every(lens=[*lens, [4096] * 8], hk=30, hv=30, k=96, v=192)
    return [("gates, backward, bf16", ready_gates, every(tokens=[512, 8192, 32768], hv=32)),
            ("convolution, backward, bf16", conv, every(lens=[*lens, [8192] * 4], channels=8192, width=4)),
            ("gated norm, backward, bf16", norm, every(tokens=[512, 2048, 8192, 32768], hv=32, dim=128)),
            ("the rule, backward, bf16", rule, [{**case, "odd": None} for case in shapes])]


GROUPS = {"gates": group(ready_gates, GATES, GATES_QUICK), "conv": group(conv, convs, CONV_QUICK), "norm": group(norm, NORMS, NORM_QUICK), "rule": check_rule,
          "packing": check_packing, "beside": check_beside, "segments": check_segments, "small": check_small, "goldens": check_goldens, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times)
