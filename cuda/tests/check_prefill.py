#!/usr/bin/env python3
"""The chunk forms, GDN_CHUNKED_SM80 and _SM90, against the token recurrence in float64.

    python3 cuda/tests/check_prefill.py --random 5000    # instead of 1000; --seed N starts at another one
    python3 cuda/tests/check_prefill.py --beside 60      # seconds, instead of 10, while others use the card
    python3 cuda/tests/check_prefill.py --only-time --cells 16/32:1x8192,4x8192 --algo chunked_sm90 --segments 0,1,4

An error is relative RMS, ||x - ref|| / ||ref||, of a whole case and of its worst (sequence, head); for o, ||ref|| is at
least what a query of no particular direction would have read, since one that is orthogonal to the state reads rounding
alone. A case over the fixed bound may be hard for any kernel with operands of 16 bits: what they cost it is worked out then
(reference.rule_in_16_bits), bounds it, and stands in its line, after "hard".
"""
import ctypes as C
import math
import random
import subprocess
import sys
import time
from functools import partial

import harness
import torch
from abi import (ALGO_NAMES, AUTO, CHUNKED_SM80, CHUNKED_SM90, DECODE_128, NULL_POINTER, OK, RECURRENT, RECURRENT_128,
                 RuleParams, ptr, workspace)
from harness import CHUNKED_BOUND, call, expect, failures, launch, one_by_one, refused, report
from reference import relative
from rule_case import RuleCase, rule_calls, unchanged, worst_seen
from timing import cold_sets, graph_us, heading, span_us, stamped

ALGOS = [CHUNKED_SM80, CHUNKED_SM90]
# Rows of NaN around the tokens, and without cu_seqlens between the sequences; a gap behind every row. The default gap of the
# slots is what the header asks of the alignment of states and no more.
Case = partial(RuleCase, padding_by_either=True, x_frame=(0, 8), o_frame=(0, 8), gates_gap=3, margin=3,
               between=2, by_head=True)
ODD_O = dict(o_frame=(8, 24))


# ---- named cases ----

LENGTHS = (1, 6, 16, 63, 64, 65, 128, 130, 200, 512, 1000)
MIXED = [0, 3, 65, 0, 1, 17, 130, 64, 0]
DIMS = ((64, 64), (96, 192), (128, 64), (64, 128), (128, 256), (72, 40), (128, 128))


def case(lib, algos, name, lens, segments=(0,), checkpoint=0, **kw):
    Case(lens, **kw).check(lib, algos, name, segments, checkpoint)


def quick(lib, algos):
    case(lib, algos, "T=130", [130], hk=1, hv=2)
    case(lib, algos, "varlen, moved", [0, 5, 70, 64, 1], slots="moved", hk=1, hv=2, checkpoint=64)
    case(lib, algos, "K=72 V=40", [65, 3], k=72, v=40, hk=1, hv=2)
    case(lib, algos, "f16, bf16 state", [80] * 2, io="f16", state="bf16", slots="shared", hk=1, hv=1)
    case(lib, algos, "V=256", [70], v=256, hk=1, hv=1)
    case(lib, algos, "segments", [300, 20], hk=1, hv=2, segments=(2, 3), checkpoint=128, slots="apart")
    case(lib, algos, "a long sequence among short ones", [1] * 40 + [300, 2], hk=1, hv=2, segments=(0, 3), checkpoint=64)
    case(lib, algos[-1:], "several heads a block", [130] * 9, hk=8, hv=16, slots="moved")
    case(lib, algos[-1:], "heads cut in two", [520] * 9, hk=8, hv=16, checkpoint=64)


