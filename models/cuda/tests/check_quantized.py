#!/usr/bin/env python3
"""Checks gdn_quantized, gdn_quantized_many, gdn_quantized_pack and gdn_quantized_rows, through the C ABI, against the product in float64
with the numbers that ggml's blocks stand for.

    python3 models/cuda/tests/check_quantized.py --only-time --cases "rows=(1|8) .*'q4_K', 12352"

An error is ||y - ref|| / ||ref||: the output's rounding, what x in fixed point adds (Case.ref), and 1e-5 of the sums in f32. Everything
around x and the outputs holds NaN.
"""
import ctypes as C
import itertools
import math

import common    # noqa: F401 - the path of cuda/tests
import harness
import torch
from abi import CODES, OK, QuantizedPackParams, QuantizedParams, QuantizedPart, QuantizedRowsParams, fill
from cases import every, rows, drawn, words
from ggml import BYTES, INPUTS, NAMES, SCALES, Blocks, packed_room
from harness import (TYPES, WAYS, Frame, Launch, Output, call, chain_repeats, expect, group, launch, normal, null_params, one_by_one, report,
                     rounding, u32, verify)
from linear_case import SHAPES, SWIGLU_SHAPES
from reference import linear

FEW = 8    # rows for which gdn_quantized reads the weights once
TYPES_OF_ALL = list(NAMES)


