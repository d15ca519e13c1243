"""What the check programs share: their lines and what failed, bounds, buffers that show what was written, launches, and
the library."""
import argparse
import ctypes as C
import math
import os
import sys
import tempfile

import abi
import torch
from abi import CODES, NO_SLOT, columns, rule_params, sequences, slots, stream, workspace
from timing import calls_of

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


def arguments(doc):
    """A parser of what all of them take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small set of cases")
    parser.add_argument("--time", action="store_true", help="print times after the checks")
    parser.add_argument("--only-time", action="store_true", help="print times and check nothing but what is timed")
    parser.add_argument("--lib", help="the shared library: loaded when it is there, else built there")
    parser.add_argument("--nvcc", default="", help="further arguments for nvcc")
    return parser


def library(args, models=False):
    """The kernels of gdn.h, or the models'."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:    # once it is loaded, the file may go
        path = os.path.abspath(args.lib or os.path.join(folder, "libcandle_gdn.so"))
        if not os.path.exists(path):
            abi.build(path, args.nvcc.split(), models)
        return abi.load(path)


def run(args, check, times, models=False):
    """A program: the checks and the times that were asked for. It ends with 1 where something failed."""
    lib = library(args, models)
    if not args.only_time:
        check(lib)
        summary()
    if args.time or args.only_time:
        times(lib)
    sys.exit(1 if failures else 0)


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


def shuffled(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def place(n, how, seed):
    """(slots there are, those of n sequences in, out, their tensors). identity: in place; shared: the same, elsewhere and
    with padding in the middle; moved: other slots of another pool too."""
    if how == "identity":
        return n, list(range(n)), list(range(n)), (None, None)
    order = shuffled(2 * n + 1, seed)
    ins, outs = order[:n], order[:n] if how == "shared" else order[n:2 * n]
    if n > 1:
        ins[n // 2] = outs[n // 2] = NO_SLOT
    return 2 * n + 1, ins, outs, (u32(ins), u32(outs))


# ---- launches ----

def launch(run, graph=False, replays=1):
    """The status of run(), one launch or several, when the GPU is done with it; replayed from a graph where asked."""
    torch.cuda.synchronize()
    if graph:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            status = run()
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


def expect(what, want, f, params, quiet=True, **changes):
    """The status of a launch with some fields changed."""
    got = call(f, change(params, **changes))
    shown = {name: "changed" if callable(value) else value for name, value in changes.items()}
    report(f"status of {what} {shown}", got == want, f"{got}, expected {want}", quiet)


WAYS = ((0, False), (1, False), (0, True), (1, True))


def chain_repeats(name, chain, out, reference_overlap=0):
    """Launches that each read what the one before wrote, as chain(overlap) runs them: with overlap, eager and from a graph,
    40 times the bits of those without. `out` is what they leave."""
    launch(lambda: chain(reference_overlap))
    ref, bad = out.clone(), 0
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        chain(1)
    for i in range(40):
        out.fill_(math.nan)
        g.replay() if i % 2 else chain(1)
        torch.cuda.synchronize()
        bad += not same(out, ref)
    report(name, bad == 0 and bool(ref.isfinite().all()), f"{bad} of 40 differ")


# ---- calls of the rule for the times ----

def rule_calls(lib, batch, tokens, hk, hv, dim, algo, sets, segments=0):
    """Calls that each touch other memory than the last, but for the workspace: `sets` is enough of them to pass the L2
    cache. A call's `params` and `o` are its own; its states are updated in place."""
    calls, t = [], batch * tokens
    a_log, dt_bias = torch.rand(hv, device="cuda"), torch.randn(hv, device="cuda") - 4
    for _ in range(sets):
        qkv, ba = bf16(t, (2 * hk + hv) * dim), bf16(t, 2 * hv)
        o = torch.empty(t, hv * dim, device="cuda", dtype=torch.bfloat16)
        state = torch.randn(batch, hv, dim, dim, device="cuda") * 0.1
        place = slots(None, batch, hv * dim * dim)
        p = rule_params(
            q=columns(qkv, 0, dim, tokens), k=columns(qkv, hk * dim, dim, tokens), v=columns(qkv, 2 * hk * dim, dim, tokens),
            a=columns(ba, hv, 1, tokens), b=columns(ba, 0, 1, tokens), a_log=a_log, dt_bias=dt_bias,
            o=columns(o, 0, dim, tokens), state_in=state, state_out=state, in_slots=place, out_slots=place,
            seqs=sequences([tokens] * batch), num_k_heads=hk, num_v_heads=hv, head_k=dim, head_v=dim, io_dtype=CODES["bf16"],
            gate_dtype=CODES["bf16"], l2norm=1, algo=algo, segments=segments)
        [one] = calls_of(lib, [(lib.gdn_rule, p)], (qkv, ba, state, a_log, dt_bias))
        one.params, one.o, one.state = p, o, state
        calls.append(one)
    workspace(lib.gdn_rule_workspace, *(one.params for one in calls))
    return calls
