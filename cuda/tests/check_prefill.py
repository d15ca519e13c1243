#!/usr/bin/env python3
"""The chunk forms on tensor cores, GDN_CHUNKED_SM80 and _SM90, against the token recurrence in float64.

    python3 cuda/check_prefill.py                # all cases; the exit code is 1 when one is over its bound
    python3 cuda/check_prefill.py --quick        # a small set, for compute-sanitizer
    python3 cuda/check_prefill.py --random 5000  # that many random batches instead of 1000; --seed N starts at another one
    python3 cuda/check_prefill.py --beside 60    # the same launches for a minute instead of 10 s while other processes use the card
    python3 cuda/check_prefill.py --time         # the checks, then times beside the peers' (--only-time: those alone)
    python3 cuda/check_prefill.py --only-time --cells 16/32:1x8192,4x8192 --algo chunked_sm90 --segments 0,1,4
    python3 cuda/check_prefill.py --lib PATH     # the shared library: loaded when it is there, else built there

What an error is and what bounds it: prefill_case.py.
"""
import ctypes as C
import random
import subprocess
import sys
import time

import checks
import torch
from abi import (ALGO_NAMES, AUTO, BAD_ALGO, BAD_CHECKPOINTS, BAD_LENGTH, BAD_WORKSPACE, CHUNKED, CHUNKED_SM90,
                 DECODE_128, NULL_POINTER, OK, RECURRENT, RECURRENT_128, load, ptr, stream, workspace)
from check import CHUNKED_BOUND
from checks import bits, report
from prefill_case import ALGOS, Case, fine, worst_seen

# ---- named cases ----

LENGTHS = (1, 6, 16, 63, 64, 65, 128, 130, 200, 512, 1000)
MIXED = [0, 3, 65, 0, 1, 17, 130, 64, 0]
DIMS = ((64, 64), (96, 192), (128, 64), (64, 128), (128, 256), (72, 40), (128, 128))


def case(lib, algos, name, lens, segments=(0,), checkpoint=0, **kw):
    c = Case(lens, **kw)
    for algo in algos:
        for n in segments:
            ok, text = fine(algo, c, *c.run(lib, algo, n, checkpoint), checkpoint)
            label = f"{name} {c.io}/{c.state} {ALGO_NAMES[algo]}" + (f" segments {n}" if n else "")
            report(label, ok, text)