class Packed:
    """Blocks, packed by the library."""

    def __init__(self, lib, blocks, paired=0):
        self.blocks, self.type, self.outputs, self.paired, self.bytes = blocks, NAMES[blocks.name], blocks.outputs, paired, None
        size = C.c_int64(-1)
        assert lib.gdn_quantized_size(C.byref(self.pack_params()), C.byref(size)) == OK
        tiles = -(-blocks.outputs // 16) * 16
        assert size.value == tiles * blocks.inputs // INPUTS[blocks.name] * BYTES[blocks.name], "as many bytes as the file has"
        self.bytes = packed_room(size.value)
        verify(lib, f"pack {blocks.name} {blocks.outputs}x{blocks.inputs}",
               Launch(lib.gdn_quantized_pack, self.pack_params(), lambda: [Output("bytes", self.bytes, slice(size.value))]))

    def pack_params(self):
        b = self.blocks
        return fill(QuantizedPackParams, **{"from": b.bytes}, to=self.bytes, type=self.type,
                    outputs=b.outputs, inputs=b.inputs, paired=self.paired)

    def rows_params(self, y, dtype, ids=None):
        return fill(QuantizedRowsParams, w=self.bytes, ids=ids, y=y, y_stride=y.stride(0), type=self.type,
                    outputs=self.outputs, inputs=self.blocks.inputs, rows=y.shape[0], paired=self.paired, dtype=CODES[dtype])


def params(x, parts, y, dtype, overlap=0, swiglu=False, groups=(0, 0)):
    """`parts`: (bytes, type, outputs)."""
    array = (QuantizedPart * len(parts))(*[QuantizedPart(w, kind, outputs) for w, kind, outputs in parts])
    p = fill(QuantizedParams, x=x, parts=C.addressof(array), y=y, x_stride=x.stride(0), y_stride=y.stride(0),
             rows=x.shape[0], num_parts=len(parts), inputs=x.shape[1], swiglu=int(swiglu), groups=groups[0], per_group=groups[1],
             dtype=CODES[dtype], overlap=overlap)
    p.kept["array"] = array, parts
    return p


class Case:
    def __init__(self, lib, rows, inputs, parts, dtype="bf16", gaps=(0, 0), seed=0, swiglu=False, outliers=False, groups=(0, 0), many=False):
        self.lib, self.dtype, self.swiglu, self.groups, self.many = lib, dtype, swiglu, groups, many
        self.f = lib.gdn_quantized_many if many else lib.gdn_quantized
        self.parts = [Packed(lib, Blocks(name, outputs, inputs, inputs ** -0.5, 8 * seed + i)) for i, (name, outputs) in enumerate(parts)]
        x = normal(seed)(rows, inputs)
        if outliers:
            x[:, ::97] *= 100
        self.x = Frame(rows, inputs, dtype, gaps[0], values=x)
        self.y = Frame(rows, sum(part.outputs for part in self.parts) // (2 if swiglu else 1), dtype, gaps[1])

    def ref(self):
        """The products, and what the fixed point of x may make of them: steps of 1 / 32512 of the largest of 32, each off by
        1 / sqrt(12) of one as a rule, beside weights that are independent of them. Half as much again for many values, four
        times for few; SwiGLU has it in both products, of numbers of about size 1."""
        w = torch.cat([part.blocks.numbers() for part in self.parts])
        x = self.x.view.double()
        if self.groups[0]:
            x = x.reshape(x.shape[0], *self.groups, -1).transpose(1, 2).reshape(x.shape)
        ref = linear(x, w, self.swiglu)
        steps = x.reshape(x.shape[0], -1, 32).abs().amax(-1).square().sum().mul(32 / 12).sqrt() / 32512
        error = 3 * steps / x.norm() if self.swiglu else steps * w.norm() / math.sqrt(x.shape[1]) / ref.norm()
        return ref, float(error) * (1.5 if ref.numel() >= 1000 else 4)

    def ref_many(self):
        """The products with numbers that are rounded to the dtype first. 3e-5: sums in f32, and a number may fall to the other side of a tie."""
        w = torch.cat([part.blocks.numbers(torch.float32).to(TYPES[self.dtype]) for part in self.parts])
        return linear(self.x.view.double(), w.double(), self.swiglu), 3e-5

    def params(self, overlap=0):
        parts = [(part.bytes, part.type, part.outputs) for part in self.parts]
        return params(self.x.view, parts, self.y.view, self.dtype, overlap, self.swiglu, self.groups)

    def outputs(self):
        ref, of_x = self.ref_many() if self.many else self.ref()
        return [Output("y", self.y.buffer, self.y.index, ref, rounding(self.dtype, ref.numel()) + of_x + 1e-5)]

    def bad(self):
        """Which outputs are NaN, after a launch; None where it was refused."""
        p = self.params()
        return self.y.view.isnan() if launch(lambda: call(self.f, p)) == OK else None


def quantized(lib, **case):
    c = Case(lib, **case)
    return Launch(c.f, c.params(), c.outputs, replays=2, nbytes=sum(part.bytes.numel() for part in c.parts), keep=c)


GAPS = ((0, 0), (8, 3), (72, 37))
MIXED = [[("q4_K", 12288), ("q8_0", 64)], [("q8_0", 20), ("q6_K", 4000), ("q4_K", 5)], [("q4_K", 8192), ("q4_K", 512), ("q6_K", 512)],
         [("q6_K", 1), ("q8_0", 1), ("q4_K", 1), ("q8_0", 100)]]
LARGE = [(2560, 12352), (9216, 2560)]


def of_types(shapes, **more):
    """Cases of one part: (inputs, outputs) in every type."""
    cases = every(name=TYPES_OF_ALL, shape=shapes, **more)
    return [{**{key: value for key, value in case.items() if key not in ("name", "shape")}, "inputs": case["shape"][0],
             "parts": [(case["name"], case["shape"][1])]} for case in cases]


def products():
    few = drawn(of_types([(2560, 1100), (256, 33), (256, 1), (512, 4096), (1024, 17), (4096, 2563), (9216, 300), (17408, 48)], dtype=list(TYPES),
                         rows=[1, 2, 3, 4, 5, 7, 8, 9, 17]), gaps=GAPS)
    yield from ({**case, "outliers": case["rows"] % 2 == 0} for case in few)
    yield from of_types(LARGE, rows=[1, 3, 8])
    for case in of_types([(2560, 18432), (512, 32), (1024, 7168), (5120, 544), (256, 34816)], rows=[1, 2, 4, 6, 8, 11], gaps=(8, 5), swiglu=True):
        yield {**case, "dtype": "bf16" if case["rows"] % 2 else "f16"}
    yield from ({"parts": parts, "rows": n, "inputs": 2560, "gaps": (0, 9), "dtype": "f16" if n == 2 else "bf16"}
                for parts in MIXED for n in (1, 2, 5, 8))
    for groups in ((16, 2), (3, 8), (2, 48)):
        inputs = 128 * 2 * groups[0] * groups[1] // math.gcd(2, groups[0])
        yield from of_types([(inputs, 100)], dtype=["bf16", "f32"], rows=[1, 6], groups=groups)
    yield from every(inputs=[128, 384, 896], rows=3, parts=(("q8_0", 77),))


def many_rows():
    yield from drawn(of_types([(2560, 1100), (256, 33), (256, 1), (1024, 17), (9216, 300)], dtype=["bf16", "f16"],
                              rows=[1, 9, 17, 32, 40, 64, 100, 130]), gaps=GAPS)
    yield from of_types(LARGE, rows=[16, 31, 64, 128])
    for case in of_types([(2560, 2 * 1008)], rows=[16, 31, 64, 128], gaps=(8, 5), swiglu=True):
        yield {**case, "dtype": "f16" if case["rows"] == 31 else "bf16"}
    yield from every(rows=[16, 40, 128], inputs=2560, parts=(("q4_K", 8192), ("q6_K", 500), ("q8_0", 20), ("q4_K", 64)), gaps=(0, 9))
    yield from every(inputs=[128, 384], rows=20, parts=(("q8_0", 77),))


def quick():
    """Every kernel: products of all types in a launch, of each dtype and number of rows, clusters."""
    yield from every(dtype=list(TYPES), rows=[1, 2, 3, 5], inputs=512, parts=(("q8_0", 20), ("q6_K", 33), ("q4_K", 50)), gaps=(8, 3))
    for name, n in zip(NAMES, (1, 3, 8)):
        yield from [dict(rows=n, inputs=1024, parts=[(name, 64)], swiglu=True), dict(rows=n, inputs=9216, parts=[(name, 40)], gaps=(0, 5))]
    for case in every(rows("name dtype", ("q4_K", "bf16"), ("q6_K", "f16"), ("q8_0", "bf16"), ("q4_K", "f16")), n=[3, 20, 40, 100]):
        yield dict(rows=case["n"], inputs=1024, parts=[(case["name"], 64)], dtype=case["dtype"], swiglu=case["n"] == 40, many=True)


def check_rows(lib, args):
    """Bit for bit: each number is rounded to f32, and then once."""
    def check(name, packed, want, dtype, gap=0, ids=None):
        y = Frame(*want.shape, dtype, gap)
        verify(lib, f"rows {name} {dtype} {words(dict(shape=tuple(want.shape), gap=gap, ids=ids is not None, paired=packed.paired))}",
               Launch(lib.gdn_quantized_rows, packed.rows_params(y.view, dtype, ids), lambda: [Output("y", y.buffer, y.index, want)]))

    # Rows of a matrix without any are zeros, and nothing is read: no memory is there.
    for name, dtype in itertools.product(NAMES, TYPES):
        y, ids = Frame(3, 768, dtype, 16), u32([0, 5, 0xFFFFFFFF])
        empty = fill(QuantizedRowsParams, w=None, ids=ids, y=y.view, y_stride=y.view.stride(0), type=NAMES[name], outputs=0, inputs=768, rows=3,
                     paired=0, dtype=CODES[dtype])
        verify(lib, f"rows of an empty {name} {dtype}",
               Launch(lib.gdn_quantized_rows, empty, lambda: [Output("y", y.buffer, y.index, torch.zeros(3, 768))]))
    shapes = ((33, 256),) if args.quick else ((1, 256), (33, 768), (300, 2560))
    for name, dtype, (outputs, inputs), gap in itertools.product(NAMES, TYPES, shapes, (0, 16)):
        packed = Packed(lib, Blocks(name, outputs, inputs, 1.0, inputs))
        want = packed.blocks.numbers(torch.float32).to(TYPES[dtype])
        ids = [0, outputs - 1, outputs // 2, outputs, 0xFFFFFFFF, outputs // 3]
        check(name, packed, want, dtype, gap)
        check(name, packed, torch.cat([want, torch.zeros_like(want[:1])])[[min(i, outputs) for i in ids]], dtype, gap, u32(ids))
        if outputs > 1:
            check(name, packed, want[:outputs // 2], dtype, gap)
    # As before they were packed, and in the order packed.
    for name, (paired, matrices) in () if args.quick else itertools.product(NAMES, ((8, 5), (24, 2), (512, 3))):
        packed = Packed(lib, Blocks(name, 2 * paired * matrices, 512, 1.0, paired), paired)
        want = packed.blocks.numbers(torch.float32).bfloat16()
        alternating = want.view(matrices, 2, paired // 8, 8, -1).transpose(1, 2).reshape(want.shape)
        for packed.paired, expected in ((paired, want), (0, alternating)):
            check(name, packed, expected, "bf16")


def check_nan(lib, args):
    """A NaN in a scale shows in its output alone, one in x or an infinity in its row alone; zeros are zeros."""
    for many, name, place in ((many, name, place) for many in (False, True) for name in NAMES for place in SCALES[name]):
        case = Case(lib, 20 if many else 3, 1024, [(name, 70)], seed=place, many=many)
        case.parts[0].blocks.put(35, 1, place, math.nan)
        case.parts[0] = Packed(lib, case.parts[0].blocks)
        count = case.x.view.shape[0]
        if many:
            case.x.view[7, 1023] = math.nan
            count += 69
        bad = case.bad()
        report(f"NaN in {name} at {place}, many {many}", bad is not None and bool(bad[:, 35].all() and (not many or bad[7].all())) and
               int(bad.sum()) == count, str(bad))
    for name, dtype, value in itertools.product(NAMES, ("bf16", "f16"), (math.nan, math.inf, -math.inf)):
        case = Case(lib, 6, 1024, [(name, 70)], dtype)
        case.x.view[2, 1023], case.x.view[4] = value, 0
        bad = case.bad()
        report(f"{value} in x, {name} {dtype}", bad is not None and bool(bad[2].all()) and int(bad.sum()) == 70 and
               bool((case.y.view[4] == 0).all()), str(bad))


def check_chain(lib, args):
    table = [(name, n, hidden, False) for name, n, hidden in itertools.product(NAMES, (1, 5), (1024, 4096))] + [("q4_K", 20, 1024, True)]
    for name, n, hidden, many in () if args.quick else table:
        layers = [Case(lib, n, hidden, [(name, hidden)], seed=seed, many=many) for seed in range(6)]

        def link(i, x, y, overlap):
            part = layers[i % 6].parts[0]
            return call(layers[0].f, params(x, [(part.bytes, part.type, hidden)], y, "bf16", overlap))

        chain_repeats(f"chain {name} rows {n} hidden {hidden} many {many}", link, layers[0].x.view.contiguous())


def check_status(lib, args):
    case = Case(lib, 4, 512, [("q4_K", 64)])
    packed, x = case.parts[0], case.x.view.data_ptr()
    expect("products", lib.gdn_quantized, case.params, {
        "BAD_DTYPE": one_by_one(dtype=[-1, 7]), "BAD_LENGTH": one_by_one(rows=[-1], inputs=[0], num_parts=[-1, 5], groups=[-1]),
        "NULL_POINTER": one_by_one(x=[None], y=[None], parts=[None]),
        "BAD_ALGO": one_by_one(inputs=[384], x=[x + 2], x_stride=[516], groups=[4]) + [dict(groups=3, per_group=1), dict(groups=64, per_group=2)],
        "BAD_STRIDE": one_by_one(x_stride=[-8], y_stride=[-1]),
        "OK": [dict(rows=0, x=None), dict(num_parts=0, y=None)]})
    expect("many", lib.gdn_quantized_many, case.params, {
        "BAD_DTYPE": one_by_one(dtype=[CODES["f32"], 7]), "BAD_LENGTH": one_by_one(rows=[-1]), "NULL_POINTER": one_by_one(x=[None], parts=[None]),
        "BAD_ALGO": [dict(groups=2, per_group=2)] + one_by_one(x=[x + 2], x_stride=[516]), "OK": [dict(rows=0, x=None), dict(num_parts=0, y=None)]})
    w = packed.bytes
    for want, parts, swiglu in (("BAD_DTYPE", [(w, 3, 64)], 0), ("BAD_LENGTH", [(w, packed.type, -1)], 0),
                                ("BAD_ALGO", [(w[16:], packed.type, 64)], 0), ("BAD_ALGO", [(w, packed.type, 48)], 1),
                                ("BAD_ALGO", [(w, packed.type, 32)] * 2, 1), ("OK", [(w, packed.type, 0), (w, packed.type, 16)], 0)):
        expect(f"parts {want}", lib.gdn_quantized, lambda: params(case.x.view, parts, case.y.view, "bf16", 0, swiglu), {want: [{}]})
    expect("pack", lib.gdn_quantized_pack, packed.pack_params, {
        "BAD_DTYPE": one_by_one(type=[-1, 3]), "BAD_LENGTH": one_by_one(outputs=[-1], inputs=[0]),
        "NULL_POINTER": [dict(to=None), {"from": None}], "BAD_ALGO": one_by_one(inputs=[128], to=[w.data_ptr() + 16], paired=[4, 24]),
        "OK": [dict(outputs=0)]})
    y = torch.empty(4, 512, dtype=torch.bfloat16)
    expect("rows", lib.gdn_quantized_rows, lambda: packed.rows_params(y, "bf16"), {
        "BAD_DTYPE": one_by_one(dtype=[-1], type=[3]), "BAD_LENGTH": one_by_one(rows=[65, -1]), "BAD_STRIDE": one_by_one(y_stride=[-8]),
        "NULL_POINTER": one_by_one(w=[None], y=[None]), "BAD_ALGO": one_by_one(y_stride=[516], y=[y.data_ptr() + 2], paired=[32]),
        "OK": [dict(rows=0)]})
    null_params(lib.gdn_quantized, lib.gdn_quantized_many, lib.gdn_quantized_pack, lib.gdn_quantized_rows)


def times(args):
    rows = [dict(rows=n, many=n > FEW) for n in (1, 2, 4, 8, 16, 32)]
    return [("packed weights, bf16", quantized, every(rows, of_types(SHAPES))),
            ("SwiGLU", quantized, every(rows, of_types([(inputs, 2 * outputs) for inputs, outputs in SWIGLU_SHAPES], swiglu=True)))]


GROUPS = {"quick": group(quantized, quick, list(quick()), WAYS), "rows": check_rows, "nan": check_nan, "products": group(quantized, products, (), WAYS),
          "many": group(quantized, lambda: every(list(many_rows()), many=True), (), WAYS), "chain": check_chain, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, models=True)
