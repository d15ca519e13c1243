#!/usr/bin/env python3
"""The chunk forms, GDN_CHUNKED_SM80 and _SM90, against the token recurrence in float64.

    python3 cuda/tests/check_chunk.py --random 5000    # instead of 1000; --seed N starts at another one
    python3 cuda/tests/check_chunk.py --busy 60        # seconds, instead of 10, while other processes use the card
    python3 cuda/tests/check_chunk.py --only-time --cases 'hk=16 hv=32 algo=5' --stamps 4096

An error is relative RMS, ||x - ref|| / ||ref||, of a whole case and of its worst (sequence, head); for o, ||ref|| is at
least what a query of no particular direction would have read, since one that is orthogonal to the state reads rounding
alone. A case over the fixed bound may be hard for any kernel with operands of 16 bits: what they cost it is worked out then
(reference.rule_in_16_bits), bounds it, and stands in its line, after "hard".
"""
import ctypes as C
import functools
import random
import subprocess
import sys
import time

import harness
import torch
from abi import ALGO_NAMES, AUTO, CHUNKED_SM80, CHUNKED_SM90, NULL_POINTER, OK, RECURRENT_128
from cases import CONSTANTS, every, rows, words
from harness import CHUNKED_BOUND, Launch, add, call, expect, group, launch, one_by_one, report, same, verify
from reference import relative
from rule_case import REPEATS, RuleCase, once, rule, worst_seen

ALGOS = [CHUNKED_SM80, CHUNKED_SM90]
# Rows of NaN around the tokens, and without cu_seqlens between the sequences; a gap after every row. The default gap of the
# slots is what the header asks of the alignment of states and no more.
FRAMED = dict(padding_by_either=True, x_frame=(0, 8), o_frame=(0, 8), gates_gap=3, margin=3, between=2, by_head=True)
ODD_O = dict(o_frame=(8, 24))
IO = ["bf16", "f16"]
MIXED = [0, 3, 65, 0, 1, 17, 130, 64, 0]
SIZES = rows("k v", (64, 64), (96, 192), (128, 64), (64, 128), (128, 256), (72, 40), (128, 128))
HEADS = rows("hk hv", (2, 2), (2, 4), (1, 3), (2, 8), (1, 8), (16, 32))
SLOTS = ["identity", "apart", "permuted", "shared", "moved"]

QUICK = [dict(lens=[130], hk=1, hv=2), dict(lens=[0, 5, 70, 64, 1], slots="moved", hk=1, hv=2), dict(lens=[65, 3], k=72, v=40, hk=1, hv=2),
         dict(lens=[80] * 2, io="f16", state="bf16", slots="shared", hk=1, hv=1), dict(lens=[70], v=256, hk=1, hv=1),
         dict(lens=[300, 20], hk=1, hv=2, segments=(2, 3), slots="apart"),
         dict(lens=[1] * 40 + [300, 2], hk=1, hv=2, segments=(0, 3)), dict(lens=[70, 300], hk=1, hv=2, ready=True, zeros=True, segments=(1, 2)),
         # Several heads a block; heads cut in two.
         dict(lens=[130] * 9, hk=8, hv=16, slots="moved", algos=1), dict(lens=[520] * 9, hk=8, hv=16, algos=1)]


def chunked(lib, **case):
    return rule(lib, **{**FRAMED, **case})


def by_algos(cases, algos):
    """The cases, each by all kernels, or by its last `algos`, and by all of its `segments`."""
    for seed, case in enumerate(cases):
        case = {"seed": seed, **case}
        for algo in algos[-case.pop("algos", 2):]:
            yield from ({**case, "algo": algo, "segments": n} for n in case.get("segments", (0,)))