def named(lib, algos):
    run = lambda *args, **kw: case(lib, algos, *args, **kw)
    for io in ("bf16", "f16"):
        for length in LENGTHS:
            run(f"T={length}", [length] * 2, io=io)
        for hk, hv in ((2, 2), (2, 4), (1, 3), (2, 8), (1, 8), (16, 32)):
            run(f"heads {hk}/{hv}", [65, 33, 128], hk=hk, hv=hv, io=io)
        for k, v in DIMS:
            run(f"K={k} V={v}", MIXED, k=k, v=v, io=io, **ODD_O)
            run(f"K={k} V={v}", [200] * 2, k=k, v=v, io=io, state="bf16", slots="moved", checkpoint=64)
        for k, v in ((8, 8), (16, 248), (120, 136)):
            run(f"K={k} V={v}", MIXED, k=k, v=v, io=io)
        for how in ("identity", "apart", "permuted", "shared", "moved"):
            for state in ("f32", "bf16"):
                run(f"slots {how} varlen", MIXED, slots=how, io=io, state=state)
                run(f"slots {how} batched", [100] * 5, slots=how, io=io, state=state)
                run(f"slots {how} empty", [0] * 5, slots=how, io=io, state=state)
        for gate in ("f32", "bf16", "f16"):
            run(f"{gate} gates", [150, 20], io=io, gate=gate)
        run("varlen, equal lengths", [64] * 3, io=io, varlen=True)
        run("varlen, loose bounds of the lengths", MIXED, io=io, slack=500)
        hard(run, io)
    # Segments are cut by the longest; shorter ones have parts that are empty.
    for lens in ([1000], [1000] * 3, [1000, 130, 0, 1, 64, 999]):
        for how in ("identity", "moved"):
            run(f"{len(lens)} sequences of up to 1000, {how}", lens, segments=(1, 2, 3, 5), slots=how, checkpoint=64)
    # Long sequences among short ones: they begin first, and are cut alone.
    ragged = [i % 5 for i in range(100)]
    ragged[37], ragged[90] = 1500, 400
    for how in ("identity", "moved"):
        run(f"two long sequences among 98, {how}", ragged, segments=(0, 1, 3, 5), slots=how, hk=2, hv=4, checkpoint=64)
    run("two long sequences among 298", ragged + [1] * 200, hk=1, hv=2, segments=(0, 3))
    run("a short sequence among long ones", [300] * 40 + [3], hk=2, hv=4, segments=(0, 3), slots="moved")
    run("1000 tokens, no decay", [1000], segments=(1, 2, 3, 5), decay="none")
    run("1000 tokens, beta 2", [1000], segments=(1, 3), beta_scale=2.0, state="bf16")
    run("segments of fewer tokens than parts", [3, 65], segments=(2, 5, 100))
    run("many sequences", [i % 3 for i in range(3000)], hk=1, hv=1, k=8, v=8)
    # More heads than multiprocessors, for some lengths in whole rounds and for some with heads cut in two.
    run("many sequences", [70] * 300, hk=1, hv=2, k=64, v=64)
    run("many empty sequences", [0] * 300, hk=1, hv=1, k=8, v=8, slots="apart")
    for how in ("identity", "moved", "permuted"):
        for tokens in (130, 600):
            run(f"16 heads of 9 sequences, {how}", [tokens] * 9, hk=8, hv=16, slots=how, checkpoint=128, segments=(0, 1))
            run(f"16 heads of 17 sequences, {how}", [tokens + 1] * 17, hk=8, hv=16, k=64, v=64, slots=how, state="bf16")
    check_checkpoints(lib, algos)
    check_resume(lib, algos)
    check_repeats(lib, algos)


def hard(run, io):
    lens = [512, 130, 64]
    for keys in ("repeated", "alternating", "parallel"):
        for beta_scale in (1.0, 2.0):
            # In bf16 the roundings alone leave nothing of o there (prefill/README.md): nothing to check.
            if io == "bf16" and keys == "alternating" and beta_scale == 2.0:
                continue
            # At beta 2 errors grow with every token: short enough that what 16 bits cost stays far below one.
            plain, cut = (lens, [1000]) if beta_scale == 1.0 else ([130, 64, 5], [130])
            hardest = dict(io=io, keys=keys, beta=20.0, beta_scale=beta_scale, decay="none")
            run(f"{keys} keys, beta {beta_scale:.0f}, no decay", plain, **hardest)
            run(f"{keys} keys, beta {beta_scale:.0f}, no decay, segments", cut, segments=(3,), **hardest)
        run(f"{keys} keys", lens, io=io, keys=keys)
    for decay in ("strong", "mixed", "uniform", "none"):
        run(f"{decay} decay", lens, io=io, decay=decay, segments=(0, 2))
    run("mixed decay, repeated keys, beta 2", lens, io=io, decay="mixed", keys="repeated", beta=20.0, beta_scale=2.0)
    run("large norms", lens, io=io, qk_size=1e3)
    run("tiny norms", lens, io=io, qk_size=1e-4)
    run("zero rows", lens, io=io, keys="zeros")
    run("large v", lens, io=io, v_size=4e3)
    run("no l2norm", lens, io=io, l2norm=False)
    run("no l2norm, beta 2, no decay", lens, io=io, l2norm=False, beta_scale=2.0, decay="none")


