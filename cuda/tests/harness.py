"""What the check programs share: their lines and what failed, bounds, buffers that show what was written, launches, and
the library."""
import argparse
import ctypes as C
import math
import os
import sys
import tempfile
from collections import namedtuple
from itertools import accumulate

import abi
import torch
from abi import NO_SLOT, OK, stream

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ULP = {"f32": 2.0 ** -23, "bf16": 2.0 ** -7, "f16": 2.0 ** -10}
O_BOUND = {"f32": 1e-5, "bf16": 4e-3, "f16": 1e-3}
STATE_BOUND = 1e-5
CHUNKED_BOUND = 5e-3    # o and state of the chunk forms: they round inside, see reference.rule_in_16_bits
failures = []
lines = 0
device = "cuda"         # "cpu" in the tests of a reference


# ---- the report ----

def report(name, ok, text="", quiet=False):
    """A check's line; a quiet one is printed only where it failed."""
    global lines
    lines += 1
    if not ok:
        failures.append(name)
    if not ok or not quiet:
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {text}", flush=True)


def summary():
    print(f"{lines} checks, {len(failures)} failed")
    for name in failures:
        print("  failed:", name)


def program(doc, check, times, models=False, options=(), self_test=None):
    """A check program: check(lib, arguments) and times(lib, arguments), those that were asked for, with a library of the
    kernels of gdn.h or of the models'. It ends with 1 where something failed. `options`: those of this program alone,
    (name, what add_argument takes)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small set of cases, for compute-sanitizer")
    parser.add_argument("--time", action="store_true", help="print times after the checks")
    parser.add_argument("--only-time", action="store_true", help="print times and check nothing but what is timed")
    parser.add_argument("--lib", help="the shared library: loaded when it is there, else built there")
    parser.add_argument("--nvcc", default="", help="further arguments for nvcc")
    if self_test:
        parser.add_argument("--self-test", action="store_true", help="check the reference, on the CPU")
    for name, how in options:
        parser.add_argument(name, **how)
    args = parser.parse_args()
    if self_test and args.self_test:
        global device
        device = "cpu"
        self_test()
        print("the reference holds")
        return
    lib = library(args, models)
    if not args.only_time:
        check(lib, args)
        summary()
    if args.time or args.only_time:
        times(lib, args)
    sys.exit(1 if failures else 0)


def library(args, models=False):
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:    # once it is loaded, the file may go
        path = os.path.abspath(args.lib or os.path.join(folder, "libcandle_gdn.so"))
        if not os.path.exists(path):
            abi.build(path, args.nvcc.split(), models)
        return abi.load(path)


# ---- numbers ----

def rounding(dtype, count):
    """relative() of values that were rounded once: of many, or of so few that they may all be rounded badly."""
    return ULP[dtype] / math.sqrt(12) * (1.0 if count >= 1000 else math.sqrt(3))


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same(x, y):
    """The same bits, of two tensors or of two lists of them."""
    pairs = zip(x, y) if isinstance(x, (list, tuple)) else [(x, y)]
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


# ---- tensors ----

def normal(seed):
    """A function that draws normal f32 tensors."""
    gen = torch.Generator(device=device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=gen, device=device)


def nan(*shape, dtype):
    return torch.full(shape, math.nan, device=device, dtype=TYPES[dtype])


def bf16(*shape):
    """Random, for the times."""
    return torch.randn(*shape, device=device).bfloat16()


def u32(values):
    return torch.tensor([v - (1 << 32) if v >= 1 << 31 else v for v in values], dtype=torch.int32, device=device)


def cu_seqlens(lens):
    """Where sequences begin and end."""
    return u32([0] + torch.tensor(lens).cumsum(0).tolist())


def framed(rows, width, gap, dtype, shift=0):
    """NaN everywhere: `rows` of `width` with a gap after each, rows before and after, `shift` elements in. The buffer
    and the view."""
    buf = nan(rows + 4, width + gap + shift, dtype=dtype)
    return buf, buf[2:2 + rows, shift:shift + width]


def only_inside(buf, *views):
    """Whether a buffer that held NaN holds it still outside of the views."""
    left = torch.ones(buf.numel(), dtype=torch.bool, device=buf.device)
    for x in views:
        if x.numel():
            left.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return bool(buf.view(-1)[left].isnan().all())


def same_outside(x, before, mask):
    """Whether what the mask shows of x has the bits that it had before."""
    return same(x[mask], before[mask])


def rows_of(lens):
    """The slice of rows of each of packed sequences."""
    ends = list(accumulate(lens))
    return [slice(end - length, end) for end, length in zip(ends, lens)]


def shuffled(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


Places = namedtuple("Places", "count ins outs tensors padding")


def place(n, how, seed, padding_by_either=False):
    """How many slots there are, those of n sequences in and out, tensors of both, and which sequences are padding.

    identity: as many as sequences, in place; apart: out of place. Others have more slots than sequences: permuted, in
    place; shared, the same with a sequence of padding; moved, with padding, from slots of one pool to others of another.
    `padding_by_either`: the in slot of one sequence makes it padding, the out slot of another one that one."""
    if how in ("identity", "apart"):
        return Places(n, list(range(n)), list(range(n)), (None, None), [])
    order, padding = shuffled(2 * n + 1, seed), []
    ins, outs = order[:n], order[n:2 * n] if how == "moved" else order[:n]
    if how != "permuted" and n > 1:
        padding = [n // 2]
        ins[n // 2] = NO_SLOT
        if not (how == "moved" and padding_by_either):
            outs[n // 2] = NO_SLOT
        elif n > 3:
            padding.append(0)
            outs[0] = 2 * n + 1
    return Places(2 * n + 1, ins, outs, (u32(ins), u32(outs)), padding)


# ---- launches ----

def capture(run):
    """(a CUDA graph of run(), what run() returned)."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = run()
    return graph, returned