def named():
    types = every(io=IO)
    yield from every(types, lens=[[n] * 2 for n in (1, 6, 16, 63, 64, 65, 128, 130, 200, 512, 1000)])
    yield from every(types, HEADS, lens=[[65, 33, 128]])
    yield from every(types, SIZES, [dict(lens=MIXED, **ODD_O), dict(lens=[200] * 2, state="bf16", slots="moved")])
    yield from every(types, rows("k v", (8, 8), (16, 248), (120, 136)), lens=[MIXED])
    yield from every(types, slots=SLOTS, state=["f32", "bf16"], lens=[MIXED, [100] * 5, [0] * 5])
    yield from every(types, lens=[[150, 20]], gate=["f32", "bf16", "f16"])
    yield from every(types, [dict(lens=[64] * 3, varlen=True), dict(lens=MIXED, slack=500)])
    # Always the same draw: what operands of 16 bits cost such inputs depends on it.
    yield from every(list(hard()), seed=0)
    sizes = rows("k v", (64, 64), (72, 40), (128, 256))
    # Segments are cut by the longest; shorter ones have parts that are empty.
    yield from every(lens=[[1000], [1000] * 3, [1000, 130, 0, 1, 64, 999]], slots=["identity", "moved"], segments=(1, 2, 3, 5))
    # Long sequences among short ones: they begin first, and are cut alone.
    ragged = [i % 5 for i in range(100)]
    ragged[37], ragged[90] = 1500, 400
    yield from every(lens=[ragged], slots=["identity", "moved"], segments=(0, 1, 3, 5))
    yield dict(lens=ragged + [1] * 200, hk=1, hv=2, segments=(0, 3))
    yield dict(lens=[300] * 40 + [3], segments=(0, 3), slots="moved")
    yield dict(lens=[1000], segments=(1, 2, 3, 5), decay="none")
    # Long enough for borders that the device chooses: heads that forget within a segment, others that do not; and where
    # samples deceive, a transfer that runs from the sequence's begin.
    yield from every(io=IO, lens=[[4200], [4500, 700, 64, 5000]], decay=["normal", "strong", "mixed", "uniform", "none"], hk=1, hv=4, segments=(3, 4, 5))
    yield from every(io=IO, lens=[[4200]], decay=["normal", "strong", "uniform"], l2norm=False, segments=(3, 4), state=["f32", "bf16"])
    yield from every(io=IO, lens=[[4200]], decay="late", zeros=[True, False], state=["f32", "bf16"], hk=1, hv=4, segments=(3, 4))
    yield from every(sizes, lens=[[4200, 20]], decay=["normal", "uniform"], ready=True, zeros=[True, False], slots="moved", beta_scale=2.0, segments=(3,))
    yield dict(lens=[i % 90 for i in range(100)] + [9000, 4000], hk=1, hv=4, segments=(0, 7))
    yield dict(lens=[1000], segments=(1, 3), beta_scale=2.0, state="bf16")
    yield dict(lens=[1000, 70], segments=(3,))
    # Gates of the caller, and no initial state.
    extras = [dict(ready=True), dict(zeros=True), dict(ready=True, zeros=True)]
    yield from every(extras, io=IO, lens=[MIXED, [200] * 3])
    yield from every(extras, lens=[[1000, 130, 0, 64]], segments=(1, 3), state=["f32", "bf16"], slots=["identity", "moved"])
    yield from every(extras, sizes, lens=[[130, 5]], decay=["normal", "strong", "none"], beta_scale=2.0)
    yield dict(lens=[130] * 9, hk=8, hv=16, ready=True, zeros=True, algos=1)
    yield dict(lens=[3, 65], segments=(2, 5, 100))      # fewer tokens than parts
    yield dict(lens=[i % 3 for i in range(3000)], hk=1, hv=1, k=8, v=8)
    # More heads than multiprocessors, for some lengths in whole rounds and for some with heads cut in two.
    yield dict(lens=[70] * 300, hk=1, hv=2, k=64, v=64)
    yield dict(lens=[0] * 300, hk=1, hv=1, k=8, v=8, slots="apart")
    yield from every(lens=[[130] * 9, [600] * 9], hk=8, hv=16, slots=["identity", "moved", "permuted"], segments=(0, 1))
    yield from every(lens=[[131] * 17, [601] * 17], hk=8, hv=16, k=64, v=64, slots=["identity", "moved", "permuted"], state="bf16")
    # The same bits again; the parts of a workspace that a launch reads are its own.
    yield from every(rows("lens hk hv", ([1000], 4, 8), ([300, 20, 0, 65], 16, 32), ([64] * 40, 2, 4)), slots="moved", segments=(0, 3), ways=REPEATS)


