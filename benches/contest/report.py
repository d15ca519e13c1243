#!/usr/bin/env python3
"""What flashinfer-bench found in a folder of pack.py: a table of each definition, then of each workload.

    python3 benches/contest/report.py FOLDER

Prints the first, and writes both to benches/results/<device>/flashinfer-bench.md. All figures are the harness's own.
"""
import argparse
import glob
import json
import math
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(TOP, "benches", "peers"))

import records

OURS = "candle_gdn"


def traces(folder):
    """{definition: {solution: {workload: evaluation}}}, the last where there are several; and {workload: axes}."""
    found, axes = {}, {}
    for path in sorted(glob.glob(os.path.join(folder, "traces", "**", "*.jsonl"), recursive=True)):
        with open(path, encoding="utf-8") as f:
            for line in filter(str.strip, f):
                trace = json.loads(line)
                workload = trace["workload"]
                found.setdefault(trace["definition"], {}).setdefault(trace["solution"], {})[workload["uuid"]] = trace["evaluation"]
                axes[workload["uuid"]] = workload["axes"]
    return found, axes


def passed(evaluations):
    return {uuid: e for uuid, e in evaluations.items() if e["status"] == "PASSED"}


def mean(values):
    """Geometric; - of nothing."""
    values = list(values)
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.3g}" if values else "-"


def latency(evaluation):
    return 1e3 * evaluation["performance"]["latency_ms"]


def size(axes):
    return f"B={axes['batch_size']}" if "batch_size" in axes else f"{axes['num_seqs']}:{axes['total_seq_len']}"


def table(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" + " ---: |" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def summary(solutions):
    ours = passed(next((e for name, e in solutions.items() if name.startswith(OURS)), {}))
    head = ["solution", "passed", "latency, µs", "ours over theirs", "least", "most", "speedup over the reference",
            "largest error"]
    rows = []
    for name, evaluations in sorted(solutions.items()):
        fine = passed(evaluations)
        ratios = [latency(ours[uuid]) / latency(e) for uuid, e in fine.items() if uuid in ours and not name.startswith(OURS)]
        wrong = sorted({e["status"] for e in evaluations.values()} - {"PASSED"})
        errors = [e["correctness"]["max_absolute_error"] for e in fine.values()]
        rows.append([name, " ".join([f"{len(fine)} of {len(evaluations)}", *wrong]), mean(map(latency, fine.values())),
                     mean(ratios), *(f"{f(ratios):.3g}" if ratios else "-" for f in (min, max)),
                     mean(e["performance"]["speedup_factor"] for e in fine.values()),
                     f"{max(errors):.1e}" if errors else "-"])
    return table(head, rows)


def workloads(solutions, axes):
    names = sorted(solutions)
    uuids = sorted({uuid for e in solutions.values() for uuid in e}, key=lambda uuid: int(uuid.rpartition("-")[2]))

    def cell(name, uuid):
        e = solutions[name].get(uuid)
        return "-" if not e else f"{latency(e):.1f}" if e["status"] == "PASSED" else e["status"]

    return table(["workload", "size", *names],
                 ([uuid.rpartition("-")[2], size(axes[uuid]), *(cell(name, uuid) for name in names)] for uuid in uuids))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--out", metavar="FILE", help="default: benches/results/<device>/flashinfer-bench.md")
    args = parser.parse_args(argv)
    found, axes = traces(args.folder)
    if not found:
        parser.error(f"no traces in {args.folder}: flashinfer-bench run --local {args.folder} writes them")
    first = next(e for solutions in found.values() for evaluations in solutions.values() for e in evaluations.values())
    device, libs = first["environment"]["hardware"], first["environment"]["libs"]
    short, long = [], []
    for name, solutions in sorted(found.items()):
        short += [f"\n## {name}\n", *summary(solutions)]
        long += [f"\n## {name}: latency of each workload, µs\n", *workloads(solutions, axes)]
    about = [f"# flashinfer-bench, {device}\n",
             f"Commit {records.commit(TOP)}, {first['timestamp'][:10]}; " + ", ".join(f"{k} {v}" for k, v in sorted(libs.items())) +
             ". What is measured: benches/README.md. Means over workloads are geometric."]
    out = args.out or os.path.join(TOP, "benches", "results", records.slug(device), "flashinfer-bench.md")
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    with open(out, "w", encoding="utf-8") as f:
        f.write("\n".join(about + short + long) + "\n")
    print("\n".join(short))


if __name__ == "__main__":
    main()