def check_checkpoints(lib, algos):
    everyone = [*algos, RECURRENT, RECURRENT_128]
    for every in (64, 128):
        for how in ("identity", "moved"):
            for state in ("f32", "bf16"):
                for name, lens in (("packed", [63, 64, 200, 0, 129, 1, 300]), ("batched", [200] * 5)):
                    # A bf16 state is rounded once: over the bound of the recurrent kernels, which is f32's.
                    case(lib, everyone if state == "f32" else algos, f"checkpoints of {every}, {name}, {how}", lens,
                         checkpoint=every, slots=how, state=state, slot_gap=8)
    case(lib, algos, "checkpoints of 192 and 3 segments", [1000, 70], checkpoint=192, segments=(3,))
    case(lib, [DECODE_128], "checkpoints that one token does not reach", [1] * 70, checkpoint=64)
    c = Case([130] * 2)
    for algo in algos:
        for every in (64, 128):     # those of the whole are the ends of the prefixes
            whole = c.buffers(every)
            c.launch(lib, whole, algo, checkpoint=every)
            for n in range(len(c.lens)):
                row = n * 130 // every
                part = c.buffers()
                status = c.launch(lib, part, algo, window=(0, every))
                got = whole.checkpoints[row].view(c.shape)
                error = relative(got, part.state_out[n].view(c.shape))
                report(f"checkpoint of {every} next to a prefix, {ALGO_NAMES[algo]}",
                       status == OK and error <= CHUNKED_BOUND, f"{error:.1e}")


def check_resume(lib, algos):
    """Two launches over the parts of every sequence are one over the whole."""
    for total, cuts in ((200, (1, 37, 63, 64, 65, 100, 199)), (1000, (333, 640))):
        c = Case([total] * 3, slots="permuted")
        for algo in algos:
            for cut in cuts:
                b = c.buffers()
                status = c.launch(lib, b, algo, window=(0, cut)) or c.launch(lib, b, algo, window=(cut, total))
                name = f"{total} tokens cut at {cut} {ALGO_NAMES[algo]}"
                if not refused(lib, name, status):
                    report(name, *c.fine(algo, *c.judge(b)))


def check_repeats(lib, algos):
    """The same bits again; the parts of a workspace that a launch reads are its own."""
    for lens, hk, hv in (([1000], 4, 8), ([300, 20, 0, 65], 16, 32), ([64] * 40, 2, 4)):
        c = Case(lens, hk=hk, hv=hv, slots="moved")
        for algo in algos:
            for segments in (0, 3):
                c.check_repeats(lib, algo, f"{len(lens)} sequences, segments {segments}", segments, 64)


COPIES = """
import torch
x = torch.zeros(1 << 28, device="cuda")
y = torch.empty_like(x)
while True:
    for _ in range(20):
        y.copy_(x)
    torch.cuda.synchronize()
"""


def check_beside(lib, algos, seconds):
    """The same bits while other processes copy: a wait that is not for all it should be for shows where copies come late."""
    others = [subprocess.Popen([sys.executable, "-c", COPIES]) for _ in range(2)]
    try:
        cases = [Case([tokens] * n, hk=8, hv=heads) for tokens in (97, 150, 340, 600) for n, heads in ((9, 16), (3, 32))]
        first, runs, differing = {}, dict.fromkeys(algos, 0), dict.fromkeys(algos, 0)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for i, c in enumerate(cases):
                for algo in algos:
                    buffers = [c.buffers(128) for _ in range(4)]
                    good = all(c.launch(lib, b, algo, 0, 128) == OK for b in buffers)
                    for b in buffers:
                        runs[algo] += 1
                        differing[algo] += not (good and unchanged(b, first.setdefault((i, algo), b)))
    finally:
        for other in others:
            other.kill()
            other.wait()
    for algo in algos:
        report(f"beside other processes {ALGO_NAMES[algo]}", differing[algo] == 0, f"{differing[algo]} of {runs[algo]} differ")


