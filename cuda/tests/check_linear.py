#!/usr/bin/env python3
"""Checks gdn_linear, products of few rows with dense weights, through the C ABI against float64.

    python3 cuda/tests/check_linear.py --only-time --shapes 4b,27b --rows 1,8
    python3 cuda/tests/check_linear.py --only-time --sweep --shapes 4b    # and the best ways to cut the product

An error is ||y - ref|| / ||ref||. Everything around inputs and outputs holds NaN.
"""
import ctypes as C
import itertools

import harness
from abi import LINEAR_ROWS, LinearOptions, LinearParams
from cases import every
from harness import expect, null_params, one_by_one
from linear_case import Dense, Product, check_chain, options, small, times as times_of

ROWS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32]
SHAPES = [(2048, 12352), (4096, 2048), (2048, 2048), (2560, 1100), (5120, 100), (64, 33), (128, 1), (320, 17), (6144, 2560), (1024, 4097),
          (9728, 64), (17408, 48), (2560, 4097), (9216, 2560), (3584, 1024), (5120, 2563), (17408, 2130)]
CASES = (every(dtype=["bf16", "f16"], rows=ROWS, shape=SHAPES, gaps=(0, 0, 0)) +
         every(dtype=["bf16", "f16"], rows=ROWS, shape=[(2048, 100), (4096, 33), (704, 5000)], gaps=[(8, 64, 1), (72, 8, 37)]))


def product(lib, rows, inputs, outputs, dtype="bf16", gaps=(0, 0, 0), seed=0, cut=None):
    """`cut` is how the product is divided: warps, groups, cluster, blocks; without it the library chooses."""
    weight = seed if isinstance(seed, Dense) else Dense(outputs, inputs, dtype, gaps[1], seed)
    function, more = ("gdn_linear_with", (C.byref(LinearOptions(0, *cut)),)) if cut else ("gdn_linear", ())
    return Product(lib, LinearParams, function, weight, rows, dtype, gaps[::2], 0 if seed is weight else seed, more=more)


def check_cases(lib, args):
    for seed, case in enumerate(CASES):
        if small(case["rows"], *case["shape"], args.quick):
            product(lib, case["rows"], *case["shape"], case["dtype"], case["gaps"], seed).check(f"gaps {case['gaps']}")


def cuts(rows=1, inputs=0, swiglu=0):
    """Warps, groups, cluster, blocks: what fills a multiprocessor's registers, and every split over two blocks."""
    chunks = -(-inputs // 64)
    for warps, groups, cluster in itertools.product((2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16), (2,) if swiglu else (1, 2), (1,) if swiglu else (1, 2, 4)):
        parts = warps * cluster
        if warps * groups <= 16 and chunks / (-(-(-(-chunks // parts)) // 4) * 4 * parts or 1) >= (0.7 if inputs else 0):
            yield warps, groups, cluster, 16 // (warps * groups)


def check_cuts(lib, args):
    """Every way that the sweep measures."""
    for seed, ((inputs, outputs), rows, cut) in enumerate(() if args.quick else itertools.product(
            ((2560, 4104), (9216, 200), (320, 77)), (1, 7), cuts())):
        p = product(lib, rows, inputs, outputs, seed=seed, cut=cut)
        if p.taken():
            p.check(f"cut {cut}")


def check_chains(lib, args):
    for dtype, rows, hidden in () if args.quick else itertools.product(("bf16", "f16"), (1, 8, 16, 32), (1024, 4096)):
        check_chain("linear", [product(lib, rows, hidden, hidden, dtype, seed=seed) for seed in range(6)], rows, hidden, dtype)


def check_status(lib, args):
    case = product(lib, 4, 128, 32)
    x, w = case.x.view.data_ptr(), case.weight.numbers.data_ptr()
    expect("linear", lib.gdn_linear, case.params, {
        "BAD_DTYPE": one_by_one(dtype=[0, 7]),
        "BAD_LENGTH": one_by_one(rows=[33, -1], inputs=[0], outputs=[-1]),
        "NULL_POINTER": one_by_one(x=[None], w=[None], y=[None]),
        "BAD_ALGO": one_by_one(inputs=[96], x=[x + 2], w=[w + 8], w_stride=[132], x_stride=[132]),
        "BAD_STRIDE": one_by_one(x_stride=[-8], y_stride=[-1]),
        "OK": [dict(rows=0, x=None), dict(outputs=0, w=None)]})
    null_params(lib.gdn_linear)
    for cut in ((17,), (8, 3), (8, 4), (8, 1, 3), (8, 1, 1, -1)):
        expect(f"cut {cut}", lib.gdn_linear_with, product(lib, 1, 128, 32).params, {"BAD_ALGO": [{}]}, C.byref(LinearOptions(0, *cut)))


def times(lib, args):
    make = lambda inputs, outputs, swiglu, rows, seed, cut: product(lib, rows, inputs, outputs, seed=seed, cut=cut)
    times_of("bf16", args, make, 2, lambda rows, swiglu: rows <= LINEAR_ROWS and not swiglu, args.sweep, cuts)


GROUPS = {"products": check_cases, "cuts": check_cuts, "chain": check_chains, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, options=options([1, 2, 4, 8, 16, 32]))