def quick(lib, algos):
    case(lib, algos, "T=130", [130], hk=1, hv=2)
    case(lib, algos, "varlen, moved", [0, 5, 70, 64, 1], slots="moved", hk=1, hv=2, checkpoint=64)
    case(lib, algos, "K=72 V=40", [65, 3], k=72, v=40, hk=1, hv=2)
    case(lib, algos, "f16, bf16 state", [80] * 2, io="f16", state="bf16", slots="shared", hk=1, hv=1)
    case(lib, algos, "V=256", [70], v=256, hk=1, hv=1)
    case(lib, algos, "segments", [300, 20], hk=1, hv=2, segments=(2, 3), checkpoint=128, slots="apart")
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
            run(f"K={k} V={v}", MIXED, k=k, v=v, io=io, odd_o=True)
            run(f"K={k} V={v}", [200] * 2, k=k, v=v, io=io, state="bf16", slots="moved", checkpoint=64)
        for k, v in ((8, 8), (16, 248), (120, 136)):
            run(f"K={k} V={v}", MIXED, k=k, v=v, io=io)
        for slots in ("identity", "apart", "permuted", "shared", "moved"):
            for state in ("f32", "bf16"):
                run(f"slots {slots} varlen", MIXED, slots=slots, io=io, state=state)
                run(f"slots {slots} batched", [100] * 5, slots=slots, io=io, state=state)
                run(f"slots {slots} empty", [0] * 5, slots=slots, io=io, state=state)
        for gate in ("f32", "bf16", "f16"):
            run(f"{gate} gates", [150, 20], io=io, gate=gate)
        run("varlen, equal lengths", [64] * 3, io=io, varlen=True)
        run("varlen, loose bounds of the lengths", MIXED, io=io, slack=500)
        hard(run, io)
    # Segments are cut by the longest; shorter ones have parts that are empty.
    for lens in ([1000], [1000] * 3, [1000, 130, 0, 1, 64, 999]):
        for slots in ("identity", "moved"):
            run(f"{len(lens)} sequences of up to 1000, {slots}", lens, segments=(1, 2, 3, 5), slots=slots, checkpoint=64)
    run("1000 tokens, no decay", [1000], segments=(1, 2, 3, 5), decay="none")
    run("1000 tokens, beta 2", [1000], segments=(1, 3), beta_scale=2.0, state="bf16")
    run("segments of fewer tokens than parts", [3, 65], segments=(2, 5, 100))
    run("many sequences", [i % 3 for i in range(3000)], hk=1, hv=1, k=8, v=8)
    # More heads than multiprocessors, for some lengths in whole rounds and for some with heads cut in two.
    run("many sequences", [70] * 300, hk=1, hv=2, k=64, v=64)
    run("many empty sequences", [0] * 300, hk=1, hv=1, k=8, v=8, slots="apart")
    for slots in ("identity", "moved", "permuted"):
        for tokens in (130, 600):
            run(f"16 heads of 9 sequences, {slots}", [tokens] * 9, hk=8, hv=16, slots=slots, checkpoint=128, segments=(0, 1))
            run(f"16 heads of 17 sequences, {slots}", [tokens + 1] * 17, hk=8, hv=16, k=64, v=64, slots=slots, state="bf16")
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
            run(f"{keys} keys, beta {beta_scale:.0f}, no decay", lens, io=io, keys=keys, beta="one", beta_scale=beta_scale,
                decay="none")
            run(f"{keys} keys, beta {beta_scale:.0f}, no decay, segments", [1000], io=io, keys=keys, beta="one",
                beta_scale=beta_scale, decay="none", segments=(3,))
        run(f"{keys} keys", lens, io=io, keys=keys)
    for decay in ("strong", "mixed", "uniform", "none"):
        run(f"{decay} decay", lens, io=io, decay=decay, segments=(0, 2))
    run("mixed decay, repeated keys, beta 2", lens, io=io, decay="mixed", keys="repeated", beta="one", beta_scale=2.0)
    run("large norms", lens, io=io, qk_size=1e3)
    run("tiny norms", lens, io=io, qk_size=1e-4)
    run("zero rows", lens, io=io, keys="zeros")
    run("large v", lens, io=io, v_size=4e3)
    run("no l2norm", lens, io=io, l2norm=False)
    run("no l2norm, beta 2, no decay", lens, io=io, l2norm=False, beta_scale=2.0, decay="none")


def check_checkpoints(lib, algos):
    everyone = [*algos, RECURRENT, RECURRENT_128]
    for every in (64, 128):
        for slots in ("identity", "moved"):
            for state in ("f32", "bf16"):
                for name, lens in (("packed", [63, 64, 200, 0, 129, 1, 300]), ("batched", [200] * 5)):
                    # A bf16 state is rounded once: over the bound of the recurrent kernels, which is f32's.
                    case(lib, everyone if state == "f32" else algos, f"checkpoints of {every}, {name}, {slots}", lens,
                         checkpoint=every, slots=slots, state=state, gap=8)
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
                got = whole.checkpoints.view(-1, *c.shape)[row].double()
                error = checks.rel(got, part.state_out[n].view(c.shape))
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
                ok, text = fine(algo, c, *(c.judge(b) if status == OK else ({}, [lib.gdn_status_string(status).decode()])))
                report(f"{total} tokens cut at {cut} {ALGO_NAMES[algo]}", ok, text)


