#!/usr/bin/env python3
"""gdn_scaled, products of few rows with weights in e4m3 and with SwiGLU, and gdn_dequantize, through the C ABI against float64.

    python3 models/cuda/tests/check_scaled.py --only-time --cases rows=1 [--sweep]    # all ways to cut the product

An error is ||y - ref|| / ||ref||; the numbers of e4m3 are exact. Everything around inputs and outputs holds NaN.
"""
import ctypes as C
import itertools
import math

import common    # noqa: F401 - the path of cuda/tests
import harness
import torch
from abi import (CODES, OK, SCALED_FEW_ROWS, SCALED_ROWS, SWIGLU_ROWS, DequantizeParams, LinearOptions, ScaledParams, fill)
from cases import every, drawn
from check_linear import cuts
from e4m3 import E4m3
from harness import TYPES, WAYS, Frame, Launch, Output, call, expect, group, launch, one_by_one, report, rounding, verify
from linear_case import SHAPES, SWEEP, SWIGLU_SHAPES, Dense, check_chain, product, small, taken
from reference import linear, relative

CLUSTER_INPUTS = 9216    # of more than 32 rows, which a cluster's shared memory holds
ROWS = [*range(1, 18), 31, 48, 64, 65]
PLAIN, GAPS = [(0, 0, 0)], [(0, 0, 0), (72, 16, 37)]
DTYPES = ["bf16", "f16"]
CASES = drawn(
    every(dtype=DTYPES, rows=ROWS, gaps=PLAIN, shape=[
        (2048, 12352), (2560, 1100), (64, 33), (128, 1), (192, 100), (320, 17), (9216, 100), (9728, 64), (17408, 48), (2560, 9728), (5120, 2563),
        (704, 5000)]) +
    every(dtype=DTYPES, rows=ROWS, gaps=[(8, 64, 1), (72, 16, 37)], shape=[(2048, 100), (4096, 33), (704, 500)]) +
    every(dtype=DTYPES, rows=[1, 2, 5, 8], gaps=GAPS, swiglu=True, shape=[(2560, 9216), (1024, 3584), (5120, 272), (64, 1), (320, 33), (704, 2131)]),
    block=(128, 32, 1, 16)) + drawn(
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
        self.fields, self.nbytes = dict(w=w, w_stride=w.stride(0), scales=scales, outputs_below=below), outputs * inputs + below * inputs
        if below:
            dense = Dense(below, inputs, dtype, gap, seed + 2)    # x is drawn from seed + 1
            self.numbers = torch.cat([self.numbers, dense.numbers.double()])
            self.fields.update(below=dense.numbers, below_stride=dense.numbers.stride(0))


def stored(lib, rows, shape, dtype="bf16", gaps=(0, 0, 0), block=128, swiglu=False, below=0, size=1.0, seed=0, cut=(0, 0, 0, 0), x=None):
    """A launch with a weight in e4m3, or with block 0 in `dtype`. `cut`: how the product is divided; zeros leave it to the library."""
    (inputs, outputs), count = shape, shape[1] * (2 if swiglu else 1)
    weight = Scaled(count, inputs, dtype, block, gaps[1], seed, size, below) if block else Dense(count, inputs, dtype, gaps[1], seed)
    weight.fields["swiglu"] = int(swiglu)
    return product(ScaledParams, lib.gdn_scaled, weight, rows, dtype, gaps[::2], seed, swiglu, (C.byref(LinearOptions(*cut)),), x, outputs - below)


def check_cases(lib, args):
    table = [{"seed": seed, **case} for seed, case in enumerate(CASES + SWIGLU)]
    few = [case for case in table if case["rows"] <= (2 * SCALED_FEW_ROWS if case["block"] else SWIGLU_ROWS)]
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    for case in small(table) if args.quick else table:
        refused = "BAD_LENGTH" if case["rows"] > SCALED_ROWS else "BAD_ALGO" if not on_hopper or case["shape"][0] > CLUSTER_INPUTS else None
        if case not in few and refused:
            x = stored(lib, **case)
            expect(f"{refused} of {case}", x.f, lambda: x.params, {refused: [{}]}, *x.more)
        else:
            group(stored, [case], [case], WAYS)(lib, args)


def check_sizes(lib, args):
    """Inputs of all sizes: one row in bf16 is divided by a power of two, block by block, which times the scale may have no place in f32."""
    seeds = itertools.count()
    for rows, inputs, (power, size) in itertools.product((1, 5, 8, 9), (64, 320, 4096),
                                                         ((0, 1.0), (100, 1.0), (-110, 1.0), (None, 1.0), (-112, 2.0 ** -13))):
        seed = next(seeds)
        x = harness.normal(seed)(rows, inputs).bfloat16().double()
        x = torch.ldexp(x, torch.randint(-40, 40, x.shape) if power is None else torch.full(x.shape, power))
        verify(lib, f"e4m3, {rows} x {inputs} inputs times 2^{power}, weights of size {size:.0e}",
               stored(lib, rows, (inputs, 100), size=size, seed=seed, x=x), WAYS)
    for rows, bad in itertools.product((1, 2, 9, 17), (math.nan, math.inf)):
        p = stored(lib, rows, (320, 100), seed=next(seeds))
        p.x[0, 200] = bad
        want = linear(p.x, p.weight.numbers)
        status, found = launch(lambda: call(p.f, p.params, *p.more)), p.y.double()
        shows = torch.equal(found[0].isnan(), want[0].isnan()) and bool((found[0] == want[0])[~want[0].isnan()].all())
        alone = rows == 1 or relative(found[1:], want[1:]) <= rounding("bf16", found[1:].numel()) + 2e-5
        report(f"e4m3, {bad} in the first of {rows} rows", status == OK and shows and alone, f"status {status}, shown {shows}, alone {alone}")


def dequantize(lib, shape, block, dtype="bf16", gap=0, seed=0):
    """Bit for bit: each number is rounded to f32, and then once."""
    weight, y = E4m3(*shape, block, 1.0, seed, gap), Frame(*shape, dtype, gap)
    p = fill(DequantizeParams, w=weight.bytes, scales=weight.struct(), y=y.view, w_stride=weight.bytes.stride(0),
             y_stride=y.view.stride(0), outputs=shape[0], inputs=shape[1], dtype=CODES[dtype])
    return Launch(lib.gdn_dequantize, p, lambda: [Output("y", y.buffer, y.index, weight.numbers().to(TYPES[dtype]))], replays=2,
                  nbytes=3 * shape[0] * shape[1], keep=(weight, y))


DEQUANTIZED = every(shape=[(1, 16), (33, 192), (300, 2560), (129, 4112)], block=[128, 4, 1], dtype=DTYPES, gap=[0, 16])


def cuts_of_many():
    """For more than 16 rows beside weights in e4m3: warpgroups along the inputs and the outputs, cluster."""
    return [(along, 2 // along, cluster, 0) for along in (1, 2) for cluster in (2, 4, 8)]


def check_cuts(lib, args):
    """Every way that the sweep measures."""
    shapes = [(2560, 4104), (9216, 200), (320, 77)]
    table = (every(shape=shapes, rows=[1, 7], cut=cuts()) + every(shape=shapes, rows=[17, 50], cut=cuts_of_many()) +
             every(shape=(2560, 1030), swiglu=True, rows=[1, 7], cut=cuts(True), block=[0, 128]))
    group(stored, lambda: (case for case in table if taken(stored(lib, **case))), ways=WAYS)(lib, args)


def check_chains(lib, args):
    for case in () if args.quick else every(dtype=DTYPES, rows=[1, 24, 64], shape=[(1024, 1024), (4096, 4096)]):
        check_chain(f"e4m3 {case}", [stored(lib, below=64 * (seed % 2), seed=seed, **case) for seed in range(6)])


def check_status(lib, args):
    case = stored(lib, 4, (128, 32), block=16)
    params = lambda: case.params_of(case.x, case.y)
    expect("e4m3", case.f, params, {
        "BAD_ALGO": one_by_one(inputs=[96], w=[case.weight.fields["w"].data_ptr() + 8], w_stride=[136], scales__rows=[0, 3, -1]),
        "BAD_STRIDE": one_by_one(scales__stride=[-1]), "OK": [dict(rows=0)]}, *case.more)
    case = stored(lib, 4, (128, 32), block=16, below=8)
    expect("rows below", case.f, params, {
        "BAD_LENGTH": one_by_one(outputs_below=[-1, 1 << 30]), "NULL_POINTER": one_by_one(below=[None]),
        "BAD_ALGO": one_by_one(below=[case.weight.fields["below"].data_ptr() + 8], below_stride=[132], scales__ptr=[None], swiglu=[1]),
        "BAD_STRIDE": one_by_one(below_stride=[-8]), "OK": [dict(rows=0), dict(outputs_below=0)]}, *case.more)
    for rows, status, cut in ((8, "OK", ()), (1, "BAD_ALGO", (9,)), (1, "BAD_ALGO", (4, 1)), (1, "BAD_ALGO", (4, 2, 2)), (9, "BAD_LENGTH", ())):
        case = stored(lib, rows, (128, 32), block=0, swiglu=True)
        expect(f"swiglu of {rows} rows, cut {cut}", case.f, params, {status: [{}]}, C.byref(LinearOptions(*cut)))
    expect("no scales, no swiglu", case.f, lambda: case.params_of(case.x[:8], case.y[:8]), {"BAD_ALGO": [dict(swiglu=0)]}, None)
    x = dequantize(lib, (129, 4112), 1, "f16", 16)
    w = x.keep[0].bytes.data_ptr()
    expect("dequantize", x.f, lambda: dequantize(lib, (129, 4112), 1, "f16", 16).params, {
        "BAD_DTYPE": one_by_one(dtype=[0, 7]), "BAD_LENGTH": one_by_one(outputs=[-1], inputs=[-16]),
        "NULL_POINTER": one_by_one(w=[None], y=[None], scales__ptr=[None]),
        "BAD_ALGO": one_by_one(inputs=[40], w=[w + 8], y_stride=[68], w_stride=[72]),
        "BAD_STRIDE": one_by_one(w_stride=[-16], y_stride=[-8]), "OK": [dict(outputs=0, w=None)]})


def times(args):
    table = lambda shapes, rows, more, **kinds: every(rows=rows, shape=shapes, cut=[(0, 0, 0, 0), *(more if args.sweep else [])], **kinds)
    return [("e4m3", stored, table(SHAPES, [1, 2, 4, 8, 16], cuts())), ("e4m3, many rows", stored, table(SHAPES, [32, 64], cuts_of_many())),
            ("e4m3, the gates' 64 rows below", stored, every(rows=[1, 8, 32, 64], shape=(2048, 12352), below=64)),
            ("SwiGLU", stored, table(SWIGLU_SHAPES, [1, 2, 4, 8], cuts(True), swiglu=True, block=[0, 128]))]


GROUPS = {"products": check_cases, "sizes": check_sizes, "dequantize": group(dequantize, DEQUANTIZED, DEQUANTIZED, ((0, False), (0, True))),
          "cuts": check_cuts, "chain": check_chains, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, models=True, options=SWEEP)
