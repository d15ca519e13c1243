#!/usr/bin/env python3
"""Products of few rows with weights in e4m3 and with SwiGLU, and gdn_dequantize, through the C ABI against float64.

    python3 models/cuda/tests/check_scaled.py --only-time --shapes 4b --rows 1,8 [--dense]    # with weights in e4m3, or in bf16
    python3 models/cuda/tests/check_scaled.py --only-time --sweep --shapes 4b                 # and the best ways to cut the product

An error is ||y - ref|| / ||ref||; the numbers of e4m3 are exact. Everything around inputs and outputs holds NaN.
"""
import ctypes as C
import itertools
import math

import common    # noqa: F401 - the path of cuda/tests
import harness
import torch
from abi import (BAD_ALGO, CODES, LINEAR_E4M3_ROWS, LINEAR_ROWS, LINEAR_SWIGLU_ROWS, OK, DequantizeParams, LinearOptions, LinearParams,
                 fill)
from cases import every, turns
from check_linear import cuts
from e4m3 import E4m3
from harness import TYPES, Frame, Output, call, expect, launch, one_by_one, report, rounding, verify
from linear_case import Dense, Product, check_chain, options, small, times as times_of
from reference import linear, relative

CLUSTER_INPUTS = 9216    # of more than 32 rows, which a cluster's shared memory holds
ROWS = [*range(1, 18), 31, 48, 64, 65]
PLAIN, GAPS = [(0, 0, 0)], [(0, 0, 0), (72, 16, 37)]
DTYPES = ["bf16", "f16"]
CASES = turns(
    every(dtype=DTYPES, rows=ROWS, gaps=PLAIN, shape=[
        (2048, 12352), (2560, 1100), (64, 33), (128, 1), (192, 100), (320, 17), (9216, 100), (9728, 64), (17408, 48), (2560, 9728), (5120, 2563),
        (704, 5000)]) +
    every(dtype=DTYPES, rows=ROWS, gaps=[(8, 64, 1), (72, 16, 37)], shape=[(2048, 100), (4096, 33), (704, 500)]) +
    every(dtype=DTYPES, rows=[1, 2, 5, 8], gaps=GAPS, swiglu=True, shape=[(2560, 9216), (1024, 3584), (5120, 272), (64, 1), (320, 33), (704, 2131)]),
    block=(128, 32, 1, 16)) + turns(
        # Rows below that are not in e4m3: in the launch of the others, or in one of their own.
        every([dict(shape=shape, below=below) for shape, below in (((2048, 12352), 64), ((2560, 8000), 96), ((5120, 2563), 33), ((64, 33), 1),
                                                                   ((192, 100), 90))], dtype=DTYPES, rows=[1, 2, 8, 9, 16, 17, 48], gaps=GAPS),
        block=(128, 32, 1, 16))
SWIGLU = every(dtype=DTYPES, rows=[1, 2, 5, 8], gaps=[(0, 0, 0), (72, 8, 37)], swiglu=True, block=0, shape=[
    (2560, 9216), (2048, 6144), (1024, 3584), (5120, 272), (64, 1), (320, 33), (704, 2131), (17408, 48)])


