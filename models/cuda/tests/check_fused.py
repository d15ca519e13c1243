#!/usr/bin/env python3
"""Checks gdn_residual and gdn_swiglu, through the C ABI, against float64.

An error is ||y - ref|| / ||ref||. The output's rounding alone makes it at most ulp / sqrt(12), with ulp at most 2^-7 of
the value in bf16, 2^-10 in f16 and 2^-23 in f32; of few values it may be any value's own at worst, sqrt(3) times that.
The f32 arithmetic adds at most 2e-6. A sum has to be the bits that torch gives. Outputs hold NaN before a launch, as
does everything around inputs and outputs.
"""
import math
import os
import sys
from functools import partial

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "cuda", "tests"))

import harness
import torch
from abi import CODES, NULL_POINTER, OK, ResidualParams, SwigluParams, fill, stream
from harness import (TYPES, WAYS, bf16, call, expect, failures, framed, launch, nan, normal, one_by_one, only_inside, refused,
                     rounding, same)
from reference import relative, rms_norm, swiglu
from timing import calls_of, cold_sets, graph_us, heading, often, span_us

EPS = 1e-6

report = partial(harness.report, quiet=True)


def bound(dtype, count):
    return rounding(dtype, count) + 2e-6


def runs(f, params, outputs):
    """The outputs of a launch, and whether all ways to launch give the same bits."""
    first, equal = None, True
    for params.overlap, graph in WAYS:
        for buf, _ in outputs:
            buf.fill_(math.nan)
        status = launch(lambda: call(f, params), graph, replays=2)
        if status != OK:
            return status, False
        got = [view.clone() for _, view in outputs]
        equal = equal and (first is None or same(first, got))
        first = first or got
    return OK, equal


def residual_params(x, h, total, y, weight, dtype, overlap=0):
    stride = lambda t: 0 if t is None else t.stride(0)
    return fill(ResidualParams, x=x, h=h, sum=total, y=y, weight=weight, x_stride=stride(x), h_stride=stride(h),
                sum_stride=stride(total), y_stride=stride(y), rows=x.shape[0], dim=x.shape[1], dtype=CODES[dtype],
                overlap=overlap, eps=EPS)


def swiglu_params(gate, up, out, dtype, overlap=0):
    return fill(SwigluParams, gate=gate, up=up, out=out, gate_stride=gate.stride(0), up_stride=up.stride(0),
                out_stride=out.stride(0), rows=out.shape[0], columns=out.shape[1], dtype=CODES[dtype], overlap=overlap)


def check_residual(lib, rows, dim, dtype, gaps=(0, 0, 0, 0), shift=0, add=True, seed=0):
    name = f"residual {dtype} {rows}x{dim} gaps {gaps} shift {shift} add {add}"
    randn = normal(seed)
    (_, x), (_, h) = framed(rows, dim, gaps[0], dtype, shift), framed(rows, dim, gaps[1], dtype, shift)
    totals, ys = framed(rows, dim, gaps[2], dtype, shift), framed(rows, dim, gaps[3], dtype, shift)
    x.copy_(randn(rows, dim) * 3)
    h.copy_(randn(rows, dim))
    weight = 1 + 0.3 * randn(dim)
    total = x + h if add else x
    ref = rms_norm(total, weight, EPS)
    p = residual_params(x, h if add else None, totals[1] if add else None, ys[1], weight, dtype)
    status, equal = runs(lib.gdn_residual, p, [totals, ys] if add else [ys])
    if refused(lib, name, status):
        return
    limit, e = bound(dtype, rows * dim), relative(ys[1], ref)
    exact = not add or same(totals[1], total)
    inside = only_inside(*ys) and (not add or only_inside(*totals))
    report(name, e <= limit and equal and exact and inside, f"{e:.2e} of {limit:.2e}, the same in all ways {equal}, "
           f"exact sum {exact}, inside {inside}")