def add(n):
    """A change of a field by n."""
    return lambda x: x + n


def check_status(lib, algos):
    c = Case([1000, 0, 130], hk=2, hv=4)
    b = c.buffers(64)
    size = C.c_int64(0)

    def params(algo):
        p = c.params(b, algo, 3, 64)
        workspace(lib.gdn_rule_workspace, p)
        return p

    for algo in algos:
        expect(ALGO_NAMES[algo], lib.gdn_rule, lambda: params(algo), {
            "OK": [{}, dict(checkpoints=None, checkpoint_tokens=-7)],       # read only with checkpoints
            "BAD_CHECKPOINTS": one_by_one(checkpoint_tokens=[0, 32, 65, -64]),
            "BAD_ALGO": one_by_one(
                io_dtype=[0], head_k=[136, 68], head_v=[68], state_in=[add(4)], state_out=[add(4)],
                in_slots__slot_stride=[add(1)], token_states=[lambda _: ptr(b.checkpoints)],
                **{f"{x}__{field}": [add(n)] for x in "qkv"
                   for field, n in (("ptr", 2), ("token_stride", 1), ("head_stride", 4))}),
            "BAD_LENGTH": one_by_one(seqs__total_tokens=[-1], seqs__max_tokens_per_seq=[-1], segments=[-1])})

        # From sizes alone: pointers that are not there yet change nothing.
        p = c.params(b, algo, 3, 64)
        assert lib.gdn_rule_workspace(C.byref(p), C.byref(size)) == OK
        need = size.value
        for x in ("q", "k", "v", "a", "b", "o"):
            getattr(p, x).ptr = None
        p.a_log = p.dt_bias = p.state_in = p.state_out = None
        got = lib.gdn_rule_workspace(C.byref(p), C.byref(size))
        report(f"workspace from sizes alone {ALGO_NAMES[algo]}", (got, size.value) == (OK, need), f"{need} bytes")
        if need:
            expect(ALGO_NAMES[algo], lib.gdn_rule, lambda: params(algo), {
                "BAD_WORKSPACE": one_by_one(workspace=[None, add(8)], workspace_bytes=[add(-1), 0])})
        report("workspace of null", lib.gdn_rule_workspace(None, C.byref(size)) == NULL_POINTER
               and lib.gdn_rule_workspace(C.byref(p), None) == NULL_POINTER)
    for algo in (RECURRENT, RECURRENT_128):
        expect(ALGO_NAMES[algo], lib.gdn_rule, lambda: params(algo), {
            "OK": [dict(checkpoint_tokens=64, workspace=None, workspace_bytes=0)],
            "BAD_CHECKPOINTS": [dict(checkpoint_tokens=63)]})
    p = c.params(b, AUTO, checkpoint=64)
    chosen = C.c_int32(AUTO)
    status = lib.gdn_rule_choice(C.byref(p), C.byref(chosen))
    report("choice of auto", status == OK and chosen.value != AUTO, ALGO_NAMES[chosen.value])


# ---- random batches ----

HEADS = ((1, 1), (2, 4), (4, 8), (1, 3), (2, 8), (16, 32))
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)


def random_case(seed):
    """(Case, segments, checkpoint, the case in words) by its number."""
    r = random.Random(seed)
    lens = [r.choice(EDGES) if r.random() < 0.6 else r.randint(0, 400) for _ in range(r.randint(1, 8))]
    hk, hv = r.choice(HEADS)
    k, v = r.choice(DIMS) if r.random() < 0.25 else (128, 128)
    kw = dict(io=r.choice(("bf16", "f16")), gate=r.choice(("f32", "bf16", "f16")), state=r.choice(("f32", "f32", "bf16")),
              slots=r.choice(("identity", "apart", "permuted", "shared", "moved")), beta_scale=r.choice((1.0, 2.0)),
              l2norm=r.random() < 0.7, decay=r.choice(("normal", "normal", "none", "strong", "mixed", "uniform")),
              **(ODD_O if r.random() < 0.3 else {}), slack=r.choice((0, 0, 1, 100)))
    # Now and then equal lengths without cu_seqlens, where rows of NaN stand between the sequences.
    if r.random() < 0.2:
        lens, kw["varlen"], kw["slack"] = [lens[0]] * len(lens), False, 0
    else:
        kw["varlen"] = True
    text = f"seed {seed} heads {hk}/{hv} K={k} V={v} lengths {lens} {kw}"
    return Case(lens, hk, hv, k, v, seed=seed, **kw), r.choice((0, 1, 2, 3)), r.choice((0, 0, 64, 128)), text