def hard():
    lens = [512, 130, 64]
    # At beta 2 errors grow with every token: short enough that what 16 bits cost stays far below one.
    for io, keys, (beta_scale, plain, cut) in ((io, keys, x) for io in IO for keys in ("repeated", "alternating", "parallel")
                                               for x in ((1.0, lens, [1000]), (2.0, [130, 64, 5], [130]))):
        # In bf16 the roundings alone leave nothing of o there (reference.py): nothing to check.
        if (io, keys, beta_scale) != ("bf16", "alternating", 2.0):
            hardest = dict(io=io, keys=keys, beta=20.0, beta_scale=beta_scale, decay="none")
            yield from [dict(lens=plain, **hardest), dict(lens=cut, segments=(3,), **hardest)]
    yield from every(io=IO, lens=[lens], keys=["repeated", "alternating", "parallel"])
    yield from every(CONSTANTS, io=IO, lens=[lens], segments=(0, 2))
    yield from every(io=IO, lens=[lens], decay=["strong", "mixed", "uniform", "none"], segments=(0, 2))
    yield from every([dict(decay="mixed", keys="repeated", beta=20.0, beta_scale=2.0), dict(qk_size=1e3), dict(qk_size=1e-4), dict(keys="zeros"),
                      dict(keys="zeros", v_size=4e3),
                      dict(v_size=4e3), dict(l2norm=False), dict(l2norm=False, beta_scale=2.0, decay="none")], io=IO, lens=[lens])


def algos_here():
    """The kernels that this device has."""
    return ALGOS if torch.cuda.get_device_capability() == (9, 0) else ALGOS[:1]


def check_named(lib, args):
    group(chunked, lambda: by_algos(named(), algos_here()), by_algos(QUICK, algos_here()))(lib, args)


def check_resume(lib, args):
    """Two launches over the parts of every sequence are one over the whole."""
    for total, cut in () if args.quick else [(200, n) for n in (1, 37, 63, 64, 65, 100, 199)] + [(1000, 333), (1000, 640)]:
        for algo in algos_here():
            c = once(RuleCase, lens=[total] * 3, slots="permuted", **FRAMED)
            c.buffers()
            first, second = (c.params(lib, algo, window=window) for window in ((0, cut), (cut, total)))
            both = lambda p, stream: lib.gdn_rule(C.byref(first), stream) or lib.gdn_rule(p, stream)
            verify(lib, f"{total} tokens cut at {cut} {ALGO_NAMES[algo]}", Launch(both, second, lambda: c.outputs(algo), after=c.after))


def check_large(lib, args):
    """A state past the largest number of f16 is cut off in products: nothing becomes NaN, and once it has decayed it is as any other."""
    sizes = [dict(lens=[700] * 2, k=64, v=64), dict(lens=[700] * 2), dict(lens=[700] * 9, hk=8, hv=16)]
    for case in sizes[:1] if args.quick else sizes:
        c = RuleCase(io="f16", **case, **FRAMED)
        c.pool *= 1e6
        c.a_log.zero_()
        c.dt_bias.fill_(-2.0)      # some e^-100 in all
        want, _, state = c.reference()
        for algo, segments in ((algo, segments) for algo in algos_here() for segments in (1, 3)):
            c.buffers()
            p = c.params(lib, algo, segments)
            status = launch(lambda: call(lib.gdn_rule, p))
            o = c.o[c.index].unflatten(-1, (c.hv, c.v)).double()
            e_o, e_state = relative(o[:, -64:], want[:, -64:]), relative(c.state_out.view_as(state), state)
            ok = status == OK and not bool(o.isnan().any()) and max(e_o, e_state) <= CHUNKED_BOUND      # false for NaN
            report(f"large states {words(case)} {ALGO_NAMES[algo]}, {segments} segments", ok, f"o {e_o:.1e} state {e_state:.1e}, status {status}")


def check_small(lib, args):
    """Without an eps the kernels have one of their own: keys of zeros, and those whose squares sum up to a subnormal number."""
    for keys in (dict(qk_size=1e-21), dict(qk_size=1e-16), dict(keys="zeros")):
        for lens, algo in ((lens, algo) for lens in ([130] * 2, [70, 5]) for algo in algos_here()):
            c = RuleCase(lens, l2_eps=2.0 ** -100, **keys, **FRAMED)
            c.buffers()
            p = c.params(lib, algo)
            p.l2_eps = 0.0
            verify(lib, f"small keys {words(keys)} {lens} {ALGO_NAMES[algo]}", Launch(lib.gdn_rule, p, lambda: c.outputs(algo), after=c.after))


