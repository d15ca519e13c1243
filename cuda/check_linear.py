#!/usr/bin/env python3
"""Checks gdn_linear, through the C ABI, against the product in float64.

    python3 cuda/check_linear.py               # builds all kernels; the exit code is 1 when a case fails
    python3 cuda/check_linear.py --lib PATH    # of a library that is there
    python3 cuda/check_linear.py --time        # the checks, then times beside torch.nn.functional.linear
    python3 cuda/check_linear.py --only-time

An error is ||y - ref|| / ||ref||. The output's rounding alone makes it at most ulp / sqrt(12), with ulp at most 2^-7 of
the value in bf16 and 2^-10 in f16; of few values it may be any value's own at worst, sqrt(3) times that. The f32 sums
add at most 2e-5. Outputs hold NaN before a launch, as does everything around the inputs.
"""
import argparse
import ctypes as C
import math
import os
import sys
import tempfile

import timing
import torch
from abi import (BAD_ALGO, BAD_DTYPE, BAD_LENGTH, BAD_STRIDE, DTYPES, NULL_POINTER, OK, LinearParams, build, load,
                 stream)

ULP = {"bf16": 2.0 ** -7, "f16": 2.0 ** -10}
failures = []


def report(name, ok, text, quiet=False):
    if not ok:
        failures.append(name)
    if not ok or not quiet:
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {text}", flush=True)


def bound(dtype, count):
    return ULP[dtype] / math.sqrt(12) * (1.0 if count >= 1000 else math.sqrt(3)) + 2e-5


def framed(rows, columns, gap, dtype):
    """NaN everywhere: `rows` of `columns` with a gap after each, and rows before and after. The buffer and the view."""
    buf = torch.full((rows + 4, columns + gap), math.nan, device="cuda", dtype=DTYPES[dtype][1])
    return buf, buf[2:2 + rows, :columns]


class Case:
    def __init__(self, rows, inputs, outputs, dtype, gaps=(0, 0, 0), seed=0):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        randn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
        self.dtype = dtype
        self.x_buf, self.x = framed(rows, inputs, gaps[0], dtype)
        self.w_buf, self.w = framed(outputs, inputs, gaps[1], dtype)
        self.y_buf, self.y = framed(rows, outputs, gaps[2], dtype)
        self.x.copy_(randn(rows, inputs))
        self.w.copy_(randn(outputs, inputs) * inputs ** -0.5)
        self.ref = self.x.double() @ self.w.double().T

    def params(self, overlap=0):
        x, w, y = self.x, self.w, self.y
        return LinearParams(x.data_ptr(), w.data_ptr(), y.data_ptr(), x.stride(0), w.stride(0), y.stride(0), x.shape[0],
                            x.shape[1], w.shape[0], DTYPES[self.dtype][0], overlap)

    def run(self, lib, overlap=0, graph=False):
        self.y_buf.fill_(math.nan)
        p = self.params(overlap)
        torch.cuda.synchronize()
        if graph:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                status = lib.gdn_linear(C.byref(p), stream())
            g.replay()
            g.replay()
        else:
            status = lib.gdn_linear(C.byref(p), stream())
        torch.cuda.synchronize()
        return status, self.y_buf.clone()


def check_case(lib, name, case, quiet=True):
    status, first = case.run(lib)
    if status != OK:
        return report(name, False, f"status {status}")
    error = ((case.y.double() - case.ref).norm() / case.ref.norm()).item()
    limit = bound(case.dtype, case.ref.numel())
    around = case.y_buf.clone()
    around[2:2 + case.y.shape[0], :case.y.shape[1]] = math.nan
    bits = lambda t: t.view(torch.int16)
    same = all(torch.equal(bits(case.run(lib, overlap, graph)[1]), bits(first))
               for overlap, graph in ((0, False), (1, False), (0, True), (1, True)))
    ok = error <= limit and bool(around.isnan().all()) and same
    report(name, ok, f"{error:.2e} of {limit:.2e}" + ("" if same else ", runs differ")
           + ("" if around.isnan().all() else ", wrote outside"), quiet)


def check_cases(lib):
    rows = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32)
    count = 0
    for dtype in ("bf16", "f16"):
        for r in rows:
            for inputs, outputs in ((2048, 12352), (4096, 2048), (2048, 2048), (2560, 1100), (5120, 100), (64, 33),
                                    (128, 1), (320, 17), (6144, 2560), (1024, 4097), (9728, 64), (17408, 48)):
                check_case(lib, f"{dtype} rows {r} inputs {inputs} outputs {outputs}",
                           Case(r, inputs, outputs, dtype, seed=count))
                count += 1
            for gaps in ((8, 64, 1), (72, 8, 37)):
                for inputs, outputs in ((2048, 100), (4096, 33), (704, 5000)):
                    check_case(lib, f"{dtype} rows {r} inputs {inputs} outputs {outputs} gaps {gaps}",
                               Case(r, inputs, outputs, dtype, gaps, seed=count))
                    count += 1
    print(f"{count} shapes, {len(failures)} failed", flush=True)


