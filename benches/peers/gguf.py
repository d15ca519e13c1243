#!/usr/bin/env python3
"""Times GGUF files here and in llama.cpp: the same file, the same threads, in turn.

    cargo bench --bench cpu --no-run        # says where the program is
    python3 benches/peers/gguf.py --ours PROGRAM --llama BUILD model-q8_0.gguf model-f16.gguf

Prints the tokens/s of the best run of each: prompts up to their logits, and tokens decoded one by one after a prompt.
Each process makes one run that is not counted before those that are. llama.cpp takes its own defaults (keys and values
in f16, batches of up to 512 tokens); here they are in f32.
"""
import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from llama_cpp import Failure, Parser, measured, parse_model


def arguments(argv):
    cpus = len(os.sched_getaffinity(0))
    p = Parser(prog="gguf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+", metavar="FILE")
    p.add_argument("--ours", required=True, metavar="PROGRAM", help="what `cargo bench --bench cpu` built")
    p.add_argument("--llama", required=True, metavar="DIR", help="a build of llama.cpp, with bin/llama-bench")
    p.add_argument("--threads", type=int, default=cpus, metavar="N", help=f"default: the CPUs there are, {cpus}")
    p.add_argument("--prompts", default="16,128,512", metavar="N,..", help="tokens; default %(default)s")
    p.add_argument("--decode", type=int, default=64, metavar="N", help="tokens; default %(default)s, 0 for none")
    p.add_argument("--depth", type=int, default=128, metavar="N", help="tokens before those; default %(default)s")
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each; default %(default)s")
    p.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of a turn; default %(default)s")
    args = p.parse_args(argv)
    if not 1 <= args.threads <= cpus:
        p.error(f"{args.threads} threads do not fit the {cpus} CPUs that this process may use")
    args.bench = os.path.join(args.llama, "bin", "llama-bench")
    for path in (args.ours, args.bench, *args.files):
        if not os.path.isfile(path):
            p.error(f"there is no file {path}")
    return args, p


def commands(args, file):
    """What runs each contender once."""
    prompts = ["--prompts", args.prompts] if args.prompts else []
    own = [args.ours, "--gguf", file, *prompts, "--decode", args.decode, "--depth", args.depth]
    # Prompts have nothing before them: tests of their own depth are runs of their own.
    peer = [args.bench, "-m", file, "-t", args.threads, "-o", "json", "-r", args.repeats]
    runs = [[*peer, "-p", args.prompts, "-n", 0]] if args.prompts else []
    runs += [[*peer, "-p", 0, "-n", args.decode, "-d", args.depth]] if args.decode else []
    return {"candle-gdn": [[*own, "--repeats", args.repeats]], "llama.cpp": runs}


def time_file(args, file, say):
    """{contender: {(prompt tokens, decoded tokens): µs of the best run}}."""
    best = {}
    threads = {"CANDLE_NUM_THREADS": str(args.threads), "RAYON_NUM_THREADS": str(args.threads)}
    for _ in range(args.rounds):
        for contender, runs in commands(args, file).items():
            times = best.setdefault(contender, {})
            for command in runs:
                text, busy = measured([str(word) for word in command], **threads)
                say(f"{contender}, {os.path.basename(file)}: {busy:.2f} CPUs busy, the loading included")
                for key, samples in parse_model(text).items():
                    times[key] = min([times.get(key, float("inf")), *samples])
    return best


def lines(file, best):
    """Rows of a table in Markdown."""
    own, peer = best["candle-gdn"], best["llama.cpp"]
    for key in own:
        rate = [sum(key) / times[key] * 1e6 for times in (own, peer)]
        what = f"prompt {key[0]}" if key[0] else f"decode {key[1]}"
        yield f"| {os.path.basename(file)} | {what} | {rate[0]:,.1f} | {rate[1]:,.1f} | {rate[0] / rate[1]:.2f} |"


def main(argv=None):
    args, parser = arguments(sys.argv[1:] if argv is None else argv)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    print("| file | tokens | candle-gdn | llama.cpp | ratio |\n|---|---|--:|--:|--:|")
    try:
        for file in args.files:
            for line in lines(file, time_file(args, file, say)):
                print(line, flush=True)
    except Failure as e:
        parser.error(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