COPIES = """
import torch
x = torch.zeros(1 << 28, device="cuda")
y = torch.empty_like(x)
while True:
    for _ in range(20):
        y.copy_(x)
    torch.cuda.synchronize()
"""


def check_busy(lib, args):
    """The same bits while other processes copy: a wait that is not for all it should be for shows where copies come late."""
    algos, others = algos_here(), []
    seconds = args.busy if args.busy is not None else 0 if args.quick else 10
    cases = [RuleCase([tokens] * n, hk=8, hv=heads, **FRAMED) for tokens in (97, 150, 340, 600) for n, heads in ((9, 16), (3, 32))] if seconds else []
    first, runs, differing = {}, dict.fromkeys(algos, 0), dict.fromkeys(algos, 0)
    end = time.monotonic() + seconds
    try:
        others += [subprocess.Popen([sys.executable, "-c", COPIES]) for _ in range(2 if seconds else 0)]
        while time.monotonic() < end:
            for i, c in enumerate(cases):
                for algo in algos * 4:
                    c.buffers()
                    p = c.params(lib, algo)
                    good = launch(lambda: call(lib.gdn_rule, p)) == OK
                    left = [c.o_buffer, c.state_out]
                    runs[algo] += 1
                    differing[algo] += not (good and same(left, first.setdefault((i, algo), left)))
    finally:
        for other in others:
            other.kill()
            other.wait()
    for algo in algos:
        report(f"beside other processes {ALGO_NAMES[algo]}", differing[algo] == 0, f"{differing[algo]} of {runs[algo]} differ", quiet=False)


def check_status(lib, args):
    c = RuleCase([1000, 0, 130], **FRAMED)
    c.buffers()
    size = C.c_int64(0)
    for algo in algos_here():
        expect(ALGO_NAMES[algo], lib.gdn_rule, lambda: c.params(lib, algo, 3), {
            "OK": [{}],
            "BAD_ALGO": one_by_one(
                io_dtype=[0], head_k=[136, 68], head_v=[68], state_in=[add(4)], state_out=[add(4)], in_slots__slot_stride=[add(1)],
                **{f"{x}__{field}": [add(n)] for x in "qkv"
                   for field, n in (("ptr", 2), ("token_stride", 1), ("head_stride", 4))}),
            "BAD_LENGTH": one_by_one(total_tokens=[-1], max_tokens_per_seq=[-1], segments=[-1])})

        # From sizes alone: pointers that are not there yet change nothing.
        p = c.params(lib, algo, 3)
        assert lib.gdn_rule_workspace(C.byref(p), C.byref(size)) == OK
        need = size.value
        for x in ("q", "k", "v", "a", "b", "o"):
            setattr(p, f"{x}__ptr", None)
        p.a_log = p.dt_bias = p.state_in = p.state_out = None
        got = lib.gdn_rule_workspace(C.byref(p), C.byref(size))
        report(f"workspace from sizes alone {ALGO_NAMES[algo]}", (got, size.value) == (OK, need), f"{need} bytes")
        if need:
            expect(ALGO_NAMES[algo], lib.gdn_rule, lambda: c.params(lib, algo, 3), {
                "BAD_WORKSPACE": one_by_one(workspace=[None, add(8)], workspace_bytes=[add(-1), 0])})
        report("workspace of null", lib.gdn_rule_workspace(None, C.byref(size)) == NULL_POINTER
               and lib.gdn_rule_workspace(C.byref(p), None) == NULL_POINTER)
    chosen = C.c_int32(AUTO)
    status = lib.gdn_rule_choice(C.byref(c.params(lib, AUTO)), C.byref(chosen))
    report("choice of auto", status == OK and chosen.value != AUTO, ALGO_NAMES[chosen.value])


# ---- random batches ----

EDGES = (0, 1, 63, 64, 65, 127, 128, 129)