def check_in_place(lib, dtype):
    """sum over x, y over h; and the norm alone over its input."""
    for dim in (2560, 77):
        x, h = (torch.randn(9, dim, device="cuda").to(TYPES[dtype]) for _ in range(2))
        weight = torch.randn(dim, device="cuda")
        out = torch.empty_like(x), torch.empty_like(x)
        assert call(lib.gdn_residual, residual_params(x, h, *out, weight, dtype)) == OK
        a, b = x.clone(), h.clone()
        assert call(lib.gdn_residual, residual_params(a, b, a, b, weight, dtype)) == OK
        c = out[0].clone()
        assert call(lib.gdn_residual, residual_params(c, None, None, c, weight, dtype)) == OK
        torch.cuda.synchronize()
        ok = same([a, b, c], [out[0], out[1], out[1]])
        report(f"residual {dtype} {dim} in place", ok, "other bits")


def check_swiglu(lib, rows, columns, dtype, gaps=(0, 0), shift=0, seed=0):
    name = f"swiglu {dtype} {rows}x{columns} gaps {gaps} shift {shift}"
    _, both = framed(rows, 2 * columns, gaps[0], dtype, shift)
    outs = framed(rows, columns, gaps[1], dtype, shift)
    both.copy_(normal(seed)(rows, 2 * columns) * 4)
    gate, up = both[:, :columns], both[:, columns:]
    status, equal = runs(lib.gdn_swiglu, swiglu_params(gate, up, outs[1], dtype), [outs])
    if refused(lib, name, status):
        return
    limit, e, inside = bound(dtype, rows * columns), relative(outs[1], swiglu(gate, up)), only_inside(*outs)
    report(name, e <= limit and equal and inside,
           f"{e:.2e} of {limit:.2e}, the same in all ways {equal}, inside {inside}")


def check_nan(lib):
    """A NaN shows in its whole row and nowhere else; an infinity does not hide."""
    for dtype in TYPES:
        for dim in (2560, 77):
            for value in (math.nan, math.inf):
                x, h = (torch.randn(5, dim, device="cuda").to(TYPES[dtype]) for _ in range(2))
                x[2, dim - 1] = value
                total, y, weight = nan(5, dim, dtype=dtype), nan(5, dim, dtype=dtype), torch.ones(dim, device="cuda")
                assert call(lib.gdn_residual, residual_params(x, h, total, y, weight, dtype)) == OK
                torch.cuda.synchronize()
                bad = y.isnan()
                want = bad[2].all() if math.isnan(value) else bad[2, dim - 1]
                elsewhere = bool(bad[[0, 1, 3, 4]].any())
                report(f"residual {dtype} {dim} {value}", bool(want) and not elsewhere, str(bad.sum(1)))
        both = torch.randn(3, 2 * 72, device="cuda").to(TYPES[dtype])
        both[1, 5], both[2, 72 + 6] = math.nan, math.nan
        both[0, 7], both[0, 8] = -1e4, 1e4
        out = nan(3, 72, dtype=dtype)
        assert call(lib.gdn_swiglu, swiglu_params(both[:, :72], both[:, 72:], out, dtype)) == OK
        torch.cuda.synchronize()
        where = out.isnan().nonzero().tolist()
        report(f"swiglu {dtype} NaN", where == [[1, 5], [2, 6]] and abs(out[0, 7].item()) == 0, str(where))


def check_arguments(lib):
    x = torch.randn(3, 64, device="cuda")
    y, total, weight = torch.empty_like(x), torch.empty_like(x), torch.ones(64, device="cuda")

    expect("residual", lib.gdn_residual, lambda: residual_params(x, x, total, y, weight, "f32"), {
        "BAD_DTYPE": [dict(dtype=3)], "BAD_LENGTH": one_by_one(rows=[-1], dim=[0]),
        "BAD_STRIDE": one_by_one(x_stride=[-1], y_stride=[-1]), "NULL_POINTER": one_by_one(x=[None], sum=[None], weight=[None]),
        "OK": [dict(h=None, sum=None), dict(rows=0, x=None), {}]})
    expect("swiglu", lib.gdn_swiglu, lambda: swiglu_params(x, x, y, "f32"), {
        "BAD_DTYPE": [dict(dtype=-1)], "BAD_LENGTH": one_by_one(rows=[-1], columns=[-1]), "BAD_STRIDE": [dict(up_stride=-1)],
        "NULL_POINTER": one_by_one(gate=[None], out=[None]), "OK": [dict(columns=0, up=None), {}]})
    report("arguments null", lib.gdn_residual(None, stream()) == lib.gdn_swiglu(None, stream()) == NULL_POINTER)


