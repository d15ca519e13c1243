#!/usr/bin/env python3
"""What flashinfer-bench found in a folder of pack.py, as a record of benches/README.md:

    python3 benches/contest/report.py FOLDER && python3 benches/report.py

Writes benches/results/<device>/flashinfer-bench.json, suites harness-decode and harness-prefill. All figures are the harness's
own: a latency is its mean, so minimum and maximum are the same number.
"""
import argparse
import glob
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "benches", "peers"))

import contest
import records
from workloads import DIM


def evaluations(folder):
    """{(kind, solution, number): (axes, evaluation)}, the last where there are several."""
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "traces", "**", "*.jsonl"), recursive=True)):
        with open(path, encoding="utf-8") as f:
            for trace in map(json.loads, filter(str.strip, f)):
                kind, _, number = trace["workload"]["uuid"].rpartition("-")
                found[kind, trace["solution"], int(number)] = trace["workload"]["axes"], trace["evaluation"]
    return found


def row(kind, contender, variant, number, axes, ms, error, note=""):
    batch, total = axes.get("batch_size", axes.get("num_seqs")), axes.get("total_seq_len", axes.get("batch_size"))
    us = None if ms is None else {name: round(1e3 * ms, 3) for name in ("median", "min", "max")}
    return {"suite": f"harness-{kind}", "workload": f"#{number} " + (f"B={batch}" if kind == "decode" else f"{batch}:{total}"),
            "contender": contender, "variant": variant or None, "call": us, "error": error, "note": note,
            "shape": {"hk": contest.HK, "hv": contest.HV, "k": DIM, "v": DIM, "batch": batch, "total_tokens": total}}


def rows(found):
    for (kind, solution, number), (axes, e) in sorted(found.items(), key=lambda item: (item[0][0], item[0][2], item[0][1])):
        # candle_gdn_decode, flashinfer_decode_in_place
        contender, _, variant = solution.partition(f"_{kind}")
        names = contender.replace("_", "-"), variant.strip("_")
        if e["status"] != "PASSED":
            yield row(kind, *names, number, axes, None, None, f"failed: {e['status']}")
            continue
        yield row(kind, *names, number, axes, e["performance"]["latency_ms"], {"absolute": e["correctness"]["max_absolute_error"]})


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--out", metavar="FILE", help="default: benches/results/<device>/flashinfer-bench.json")
    args = parser.parse_args(argv)
    found = evaluations(args.folder)
    if not found:
        parser.error(f"no traces in {args.folder}: benches/contest/run.py {args.folder} writes them")
    _, first = next(iter(found.values()))
    device, libs = first["environment"]["hardware"], first["environment"]["libs"]
    head = records.header("flashinfer-bench", "python3 benches/contest/run.py FOLDER", TOP, {"device": device, "cuda": libs.get("cuda")},
                          {}, libs)
    head["date"] = first["timestamp"][:10]
    out = args.out or os.path.join(TOP, "benches", "results", records.slug(device), "flashinfer-bench.json")
    records.save(out, head, list(rows(found)))
    print(out)


if __name__ == "__main__":
    main()
