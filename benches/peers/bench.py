#!/usr/bin/env python3
"""Times our kernels next to FlashInfer, FlashQLA, flash-linear-attention and PyTorch: one run, one timer, one format.

    python3 benches/peers/bench.py                                  # every suite
    python3 benches/peers/bench.py decode --shapes 16/32 --batches 1,64
    python3 benches/peers/bench.py prefill --warm-up-compile --limit 540
    python3 benches/peers/bench.py decode --no-peers --algo all

Suites: decode, prefill, contest-decode, contest-prefill, backward, layer, projections, hard. Needs a GPU, nvcc and torch; a peer that
is not installed, does not compile or dies leaves gaps. Each contender runs in processes of its own, one at a time.
Writes peers-<suite>.json under --out and prints a summary. Protocol and format: benches/README.md.

torch and torch-compile are PyTorch's own operations: the rule, on the few shapes of --quick, and the layer around our kernel
of the rule. A speedup is over these.

Our times include the gates and the L2 norm. The peers' prefills take normalised q and k and ready gates; what a row
includes is said in it.
"""
import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
VARIABLE = "CANDLE_GDN_ALGO"        # what --algo is where it is not given, as in the Rust programs
sys.path.insert(0, HERE)

import children
import contenders
import records
import workloads


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One sentence and exit code 2, no usage."""
        print(f"bench.py: {message}", file=sys.stderr)
        sys.exit(2)


def listed(item):
    """The type of an argument with commas, `item` that of each part."""
    return lambda text: [item(x.strip()) for x in text.split(",") if x.strip()]


def names(known, what):
    def item(x):
        if x not in known:
            raise argparse.ArgumentTypeError(f"unknown {what} '{x}'; there are {', '.join(known)}")
        return x
    return listed(item)


def numbers(x, by, expected):
    """The positive numbers that x is made of, between the signs `by`."""
    parts = x.split(by) if by else [x]
    if len(parts) != (2 if by else 1) or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"'{x}' is not {expected}")
    return [int(part) for part in parts]


def head_pair(x):
    hk, hv = numbers(x, "/", "a pair of head counts HK/HV such as 16/32")
    if hv % hk:
        raise argparse.ArgumentTypeError(f"no kernel takes {x}: HV must be a multiple of HK")
    return x


def dim(x):
    return tuple(numbers(x, "x", "head sizes KxV such as 96x192"))


def length(x):
    numbers(x, "x", "SEQUENCESxTOKENS such as 4x2048")
    return x


def count(x):
    return numbers(x, None, "a positive number")[0]


def place(x):
    if not x.isdecimal():
        raise argparse.ArgumentTypeError(f"'{x}' is not a number from 0 on")
    return int(x)


def seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of seconds")
    return value


def arguments(argv):
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("suites", nargs="*", metavar="suite", help="any of the suites above; default: all")
    p.add_argument("--shapes", type=listed(head_pair), metavar="HK/HV,…", help="head counts, of the suites' or others")
    p.add_argument("--batches", type=listed(count), metavar="N,…", help="batch sizes of the decode suites and the layer")
    p.add_argument("--lengths", type=listed(length), metavar="NxT,…", help="sequences x tokens of the suites prefill and backward")
    p.add_argument("--dim", type=dim, metavar="KxV", default=(workloads.DIM, workloads.DIM),
                   help="head sizes of the suites decode, prefill and backward, whose files are then named after them; default 128x128")
    p.add_argument("--contenders", type=names(list(contenders.CONTENDERS), "contender"), metavar="NAME,…",
                   default=list(contenders.CONTENDERS), help="default: all of " + ", ".join(contenders.CONTENDERS))
    p.add_argument("--no-peers", action="store_true", help="only candle-gdn, torch and torch-compile")
    p.add_argument("--algo", type=names(["all", *contenders.ALGOS], "algo"), metavar="NAME,…",
                   help=f"our kernels: {', '.join(contenders.ALGOS)}, or all; default: the variable {VARIABLE}, or auto")
    p.add_argument("--workload", type=place, metavar="N", help="one workload of each contest suite, by its place in "
                   "benches/contest/workloads.json from 0; other suites are skipped")
    p.add_argument("--quick", action="store_true", help="a few shapes of each suite")
    p.add_argument("--out", metavar="DIR", help="default: benches/results/<device>")
    p.add_argument("--lib", metavar="PATH", help="our shared library: loaded when it is there, else built there")
    p.add_argument("--limit", type=seconds, metavar="SECONDS", default=float("inf"),
                   help="for the whole run; what is not done by then is a gap")
    p.add_argument("--contender-limit", type=seconds, metavar="SECONDS", default=300,
                   help="for one contender in one suite, compiling included; default 300")
    p.add_argument("--shape-limit", type=seconds, metavar="SECONDS", default=180,
                   help="for one contender on one shape, compiling included; default 180")
    p.add_argument("--warm-up-compile", action="store_true",
                   help="first let the peers that keep their compiled kernels on disk compile, side by side: fla, "
                        "FlashQLA, FlashInfer's decode (its prefill kernels are kept in memory only)")
    args = p.parse_args(argv)
    for suite in args.suites:
        if suite not in workloads.SUITES:
            p.error(f"unknown suite '{suite}'; there are {', '.join(workloads.SUITES)}")
    args.suites = list(dict.fromkeys(args.suites)) or list(workloads.SUITES)
    if args.no_peers:
        args.contenders = [c for c in args.contenders if c not in contenders.PEERS]
    if args.algo is None:
        args.algo = [os.environ.get(VARIABLE) or "auto"]
        if args.algo[0] not in contenders.ALGOS:
            p.error(f"{VARIABLE}: expected {', '.join(contenders.ALGOS)}, got '{args.algo[0]}'")
    if "all" in args.algo:
        args.algo = contenders.ALGOS
    return args, p


def plan(args):
    """[(suite, [(contender, [(Workload, variant)])])] of all that was asked for, and nothing empty."""
    todo = []
    for suite in args.suites:
        works = workloads.select(suite, args.shapes, args.batches, args.lengths, args.quick, args.workload, args.dim)
        parts = []
        for name in args.contenders:
            items = [(w, v) for w in works for v in contenders.variants(name, suite, args.algo)
                     if contenders.takes(name, v, w)]
            if items:
                parts.append((name, items))
        if parts:
            todo.append((suite, parts))
    return todo


def compile_ahead(todo, deadline, args, say):
    """Fills the peers' caches on disk: a process for each peer, suite and pair of heads, several at a time."""
    jobs = {}
    for suite, parts in todo:
        for name, items in parts:
            if suite in contenders.ON_DISK.get(name, []):
                for work, variant in items:
                    if work.l2 == "cold" and work.timed:
                        jobs.setdefault((name, suite, work.hk, work.hv), []).append((work, variant))

    start = time.monotonic()
    deadline = min(deadline, start + args.contender_limit)

    def one(job):
        (name, *_), items = job
        env = {**os.environ, **contenders.COMPILE_AHEAD_ENV.get(name, {})}
        # A shape may take as long as all: many compile at once.
        return children.run_items("compile", name, items, None, args.contender_limit, deadline, env)[0]

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        results = [r for part in pool.map(one, jobs.items()) for r in part]
    failed = sum("note" in r for r in results)
    say(f"compiled ahead: {len(results) - failed} of {len(results)} calls in {time.monotonic() - start:.0f} s, "
        f"{len(jobs)} processes")


