#!/usr/bin/env python3
"""Compiles all kernels for architectures that need not be here, and looks into the machine code for what each should have.

    python3 cuda/tests/architectures.py 89 100 120    # nvcc and nvdisasm on the PATH; no GPU

The exit code is 1 if a file does not compile, or has not the instructions that it should.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from abi import CUDA, MODELS

MNEMONIC = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]+)")
PRODUCTS, COPIES = "HMMA.16816", "LDGSTS"           # mma.sync; cp.async
CLUSTERS, SENT = "UCGABAR", "STAS"                  # barriers of a cluster; words sent within it, st.async
WARPGROUPS, TMA = "HGMMA", "UTMALDG"                # wgmma; tensor copies


def expected(file, arch):
    """Instructions that the machine code of a file must have, and those that it must not."""
    newer, hopper = int(arch.rstrip("af")) >= 90, arch == "90a"
    of_clusters = [CLUSTERS, SENT]
    if file == "chunk/sm80_bf16.cu":
        return [PRODUCTS, COPIES], [WARPGROUPS]
    if file == "chunk/sm90_bf16_f32.cu":
        return ([WARPGROUPS, TMA], []) if hopper else ([], [WARPGROUPS, PRODUCTS])
    if file == "backward/chunk_bf16.cu":
        return [PRODUCTS, COPIES, *([WARPGROUPS, TMA] if hopper else [])], ([] if hopper else [WARPGROUPS, TMA])
    if file == "chunk/combine.cu":
        return ["HMMA.1688", *(of_clusters if newer else [])], ([] if newer else of_clusters)
    if file == "step/step_bf16.cu":
        return [COPIES, *(of_clusters if newer else [])], ([] if newer else of_clusters)
    return [], []


def check(source, arch, folder):
    """What is wrong with a file, or nothing."""
    file = os.path.join(*source.split(os.sep)[-2:])
    cubin = os.path.join(folder, file.replace(os.sep, "-") + arch)
    compiled = subprocess.run(["nvcc", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-I", CUDA, "-cubin", "-o", cubin,
                               f"-gencode=arch=compute_{arch},code=sm_{arch}", source], capture_output=True, text=True)
    if compiled.returncode:
        return f"sm_{arch} {file}: {compiled.stderr.strip().splitlines()[:1]}"
    must, must_not = expected(file, arch)
    if not must and not must_not:
        return None
    code = subprocess.run(["nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    found = MNEMONIC.findall(code)
    has = lambda name: any(x.startswith(name) for x in found)
    wrong = [f"no {x}" for x in must if not has(x)] + [f"{x} in it" for x in must_not if has(x)]
    print(f"sm_{arch} {file}: " + (", ".join(f"{sum(x.startswith(name) for x in found)} {name}" for name in must) or "none of "
                                   + ", ".join(must_not)), flush=True)
    return f"sm_{arch} {file}: {', '.join(wrong)}" if wrong else None


def main(archs):
    if not archs:
        sys.exit(__doc__)
    for tool in ("nvcc", "nvdisasm"):
        if not shutil.which(tool):
            sys.exit(f"no {tool} on the PATH")
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            sys.exit(f"expected architectures such as 89 or 90a, got {arch!r}")
    sources = sorted(glob.glob(os.path.join(CUDA, "*", "*.cu")) + glob.glob(os.path.join(MODELS, "*", "*.cu")))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        work = [(source, arch, folder) for arch in archs for source in sources]
        wrong = [x for x in pool.map(lambda item: check(*item), work) if x]
    print("\n".join(wrong) if wrong else f"{len(sources)} files for each of {', '.join('sm_' + a for a in archs)}: as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
