#!/usr/bin/env python3
"""Runs flashinfer-bench 0.1.2 on a folder of pack.py, a few minutes on an H200:

    TVM_FFI_CUDA_ARCH_LIST=9.0a python3 benches/contest/run.py FOLDER [SOLUTION ...]

All is as in `flashinfer-bench run --local FOLDER`, but the reference is not timed: no table has its time, and it would take
half an hour. The traces lie in FOLDER afterwards.
"""
import argparse
import sys

from flashinfer_bench.bench import Benchmark, BenchmarkConfig
from flashinfer_bench.data import TraceSet


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("solutions", nargs="*", help="of the folder, such as candle_gdn_decode; default: all")
    args = parser.parse_args(argv)
    config = BenchmarkConfig(solutions=args.solutions or None, profile_baseline=False)
    benchmark = Benchmark(TraceSet.from_path(args.folder), config)
    try:
        found = benchmark.run_all(dump_traces=True)
    finally:
        benchmark.close()
    statuses = [trace.evaluation.status.value for traces in found.traces.values() for trace in traces]
    print(f"{len(statuses)} evaluations, {statuses.count('PASSED')} passed")
    return 0 if statuses and set(statuses) == {"PASSED"} else 1


if __name__ == "__main__":
    sys.exit(main())