def check_chain(lib):
    """Launches that each read what the one before wrote, over two buffers: both kinds of hazard under overlap."""
    for dtype in ("bf16", "f16"):
        for rows in (1, 8, 16, 32):
            for hidden in (1024, 4096):
                weights = [torch.randn(hidden, hidden, device="cuda").mul_(hidden ** -0.5).to(DTYPES[dtype][1])
                           for _ in range(6)]
                start = torch.randn(rows, hidden, device="cuda").to(DTYPES[dtype][1])
                buffers = [torch.empty_like(start) for _ in range(2)]
                out = torch.empty_like(start)

                def chain(overlap):
                    buffers[0].copy_(start)
                    buffers[1].fill_(math.nan)
                    for i in range(24):
                        x, y = buffers[i % 2], buffers[(i + 1) % 2]
                        p = LinearParams(x.data_ptr(), weights[i % 6].data_ptr(), y.data_ptr(), hidden, hidden, hidden,
                                         rows, hidden, hidden, DTYPES[dtype][0], overlap)
                        assert lib.gdn_linear(C.byref(p), stream()) == OK
                    out.copy_(buffers[0])

                chain(0)
                torch.cuda.synchronize()
                ref, bad = out.clone(), 0
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g):
                    chain(1)
                for i in range(40):
                    out.fill_(math.nan)
                    if i % 2:
                        g.replay()
                    else:
                        chain(1)
                    torch.cuda.synchronize()
                    bad += not torch.equal(out.view(torch.int16), ref.view(torch.int16))
                report(f"chain {dtype} rows {rows} hidden {hidden}", bad == 0 and bool(ref.isfinite().all()),
                       f"{bad} of 40 differ")


def check_arguments(lib):
    case = Case(4, 128, 32, "bf16")

    def status(**changes):
        p = case.params()
        for name, value in changes.items():
            setattr(p, name, value)
        return lib.gdn_linear(C.byref(p), stream())

    for changes, want in (({"dtype": 0}, BAD_DTYPE), ({"dtype": 7}, BAD_DTYPE), ({"rows": 33}, BAD_LENGTH),
                          ({"rows": -1}, BAD_LENGTH), ({"inputs": 0}, BAD_LENGTH), ({"outputs": -1}, BAD_LENGTH),
                          ({"x": None}, NULL_POINTER), ({"w": None}, NULL_POINTER), ({"y": None}, NULL_POINTER),
                          ({"inputs": 96}, BAD_ALGO), ({"x": case.x.data_ptr() + 2}, BAD_ALGO),
                          ({"w": case.w.data_ptr() + 8}, BAD_ALGO), ({"w_stride": 132}, BAD_ALGO),
                          ({"x_stride": 132}, BAD_ALGO), ({"x_stride": -8}, BAD_STRIDE), ({"y_stride": -1}, BAD_STRIDE),
                          ({"rows": 0, "x": None}, OK), ({"outputs": 0, "w": None}, OK)):
        got = status(**changes)
        report(f"arguments {changes}", got == want, f"status {got}, expected {want}", quiet=True)
    report("arguments null", lib.gdn_linear(None, stream()) == NULL_POINTER, "", quiet=True)
    torch.cuda.synchronize()


SHAPES = ((2048, 12352), (4096, 2048), (2048, 2048), (2560, 2560), (2048, 6144), (6144, 2048), (5120, 5120))


def times(lib):
    rate = timing.copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; bf16, cold L2; us: kernels (CUPTI) / graph "
          "/ graph with overlap, beside torch: kernels / graph")
    for inputs, outputs in SHAPES:
        nbytes = 2 * inputs * outputs
        sets = int(2.4e8 / nbytes) + 2
        weights = [torch.randn(outputs, inputs, device="cuda").mul_(inputs ** -0.5).bfloat16() for _ in range(sets)]
        print(f"{inputs} -> {outputs}: {nbytes / 1e6:.1f} MB, floor {nbytes / rate * 1e6:.2f}")
        for rows in (1, 2, 4, 8, 16, 32):
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            y = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)

            def ours(overlap):
                calls = []
                for w in weights:
                    p = LinearParams(x.data_ptr(), w.data_ptr(), y.data_ptr(), inputs, inputs, outputs, rows, inputs,
                                     outputs, 1, overlap)
                    calls.append(lambda p=p: lib.gdn_linear(C.byref(p), stream()))
                return calls * max(1, 64 // sets)

            theirs = [lambda w=w: torch.nn.functional.linear(x, w) for w in weights] * max(1, 64 // sets)
            k = timing.span_us(ours(0))
            print(f"  rows {rows:2d}  {k:6.2f} / {timing.graph_us(ours(0)):6.2f} / {timing.graph_us(ours(1)):6.2f}"
                  f"  {nbytes / k / 1e3:5.0f} GB/s    torch {timing.span_us(theirs):6.2f} / {timing.graph_us(theirs):6.2f}",
                  flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lib")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only-time", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        path = args.lib or os.path.join(tmp, "libcandle_gdn.so")
        if not args.lib:
            build(path, [])
        lib = load(path)
        if not args.only_time:
            check_arguments(lib)
            check_cases(lib)
            check_chain(lib)
        if args.time or args.only_time:
            times(lib)
    print(f"{len(failures)} failures" if failures else "all ok")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
