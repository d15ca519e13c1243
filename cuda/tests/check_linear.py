#!/usr/bin/env python3
"""Checks gdn_linear, through the C ABI, against the product in float64.

    python3 cuda/tests/check_linear.py --only-time --shapes 4b,27b --rows 1,8
    python3 cuda/tests/check_linear.py --sweep --shapes 4b    # how long every way to cut the product takes
    python3 cuda/tests/check_linear.py --only-time --e4m3     # either with weights in e4m3

An error is ||y - ref|| / ||ref||. The output's rounding alone makes it at most ulp / sqrt(12), with ulp at most 2^-7 of
the value in bf16 and 2^-10 in f16; of few values it may be any value's own at worst, sqrt(3) times that. The f32 sums
add at most 2e-5; weights in e4m3 are exact. Outputs hold NaN before a launch, as does everything around the inputs.
"""
import ctypes as C
import itertools
import math

import harness
import torch
from abi import (BAD_ALGO, CODES, LINEAR_E4M3_ROWS, LINEAR_ROWS, LINEAR_SWIGLU_ROWS, NULL_POINTER, OK, DequantizeParams, LinearOptions,
                 LinearParams, Scales, fill, stream)
from e4m3 import E4m3
from harness import (TYPES, WAYS, bf16, call, chain_repeats, expect, failures, framed, launch, normal, one_by_one,
                     only_inside, refused, report, rounding, same)
from reference import linear, relative
from timing import graph_us, heading, span_us


def bound(dtype, count):
    return rounding(dtype, count) + 2e-5


def params(x, w, y, dtype, overlap=0, scales=None, below=None):
    rows_below = 0 if below is None else below.shape[0]
    return fill(LinearParams, x=x, w=w, below=below, y=y, scales=scales or Scales(), x_stride=x.stride(0), w_stride=w.stride(0),
                below_stride=below.stride(0) if rows_below else 0, y_stride=y.stride(0), rows=x.shape[0], inputs=x.shape[1],
                outputs=y.shape[1] - rows_below, outputs_below=rows_below, dtype=CODES[dtype], overlap=overlap)


