"""What the check programs share: the report, tolerances, buffers that show what was written, launches, and the command line."""
import argparse
import ctypes as C
import math
import os
import re
import sys
import tempfile
from collections import namedtuple
from itertools import accumulate

import abi
import timing
import torch
from abi import NO_SLOT, OK, stream
from cases import words
from reference import relative

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ULP = {"f32": 2.0 ** -23, "bf16": 2.0 ** -7, "f16": 2.0 ** -10}
O_BOUND = {"f32": 1e-5, "bf16": 4e-3, "f16": 1e-3}
# A state of 16 bits is the f32 result rounded once: in bf16 half a unit in the last of 8 bits, 1.7e-3 RMS over a binade.
STATE_BOUND = {"f32": 1e-5, "bf16": 2e-3, "f16": 3e-4}
CHUNKED_BOUND = 5e-3    # o and state of the chunk forms: they round inside, see reference.rule_in_16_bits
device = "cuda" if torch.cuda.is_available() else "cpu"     # "cpu": for trials of the checks themselves
torch.set_default_device(device)
failures = []
lines = 0


# ---- the report ----

def report(name, ok, text="", quiet=True):
    """The line of a check; a quiet one is printed only where it failed."""
    global lines
    lines += 1
    if not ok:
        failures.append(name)
    if not ok or not quiet:
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {text}", flush=True)


def program(doc, groups, times=lambda args: [], models=False, options=()):
    """A check program, which ends with 1 where a check failed. `groups`: {name: check(lib, arguments)}; times(arguments):
    [(title, make, table of cases), ..]; `options`: (name, the keywords of add_argument) of this program alone."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small set of cases, for compute-sanitizer")
    parser.add_argument("--only", default="", metavar="REGEX", help=f"some of the checks: {', '.join(groups)}")
    parser.add_argument("--cases", default="", metavar="REGEX", help="of tables, checks and times, the cases whose words match")
    parser.add_argument("--time", action="store_true", help="print times after the checks")
    parser.add_argument("--only-time", action="store_true", help="print times and check nothing but what is timed")
    parser.add_argument("--lib", help="the shared library: loaded when it is there, else built there")
    parser.add_argument("--nvcc", default="", help="further arguments for nvcc")
    for name, keywords in options:
        parser.add_argument(name, **keywords)
    args = parser.parse_args()
    lib = library(args, models)
    if not args.only_time:
        for name, check in groups.items():
            if re.search(args.only, name):
                before = lines, len(failures)
                check(lib, args)
                print(f"{name}: {lines - before[0]} checks, {len(failures) - before[1]} failed", flush=True)
        print(f"{lines} checks, {len(failures)} failed", *(f"  failed: {name}" for name in failures), sep="\n")
    for title, make, table in times(args) if args.time or args.only_time else ():
        timing.compare(lib, title, make, [case for case in table if re.search(args.cases, words(case))], words)
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
    """relative() of values that were rounded once: of many, or of so few that all may be rounded badly. The unit in the last place
    is at most ULP of a value; sqrt(12) is for an error anywhere within it, sqrt(3) for one at its end."""
    return ULP[dtype] / math.sqrt(12) * (1.0 if count >= 1000 else math.sqrt(3))


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(x, y):
    """The same bits, of two tensors or of two lists of tensors."""
    pairs = zip(x, y) if isinstance(x, (list, tuple)) else [(x, y)]
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


# ---- tensors ----

def normal(seed):
    """A function that draws normal f32 tensors."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def nan(*shape, dtype):
    return torch.full(shape, math.nan, dtype=TYPES[dtype])


def u32(values):
    return torch.tensor([v - (1 << 32) if v >= 1 << 31 else v for v in values], dtype=torch.int32)


def cu_seqlens(lens):
    """Where sequences begin and end."""
    return u32([0, *accumulate(lens)])


def rows_of(lens):
    """The slice of rows of each packed sequence."""
    return [slice(end - length, end) for end, length in zip(accumulate(lens), lens)]


