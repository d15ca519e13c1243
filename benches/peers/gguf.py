#!/usr/bin/env python3
"""Times GGUF files here and in llama.cpp: the same file, the same threads, in turn.

    cargo bench --bench cpu --no-run        # says where the program is
    python3 benches/peers/gguf.py --ours PROGRAM --llama BUILD --threads 1,2 model-q8_0.gguf model-f16.gguf

random_gguf.py makes a file with random weights. Prints the tokens/s of the best run of each: prompts up to their logits,
and tokens decoded one by one after a prompt; writes gguf.json under --out in the format of benches/README.md, where `wall`
is the time of all tokens together. With --avx2 the same once more without AVX-512: here by CANDLE_GDN_AVX512=0, there by a
build (cmake -DGGML_NATIVE=OFF).
Each process makes one run that is not counted before those that are. llama.cpp takes its own defaults (keys and values
in f16, batches of up to 512 tokens); here they are in f32.
"""
import argparse
import itertools
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import records
from llama_cpp import Failure, Parser, TOP, measured, parse_model, row, version


def arguments(argv):
    cpus = len(os.sched_getaffinity(0))
    p = Parser(prog="gguf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+", metavar="FILE")
    p.add_argument("--ours", required=True, metavar="PROGRAM", help="what `cargo bench --bench cpu` built")
    p.add_argument("--llama", required=True, metavar="DIR", help="a build of llama.cpp, with bin/llama-bench")
    p.add_argument("--avx2", metavar="DIR", help="a build of llama.cpp without AVX-512")
    p.add_argument("--threads", default=str(cpus), metavar="N,..", help=f"default: the CPUs there are, {cpus}")
    p.add_argument("--prompts", default="16,128,512", metavar="N,..", help="tokens; default %(default)s")
    p.add_argument("--decode", type=int, default=64, metavar="N", help="tokens; default %(default)s, 0 for none")
    p.add_argument("--depth", type=int, default=128, metavar="N", help="tokens before those; default %(default)s")
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each; default %(default)s")
    p.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of a turn; default %(default)s")
    p.add_argument("--out", metavar="DIR", help="default: benches/results/<CPU>")
    args = p.parse_args(argv)
    if not all(n.isdecimal() and 1 <= int(n) <= cpus for n in args.threads.split(",")):
        p.error(f"{args.threads} threads do not fit the {cpus} CPUs that this process may use")
    args.threads = [int(n) for n in args.threads.split(",")]
    # What a row says of it, and llama-bench.
    builds = {"": args.llama, ", AVX2": args.avx2}
    args.benches = {name: os.path.join(path, "bin", "llama-bench") for name, path in builds.items() if path}
    for path in (args.ours, *args.benches.values(), *args.files):
        if not os.path.isfile(path):
            p.error(f"there is no file {path}")
    return args, p


def commands(args, bench, threads, file):
    """What runs each contender once."""
    prompts = ["--prompts", args.prompts] if args.prompts else []
    own = [args.ours, "--gguf", file, *prompts, "--decode", args.decode, "--depth", args.depth]
    # Prompts have nothing before them: tests of their own depth are runs of their own.
    peer = [bench, "-m", file, "-t", threads, "-o", "json", "-r", args.repeats]
    runs = [[*peer, "-p", args.prompts, "-n", 0]] if args.prompts else []
    runs += [[*peer, "-p", 0, "-n", args.decode, "-d", args.depth]] if args.decode else []
    return {"candle-gdn": [[*own, "--repeats", args.repeats]], "llama.cpp": runs}


def time_file(args, build, threads, file, say):
    """{contender: {(prompt tokens, decoded tokens): µs of each run}}."""
    found = {}
    env = {"CANDLE_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    env |= {"CANDLE_GDN_AVX512": "0"} if build else {}
    for _ in range(args.rounds):
        for contender, runs in commands(args, args.benches[build], threads, file).items():
            times = found.setdefault(contender, {})
            for command in runs:
                text, busy = measured([str(word) for word in command], **env)
                say(f"{contender}, {os.path.basename(file)}: {busy:.2f} of {threads} CPUs busy, the loading included")
                for key, samples in parse_model(text).items():
                    times.setdefault(key, []).extend(samples)
    return found


def workload(build, threads, file, key):
    what = f"prompt {key[0]}" if key[0] else f"decode {key[1]}"
    return f"{os.path.basename(file).removesuffix('.gguf')}, {what}, {threads} thread{'s' * (threads > 1)}{build}"


def lines(build, threads, file, found):
    """Rows of a table in Markdown."""
    own, peer = found["candle-gdn"], found["llama.cpp"]
    for key in own:
        rate = [sum(key) / min(times[key]) * 1e6 for times in (own, peer)]
        yield f"| {workload(build, threads, file, key)} | {rate[0]:,.1f} | {rate[1]:,.1f} | {rate[0] / rate[1]:.2f} |"


def main(argv=None):
    args, parser = arguments(sys.argv[1:] if argv is None else argv)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    print("| file, tokens | candle-gdn | llama.cpp | ratio |\n|---|--:|--:|--:|")
    rows = []
    try:
        for build, threads, file in itertools.product(args.benches, args.threads, args.files):
            found = time_file(args, build, threads, file, say)
            rows += [row("gguf", workload(build, threads, file, key), wall, contender=contender,
                         shape={"batch": 1, "tokens": sum(key), "total_tokens": sum(key)})
                     for contender, times in found.items() for key, wall in times.items()]
            for line in lines(build, threads, file, found):
                print(line, flush=True)
    except Failure as e:
        parser.error(str(e))
    cpu = records.cpu_model()
    # Without the folders of whoever ran it.
    command = f"python3 benches/peers/gguf.py --ours PROGRAM --llama BUILD{' --avx2 BUILD' * bool(args.avx2)}"
    command += f" --threads {','.join(map(str, args.threads))} --prompts {args.prompts} --decode {args.decode}"
    command += f" --depth {args.depth} --rounds {args.rounds} {' '.join(map(os.path.basename, args.files))}"
    machine = {"device": cpu, "host": cpu, "threads": max(args.threads)}
    head = records.header("benches/peers/gguf", command, TOP, machine, {}, {"llama.cpp": version(args.llama)})
    records.save(os.path.join(args.out or os.path.join(TOP, "benches", "results", records.slug(cpu)), "gguf.json"), head, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
