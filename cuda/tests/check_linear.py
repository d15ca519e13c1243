#!/usr/bin/env python3
"""Checks gdn_linear, products of few rows with dense weights, through the C ABI against float64.

    python3 cuda/tests/check_linear.py --only-time --cases 'rows=(1|8) shape=.2560'
    python3 cuda/tests/check_linear.py --only-time --sweep --cases rows=1    # all ways to cut the product

An error is ||y - ref|| / ||ref||. Everything around inputs and outputs holds NaN.
"""
import ctypes as C
import itertools

import harness
from abi import LinearOptions, LinearParams
from cases import every
from harness import WAYS, expect, group, null_params, one_by_one
from linear_case import SHAPES, SWEEP, Dense, check_chain, product, small, taken

ROWS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32]
CASES = (every(dtype=["bf16", "f16"], rows=ROWS, shape=[
            (2048, 12352), (4096, 2048), (2048, 2048), (2560, 1100), (5120, 100), (64, 33), (128, 1), (320, 17), (6144, 2560), (1024, 4097),
            (9728, 64), (17408, 48), (2560, 4097), (9216, 2560), (3584, 1024), (5120, 2563), (17408, 2130), (3840, 1100), (11008, 2100)]) +
         every(dtype=["bf16", "f16"], rows=ROWS, shape=[(2048, 100), (4096, 33), (704, 5000)], gaps=[(8, 64, 1), (72, 8, 37)]))


def linear(lib, rows, shape, dtype="bf16", gaps=(0, 0, 0), cut=None, seed=0):
    """`cut` is how the product is divided: warps, groups, cluster, blocks; without it the library chooses."""
    f, more = (lib.gdn_linear_with, (C.byref(LinearOptions(*cut)),)) if cut else (lib.gdn_linear, ())
    return product(LinearParams, f, Dense(shape[1], shape[0], dtype, gaps[1], seed), rows, dtype, gaps[::2], seed, more=more)


def cuts(swiglu=False):
    """What fills a multiprocessor's registers, and every split over two blocks."""
    return [(warps, groups, cluster, 16 // (warps * groups)) for warps, groups, cluster in itertools.product(
        (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16), (2,) if swiglu else (1, 2), (1,) if swiglu else (1, 2, 4)) if warps * groups <= 16]


def check_cuts(lib, args):
    """Every way that the sweep measures."""
    table = every(shape=[(2560, 4104), (9216, 200), (320, 77)], rows=[1, 7], cut=cuts())
    group(linear, lambda: (case for case in table if taken(linear(lib, **case))), ways=WAYS)(lib, args)


def check_chains(lib, args):
    for case in () if args.quick else every(dtype=["bf16", "f16"], rows=[1, 8, 16, 32], shape=[(1024, 1024), (4096, 4096)]):
        check_chain(f"linear {case}", [linear(lib, seed=seed, **case) for seed in range(6)])


def check_status(lib, args):
    case = linear(lib, 4, (128, 32))
    x, w = case.x.data_ptr(), case.weight.numbers.data_ptr()
    expect("linear", lib.gdn_linear, lambda: case.params_of(case.x, case.y), {
        "BAD_DTYPE": one_by_one(dtype=[0, 7]),
        "BAD_LENGTH": one_by_one(rows=[33, -1], inputs=[0], outputs=[-1]),
        "NULL_POINTER": one_by_one(x=[None], w=[None], y=[None]),
        "BAD_ALGO": one_by_one(inputs=[96], x=[x + 2], w=[w + 8], w_stride=[132], x_stride=[132]),
        "BAD_STRIDE": one_by_one(x_stride=[-8], y_stride=[-1]),
        "OK": [dict(rows=0, x=None), dict(outputs=0, w=None)]})
    null_params(lib.gdn_linear)
    for cut in ((17,), (8, 3), (8, 4), (8, 1, 3), (8, 1, 1, -1)):
        case = linear(lib, 1, (128, 32), cut=cut)
        expect(f"cut {cut}", case.f, lambda: case.params, {"BAD_ALGO": [{}]}, *case.more)


def times(args):
    return [("products, bf16", linear, every(rows=[1, 2, 4, 8, 16, 32], shape=SHAPES, cut=[None, *(cuts() if args.sweep else [])]))]


GROUPS = {"products": group(linear, CASES, small(CASES), WAYS), "cuts": check_cuts, "chain": check_chains, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, options=SWEEP)