def shuffled(n, seed):
    return torch.randperm(n, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()


class Frame:
    """`view` [rows, width] in a buffer of NaN: two rows before and after, a gap after each row, `shift` elements before it."""

    def __init__(self, rows, width, dtype, gap=0, shift=0, values=None):
        self.buffer = nan(rows + 4, width + gap + shift, dtype=dtype)
        self.index = slice(2, 2 + rows), slice(shift, shift + width)
        self.view = self.buffer[self.index]
        if values is not None:
            self.view.copy_(values)


Places = namedtuple("Places", "count ins outs tensors padding")


def place(n, how, seed, padding_by_either=False):
    """How many slots there are, the slots of n sequences in and out, tensors of both, and which sequences are padding.

    identity: as many slots as sequences, in place; apart: out of place. Others have more slots than sequences: permuted, in
    place; shared, the same with a sequence of padding; moved, with padding, from slots of one pool to others of another.
    `padding_by_either`: the in slot of one sequence makes it padding, the out slot of another sequence that one."""
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
    """The status of run(), one launch or several, when the GPU has finished; replayed from a graph where asked."""
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


class Output:
    """A buffer that a launch may write, and what it has to hold then. Before a launch it holds what it holds now.

    `index`: the elements that are written, as in buffer[index]; None: none. `want`: their values, in any shape. `bound`: of the
    relative error; None: the same bits. `error`: instead of both a function of buffer[index], (whether it is fine, words)."""

    def __init__(self, name, buffer, index=None, want=None, bound=None, error=None):
        self.name, self.buffer, self.index, self.before, self.error = name, buffer, index, buffer.clone(), error
        if error is None and want is not None:
            self.error = lambda got: self.compare(got.reshape(want.shape), want, bound)

    def compare(self, got, want, bound):
        if bound is None:
            equal = same(got, want.to(got.dtype))
            return equal, "" if equal else "other bits"
        error = relative(got, want) if want.numel() else 0.0
        return error <= bound, f"{error:.1e} of {bound:.1e}"

    def judge(self):
        """(whether all is fine, words)."""
        fine, text = True, ""
        outside = torch.ones_like(self.buffer, dtype=torch.bool)
        if self.index is not None:
            outside[self.index] = False
            fine, text = self.error(self.buffer[self.index]) if self.error else (True, "")
        if not same(self.buffer[outside], self.before[outside]):
            fine, text = False, f"{text} wrote outside"
        return fine, f"{self.name} {text}" if text else ""


class Launch:
    """Parameters of a launch, what it has to leave, and what a time is held against. `outputs`: makes the list of Outputs, before the
    launch; after(): what else is wrong with the result, a list of words. `replays` of a graph: more than one only where a launch reads
    nothing that it writes. `nbytes` is what it has to move."""

    def __init__(self, f, params, outputs=list, more=(), after=list, replays=1, nbytes=0, keep=None):
        self.f, self.params, self.outputs, self.more, self.after = f, params, outputs, more, after
        self.replays, self.nbytes, self.keep, self.overlaps = replays, nbytes, keep, type(params).has("overlap")

    def run(self):
        status = call(self.f, self.params, *self.more)
        assert status == OK, f"status {status}"

    def set_overlap(self, overlap):
        if self.overlaps:
            self.params.overlap = overlap


ONCE = ((0, False),)
WAYS = ((0, False), (1, False), (0, True), (1, True))


def verify(lib, name, x, ways=ONCE):
    """Launches x in all of the `ways`, (overlap, from a graph): each has to leave the same bits, those of the first are judged, and
    nothing past the workspace may be written."""
    outputs, first, wrong, texts = x.outputs(), None, [], []
    for overlap, graph in ways:
        x.set_overlap(overlap)
        for out in outputs:
            out.buffer.copy_(out.before)
        status = launch(lambda: call(x.f, x.params, *x.more), graph, x.replays if graph else 1)
        if status != OK:
            return report(name, False, lib.gdn_status_string(status).decode())
        room = x.params.room
        if room is not None and not bool((room[x.params.workspace_bytes:] == 0xFF).all()):
            wrong.append("wrote past its workspace")
        if first is None:
            judged = [out.judge() for out in outputs]
            texts = [text for _, text in judged if text]
            wrong += x.after() + [f"({out.name})" for out, (fine, _) in zip(outputs, judged) if not fine]
        left = [out.buffer.clone() for out in outputs] if len(ways) > 1 else []
        if first is not None and not same(left, first):
            wrong.append(f"other bits with overlap {overlap}, graph {graph}")
        first = left if first is None else first
    report(name, not wrong, ", ".join(texts + wrong))


def group(make, table, quick=(), ways=ONCE):
    """The check of a table of cases: make(lib, **case) is a Launch. A case may have `ways` of its own."""
    def check(lib, args):
        for i, given in enumerate(quick if args.quick else table() if callable(table) else table):
            if not re.search(args.cases, words(given)):
                continue
            case = {"seed": i, **given}
            every_way = case.pop("ways", ways)
            verify(lib, f"{make.__name__} {words(given)}", make(lib, **case), every_way)
    return check


def expect(what, f, params, table, *more):
    """The statuses of launches with some fields changed: `params` makes fresh ones, `table` has {the status's name: [the
    changes of each launch]}. A function makes the new value of the old one."""
    for want, launches in table.items():
        for changes in launches:
            p = params()
            for name, value in changes.items():
                setattr(p, name, value(getattr(p, name)) if callable(value) else value)
            got = call(f, p, *more)
            shown = {name: "changed" if callable(value) else value for name, value in changes.items()}
            report(f"status of {what} {shown}", got == abi.ABI.constants[f"GDN_{want}"], f"{got}, expected {want}")
    torch.cuda.synchronize()


def add(n):
    """A change of a field by n."""
    return lambda x: (x or 0) + n


def one_by_one(**fields):
    """A launch for each value of each field: [{field: value}, ..]."""
    return [{name: value} for name, values in fields.items() for value in values]


def null_params(*functions):
    for f in functions:
        report(f"{f.__name__} of null", f(None, *[None] * (len(f.argtypes) - 1)) == abi.NULL_POINTER)


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
