#!/usr/bin/env python3
"""Checks gdn_residual and gdn_swiglu, through the C ABI, against float64.

    python3 cuda/check_fused.py               # builds all kernels; the exit code is 1 when a case fails
    python3 cuda/check_fused.py --lib PATH    # of a library that is there
    python3 cuda/check_fused.py --quick       # fewer cases
    python3 cuda/check_fused.py --time        # the checks, then times beside torch
    python3 cuda/check_fused.py --only-time

An error is ||y - ref|| / ||ref||. The output's rounding alone makes it at most ulp / sqrt(12), with ulp at most 2^-7 of
the value in bf16, 2^-10 in f16 and 2^-23 in f32; of few values it may be any value's own at worst, sqrt(3) times that.
The f32 arithmetic adds at most 2e-6. A sum has to be the bits that torch gives. Outputs hold NaN before a launch, as
does everything around inputs and outputs.
"""
import ctypes as C
import math
from functools import partial

import checks
import timing
import torch
from abi import BAD_DTYPE, BAD_LENGTH, BAD_STRIDE, DTYPES, NULL_POINTER, OK, ptr, stream
from abi_model import ResidualParams, SwigluParams, load
from checks import bits, failures, framed, rel

EPS = 1e-6

report = partial(checks.report, quiet=True)


def bound(dtype, count):
    return checks.rounding(dtype, count) + 2e-6


def only_inside(buf, view):
    """Whether nothing but the view was written in a buffer of framed()."""
    kept = view.clone()
    view.fill_(math.nan)
    ok = bool(buf.isnan().all())
    view.copy_(kept)
    return ok


def runs(launch, outputs):
    """The outputs of launch(overlap), and whether all ways to launch give the same bits."""
    first, same = None, True
    for overlap, graph in ((0, False), (1, False), (0, True), (1, True)):
        for buf, _ in outputs:
            buf.fill_(math.nan)
        torch.cuda.synchronize()
        if graph:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                status = launch(overlap)
            g.replay()
            g.replay()
        else:
            status = launch(overlap)
        torch.cuda.synchronize()
        if status != OK:
            return status, False
        got = [bits(view).clone() for _, view in outputs]
        same = same and (first is None or all(torch.equal(a, b) for a, b in zip(first, got)))
        first = first or got
    return OK, same


def residual_params(x, h, total, y, weight, dtype, overlap=0):
    stride = lambda t: 0 if t is None else t.stride(0)
    return ResidualParams(ptr(x), ptr(h), ptr(total), ptr(y), ptr(weight), stride(x), stride(h), stride(total),
                          stride(y), x.shape[0], x.shape[1], DTYPES[dtype][0], overlap, EPS)


def check_residual(lib, rows, dim, dtype, gaps=(0, 0, 0, 0), shift=0, add=True, seed=0):
    name = f"residual {dtype} {rows}x{dim} gaps {gaps} shift {shift} add {add}"
    gen = torch.Generator(device="cuda").manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
    (_, x), (_, h) = framed(rows, dim, gaps[0], dtype, shift), framed(rows, dim, gaps[1], dtype, shift)
    totals, ys = framed(rows, dim, gaps[2], dtype, shift), framed(rows, dim, gaps[3], dtype, shift)
    x.copy_(randn(rows, dim) * 3)
    h.copy_(randn(rows, dim))
    weight = 1 + 0.3 * randn(dim)
    total = x + h if add else x
    wide = total.double()
    ref = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()

    def launch(overlap):
        p = residual_params(x, h if add else None, totals[1] if add else None, ys[1], weight, dtype, overlap)
        return lib.gdn_residual(C.byref(p), stream())

    status, same = runs(launch, [totals, ys] if add else [ys])
    if status != OK:
        return report(name, False, f"status {status}")
    limit, e = bound(dtype, rows * dim), rel(ys[1], ref)
    exact = not add or torch.equal(bits(totals[1]), bits(total))
    inside = only_inside(*ys) and (not add or only_inside(*totals))
    report(name, e <= limit and same and exact and inside, f"{e:.2e} of {limit:.2e}, the same in all ways {same}, "
           f"exact sum {exact}, inside {inside}")