def launch(run, graph=False, replays=1):
    """The status of run(), one launch or several, when the GPU is done with it; replayed from a graph where asked."""
    torch.cuda.synchronize()
    if graph:
        g, status = capture(run)
        for _ in range(replays):
            g.replay()
    else:
        status = run()
    torch.cuda.synchronize()
    return status


def call(f, params, *more):
    return f(C.byref(params), *more, stream())


def change(params, **changes):
    """Sets fields; `a__b` is field b of a, and a function makes the new value of the old one."""
    for name, value in changes.items():
        inner, (*path, field) = params, name.split("__")
        for part in path:
            inner = getattr(inner, part)
        setattr(inner, field, value(getattr(inner, field)) if callable(value) else value)
    return params


def refused(lib, name, status):
    """Whether a launch did not take its parameters, which fails the check of this name."""
    if status != OK:
        report(name, False, lib.gdn_status_string(status).decode())
    return status != OK


def expect(what, f, params, table, *more):
    """The statuses of launches with some fields changed: `params` makes them anew, `table` has {the status's name: [the
    changes of each launch]}."""
    for want, launches in table.items():
        for changes in launches:
            got = call(f, change(params(), **changes), *more)
            shown = {name: "changed" if callable(value) else value for name, value in changes.items()}
            report(f"status of {what} {shown}", got == abi.ABI.constants[f"GDN_{want}"], f"{got}, expected {want}",
                   quiet=True)
    torch.cuda.synchronize()


def one_by_one(**fields):
    """A launch for each value of each field: [{field: value}, ..]."""
    return [{name: value} for name, values in fields.items() for value in values]


WAYS = ((0, False), (1, False), (0, True), (1, True))


def chain_repeats(name, link, start, reference_overlap=0, links=24):
    """Launches that each read what the one before wrote, link(i, x, y, overlap) from x to y, over two buffers: both kinds of
    hazard. With overlap, eager and from a graph, they leave 40 times the bits of those without."""
    buffers, out = [torch.empty_like(start) for _ in range(2)], torch.empty_like(start)

    def chain(overlap):
        buffers[0].copy_(start)
        buffers[1].fill_(math.nan)
        for i in range(links):
            assert link(i, buffers[i % 2], buffers[(i + 1) % 2], overlap) == OK
        out.copy_(buffers[links % 2])

    launch(lambda: chain(reference_overlap))
    ref, bad = out.clone(), 0
    g, _ = capture(lambda: chain(1))
    for i in range(40):
        out.fill_(math.nan)
        g.replay() if i % 2 else chain(1)
        torch.cuda.synchronize()
        bad += not same(out, ref)
    report(name, bad == 0 and bool(ref.isfinite().all()), f"{bad} of 40 differ")
