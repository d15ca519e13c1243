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
from cases import every, rows
from harness import TYPES, WAYS, Frame, Launch, Output, call, expect, group, nan, normal, null_params, one_by_one, report, rounding, same
from reference import rms_norm, swiglu as gated

EPS = 0.03    # large enough to be missed
IO = list(TYPES)


def residual_params(x, h, total, y, weight, dtype, overlap=0):
    stride = lambda t: 0 if t is None else t.stride(0)
    return fill(ResidualParams, x=x, h=h, sum=total, y=y, weight=weight, x_stride=stride(x), h_stride=stride(h),
                sum_stride=stride(total), y_stride=stride(y), rows=x.shape[0], dim=x.shape[1], dtype=CODES[dtype],
                overlap=overlap, eps=EPS)


def swiglu_params(gate, up, out, dtype, overlap=0):
    return fill(SwigluParams, gate=gate, up=up, out=out, gate_stride=gate.stride(0), up_stride=up.stride(0),
                out_stride=out.stride(0), rows=out.shape[0], columns=out.shape[1], dtype=CODES[dtype], overlap=overlap)


def residual(lib, rows, dim, dtype="bf16", add=True, gaps=(0, 0, 0, 0), shift=0, seed=0):
    randn = normal(seed)
    frame = lambda i, values=None: Frame(rows, dim, dtype, gaps[i], shift, values)
    x, h, total, y = frame(0, randn(rows, dim) * 3), frame(1, randn(rows, dim)), frame(2), frame(3)
    weight = 1 + 0.3 * randn(dim)
    p = residual_params(x.view, h.view if add else None, total.view if add else None, y.view, weight, dtype)

    def outputs():
        want = x.view + h.view if add else x.view
        return [Output("y", y.buffer, y.index, rms_norm(want, weight, EPS), rounding(dtype, rows * dim) + 2e-6),
                Output("sum", total.buffer, total.index if add else None, want)]

    return Launch(lib.gdn_residual, p, outputs, replays=2, nbytes=(4 if add else 2) * x.view.numel() * x.view.element_size())


def swiglu(lib, rows, columns, dtype="bf16", gaps=(0, 0), shift=0, seed=0):
    both = Frame(rows, 2 * columns, dtype, gaps[0], shift, normal(seed)(rows, 2 * columns) * 4)
    gate, up, out = both.view[:, :columns], both.view[:, columns:], Frame(rows, columns, dtype, gaps[1], shift)
    return Launch(lib.gdn_swiglu, swiglu_params(gate, up, out.view, dtype), lambda: [
        Output("out", out.buffer, out.index, gated(gate, up), rounding(dtype, rows * columns) + 2e-6)], replays=2,
        nbytes=3 * out.view.numel() * out.view.element_size())


FRAMES = rows("gaps shift", ((0, 0, 0, 0), 0), ((8, 16, 24, 32), 0), ((1, 3, 0, 5), 1))
GATED_FRAMES = rows("gaps shift", ((0, 0), 0), ((8, 16), 0), ((1, 3), 1))
RESIDUALS = every(FRAMES, dtype=IO, dim=[1, 7, 8, 77, 256, 1024, 2048, 2560, 4096, 5120, 6144, 8200, 12288, 12296, 20000],
                  rows=[1, 2, 3, 32, 33, 700], add=[True, False])
SWIGLUS = every(GATED_FRAMES, dtype=IO, columns=[1, 8, 77, 512, 3584, 6144, 9216, 17408], rows=[1, 2, 32, 33, 700])


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


def times(args):
    counts = [1, 8, 32, 512, 8192]
    return [("residual and norm, bf16", residual, every(dim=[1024, 2048, 2560, 5120], rows=counts)),
            ("SwiGLU, bf16", swiglu, every(columns=[3584, 6144, 9216, 17408], rows=counts))]


GROUPS = {"residual": group(residual, RESIDUALS, every(FRAMES, dtype=IO, dim=[2560, 1024, 77], rows=[1, 33], add=[True, False]), WAYS),
          "swiglu": group(swiglu, SWIGLUS, every(GATED_FRAMES, dtype=IO, columns=[9216, 77], rows=[1, 33]), WAYS),
          "in place": check_in_place, "nan": check_nan, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, models=True)