def check_random(lib, algos, count, seed):
    bad = {algo: 0 for algo in algos}
    for i in range(count):
        c, segments, checkpoint, text = random_case(seed + i)
        for algo in algos:
            ok, found = c.run(lib, algo, segments, checkpoint)
            if not ok:
                bad[algo] += 1
                report(f"random {text} {ALGO_NAMES[algo]} segments {segments} checkpoints {checkpoint}", False, found)
        if (i + 1) % 100 == 0:
            print(f"     {i + 1} random batches, {sum(bad.values())} failed", flush=True)
    for algo in algos:
        report(f"{count} random batches {ALGO_NAMES[algo]}", bad[algo] == 0, f"{bad[algo]} failed")


# ---- times ----

CELLS = ["1x64", "1x128", "1x512", "1x2048", "1x8192", "1x32768", "4x2048", "4x8192", "8x1024"]
# µs of the fastest peer (FlashInfer 0.7.2, FlashQLA 0.1.3) on an H200: their rule alone, from normalised q and k and ready
# gates, where ours includes both.
PEERS = {
    "16/32": [8.8, 11.8, 28.6, 84.7, 227, 705, 101, 371, 110],
    "4/8": [8.0, 11.0, 23.8, 61.7, 111, 234, 82.3, 254, 51.5],
    "16/16": [8.2, 11.2, 25.1, 75.3, 151, 386, 97.3, 365, 57.6],
    "16/48": [8.3, 11.5, 28.1, 95.4, 351, 1255, 197, 723, 160],
    "16/64": [8.4, 11.6, 28.5, 96.3, 362, 1373, 197, 733, 212],
}


def select(text):
    """{heads: [cell]} of "16/32:1x8192,4x8192,4/8" or "all"."""
    chosen, heads = {}, None
    for word in (",".join(PEERS) if text == "all" else text).replace(",", " ").split():
        cell = word
        if "/" in word:
            heads, _, cell = word.partition(":")
            if heads not in PEERS:
                raise SystemExit(f"no times of peers for heads {heads}; there are {', '.join(PEERS)}")
            chosen.setdefault(heads, [])
        if cell and cell not in CELLS or heads is None:
            raise SystemExit(f"'{word}' is not one of {', '.join(CELLS)}, behind heads such as 16/32:")
        chosen[heads] += [cell] if cell else CELLS
    return chosen


def result(lib, timed, algo):
    """o and the final state of a call by another kernel or its own, elsewhere than where it writes them."""
    p = RuleParams.from_buffer_copy(timed.params)
    o, state = (torch.full_like(x, math.nan) for x in (timed.buffers.o, timed.buffers.state_out))
    p.o.ptr, p.state_out, p.algo = ptr(o), ptr(state), algo
    workspace(lib.gdn_rule_workspace, p)
    status = launch(lambda: call(lib.gdn_rule, p))
    return (o, state) if status == OK else lib.gdn_status_string(status).decode()