def random_case(seed):
    """A case by its number."""
    r = random.Random(seed)
    lens = [r.choice(EDGES) if r.random() < 0.6 else r.randint(0, 400) for _ in range(r.randint(1, 8))]
    heads = r.choice([*HEADS[1:], dict(hk=1, hv=1), dict(hk=4, hv=8)])
    size = r.choice(SIZES) if r.random() < 0.25 else dict(k=128, v=128)
    case = dict(io=r.choice(IO), gate=r.choice(("f32", "bf16", "f16")), state=r.choice(("f32", "f32", "bf16")), slots=r.choice(SLOTS),
                beta_scale=r.choice((1.0, 2.0)), l2norm=r.random() < 0.7, **(ODD_O if r.random() < 0.3 else {}),
                decay=r.choice(("normal", "normal", "none", "strong", "mixed", "uniform")), slack=r.choice((0, 0, 1, 100)), varlen=True)
    # Now and then equal lengths without cu_seqlens, where rows of NaN stand between the sequences.
    if r.random() < 0.2:
        lens, case["varlen"], case["slack"] = [lens[0]] * len(lens), False, 0
    return {**case, "lens": lens, **heads, **size, "seed": seed, "segments": (r.choice((0, 1, 2, 3)),)}


def check_random(lib, args):
    count = args.random if args.random is not None else 0 if args.quick else 1000
    cases = [random_case(args.seed + i) for i in range(count)]
    group(chunked, by_algos(cases, algos_here()), by_algos(cases, algos_here()))(lib, args)
    for (algo, name), (whole, worst) in sorted(worst_seen.items()):
        print(f"largest error of {name}, {ALGO_NAMES[algo]}: {whole:.1e} of a case, {worst:.1e} of a head")


# ---- times ----

@functools.cache
def stamps_room():
    return torch.zeros(1 << 31, dtype=torch.uint8)


def timed(lib, stamps=0, **case):
    """A launch that was compared with GDN_RECURRENT_128, where it is the first of its shape. With `stamps` it records that many events a
    warp at most."""
    def stamped(p, stream):
        lib.gdn_profile_set(stamps_room().data_ptr(), stamps_room().numel(), stamps)
        status = lib.gdn_rule(p, stream)
        lib.gdn_profile_set(None, 0, 0)
        return status

    if case["seed"] == 0:
        left = []
        for algo in (RECURRENT_128, case["algo"]):
            x = rule(lib, **{**case, "algo": algo})
            ok = launch(lambda: call(x.f, x.params)) == OK
            left.append((x.keep.o.clone(), x.keep.state_out.clone()))
        error = max(map(relative, *reversed(left)))
        report(f"timed {words(case)}", ok and error <= CHUNKED_BOUND, f"{error:.1e}")
    x = rule(lib, **case)
    x.f = stamped if stamps else x.f
    return x


def times(args):
    heads = rows("hk hv", (16, 32), (4, 8), (16, 16), (16, 48), (16, 64))
    lens = [[64], [128], [512], [2048], [8192], [32768], [2048] * 4, [8192] * 4, [1024] * 8]
    return [("prefill, bf16, f32 state, K = V = 128", timed, every(heads, algo=algos_here(), lens=lens, stamps=args.stamps)),
            ("segments", timed, every(heads[:2], algo=algos_here(), segments=[1, 2, 4, 8], lens=[[2048], [8192]], stamps=args.stamps)),
            ("what heads forget", timed, every(heads[:2], algo=algos_here(), decay=["strong", "normal", "none"], lens=[[8192], [32768]], stamps=args.stamps))]


OPTIONS = [
    ("--random", dict(type=int, metavar="N", help="that many random batches; default 1000, with --quick none")),
    ("--seed", dict(type=int, default=0, help="of the first random batch")),
    ("--busy", dict(type=float, metavar="S", help="seconds of launches beside other processes; default 10, with --quick none")),
    ("--stamps", dict(type=int, default=0, metavar="N",
                      help="of the times: record that many events a warp; for a library built with -DGDN_PROFILE"))]
GROUPS = {"named": check_named, "resume": check_resume, "large": check_large, "small": check_small, "status": check_status, "random": check_random, "busy": check_busy}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, options=OPTIONS)
