#!/usr/bin/env python3
"""Checks gdn_residual and gdn_swiglu, through the C ABI, against float64.

An error is ||y - ref|| / ||ref||: the output's rounding, and at most 2e-6 of the f32 arithmetic. A sum has to be the bits that torch
gives. Everything around inputs and outputs holds NaN.
"""
import math

import common    # noqa: F401 - the path of cuda/tests
import harness
import torch
from abi import CODES, OK, ResidualParams, SwigluParams, fill
from cases import every, rows, seeded, words
from harness import TYPES, WAYS, Frame, Output, bf16, call, expect, nan, normal, null_params, one_by_one, report, rounding, same, verify
from reference import rms_norm, swiglu
from timing import calls_of, cold_sets, compare

EPS = 1e-6
IO = list(TYPES)


def residual_params(x, h, total, y, weight, dtype, overlap=0):
    stride = lambda t: 0 if t is None else t.stride(0)
    return fill(ResidualParams, x=x, h=h, sum=total, y=y, weight=weight, x_stride=stride(x), h_stride=stride(h),
                sum_stride=stride(total), y_stride=stride(y), rows=x.shape[0], dim=x.shape[1], dtype=CODES[dtype],
                overlap=overlap, eps=EPS)


def swiglu_params(gate, up, out, dtype, overlap=0):
    return fill(SwigluParams, gate=gate, up=up, out=out, gate_stride=gate.stride(0), up_stride=up.stride(0),
                out_stride=out.stride(0), rows=out.shape[0], columns=out.shape[1], dtype=CODES[dtype], overlap=overlap)


def check_residual(lib, args):
    dims = [2560, 1024, 77] if args.quick else [1, 7, 8, 77, 256, 1024, 2048, 2560, 4096, 5120, 6144, 8200, 12288, 12296, 20000]
    frames = rows("gaps shift", ((0, 0, 0, 0), 0), ((8, 16, 24, 32), 0), ((1, 3, 0, 5), 1))
    for case in seeded(every(frames, dtype=IO, dim=dims, rows=[1, 33] if args.quick else [1, 2, 3, 32, 33, 700], add=[True, False])):
        count, dim, dtype, add, randn = case["rows"], case["dim"], case["dtype"], case["add"], normal(case["seed"])
        frame = lambda i, values=None: Frame(count, dim, dtype, case["gaps"][i], case["shift"], values)
        x, h, total, y = frame(0, randn(count, dim) * 3), frame(1, randn(count, dim)), frame(2), frame(3)
        weight, want = 1 + 0.3 * randn(dim), x.view + h.view if add else x.view
        p = residual_params(x.view, h.view if add else None, total.view if add else None, y.view, weight, dtype)
        bound = rounding(dtype, count * dim) + 2e-6
        verify(lib, f"residual {words(case)}", lib.gdn_residual, p, [
            Output("y", y.buffer, y.index, rms_norm(want, weight, EPS), bound),
            Output("sum", total.buffer, total.index if add else None, want)], WAYS, replays=2)


def check_in_place(lib, args):
    """sum over x, y over h; and the norm alone over its input."""
    for dtype, dim in ((dtype, dim) for dtype in IO for dim in (2560, 77)):
        x, h = (torch.randn(9, dim).to(TYPES[dtype]) for _ in range(2))
        weight, out = torch.randn(dim), (torch.empty_like(x), torch.empty_like(x))
        assert call(lib.gdn_residual, residual_params(x, h, *out, weight, dtype)) == OK
        a, b = x.clone(), h.clone()
        assert call(lib.gdn_residual, residual_params(a, b, a, b, weight, dtype)) == OK
        c = out[0].clone()
        assert call(lib.gdn_residual, residual_params(c, None, None, c, weight, dtype)) == OK
        torch.cuda.synchronize()
        report(f"residual {dtype} {dim} in place", same([a, b, c], [out[0], out[1], out[1]]), "other bits")


def check_swiglu(lib, args):
    columns = [9216, 77] if args.quick else [1, 8, 77, 512, 3584, 6144, 9216, 17408]
    frames = rows("gaps shift", ((0, 0), 0), ((8, 16), 0), ((1, 3), 1))
    for case in seeded(every(frames, dtype=IO, columns=columns, rows=[1, 33] if args.quick else [1, 2, 32, 33, 700])):
        count, width, dtype, gaps, shift = case["rows"], case["columns"], case["dtype"], case["gaps"], case["shift"]
        both = Frame(count, 2 * width, dtype, gaps[0], shift, normal(case["seed"])(count, 2 * width) * 4)
        gate, up, out = both.view[:, :width], both.view[:, width:], Frame(count, width, dtype, gaps[1], shift)
        verify(lib, f"swiglu {words(case)}", lib.gdn_swiglu, swiglu_params(gate, up, out.view, dtype), [
            Output("out", out.buffer, out.index, swiglu(gate, up), rounding(dtype, count * width) + 2e-6)], WAYS, replays=2)