def check_in_place(lib, dtype):
    """sum over x, y over h; and the norm alone over its input."""
    for dim in (2560, 77):
        x, h = (torch.randn(9, dim, device="cuda").to(DTYPES[dtype][1]) for _ in range(2))
        weight = torch.randn(dim, device="cuda")
        out = torch.empty_like(x), torch.empty_like(x)
        assert lib.gdn_residual(C.byref(residual_params(x, h, *out, weight, dtype)), stream()) == OK
        a, b = x.clone(), h.clone()
        assert lib.gdn_residual(C.byref(residual_params(a, b, a, b, weight, dtype)), stream()) == OK
        c = out[0].clone()
        assert lib.gdn_residual(C.byref(residual_params(c, None, None, c, weight, dtype)), stream()) == OK
        torch.cuda.synchronize()
        ok = all(torch.equal(bits(p), bits(q)) for p, q in ((a, out[0]), (b, out[1]), (c, out[1])))
        report(f"residual {dtype} {dim} in place", ok, "other bits")


def check_swiglu(lib, rows, columns, dtype, gaps=(0, 0), shift=0, seed=0):
    name = f"swiglu {dtype} {rows}x{columns} gaps {gaps} shift {shift}"
    gen = torch.Generator(device="cuda").manual_seed(seed)
    _, both = framed(rows, 2 * columns, gaps[0], dtype, shift)
    outs = framed(rows, columns, gaps[1], dtype, shift)
    both.copy_(torch.randn(rows, 2 * columns, generator=gen, device="cuda") * 4)
    gate, up = both[:, :columns], both[:, columns:]
    ref = torch.nn.functional.silu(gate.double()) * up.double()

    def launch(overlap):
        p = SwigluParams(gate.data_ptr(), up.data_ptr(), outs[1].data_ptr(), both.stride(0), both.stride(0),
                         outs[1].stride(0), rows, columns, DTYPES[dtype][0], overlap)
        return lib.gdn_swiglu(C.byref(p), stream())

    status, same = runs(launch, [outs])
    if status != OK:
        return report(name, False, f"status {status}")
    limit, e, inside = bound(dtype, rows * columns), rel(outs[1], ref), only_inside(*outs)
    report(name, e <= limit and same and inside,
           f"{e:.2e} of {limit:.2e}, the same in all ways {same}, inside {inside}")


def check_nan(lib):
    """A NaN shows in its whole row and nowhere else; an infinity does not hide."""
    for dtype in DTYPES:
        for dim in (2560, 77):
            for value in (math.nan, math.inf):
                x, h = (torch.randn(5, dim, device="cuda").to(DTYPES[dtype][1]) for _ in range(2))
                x[2, dim - 1] = value
                total, y, weight = torch.empty_like(x), torch.empty_like(x), torch.ones(dim, device="cuda")
                assert lib.gdn_residual(C.byref(residual_params(x, h, total, y, weight, dtype)), stream()) == OK
                torch.cuda.synchronize()
                bad = y.isnan()
                want = bad[2].all() if math.isnan(value) else bad[2, dim - 1]
                elsewhere = bool(bad[[0, 1, 3, 4]].any())
                report(f"residual {dtype} {dim} {value}", bool(want) and not elsewhere, str(bad.sum(1)))
        both = torch.randn(3, 2 * 72, device="cuda").to(DTYPES[dtype][1])
        both[1, 5], both[2, 72 + 6] = math.nan, math.nan
        both[0, 7], both[0, 8] = -1e4, 1e4
        out = torch.empty(3, 72, device="cuda", dtype=both.dtype)
        p = SwigluParams(both.data_ptr(), both.data_ptr() + 72 * both.element_size(), out.data_ptr(), 144, 144, 72, 3,
                         72, DTYPES[dtype][0], 0)
        assert lib.gdn_swiglu(C.byref(p), stream()) == OK
        torch.cuda.synchronize()
        where = out.isnan().nonzero().tolist()
        report(f"swiglu {dtype} NaN", where == [[1, 5], [2, 6]] and abs(out[0, 7].item()) == 0, str(where))


