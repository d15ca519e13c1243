#!/usr/bin/env python3
"""The kernels of a layer's call, in every form that `bench.py layer` times but the peers': how many, how long, and how many
bytes each moves to and from the GPU's memory, by Nsight Compute.

    python3 benches/peers/kernels.py --lib LIB                      # T = 1, 16, 128, 512, 2048, 8192
    python3 benches/peers/kernels.py --lib LIB --works "B=1,T=2048"

LIB: as built by `cuda/tests/abi.py --build`. Writes layer-kernels.md under --out. ncu runs kernel by kernel, without the
overlap and the gaps that they have otherwise, and leaves the L2 cache as it is: what one kernel leaves there the next one reads.
Weights are cold.
"""
import argparse
import csv
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(TOP, "cuda", "tests")]

import contenders
import records
import workloads

METRICS = {"gpu__time_duration.sum": "ns", "dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
NAMES = ["candle-gdn", "torch", "torch-compile"]
MARK = "spin_kernel"        # of torch.cuda._sleep, between one call and the next
LONGEST = 4                 # kernels listed by name


def items(name, works):
    return [(work, variant) for work in works for variant in contenders.variants(name, "layer")
            if contenders.takes(name, variant, work)]


def run_calls(name, works, lib):
    """What ncu watches: each call once, after others that fill the cache with their own, between marks."""
    import child
    import clocks
    import torch
    torch.set_grad_enabled(False)
    contender = contenders.load(name)(lib)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for work, variant in items(name, works):
        sets = clocks.sets_for(workloads.touched(work), "cold", l2_bytes)
        case = child.case_of(contender, work, variant, sets)
        for call in [*case.calls, *case.calls]:
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        case.calls[0]()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del case
        torch.cuda.empty_cache()


def profiled(name, names, lib):
    """[[{name, ns, read, written} of each kernel] of each call], by ncu."""
    own = [sys.executable, os.path.abspath(__file__), "--lib", lib, "--works", names, "--calls", name]
    command = ["ncu", "--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none", "--csv", "--page",
               "raw", "--print-units", "base", "--metrics", ",".join(METRICS), *own]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"kernels.py: ncu ended with {done.returncode}:\n{done.stdout[-2000:]}")
    lines = done.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    calls, kernels = [], []
    for row in csv.DictReader(lines[head:]):
        if not row["ID"]:       # the units
            continue
        if MARK in row["Kernel Name"]:
            calls.append(kernels)
            kernels = []
        else:
            kernels.append({"name": short(row["Kernel Name"]),
                            **{key: float(row[metric].replace(",", "")) for metric, key in METRICS.items()}})
    return calls


def short(name):
    """A kernel's name without its namespaces, template arguments and parameters."""
    name = re.sub(r"\(.*", "", re.sub(r"<.*", "", name.removeprefix("void ")))
    return name.split("::")[-1].strip() or "?"


def line(work, name, variant, kernels):
    total = lambda key: sum(kernel[key] for kernel in kernels)
    longest = sorted(kernels, key=lambda kernel: -kernel["ns"])[:LONGEST]
    names = ", ".join(f"`{kernel['name']}` {kernel['ns'] / 1e3:.1f}" for kernel in longest)
    return (f"| {work} | {name} {variant} | {len(kernels)} | {total('ns') / 1e3:.1f} | {total('read') / 1e6:.1f} | "
            f"{total('written') / 1e6:.1f} | {names} |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", required=True, help="our shared library")
    p.add_argument("--works", default="B=1,T=16,T=128,T=512,T=2048,T=8192", help="of the suite `layer`")
    p.add_argument("--out", metavar="DIR", help="default: benches/results/<device>")
    p.add_argument("--calls", choices=NAMES, help=argparse.SUPPRESS)       # what this program runs under ncu
    args = p.parse_args()
    known = {work.name: work for work in workloads.select("layer")}
    wanted = args.works.split(",")
    if not set(wanted) <= set(known):
        p.error(f"--works: there are {', '.join(known)}")
    works = [known[name] for name in wanted]
    if args.calls:
        return run_calls(args.calls, works, args.lib)
    if not shutil.which("ncu"):
        p.error("no ncu on the PATH")
    lines = {work.name: [] for work in works}
    for name in NAMES:
        for (work, variant), kernels in zip(items(name, works), profiled(name, args.works, args.lib), strict=True):
            lines[work.name].append(line(work.name, name, variant, kernels))
    import torch
    device = torch.cuda.get_device_name()
    command = f"python3 benches/peers/kernels.py --lib LIB --works {args.works}"
    out = [f"# The kernels of a layer's call\n\n{device}, commit {records.commit(TOP)}, `{command}`: Nsight Compute, kernel by kernel.\n",
           "| work | form | kernels | µs in all | MB read | MB written | the longest, µs |", "|---|---|--:|--:|--:|--:|---|", *sum(lines.values(), [])]
    folder = args.out or os.path.join(TOP, "benches", "results", records.slug(device))
    os.makedirs(folder, exist_ok=True)
    text = "\n".join(out) + "\n"
    with open(os.path.join(folder, "layer-kernels.md"), "w", encoding="utf-8") as f:
        f.write(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