def main(argv=None):
    started = time.monotonic()
    args, parser = arguments(sys.argv[1:] if argv is None else argv)
    todo = plan(args)
    if not todo:
        parser.error("nothing to time: no contender that was asked for has such a shape in these suites")
    # An end from outside still writes what there is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        lib = None
        if args.lib and not os.path.isdir(os.path.dirname(os.path.abspath(args.lib))):
            parser.error(f"there is no folder for {args.lib}")
        if any(name == "candle-gdn" for _, parts in todo for name, _ in parts):
            lib = os.path.abspath(args.lib) if args.lib else os.path.join(folder, "libcandle_gdn.so")
            if not os.path.exists(lib) and not shutil.which("nvcc"):
                parser.error("no nvcc on the PATH: our kernels cannot be built")
        try:
            return bench(args, parser, todo, lib, started + args.limit)
        except KeyboardInterrupt:
            return 130


def bench(args, parser, todo, lib, deadline):
    say = lambda text: print(text, file=sys.stderr, flush=True)
    machine, why = children.probe(lib)
    if why:
        parser.error(why)
    out = args.out or os.path.join(TOP, "benches", "results", records.slug(machine["device"]))
    ceilings = machine.pop("ceilings")
    machine = {"device": machine["device"], "host": records.cpu_model(), "threads": records.threads(),
               "driver": records.driver(), "cuda": machine["cuda"]}
    say(f"{machine['device']}: copy {ceilings['copy_gb_s']:.0f} GB/s, matmul {ceilings['matmul_tflop_s']:.0f} TFLOP/s")
    if args.warm_up_compile:
        compile_ahead(todo, deadline, args, say)
    command = shlex.join(["python3", "benches/peers/bench.py", *without_folders(sys.argv[1:])])
    if os.environ.get(VARIABLE):
        command = f"{VARIABLE}={shlex.quote(os.environ[VARIABLE])} {command}"
    for suite, parts in todo:
        rows, versions = [], {}

        def write():
            head = records.header("benches/peers", command, TOP, machine, ceilings, versions)
            size = "" if args.dim == (workloads.DIM, workloads.DIM) else "-{}x{}".format(*args.dim)
            records.save(os.path.join(out, f"peers-{suite}{size}.json"), head, in_order(rows, parts))

        for name, items in parts:
            start, results = time.monotonic(), [None] * len(items)
            try:
                _, versions[name] = children.run_items(
                    "time", name, items, lib, args.shape_limit, min(deadline, start + args.contender_limit),
                    complain=say, results=results)
            finally:        # an interrupted run keeps what it has
                own_rows = [records.row(w, name, v, r or {"note": "not run: interrupted"}, ceilings)
                        for (w, v), r in zip(items, results)]
                records.share_times(own_rows, [w for w, _ in items])
                rows += own_rows
                write()
            done = sum(bool(records.done(suite, r)) for r in own_rows)
            say(f"{suite}: {name}, {done} of {len(own_rows)} rows in {time.monotonic() - start:.0f} s")
        print(records.summary(suite, in_order(rows, parts)), flush=True)
    say(f"written to {os.path.relpath(out)}")
    return 0


def without_folders(argv):
    """The arguments less --lib and --out: a record does not tell how somebody's disk is laid out."""
    kept, skip = [], False
    for arg in argv:
        if not skip and arg.split("=")[0] not in ("--lib", "--out"):
            kept.append(arg)
        skip = not skip and arg in ("--lib", "--out")
    return kept


def in_order(rows, parts):
    """Rows of one work side by side, works in the order they were planned in."""
    order = {}
    for _, items in parts:
        for work, _ in items:
            order.setdefault((work.name, work.l2), len(order))
    return sorted(rows, key=lambda r: order[r["workload"], r["l2"]])


if __name__ == "__main__":
    sys.exit(main())
