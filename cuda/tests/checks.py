"""What the checks share: their lines and what failed, errors, buffers that show what was written, and the library."""
import argparse
import math
import os
import sys
import tempfile

import torch
from abi import DTYPES, build

ULP = {"f32": 2.0 ** -23, "bf16": 2.0 ** -7, "f16": 2.0 ** -10}
failures = []
lines = 0


def report(name, ok, text="", quiet=False):
    """A check's line; a quiet one is printed only where it failed."""
    global lines
    lines += 1
    if not ok:
        failures.append(name)
    if not ok or not quiet:
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {text}", flush=True)


def summary():
    print(f"{lines} checks, {len(failures)} failed")
    for name in failures:
        print("  failed:", name)


def arguments(doc):
    """A parser of what all of them take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small set of cases")
    parser.add_argument("--time", action="store_true", help="print times after the checks")
    parser.add_argument("--only-time", action="store_true", help="print times and check nothing but what is timed")
    parser.add_argument("--lib", help="the shared library: loaded when it is there, else built there")
    parser.add_argument("--nvcc", default="", help="further arguments for nvcc")
    return parser


def library(args, load):
    """The kernels, by what abi.py or one of its like makes of a file."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:    # once it is loaded, the file may go
        path = os.path.abspath(args.lib or os.path.join(folder, "libcandle_gdn.so"))
        if not os.path.exists(path):
            build(path, args.nvcc.split())
        return load(path)


def leave():
    """Ends the program: with 1 where something failed."""
    sys.exit(1 if failures else 0)


def rel(x, ref):
    """||x - ref|| / ||ref||, or ||x|| where ref is zero; infinite where x is not a number."""
    x, ref = x.double(), ref.double()
    norm, error = ref.norm(), (x - ref).norm()
    error = (error / norm if norm > 0 else error).item()
    return math.inf if math.isnan(error) else error


def rounding(dtype, count):
    """rel() of values that were rounded once: of many, or of so few that they may all be rounded badly."""
    return ULP[dtype] / math.sqrt(12) * (1.0 if count >= 1000 else math.sqrt(3))


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same(x, y):
    return torch.equal(bits(x), bits(y))


def framed(rows, columns, gap, dtype, shift=0):
    """NaN everywhere: `rows` of `columns` with a gap after each, rows before and after, `shift` elements in. The buffer
    and the view."""
    buf = torch.full((rows + 4, columns + gap + shift), math.nan, device="cuda", dtype=DTYPES[dtype][1])
    return buf, buf[2:2 + rows, shift:shift + columns]