class Scaled:
    """A weight in e4m3 with a scale for each `block` of rows, of numbers of size `size` / sqrt(inputs); the last `below` rows in x's type."""

    def __init__(self, outputs, inputs, dtype, block, gap=0, seed=0, size=1.0, below=0):
        self.stored = E4m3(outputs - below, inputs, block, size * inputs ** -0.5, seed, -(-gap // 16) * 16)
        scales, w = self.stored.struct(), self.stored.bytes
        self.numbers = self.stored.exact()
        self.fields = dict(w=w, w_stride=w.stride(0), scales=scales, outputs_below=below)
        if below:
            dense = Dense(below, inputs, dtype, gap, seed + 1)
            self.numbers = torch.cat([self.numbers, dense.numbers.double()])
            self.fields.update(below=dense.numbers, below_stride=dense.numbers.stride(0))


def product(lib, rows, shape, dtype="bf16", gaps=(0, 0, 0), block=128, swiglu=False, below=0, size=1.0, seed=0, cut=(0, 0, 0, 0), x=None):
    """A weight in e4m3, or with block 0 in `dtype`. `cut`: how the product is divided; zeros leave it to the library."""
    inputs, outputs = shape
    weight, all_outputs = seed, 2 * outputs if swiglu else outputs
    if isinstance(seed, int):
        weight = Scaled(all_outputs, inputs, dtype, block, gaps[1], seed, size, below) if block else Dense(all_outputs, inputs, dtype, gaps[1], seed)
    weight.fields["outputs"] = outputs - below
    return Product(lib, LinearParams, "gdn_linear_with", weight, rows, dtype, gaps[::2], seed if isinstance(seed, int) else 0, swiglu,
                   (C.byref(LinearOptions(int(swiglu), *cut)),), x)


def check_cases(lib, args):
    many = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    for seed, case in enumerate(CASES + SWIGLU):
        rows, (inputs, outputs) = case["rows"], case["shape"]
        if not small(rows, inputs, outputs, args.quick):
            continue
        p = product(lib, **case, seed=seed)
        if case["block"] and rows > 2 * LINEAR_ROWS:
            expect("rows of e4m3", p.f, p.params, {"BAD_LENGTH": [{}]}, *p.more)
        elif case["block"] and rows > 2 * LINEAR_E4M3_ROWS and (inputs > CLUSTER_INPUTS or not many):
            expect("rows of e4m3 that do not fit", p.f, p.params, {"BAD_ALGO": [{}]}, *p.more)
        else:
            p.check(f"e4m3 by {case['block']}, {case.get('below', 0)} below, gaps {case['gaps']}")


def check_sizes(lib, args):
    """Inputs of all sizes: one row in bf16 is divided by a power of two, block by block, which times the scale may have no place in f32."""
    seeds = itertools.count()
    for rows, inputs, (power, size) in itertools.product((1, 5, 8, 9), (64, 320, 4096),
                                                         ((0, 1.0), (100, 1.0), (-110, 1.0), (None, 1.0), (-112, 2.0 ** -13))):
        seed = next(seeds)
        x = harness.normal(seed)(rows, inputs).bfloat16().double()
        x = torch.ldexp(x, torch.randint(-40, 40, x.shape) if power is None else torch.full(x.shape, power))
        product(lib, rows, (inputs, 100), size=size, seed=seed, x=x).check(f"e4m3, inputs times 2^{power}, weights of size {size:.0e}")
    for rows, bad in itertools.product((1, 2, 9, 17), (math.nan, math.inf)):
        p = product(lib, rows, (320, 100), seed=next(seeds))
        p.x.view[0, 200] = bad
        want = linear(p.x.view, p.weight.numbers)
        params = p.params()
        status, found = launch(lambda: p.launch(params)), p.y.view.double()
        shows = torch.equal(found[0].isnan(), want[0].isnan()) and bool((found[0] == want[0])[~want[0].isnan()].all())
        alone = rows == 1 or relative(found[1:], want[1:]) <= rounding("bf16", found[1:].numel()) + 2e-5
        report(f"e4m3, {bad} in the first of {rows} rows", status == OK and shows and alone, f"status {status}, shown {shows}, alone {alone}")


def check_dequantize(lib, args):
    """Bit for bit: each number is rounded to f32, and then once."""
    def params():
        return fill(DequantizeParams, w=weight.bytes, scales=weight.struct(), y=y.view, w_stride=weight.bytes.stride(0),
                    y_stride=y.view.stride(0), outputs=outputs, inputs=inputs, dtype=CODES[dtype])

    for dtype, (outputs, inputs), block_rows, gap in itertools.product(
            DTYPES, ((1, 16), (33, 192), (300, 2560), (129, 4112)), (128, 4, 1), (0, 16)):
        weight, y = E4m3(outputs, inputs, block_rows, 1.0, inputs, gap), Frame(outputs, inputs, dtype, gap)
        verify(lib, f"dequantize {dtype} {outputs}x{inputs} by {block_rows} gap {gap}", lib.gdn_dequantize, params(),
               [Output("y", y.buffer, y.index, weight.numbers().to(TYPES[dtype]))], ((0, False), (0, True)))
    expect("dequantize", lib.gdn_dequantize, params, {
        "BAD_DTYPE": one_by_one(dtype=[0, 7]), "BAD_LENGTH": one_by_one(outputs=[-1], inputs=[-16]),
        "NULL_POINTER": one_by_one(w=[None], y=[None], scales__ptr=[None]),
        "BAD_ALGO": one_by_one(inputs=[40], w=[weight.bytes.data_ptr() + 8], y_stride=[68], w_stride=[72]),
        "BAD_STRIDE": one_by_one(w_stride=[-16], y_stride=[-8]), "OK": [dict(outputs=0, w=None)]})


def cuts_of_many():
    """For more than 16 rows beside weights in e4m3: warpgroups along the inputs and the outputs, cluster."""
    return [(along, 2 // along, cluster, 0) for along in (1, 2) for cluster in (2, 4, 8)]


def check_cuts(lib, args):
    """Every way that the sweep measures."""
    shapes = ((2560, 4104), False), ((9216, 200), False), ((320, 77), False), ((2560, 1030), True)
    few = [(shape, swiglu, *rest) for shape, swiglu in shapes for rest in itertools.product((1, 7), cuts(swiglu=swiglu), (0, 128))]
    many = [(shape, False, *rest, 128) for shape, swiglu in shapes if not swiglu for rest in itertools.product((17, 50), cuts_of_many())]
    for seed, (shape, swiglu, rows, cut, block) in enumerate(() if args.quick else few + many):
        if block or swiglu:
            p = product(lib, rows, shape, swiglu=swiglu, block=block, seed=seed, cut=cut)
            if p.taken():
                p.check(f"cut {cut} e4m3 by {block}")


def check_chains(lib, args):
    for dtype, rows, hidden in () if args.quick else itertools.product(DTYPES, (1, 24, 64), (1024, 4096)):
        products = [product(lib, rows, (hidden, hidden), dtype, below=64 * (seed % 2), seed=seed) for seed in range(6)]
        check_chain("e4m3", products, rows, hidden, dtype)


def check_status(lib, args):
    case = product(lib, 4, (128, 32), block=16)
    w = case.weight.fields["w"].data_ptr()
    expect("e4m3", case.f, case.params, {
        "BAD_ALGO": one_by_one(inputs=[96], w=[w + 8], w_stride=[136], scales__rows=[0, 3, -1]),
        "BAD_STRIDE": one_by_one(scales__stride=[-1]), "OK": [dict(rows=0)]}, *case.more)
    case = product(lib, 4, (128, 32), block=16, below=8)
    expect("rows below", case.f, case.params, {
        "BAD_LENGTH": one_by_one(outputs_below=[-1, 1 << 30]), "NULL_POINTER": one_by_one(below=[None]),
        "BAD_ALGO": one_by_one(below=[case.weight.fields["below"].data_ptr() + 8], below_stride=[132], scales__ptr=[None]),
        "BAD_STRIDE": one_by_one(below_stride=[-8]), "OK": [dict(rows=0), dict(outputs_below=0)]}, *case.more)
    expect("rows below with swiglu", case.f, case.params, {"BAD_ALGO": [{}]}, C.byref(LinearOptions(1)))
    for rows, status, cut in ((8, "OK", ()), (1, "BAD_ALGO", (9,)), (1, "BAD_ALGO", (4, 1)), (1, "BAD_ALGO", (4, 2, 2)), (9, "BAD_LENGTH", ())):
        case = product(lib, rows, (128, 32), block=0, swiglu=True)
        expect(f"swiglu of {rows} rows, cut {cut}", case.f, case.params, {status: [{}]}, C.byref(LinearOptions(1, *cut)))


def times(lib, args):
    block = 0 if args.dense else 128
    make = lambda inputs, outputs, swiglu, rows, seed, cut: product(
        lib, rows, (inputs, outputs), swiglu=bool(swiglu), block=block, seed=seed, cut=cut or (0, 0, 0, 0))
    takes = lambda rows, swiglu: rows <= (LINEAR_SWIGLU_ROWS if swiglu else 2 * LINEAR_ROWS if block else LINEAR_ROWS)
    ways = lambda rows, inputs, swiglu: cuts_of_many() if block and rows > 16 else cuts(rows, inputs // (2 if block else 1), swiglu)
    times_of("bf16" if args.dense else "e4m3, torch's in bf16", args, make, 1 if block else 2, takes, args.sweep, ways)


GROUPS = {"products": check_cases, "sizes": check_sizes, "dequantize": check_dequantize, "cuts": check_cuts, "chain": check_chains,
          "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, options=[*options([1, 2, 4, 8, 16, 32]), ("--dense", dict(action="store_true", help="times of bf16"))])