def check(lib, args):
    quick = args.quick
    count = 0
    for dtype in TYPES:
        dims = (1, 7, 8, 77, 256, 1024, 2048, 2560, 4096, 5120, 6144, 8200, 12288, 12296, 20000)
        for dim in (2560, 1024, 77) if quick else dims:
            for rows in (1, 33) if quick else (1, 2, 3, 32, 33, 700):
                for add in (True, False):
                    check_residual(lib, rows, dim, dtype, add=add, seed=count)
                    check_residual(lib, rows, dim, dtype, (8, 16, 24, 32), add=add, seed=count)
                    check_residual(lib, rows, dim, dtype, (1, 3, 0, 5), 1, add=add, seed=count)
                    count += 3
        for columns in (9216, 77) if quick else (1, 8, 77, 512, 3584, 6144, 9216, 17408):
            for rows in (1, 33) if quick else (1, 2, 32, 33, 700):
                for gaps, shift in (((0, 0), 0), ((8, 16), 0), ((1, 3), 1)):
                    check_swiglu(lib, rows, columns, dtype, gaps, shift, seed=count)
                    count += 1
        check_in_place(lib, dtype)
    check_nan(lib)
    check_arguments(lib)
    print(f"{count} shapes, {len(failures)} failed", flush=True)


def times(lib, args):
    rate = heading("bf16, cold L2; us: kernels (CUPTI) / graph / graph with overlap, beside torch: kernels / graph")
    functional = torch.nn.functional

    def line(name, nbytes, f, params, theirs):
        """`params`: overlap to those of each set."""
        ours = lambda overlap: often(calls_of(lib, [(f, p) for p in params(overlap)]), 64)
        theirs = often(theirs, 64)
        k, plain, overlapped = span_us(ours(0)), graph_us(ours(0)), graph_us(ours(1))
        print(f"  {name:24s} {k:7.2f} / {plain:7.2f} / {overlapped:7.2f}  floor {nbytes / rate * 1e6:6.2f}  torch "
              f"{span_us(theirs):7.2f} / {graph_us(theirs):7.2f}", flush=True)

    for dim in (1024, 2048, 2560, 5120):
        for rows in (1, 8, 32, 512, 8192):
            weight, half = torch.ones(dim, device="cuda"), torch.ones(dim, device="cuda", dtype=torch.bfloat16)
            data = [[bf16(rows, dim) for _ in range(4)] for _ in range(cold_sets(rows * dim * 8, least=2))]
            params = lambda overlap: [residual_params(*tensors, weight, "bf16", overlap) for tensors in data]
            theirs = [lambda x=x, h=h: functional.rms_norm(x + h, (dim,), half, EPS) for x, h, _, _ in data]
            line(f"residual {rows} x {dim}", rows * dim * 8, lib.gdn_residual, params, theirs)
    for columns in (3584, 6144, 9216, 17408):
        for rows in (1, 8, 32, 512, 8192):
            data = [(bf16(rows, 2 * columns), bf16(rows, columns)) for _ in range(cold_sets(rows * columns * 6, least=2))]
            params = lambda overlap: [swiglu_params(b[:, :columns], b[:, columns:], out, "bf16", overlap) for b, out in data]
            theirs = [lambda b=b: functional.silu(b[:, :columns]) * b[:, columns:] for b, _ in data]
            line(f"swiglu {rows} x {columns}", rows * columns * 6, lib.gdn_swiglu, params, theirs)


def main():
    harness.program(__doc__, check, times, models=True)


if __name__ == "__main__":
    main()