def check_nan(lib, args):
    """A NaN shows in its whole row and nowhere else; an infinity does not hide."""
    for dtype in IO:
        for dim, value in ((dim, value) for dim in (2560, 77) for value in (math.nan, math.inf)):
            x, h = (torch.randn(5, dim).to(TYPES[dtype]) for _ in range(2))
            x[2, dim - 1] = value
            total, y, weight = nan(5, dim, dtype=dtype), nan(5, dim, dtype=dtype), torch.ones(dim)
            assert call(lib.gdn_residual, residual_params(x, h, total, y, weight, dtype)) == OK
            torch.cuda.synchronize()
            bad = y.isnan()
            shown = bad[2].all() if math.isnan(value) else bad[2, dim - 1]
            report(f"residual {dtype} {dim} {value}", bool(shown) and not bool(bad[[0, 1, 3, 4]].any()), str(bad.sum(1)))
        both = torch.randn(3, 2 * 72).to(TYPES[dtype])
        both[1, 5], both[2, 72 + 6] = math.nan, math.nan
        both[0, 7], both[0, 8] = -1e4, 1e4
        out = nan(3, 72, dtype=dtype)
        assert call(lib.gdn_swiglu, swiglu_params(both[:, :72], both[:, 72:], out, dtype)) == OK
        torch.cuda.synchronize()
        where = out.isnan().nonzero().tolist()
        report(f"swiglu {dtype} NaN", where == [[1, 5], [2, 6]] and abs(out[0, 7].item()) == 0, str(where))


def check_status(lib, args):
    x = torch.randn(3, 64)
    y, total, weight = torch.empty_like(x), torch.empty_like(x), torch.ones(64)
    expect("residual", lib.gdn_residual, lambda: residual_params(x, x, total, y, weight, "f32"), {
        "BAD_DTYPE": [dict(dtype=3)], "BAD_LENGTH": one_by_one(rows=[-1], dim=[0]),
        "BAD_STRIDE": one_by_one(x_stride=[-1], y_stride=[-1]), "NULL_POINTER": one_by_one(x=[None], sum=[None], weight=[None]),
        "OK": [dict(h=None, sum=None), dict(rows=0, x=None), {}]})
    expect("swiglu", lib.gdn_swiglu, lambda: swiglu_params(x, x, y, "f32"), {
        "BAD_DTYPE": [dict(dtype=-1)], "BAD_LENGTH": one_by_one(rows=[-1], columns=[-1]), "BAD_STRIDE": [dict(up_stride=-1)],
        "NULL_POINTER": one_by_one(gate=[None], out=[None]), "OK": [dict(columns=0, up=None), {}]})
    null_params(lib.gdn_residual, lib.gdn_swiglu)


def times(lib, args):
    functional, counts = torch.nn.functional, (1, 8, 32, 512, 8192)

    def residual(dim, count):
        weight, half = torch.ones(dim), torch.ones(dim, dtype=torch.bfloat16)
        data = [[bf16(count, dim) for _ in range(4)] for _ in range(cold_sets(count * dim * 8, least=2))]
        found = {name: calls_of(lib, [(lib.gdn_residual, residual_params(*x, weight, "bf16", overlap)) for x in data])
                 for name, overlap in (("", 0), ("overlapped", 1))}
        return f"residual {count} x {dim}", count * dim * 8, {
            **found, "torch": [lambda x=x, h=h: functional.rms_norm(x + h, (dim,), half, EPS) for x, h, _, _ in data]}

    def gated(width, count):
        data = [(bf16(count, 2 * width), bf16(count, width)) for _ in range(cold_sets(count * width * 6, least=2))]
        found = {name: calls_of(lib, [(lib.gdn_swiglu, swiglu_params(b[:, :width], b[:, width:], out, "bf16", overlap)) for b, out in data])
                 for name, overlap in (("", 0), ("overlapped", 1))}
        return f"swiglu {count} x {width}", count * width * 6, {
            **found, "torch": [lambda b=b: functional.silu(b[:, :width]) * b[:, width:] for b, _ in data]}

    compare("residual and norm, bf16, cold L2", (residual(dim, count) for dim in (1024, 2048, 2560, 5120) for count in counts))
    compare("SwiGLU, bf16, cold L2", (gated(width, count) for width in (3584, 6144, 9216, 17408) for count in counts))


GROUPS = {"residual": check_residual, "in place": check_in_place, "swiglu": check_swiglu, "nan": check_nan, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, models=True)