def check_repeats(lib, algos):
    """The same bits again, and from a graph; the parts of a workspace that a launch reads are its own."""
    for lens, hk, hv in (([1000], 4, 8), ([300, 20, 0, 65], 16, 32), ([64] * 40, 2, 4)):
        c = Case(lens, hk=hk, hv=hv, slots="moved")
        for algo in algos:
            for segments in (0, 3):
                first = c.buffers(64)
                status = c.launch(lib, first, algo, segments, 64)
                for how in ("again", "graph"):
                    b = c.buffers(64)
                    status = status or c.launch(lib, b, algo, segments, 64, graph=how == "graph")
                    same = all(torch.equal(bits(getattr(b, x)), bits(getattr(first, x)))
                               for x in ("o_buf", "state_out", "checkpoints"))
                    report(f"{len(lens)} sequences, segments {segments}, {how}, {ALGO_NAMES[algo]}", status == OK and same,
                           "same bits" if same else "differs")


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
                        found = [bits(getattr(b, x)) for x in ("o_buf", "state_out", "checkpoints")]
                        want = first.setdefault((i, algo), found)
                        runs[algo] += 1
                        differing[algo] += not (good and all(torch.equal(x, y) for x, y in zip(found, want)))
    finally:
        for other in others:
            other.kill()
            other.wait()
    for algo in algos:
        report(f"beside other processes {ALGO_NAMES[algo]}", differing[algo] == 0, f"{differing[algo]} of {runs[algo]} differ")


def check_status(lib, algos):
    c = Case([1000, 0, 130], hk=2, hv=4)
    b = c.buffers(64)
    size = C.c_int64(0)

    def rule(algo, want, **changes):
        p = c.params(b, algo, 3, 64)
        workspace(lib, p)
        for name, value in changes.items():
            target, _, field = name.rpartition("__")
            inner = getattr(p, target) if target else p
            setattr(inner, field, value(getattr(inner, field)) if callable(value) else value)
        got = lib.gdn_rule(C.byref(p), stream())
        shown = {name: "changed" if callable(value) else value for name, value in changes.items()}
        report(f"status {ALGO_NAMES[algo]} {shown}", got == want, lib.gdn_status_string(got).decode())

    add = lambda n: lambda x: x + n
    for algo in algos:
        rule(algo, OK)
        rule(algo, OK, checkpoints=None, checkpoint_tokens=-7)      # read only with checkpoints
        for every in (0, 32, 65, -64):
            rule(algo, BAD_CHECKPOINTS, checkpoint_tokens=every)
        rule(algo, BAD_ALGO, io_dtype=0)
        rule(algo, BAD_ALGO, head_k=136)
        rule(algo, BAD_ALGO, head_k=68)
        rule(algo, BAD_ALGO, head_v=68)
        for x in ("q", "k", "v"):
            rule(algo, BAD_ALGO, **{f"{x}__ptr": add(2)})
            rule(algo, BAD_ALGO, **{f"{x}__token_stride": add(1)})
            rule(algo, BAD_ALGO, **{f"{x}__head_stride": add(4)})
        rule(algo, BAD_ALGO, state_in=add(4))
        rule(algo, BAD_ALGO, state_out=add(4))
        rule(algo, BAD_ALGO, in_slots__slot_stride=add(1))
        rule(algo, BAD_ALGO, token_states=lambda _: ptr(b.checkpoints))
        rule(algo, BAD_LENGTH, seqs__total_tokens=-1)
        rule(algo, BAD_LENGTH, seqs__max_tokens_per_seq=-1)
        rule(algo, BAD_LENGTH, segments=-1)

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
            rule(algo, BAD_WORKSPACE, workspace=None)
            rule(algo, BAD_WORKSPACE, workspace=add(8))
            rule(algo, BAD_WORKSPACE, workspace_bytes=add(-1))
            rule(algo, BAD_WORKSPACE, workspace_bytes=0)
        report("workspace of null", lib.gdn_rule_workspace(None, C.byref(size)) == NULL_POINTER
               and lib.gdn_rule_workspace(C.byref(p), None) == NULL_POINTER, "")
    rule(CHUNKED, BAD_ALGO, checkpoint_tokens=64)
    for algo in (RECURRENT, RECURRENT_128):
        rule(algo, OK, checkpoint_tokens=64, workspace=None, workspace_bytes=0)
        rule(algo, BAD_CHECKPOINTS, checkpoint_tokens=63)
    p = c.params(b, AUTO, checkpoint=64)
    chosen = C.c_int32(AUTO)
    status = lib.gdn_rule_choice(C.byref(p), C.byref(chosen))
    report("choice of auto", status == OK and chosen.value != AUTO, ALGO_NAMES[chosen.value])
    torch.cuda.synchronize()