def times(lib, args):
    variants = [(a, s) for a in wanted(args) for s in args.segments]
    names = [ALGO_NAMES[a] + (f", {s} segments" if s else "") for a, s in variants]
    heading("µs from the first kernel's begin to the last one's end (CUPTI) / of graph replay a call; cold L2, bf16, f32 state, "
            "K = V = 128; x: the peer's time over ours")
    print(f"| HK/HV | shape | peer | {' | '.join(names)} |")
    print("|---" * (3 + len(names)) + "|")
    worst = 0.0
    for heads, shapes in select(args.cells).items():
        hk, hv = map(int, heads.split("/"))
        ratios = [[] for _ in variants]
        for shape in shapes:
            batch, tokens = map(int, shape.split("x"))
            peer, row = PEERS[heads][CELLS.index(shape)], []
            nbytes = batch * (tokens * 4 * (hk + hv) * 128 + hv * 128 * 128 * 4)
            want = None
            for (algo, parts), mine in zip(variants, ratios):
                calls = rule_calls(lib, batch, tokens, hk, hv, 128, algo, cold_sets(nbytes), parts)
                want = want or result(lib, calls[0], RECURRENT_128)
                got = result(lib, calls[0], algo)
                if isinstance(got, str):
                    row.append(got)
                    continue
                error = max(map(relative, got, want))
                if not error <= CHUNKED_BOUND:
                    failures.append(f"timed {heads} {shape} {ALGO_NAMES[algo]} segments {parts}: {error:.1e}")
                    row.append(f"WRONG {error:.1e}")
                    continue
                worst = max(worst, error)
                calls = stamped(lib, calls, args.stamps) if args.stamps else calls
                span = span_us(calls * math.ceil((24 if batch * tokens <= 8192 else 9) / len(calls)))
                mine.append(peer / span)
                row.append(f"{span:.1f} / {graph_us(calls, 5):.1f} x{peer / span:.2f}")
                del calls
            print(f"| {heads} | {shape} | {peer:g} | {' | '.join(row)} |", flush=True)
        mean = lambda x: f"x{math.exp(sum(map(math.log, x)) / len(x)):.2f}" if x else ""
        print(f"| {heads} | geometric mean of {len(shapes)} | | {' | '.join(map(mean, ratios))} |", flush=True)
    print(f"o and states next to {ALGO_NAMES[RECURRENT_128]}: {worst:.1e} at most")


def split(text):
    return [word.strip() for word in text.split(",") if word.strip()]


OPTIONS = [
    ("--random", dict(type=int, metavar="N", help="that many random batches; default 1000, with --quick none")),
    ("--seed", dict(type=int, default=0, help="of the first random batch")),
    ("--beside", dict(type=float, metavar="S",
                      help="seconds of launches beside other processes; default 10, with --quick none")),
    ("--algo", dict(type=split, default=[ALGO_NAMES[a] for a in ALGOS], metavar="NAME,…",
                    help="chunked_sm80, chunked_sm90; for the times others too")),
    ("--segments", dict(type=lambda text: [int(x) for x in split(text)], default=[0], metavar="N,…",
                        help="of the times; default 0, the kernel's own choice")),
    ("--stamps", dict(type=int, default=0, metavar="N",
                      help="of the times: record that many events a warp; for a library built with -DGDN_PROFILE")),
    ("--cells", dict(default="16/32,4/8", metavar="HK/HV[:NxT,…] …",
                     help="of the times: heads, or some lengths of them, apart by spaces or by ',' before heads; 'all'")),
]


def wanted(args):
    """The algorithms that --algo names and this device has."""
    for name in args.algo:
        if name not in ALGO_NAMES:
            raise SystemExit(f"unknown algo '{name}'; there are {', '.join(ALGO_NAMES)}")
    algos = [ALGO_NAMES.index(name) for name in args.algo]
    if CHUNKED_SM90 in algos and torch.cuda.get_device_capability() != (9, 0):
        print("chunked_sm90 is for sm_90 alone: left out")
        algos.remove(CHUNKED_SM90)
    return algos


def check(lib, args):
    algos = [algo for algo in wanted(args) if algo in ALGOS]
    (quick if args.quick else named)(lib, algos)
    check_status(lib, algos)
    count = args.random if args.random is not None else 0 if args.quick else 1000
    if count:
        check_random(lib, algos, count, args.seed)
    seconds = args.beside if args.beside is not None else 0 if args.quick else 10
    if seconds:
        check_beside(lib, algos, seconds)
    for (algo, name), (whole, worst) in sorted(worst_seen.items()):
        print(f"largest error of {name}, {ALGO_NAMES[algo]}: {whole:.1e} of a case, {worst:.1e} of a head")


def main():
    harness.program(__doc__, check, times, options=OPTIONS)


if __name__ == "__main__":
    main()