def check_arguments(lib):
    x = torch.randn(3, 64, device="cuda")
    y, total, weight = torch.empty_like(x), torch.empty_like(x), torch.ones(64, device="cuda")

    def residual(**changes):
        p = residual_params(x, x, total, y, weight, "f32")
        for name, value in changes.items():
            setattr(p, name, value)
        return lib.gdn_residual(C.byref(p), stream())

    def swiglu(**changes):
        p = SwigluParams(x.data_ptr(), x.data_ptr(), y.data_ptr(), 64, 64, 64, 3, 64, 0, 0)
        for name, value in changes.items():
            setattr(p, name, value)
        return lib.gdn_swiglu(C.byref(p), stream())

    cases = [(residual, c, s) for c, s in (
        ({"dtype": 3}, BAD_DTYPE), ({"rows": -1}, BAD_LENGTH), ({"dim": 0}, BAD_LENGTH), ({"x_stride": -1}, BAD_STRIDE),
        ({"y_stride": -1}, BAD_STRIDE), ({"x": None}, NULL_POINTER), ({"sum": None}, NULL_POINTER),
        ({"weight": None}, NULL_POINTER), ({"h": None, "sum": None}, OK), ({"rows": 0, "x": None}, OK), ({}, OK))]
    cases += [(swiglu, c, s) for c, s in (
        ({"dtype": -1}, BAD_DTYPE), ({"rows": -1}, BAD_LENGTH), ({"columns": -1}, BAD_LENGTH),
        ({"up_stride": -1}, BAD_STRIDE), ({"gate": None}, NULL_POINTER), ({"out": None}, NULL_POINTER),
        ({"columns": 0, "up": None}, OK), ({}, OK))]
    for launch, changes, want in cases:
        got = launch(**changes)
        report(f"arguments {launch.__name__} {changes}", got == want, f"status {got}, expected {want}")
    report("arguments null", lib.gdn_residual(None, stream()) == lib.gdn_swiglu(None, stream()) == NULL_POINTER, "")
    torch.cuda.synchronize()


def check_all(lib, quick):
    count = 0
    for dtype in DTYPES:
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


def times(lib):
    rate = timing.copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; bf16, cold L2; us: kernels (CUPTI) / graph "
          "/ graph with overlap, beside torch: kernels / graph")
    functional = torch.nn.functional

    def line(name, nbytes, ours, theirs):
        k = timing.span_us(ours(0))
        plain, overlapped = timing.graph_us(ours(0)), timing.graph_us(ours(1))
        print(f"  {name:24s} {k:7.2f} / {plain:7.2f} / {overlapped:7.2f}  floor {nbytes / rate * 1e6:6.2f}  torch "
              f"{timing.span_us(theirs):7.2f} / {timing.graph_us(theirs):7.2f}", flush=True)

    for dim in (1024, 2048, 2560, 5120):
        for rows in (1, 8, 32, 512, 8192):
            nbytes = rows * dim * 8
            sets = max(2, min(64, int(3e8 / nbytes) + 1))
            weight, half = torch.ones(dim, device="cuda"), torch.ones(dim, device="cuda", dtype=torch.bfloat16)
            data = [[torch.randn(rows, dim, device="cuda").bfloat16() for _ in range(4)] for _ in range(sets)]

            def ours(overlap):
                calls = []
                for x, h, total, y in data:
                    p = residual_params(x, h, total, y, weight, "bf16", overlap)
                    calls.append(lambda p=p: lib.gdn_residual(C.byref(p), stream()))
                return calls * max(1, 64 // sets)

            theirs = [lambda x=x, h=h: functional.rms_norm(x + h, (dim,), half, EPS) for x, h, _, _ in data]
            line(f"residual {rows} x {dim}", nbytes, ours, theirs * max(1, 64 // sets))
            del data
    for columns in (3584, 6144, 9216, 17408):
        for rows in (1, 8, 32, 512, 8192):
            nbytes = rows * columns * 6
            sets = max(2, min(64, int(3e8 / nbytes) + 1))
            data = [(torch.randn(rows, 2 * columns, device="cuda").bfloat16(),
                     torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)) for _ in range(sets)]

            def ours(overlap):
                calls = []
                for both, out in data:
                    p = SwigluParams(both.data_ptr(), both.data_ptr() + 2 * columns, out.data_ptr(), 2 * columns,
                                     2 * columns, columns, rows, columns, 1, overlap)
                    calls.append(lambda p=p: lib.gdn_swiglu(C.byref(p), stream()))
                return calls * max(1, 64 // sets)

            theirs = [lambda b=b: functional.silu(b[:, :columns]) * b[:, columns:] for b, _ in data]
            line(f"swiglu {rows} x {columns}", nbytes, ours, theirs * max(1, 64 // sets))
            del data


def main():
    args = checks.arguments(__doc__).parse_args()
    lib = checks.library(args, load)
    if not args.only_time:
        check_all(lib, args.quick)
        checks.summary()
    if args.time or args.only_time:
        times(lib)
    checks.leave()


if __name__ == "__main__":
    main()