class Case:
    """With swiglu the weight has the gate's rows, then up's. `cut` is how the product is cut: warps, groups, cluster,
    blocks; without it the library chooses. `e4m3`: rows of a block of the weight's scales;
    its numbers are of size `size` / sqrt(inputs). The last `below` outputs are of rows that are not in e4m3."""

    def __init__(self, rows, inputs, outputs, dtype, gaps=(0, 0, 0), seed=0, swiglu=False, cut=(0, 0, 0, 0), e4m3=0, size=1.0, below=0):
        randn = normal(seed)
        self.dtype, self.options = dtype, LinearOptions(int(swiglu), *cut)
        weights = 2 * outputs if swiglu else outputs
        self.x_buf, self.x = framed(rows, inputs, gaps[0], dtype)
        self.y_buf, self.y = framed(rows, outputs, gaps[2], dtype)
        self.x.copy_(randn(rows, inputs))
        self.scales = self.below = None
        if e4m3:
            weights -= below
            self.e4m3 = E4m3(weights, inputs, e4m3, size * inputs ** -0.5, seed, -(-gaps[1] // 16) * 16)
            self.w, self.scales = self.e4m3.bytes, self.e4m3.struct()
            self.ref = linear(self.x, self.e4m3.exact(), swiglu)
            if below:
                self.below_buf, self.below = framed(below, inputs, gaps[1], dtype)
                self.below.copy_(randn(below, inputs) * inputs ** -0.5)
                self.ref = torch.cat([self.ref, linear(self.x, self.below)], 1)
        else:
            self.w_buf, self.w = framed(weights, inputs, gaps[1], dtype)
            self.w.copy_(randn(weights, inputs) * inputs ** -0.5)
            self.ref = linear(self.x, self.w, swiglu)

    def params(self, overlap=0):
        return params(self.x, self.w, self.y, self.dtype, overlap, self.scales, self.below)

    def launch(self, lib, p):
        return call(lib.gdn_linear_with, p, C.byref(self.options))

    def run(self, lib, overlap=0, graph=False):
        self.y_buf.fill_(math.nan)
        p = self.params(overlap)
        return launch(lambda: self.launch(lib, p), graph, replays=2), self.y_buf.clone()


def check_case(lib, name, case):
    name = f"{name} {case.dtype} rows {case.x.shape[0]} inputs {case.x.shape[1]} outputs {case.y.shape[1]}"
    status, first = case.run(lib)
    if refused(lib, name, status):
        return
    error, limit = relative(case.y, case.ref), bound(case.dtype, case.ref.numel())
    inside = only_inside(case.y_buf, case.y)
    equal = all(same(case.run(lib, overlap, graph)[1], first) for overlap, graph in WAYS)
    report(name, error <= limit and inside and equal,
           f"{error:.2e} of {limit:.2e}, the same in all ways {equal}, inside {inside}", quiet=True)


# For compute-sanitizer: each kernel, and matrices of a few tiles.
QUICK_ROWS, QUICK_NUMBERS = (1, 8, 9, 16, 32, 48, 65), 300_000


def every_case(cases, quick):
    for every_rows, shapes, every_gaps, swiglu in cases:
        for dtype, rows, (inputs, outputs), gaps in itertools.product(("bf16", "f16"), every_rows, shapes, every_gaps):
            if not quick or (rows in QUICK_ROWS and inputs * outputs <= QUICK_NUMBERS):
                yield dtype, rows, inputs, outputs, gaps, swiglu


# [(rows, [(inputs, outputs), ..], gaps behind the rows of x, w and y, swiglu)]
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32)
CASES = [
    (ROWS, ((2048, 12352), (4096, 2048), (2048, 2048), (2560, 1100), (5120, 100), (64, 33), (128, 1), (320, 17), (6144, 2560),
            (1024, 4097), (9728, 64), (17408, 48), (2560, 4097), (9216, 2560), (3584, 1024), (5120, 2563), (17408, 2130)),
     [(0, 0, 0)], False),
    (ROWS, ((2048, 100), (4096, 33), (704, 5000)), [(8, 64, 1), (72, 8, 37)], False),
    ((1, 2, 5, 8), ((2560, 9216), (2048, 6144), (1024, 3584), (5120, 272), (64, 1), (320, 33), (704, 2131), (17408, 48)),
     [(0, 0, 0), (72, 8, 37)], True),
]


def check_cases(lib, quick):
    seeds = itertools.count()
    for dtype, rows, inputs, outputs, gaps, swiglu in every_case(CASES, quick):
        check_case(lib, f"{'swiglu' if swiglu else 'linear'} gaps {gaps}", Case(rows, inputs, outputs, dtype, gaps, next(seeds), swiglu))
    print(f"{next(seeds)} shapes, {len(failures)} failed", flush=True)


# [(rows, [(inputs, outputs), ..], gaps, swiglu)]
E4M3_ROWS = (*range(1, 18), 31, 48, 64, 65)
E4M3_INPUTS = 9216    # of more than 32 rows, which a cluster's shared memory holds
E4M3_CASES = [
    (E4M3_ROWS, ((2048, 12352), (2560, 1100), (64, 33), (128, 1), (192, 100), (320, 17), (9216, 100), (9728, 64), (17408, 48),
                 (2560, 9728), (5120, 2563), (704, 5000)), [(0, 0, 0)], False),
    (E4M3_ROWS, ((2048, 100), (4096, 33), (704, 500)), [(8, 64, 1), (72, 16, 37)], False),
    ((1, 2, 5, 8), ((2560, 9216), (1024, 3584), (5120, 272), (64, 1), (320, 33), (704, 2131)), [(0, 0, 0), (72, 16, 37)], True),
]


def check_e4m3(lib, quick):
    seeds = itertools.count()
    blocks = itertools.cycle((128, 32, 1, 16))
    for dtype, rows, inputs, outputs, gaps, swiglu in every_case(E4M3_CASES, quick):
        case = Case(rows, inputs, outputs, dtype, gaps, next(seeds), swiglu, e4m3=next(blocks))
        if rows > 2 * LINEAR_ROWS:
            expect("rows of e4m3", lib.gdn_linear_with, case.params, {"BAD_LENGTH": [{}]}, C.byref(case.options))
        elif rows > 2 * LINEAR_E4M3_ROWS and (inputs > E4M3_INPUTS or torch.cuda.get_device_capability() != (9, 0)):
            expect("rows of e4m3 that do not fit", lib.gdn_linear_with, case.params, {"BAD_ALGO": [{}]}, C.byref(case.options))
        else:
            check_case(lib, f"e4m3 by {case.e4m3.block_rows}{' swiglu' if swiglu else ''} gaps {gaps}", case)
    # Rows below that are not in e4m3: in the launch of the others, or in one of their own.
    for dtype, rows, (inputs, outputs, below), gaps in itertools.product(
            ("bf16", "f16"), (1, 2, 8, 9, 16, 17, 48), ((2048, 12352, 64), (2560, 8000, 96), (5120, 2563, 33), (64, 33, 1), (192, 100, 90)),
            ((0, 0, 0), (72, 16, 37))):
        if not quick or (rows in QUICK_ROWS and inputs * outputs <= QUICK_NUMBERS):
            if rows > 2 * LINEAR_E4M3_ROWS and torch.cuda.get_device_capability() != (9, 0):
                continue
            case = Case(rows, inputs, outputs, dtype, gaps, next(seeds), e4m3=next(blocks), below=below)
            check_case(lib, f"e4m3 by {case.e4m3.block_rows}, {below} rows below, gaps {gaps}", case)
    # Inputs of all sizes: one row in bf16 is divided by a power of two, block by block, which times the scale may have no place in f32.
    for rows, inputs, (power, size) in itertools.product((1, 5, 8, 9), (64, 320, 4096),
                                                         ((0, 1.0), (100, 1.0), (-110, 1.0), (None, 1.0), (-112, 2.0 ** -13))):
        case = Case(rows, inputs, 100, "bf16", seed=next(seeds), e4m3=128, size=size)
        of_each = torch.randint(-40, 40, case.x.shape, device="cuda") if power is None else torch.full_like(case.x, power)
        case.x.copy_(torch.ldexp(case.x.double(), of_each))
        case.ref = linear(case.x, case.e4m3.exact())
        check_case(lib, f"e4m3, inputs times 2^{power}, weights of size {size:.0e}", case)
    for rows, bad in itertools.product((1, 2, 9, 17), (math.nan, math.inf)):
        case = Case(rows, 320, 100, "bf16", seed=next(seeds), e4m3=128)
        case.x[0, 200] = bad
        want = linear(case.x, case.e4m3.exact())
        status, _ = case.run(lib)
        found = case.y.double()
        shows = torch.equal(found[0].isnan(), want[0].isnan()) and bool((found[0] == want[0])[~want[0].isnan()].all())
        alone = rows == 1 or relative(found[1:], want[1:]) <= bound("bf16", found[1:].numel())
        report(f"e4m3, {bad} in the first of {rows} rows", status == OK and shows and alone, f"status {status}, shown {shows}, alone {alone}", quiet=True)
    case = Case(4, 128, 32, "bf16", e4m3=16)
    expect("e4m3", lib.gdn_linear, case.params, {
        "BAD_ALGO": one_by_one(inputs=[96], w=[case.w.data_ptr() + 8], w_stride=[136], scales__rows=[0, 3, -1]),
        "BAD_STRIDE": one_by_one(scales__stride=[-1]), "OK": [dict(rows=0)]})
    case = Case(4, 128, 32, "bf16", e4m3=16, below=8)
    expect("rows below", lib.gdn_linear, case.params, {
        "BAD_LENGTH": one_by_one(outputs_below=[-1, 1 << 30]), "NULL_POINTER": one_by_one(below=[None]),
        "BAD_ALGO": one_by_one(below=[case.below.data_ptr() + 8], below_stride=[132], scales__ptr=[None]),
        "BAD_STRIDE": one_by_one(below_stride=[-8]), "OK": [dict(rows=0), dict(outputs_below=0)]})
    swiglu = LinearOptions(1)
    expect("rows below with swiglu", lib.gdn_linear_with, case.params, {"BAD_ALGO": [{}]}, C.byref(swiglu))
    print(f"{next(seeds)} shapes in e4m3, {len(failures)} failed", flush=True)


def check_dequantize(lib):
    """Bit for bit: each number is rounded to f32, and then once."""
    for dtype, (outputs, inputs), block_rows, gap in itertools.product(
            ("bf16", "f16"), ((1, 16), (33, 192), (300, 2560), (129, 4112)), (128, 4, 1), (0, 16)):
        weight = E4m3(outputs, inputs, block_rows, 1.0, inputs, gap)
        buf, y = framed(outputs, inputs, gap, dtype)
        p = fill(DequantizeParams, w=weight.bytes, scales=weight.struct(), y=y, w_stride=weight.bytes.stride(0),
                 y_stride=y.stride(0), outputs=outputs, inputs=inputs, dtype=CODES[dtype])
        for graph in (False, True):
            buf.fill_(math.nan)
            status = launch(lambda: call(lib.gdn_dequantize, p), graph)
            report(f"dequantize {dtype} {outputs}x{inputs} by {block_rows} gap {gap} graph {graph}",
                   status == OK and same(y, weight.numbers().to(TYPES[dtype])) and only_inside(buf, y), quiet=True)
    make = lambda: fill(DequantizeParams, w=weight.bytes, scales=weight.struct(), y=y, w_stride=weight.bytes.stride(0),
                        y_stride=y.stride(0), outputs=2, inputs=64, dtype=CODES["f16"])
    expect("dequantize", lib.gdn_dequantize, make, {
        "BAD_DTYPE": one_by_one(dtype=[0, 7]), "BAD_LENGTH": one_by_one(outputs=[-1], inputs=[-16]),
        "NULL_POINTER": one_by_one(w=[None], y=[None], scales__ptr=[None]),
        "BAD_ALGO": one_by_one(inputs=[40], w=[weight.bytes.data_ptr() + 8], y_stride=[68], w_stride=[72]),
        "BAD_STRIDE": one_by_one(w_stride=[-16], y_stride=[-8]), "OK": [dict(outputs=0, w=None)]})


def check_cuts(lib):
    """Every way that the sweep measures."""
    count = 0
    for inputs, outputs, swiglu in ((2560, 4104, False), (9216, 200, False), (320, 77, False), (2560, 1030, True)):
        for rows, cut, e4m3 in itertools.product((1, 7), cuts(swiglu), (0, 128)):
            case = Case(rows, inputs, outputs, "bf16", seed=count, swiglu=swiglu, cut=cut, e4m3=e4m3)
            if case.launch(lib, case.params()) != BAD_ALGO:
                check_case(lib, f"cut {cut} swiglu {swiglu} e4m3 {e4m3}", case)
            count += 1
        for rows, cut in itertools.product((17, 50), () if swiglu else cuts_of_many()):
            case = Case(rows, inputs, outputs, "bf16", seed=count, cut=cut, e4m3=128)
            if case.launch(lib, case.params()) != BAD_ALGO:
                check_case(lib, f"cut {cut} of many rows", case)
            count += 1
    print(f"{count} cuts", flush=True)


def check_chain(lib):
    for dtype, rows, hidden in itertools.product(("bf16", "f16"), (1, 8, 16, 32), (1024, 4096)):
        weights = [(torch.randn(hidden, hidden, device="cuda") * hidden ** -0.5).to(TYPES[dtype]) for _ in range(6)]
        start = torch.randn(rows, hidden, device="cuda").to(TYPES[dtype])
        chain_repeats(f"chain {dtype} rows {rows} hidden {hidden}",
                      lambda i, x, y, overlap: call(lib.gdn_linear, params(x, weights[i % 6], y, dtype, overlap)), start)
    for dtype, rows, hidden in itertools.product(("bf16", "f16"), (1, 24, 64), (1024, 4096)):
        scaled = [E4m3(hidden - 64 * (seed % 2), hidden, 128, hidden ** -0.5, seed) for seed in range(6)]
        below = [(torch.randn(64, hidden, device="cuda") * hidden ** -0.5).to(TYPES[dtype]) if i % 2 else None for i in range(6)]
        start = torch.randn(rows, hidden, device="cuda").to(TYPES[dtype])
        chain_repeats(f"chain e4m3 {dtype} rows {rows} hidden {hidden}", lambda i, x, y, overlap: call(
            lib.gdn_linear, params(x, scaled[i % 6].bytes, y, dtype, overlap, scaled[i % 6].struct(), below[i % 6])), start)


# {status: [(swiglu, warps, groups, cluster, blocks; those left out are 0), ..]} of one row.
OPTIONS = {"OK": [(1,)], "BAD_ALGO": [(0, 17), (0, 8, 3), (0, 8, 4), (0, 8, 1, 3), (0, 8, 1, 1, -1), (1, 9), (1, 4, 1),
                                      (1, 4, 2, 2)]}


def check_arguments(lib):
    case = Case(4, 128, 32, "bf16")
    x, w = case.x.data_ptr(), case.w.data_ptr()
    expect("linear", lib.gdn_linear, case.params, {
        "BAD_DTYPE": one_by_one(dtype=[0, 7]),
        "BAD_LENGTH": one_by_one(rows=[33, -1], inputs=[0], outputs=[-1]),
        "NULL_POINTER": one_by_one(x=[None], w=[None], y=[None]),
        "BAD_ALGO": one_by_one(inputs=[96], x=[x + 2], w=[w + 8], w_stride=[132], x_stride=[132]),
        "BAD_STRIDE": one_by_one(x_stride=[-8], y_stride=[-1]),
        "OK": [dict(rows=0, x=None), dict(outputs=0, w=None)]})
    report("arguments null", lib.gdn_linear(None, stream()) == NULL_POINTER, quiet=True)
    for want, every in OPTIONS.items():
        for options in every:
            case = Case(8 if want == "OK" else 1, 128, 32, "bf16", swiglu=bool(options[0]))
            expect(f"options {options}", lib.gdn_linear_with, case.params, {want: [{}]}, C.byref(LinearOptions(*options)))
    case = Case(9, 128, 32, "bf16", swiglu=True)
    expect("swiglu of 9 rows", lib.gdn_linear_with, case.params, {"BAD_LENGTH": [{}]}, C.byref(case.options))


# inputs, outputs, swiglu; of the models' layers: projections of both mixers in and out, feed-forward, head.
SHAPES = {
    "first": ((2048, 12352, 0), (4096, 2048, 0), (2048, 2048, 0), (2560, 2560, 0), (2048, 6144, 0), (6144, 2048, 0),
              (5120, 5120, 0)),
    "4b": ((2560, 9216, 1), (2560, 18432, 0), (9216, 2560, 0), (2560, 12352, 0), (4096, 2560, 0), (2560, 10240, 0),
           (2560, 248320, 0)),
    "2b": ((2048, 6144, 1), (6144, 2048, 0), (2048, 248320, 0)),
    "0.8b": ((1024, 3584, 1), (1024, 7168, 0), (3584, 1024, 0), (1024, 8224, 0), (1024, 5120, 0), (2048, 1024, 0),
             (1024, 248320, 0)),
    "35b": ((2048, 12352, 0), (4096, 2048, 0), (2048, 9216, 0), (2048, 248320, 0)),
    "27b": ((5120, 17408, 1), (5120, 34816, 0), (17408, 5120, 0), (5120, 16480, 0), (6144, 5120, 0), (5120, 14336, 0)),
}


class Timing:
    """One shape and number of rows, its weights in turn so that L2 is cold."""

    def __init__(self, lib, inputs, outputs, swiglu, e4m3):
        self.lib, self.inputs, self.outputs, self.swiglu = lib, inputs, outputs, swiglu
        weights = 2 * outputs if swiglu else outputs
        self.nbytes = inputs * weights * (1 if e4m3 else 2)
        sets = int(2.4e8 / self.nbytes) + 2
        made = lambda: torch.empty(weights, inputs, device="cuda", dtype=torch.bfloat16).normal_(0, inputs ** -0.5)
        self.weights, self.scales = [made() for _ in range(sets)], [None] * sets
        self.theirs_of = self.weights
        if e4m3:
            every = [E4m3(weights, inputs, 128, inputs ** -0.5, seed) for seed in range(sets)]
            self.weights, self.scales = [w.bytes for w in every], [w.struct() for w in every]
        self.repeat = max(1, min(64, int(4e9 / self.nbytes)) // sets)

    def rows(self, rows):
        self.x, self.y = bf16(rows, self.inputs), bf16(rows, self.outputs)

    def ours(self, overlap, cut=(0, 0, 0, 0)):
        options, f = LinearOptions(self.swiglu, *cut), self.lib.gdn_linear_with
        every = [params(self.x, w, self.y, "bf16", overlap, scales) for w, scales in zip(self.weights, self.scales)]
        return [lambda p=p: call(f, p, C.byref(options)) for p in every] * self.repeat

    def theirs(self):
        def call(w):
            y = torch.nn.functional.linear(self.x, w)
            return torch.nn.functional.silu(y[:, :self.outputs]) * y[:, self.outputs:] if self.swiglu else y

        return [lambda w=w: call(w) for w in self.theirs_of] * self.repeat


def each_case(lib, names, every_rows, rate, e4m3):
    """(a Timing, its rows) of all shapes and rows that there is a kernel for."""
    for name in names:
        for inputs, outputs, swiglu in SHAPES[name]:
            case = Timing(lib, inputs, outputs, swiglu, e4m3)
            print(f"{name}: {inputs} -> {outputs}{' swiglu' if swiglu else ''}{' e4m3' if e4m3 else ''}: {case.nbytes / 1e6:.1f} MB, floor "
                  f"{case.nbytes / rate * 1e6:.2f}", flush=True)
            for rows in every_rows:
                if rows <= (LINEAR_SWIGLU_ROWS if swiglu else 2 * LINEAR_ROWS if e4m3 else rows):
                    case.rows(rows)
                    yield case, rows
            del case


def times(lib, names, every_rows, e4m3):
    rate = heading("bf16, cold L2; us: kernels (CUPTI) / graph / graph with overlap, beside torch: kernels / graph; and the share "
                   "of the copy rate that the kernels have")
    for case, rows in each_case(lib, names, every_rows, rate, e4m3):
        kernels, theirs = span_us(case.ours(0)), case.theirs()
        print(f"  rows {rows:2d}  {kernels:7.2f} / {graph_us(case.ours(0)):7.2f} / {graph_us(case.ours(1)):7.2f}  "
              f"{100 * case.nbytes / kernels / rate * 1e6:4.0f} %    torch {span_us(theirs):7.2f} / {graph_us(theirs):7.2f}",
              flush=True)


def cuts(swiglu):
    """Warps, groups, cluster, blocks: what fills a multiprocessor's registers, and every split over two blocks."""
    for warps in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16):
        for groups in (2,) if swiglu else (1, 2):
            for cluster in (1,) if swiglu else (1, 2, 4):
                if warps * groups <= 16:
                    yield warps, groups, cluster, 16 // (warps * groups)


def cuts_of_many():
    """The same of more than 16 rows beside weights in e4m3: warpgroups along the inputs and the outputs, cluster."""
    return [(along, 2 // along, cluster, 0) for along in (1, 2) for cluster in (2, 4, 8)]


def sweep(lib, names, every_rows, e4m3, best=5):
    """The best cuts of each shape beside the one that the library chooses: graph / graph with overlap."""
    rate = heading("bf16, cold L2; us in a graph / with overlap, by (warps, groups, cluster, blocks)")
    for case, rows in each_case(lib, names, every_rows, rate, e4m3):
        chunks, found = -(-case.inputs // (128 if e4m3 else 64)), []
        many = e4m3 and rows > 16
        for cut in cuts_of_many() if many else cuts(case.swiglu):
            parts = cut[0] * cut[2]
            places = -(-(-(-chunks // parts)) // 4) * 4 * parts
            if (not many and chunks / places < 0.7) or case.ours(0, cut)[0]() != OK:
                continue
            found.append((graph_us(case.ours(1, cut), 5), graph_us(case.ours(0, cut), 5), cut))
        chosen = f"{graph_us(case.ours(0)):.2f} / {graph_us(case.ours(1)):.2f}"
        others = "  ".join(f"{cut} {plain:.2f} / {overlapped:.2f}" for overlapped, plain, cut in sorted(found)[:best])
        print(f"  rows {rows:2d}  chosen {chosen}   best {others}", flush=True)


def check(lib, args):
    check_arguments(lib)
    check_cases(lib, args.quick)
    check_e4m3(lib, args.quick)
    check_dequantize(lib)
    if not args.quick:
        check_cuts(lib)
        check_chain(lib)


def main():
    words = lambda text: text.split(",")
    timed = lambda lib, args: (sweep if args.only_time == "sweep" else times)(lib, args.shapes, args.rows, args.e4m3)
    harness.program(__doc__, check, timed, options=[
        ("--sweep", dict(dest="only_time", action="store_const", const="sweep", help="instead of the checks and the times")),
        ("--e4m3", dict(action="store_true", help="times of weights in e4m3; torch's are of bf16")),
        ("--shapes", dict(type=words, default=list(SHAPES), help="of " + ", ".join(SHAPES))),
        ("--rows", dict(type=lambda text: [int(rows) for rows in words(text)], default=[1, 2, 4, 8, 16, 32]))])


if __name__ == "__main__":
    main()
