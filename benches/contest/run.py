#!/usr/bin/env python3
"""Runs flashinfer-bench 0.1.2 on a folder of pack.py, a few minutes on an H200:

    TVM_FFI_CUDA_ARCH_LIST=9.0a python3 benches/contest/run.py FOLDER [SOLUTION ...]

All is as in `flashinfer-bench run --local FOLDER`, but the reference is not timed: no table has its time, and it would take
longer than everything else together. The traces lie in FOLDER afterwards.
"""
import argparse
import sys

try:
    from flashinfer_bench.bench import Benchmark, BenchmarkConfig
    from flashinfer_bench.data import TraceSet
except ImportError as e:
    sys.exit(f"{e}: pip install flashinfer-bench==0.1.2")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("solutions", nargs="*", help="of the folder, such as candle_gdn_decode; default: all")
    args = parser.parse_args(argv)
    packed = TraceSet.from_path(args.folder)
    known = {solution.name for solutions in packed.solutions.values() for solution in solutions}
    if not known:
        parser.error(f"{args.folder}: expected a folder of pack.py, found no solution")
    if not set(args.solutions) <= known:
        parser.error(f"solutions: there are {', '.join(sorted(known))}, got {' '.join(args.solutions)}")
    config = BenchmarkConfig(solutions=args.solutions or None, profile_baseline=False)
    benchmark = Benchmark(packed, config)
    try:
        found = benchmark.run_all(dump_traces=True)
    finally:
        benchmark.close()
    statuses = [trace.evaluation.status.value for traces in found.traces.values() for trace in traces]
    print(f"{len(statuses)} evaluations, {statuses.count('PASSED')} passed")
    return 0 if statuses and set(statuses) == {"PASSED"} else 1


if __name__ == "__main__":
    sys.exit(main())