# ---- random batches ----

HEADS = ((1, 1), (2, 4), (4, 8), (1, 3), (2, 8), (16, 32))
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)


def random_case(seed):
    """(Case, segments, checkpoint) by its number."""
    r = random.Random(seed)
    lens = [r.choice(EDGES) if r.random() < 0.6 else r.randint(0, 400) for _ in range(r.randint(1, 8))]
    hk, hv = r.choice(HEADS)
    k, v = r.choice(DIMS) if r.random() < 0.25 else (128, 128)
    kw = dict(io=r.choice(("bf16", "f16")), gate=r.choice(("f32", "bf16", "f16")), state=r.choice(("f32", "f32", "bf16")),
              slots=r.choice(("identity", "apart", "permuted", "shared", "moved")), beta_scale=r.choice((1.0, 2.0)),
              l2norm=r.random() < 0.7, decay=r.choice(("normal", "normal", "none", "strong", "mixed", "uniform")),
              odd_o=r.random() < 0.3, slack=r.choice((0, 0, 1, 100)))
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
            ok, found = fine(algo, c, *c.run(lib, algo, segments, checkpoint), checkpoint)
            if not ok:
                bad[algo] += 1
                report(f"random {text} {ALGO_NAMES[algo]} segments {segments} checkpoints {checkpoint}", False, found)
        if (i + 1) % 100 == 0:
            print(f"     {i + 1} random batches, {sum(bad.values())} failed", flush=True)
    for algo in algos:
        report(f"{count} random batches {ALGO_NAMES[algo]}", bad[algo] == 0, f"{bad[algo]} failed")


def main():
    parser = checks.arguments(__doc__)
    names = lambda text: [x.strip() for x in text.split(",") if x.strip()]
    parser.add_argument("--random", type=int, metavar="N", help="that many random batches; default 1000, with --quick none")
    parser.add_argument("--only-random", action="store_true", help="the random batches alone")
    parser.add_argument("--seed", type=int, default=0, help="of the first random batch")
    parser.add_argument("--beside", type=float, metavar="S", help="seconds of launches beside other processes; default 10, with --quick none")
    parser.add_argument("--algo", type=names, default=[ALGO_NAMES[a] for a in ALGOS], metavar="NAME,…",
                        help="chunked_sm80, chunked_sm90; for the times others too")
    parser.add_argument("--segments", type=lambda text: [int(x) for x in names(text)], default=[0], metavar="N,…",
                        help="of the times; default 0, the kernel's own choice")
    parser.add_argument("--cells", default="16/32,4/8", metavar="HK/HV[:NxT,…] …",
                        help="of the times: heads, or some lengths of them, apart by spaces or by ',' before heads; 'all'")
    args = parser.parse_args()
    for name in args.algo:
        if name not in ALGO_NAMES:
            parser.error(f"unknown algo '{name}'; there are {', '.join(ALGO_NAMES)}")
    lib = checks.library(args, load)
    wanted = [ALGO_NAMES.index(name) for name in args.algo]
    if CHUNKED_SM90 in wanted and torch.cuda.get_device_capability() != (9, 0):
        print("chunked_sm90 is for sm_90 alone: left out")
        wanted.remove(CHUNKED_SM90)
    if not args.only_time:
        algos = [a for a in wanted if a in ALGOS]
        if args.quick:
            quick(lib, algos)
        elif not args.only_random:
            named(lib, algos)
        if not args.only_random:
            check_status(lib, algos)
        count = args.random if args.random is not None else 0 if args.quick else 1000
        if count:
            check_random(lib, algos, count, args.seed)
        seconds = args.beside if args.beside is not None else 0 if args.quick or args.only_random else 10
        if seconds:
            check_beside(lib, algos, seconds)
        for (algo, name), (whole, worst) in sorted(worst_seen.items()):
            print(f"largest error of {name}, {ALGO_NAMES[algo]}: {whole:.1e} of a case, {worst:.1e} of a head")
        checks.summary()
    if args.time or args.only_time:
        from timing_prefill import times
        times(lib, wanted, args.segments, args.cells)
    checks.leave()


if __name__ == "__main__":
    main()
