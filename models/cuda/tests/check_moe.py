#!/usr/bin/env python3
"""Checks gdn_moe, through the C ABI, against a mixture of experts in float64.

    python3 models/cuda/tests/check_moe.py --self-test  # of the reference alone, on the CPU

An error is the largest over tokens of ||y - ref|| / ||ref||. Outputs hold NaN before a launch, as does everything around
them, around x and in the workspace. Tokens whose k-th and next logit differ by less than f32 can tell do not count, but where
they are equal.
"""
import ctypes as C
import statistics

import common    # noqa: F401 - the path of cuda/tests
import harness
import torch
from abi import (MOE_AUTO, MOE_EXPERTS, MOE_FEW, MOE_FEW_TOKENS, MOE_MANY, MOE_PACKED_INPUTS, MOE_PACKED_TOKENS, MOE_TOP_K, NULL_POINTER,
                 workspace)
from cases import every, rows, seeded, turns, words
from check_residual import residual_params
from ggml import BYTES, INPUTS
from harness import ONCE, WAYS, Output, bf16, call, chain_repeats, expect, null_params, one_by_one, report, verify
from moe_case import Case, self_test
from timing import calls_of, compare, device_events

# Rounding of y, at most 2^-7 / sqrt(12) of it in bf16, and as much of silu(gate) * up before the last product; MOE_MANY
# rounds each expert's output too. Narrow cases average little. Weights in e4m3 are exact, for MOE_MANY rounded as the
# reference's are.
BOUND = {"bf16": 6e-3, "f16": 8e-4}
IO = ["bf16", "f16"]
REPEATED = (*WAYS, (-1, True))


def check_case(lib, ways=ONCE, **kw):
    """Broken tokens must show their NaN, and no others."""
    case = Case(**kw)
    case.pack(lib)
    want, sure = case.reference()
    broken = list(kw.get("broken", ()))
    sure[broken] = False

    def error(got):
        y = got.double()
        errors = ((y - want).norm(dim=1) / want.norm(dim=1))[sure]
        worst = errors.max().item() if errors.numel() else 0.0
        shown = bool(y[broken].isnan().all())
        fine = worst <= BOUND[case.io] and bool(errors.isfinite().all()) and shown
        return fine, f"{worst:.1e}, {int(sure.sum())} of {case.tokens} tokens{'' if shown else ' hides a NaN'}"

    verify(lib, f"moe {words(kw)}", lib.gdn_moe, case.params(lib), [Output("y", case.y.buffer, case.y.index, error=error)], ways,
           replays=2)
    torch.cuda.empty_cache()


def algos_of(cases):
    """Each case by all algorithms that there are for its tokens."""
    return [{**case, "algo": algo} for case in cases for algo in ((MOE_FEW, MOE_MANY) if case["tokens"] <= MOE_FEW_TOKENS else (MOE_MANY,))]


SIZES = rows("experts k hidden inner shared", (16, 4, 256, 64, 64), (8, 8, 128, 128, 0), (60, 3, 320, 192, 64), (300, 10, 192, 64, 320))
PACKED = (("q4_K",) * 4, ("q8_0",) * 4, ("q6_K",) * 4, ("q4_K", "q6_K", "q8_0", "q8_0"), ("q8_0", "q4_K", "q4_K", "q6_K"))
GAPS = tuple((8 * (i % 3), i % 4) for i in range(12))


def cases():
    yield from seeded(turns(algos_of(every([*SIZES, dict(experts=1, k=1, hidden=64, inner=64, shared=64)],
                                           tokens=[*range(1, 34), 40, 63, 64, 65, 100, 128, 129, 200, 257], io=IO)),
                            router=("f32", "bf16"), normalise=(True, False, True), gaps=GAPS))
    # Several tokens a warp of choose_kernel.
    yield from every(rows("experts k router", (16, 4, "f32"), (300, 10, "bf16")), io=IO, tokens=4100)
    options = [dict(ties=True), dict(ties=True, experts=33, k=16), dict(favour=5), dict(favour=15, k=1), dict(experts=1000, k=16, hidden=64),
               dict(experts=512, k=10, shared=0), dict(hidden=2112, inner=64), dict(hidden=4096), dict(hidden=2048, inner=512, shared=512),
               dict(inner=320, shared=576), dict(scale=20.0)]
    for tokens in (1, 2, 7, 8, 9, 32, 33, 64, 150):
        broken = [dict(broken=(0,)), dict(broken=(tokens - 1,)), dict(broken=tuple(range(tokens))),
                  dict(broken=(tokens // 2,), shared=128, normalise=False)]
        yield from seeded(algos_of(every([*options, *broken], tokens=tokens, io=IO)), tokens)


def models():
    """The shapes that matter, and that every launch gives the same bits."""
    sizes = dict(hidden=2048, inner=512, shared=512, ways=REPEATED)
    yield from seeded(turns(every(rows("experts k", (256, 8), (512, 10)), tokens=[1, 2, 4, 8, 16, 31, 32, 33, 64, 65, 96, 512, 2048], **sizes),
                            router=("bf16", "f32")))
    yield from seeded(every(tokens=[1, 2, 8, 32, 33, 512], experts=512, k=10, e4m3=128, **sizes))
    yield from seeded(every(tokens=[1, 2, 8, 16], experts=256, k=8, packed=PACKED[3], **sizes))


def e4m3():
    yield from seeded(turns(algos_of(every([*SIZES, dict(experts=8, k=2, hidden=2112, inner=64, shared=64)],
                                           tokens=[*range(1, 18), 31, 32, 33, 64, 100, 129, 257], io=IO)), gaps=GAPS, e4m3=(128, 64, 16, 1)))


def packed():
    sizes = rows("experts k hidden inner shared", (16, 4, 256, 256, 256), (8, 8, 512, 512, 0), (60, 3, 1280, 256, 512), (300, 10, 256, 768, 256),
                 (1, 1, 256, 256, 1280), (8, 2, 4096, 256, 256))
    tokens = list(range(1, MOE_PACKED_TOKENS + 1))
    yield from seeded(turns(every(sizes, tokens=tokens, io=IO), normalise=(True, False, True), ways=(REPEATED, ONCE, ONCE, ONCE), packed=PACKED,
                            gaps=GAPS))
    for n in tokens:
        yield from seeded(turns(every([dict(favour=5), dict(ties=True), dict(broken=(0,)), dict(broken=(n - 1,), shared=512)], tokens=n, inner=256,
                                      io=IO), packed=PACKED), n)
    yield from every(inner=[128, 384], shared=128, tokens=5, hidden=384, packed=PACKED[1])      # of q8_0 alone


def quick():
    yield from every(io=IO, algo=[MOE_FEW, MOE_MANY], tokens=[1, 3, 11])
    yield from every(io=IO, tokens=[70, 200])
    yield from every(rows("tokens algo", (1, MOE_FEW), (50, MOE_FEW), (3, MOE_MANY)), io=IO, e4m3=32)
    yield from every(rows("tokens packed", (1, PACKED[3]), (3, ("q8_0", "q8_0", "q4_K", "q6_K")), (11, ("q6_K", "q4_K", "q6_K", "q4_K"))),
                     io=IO, inner=256, shared=256)


def group(table, always=False):
    """The check of a table."""
    def check(lib, args):
        for case in table() if always or not args.quick else ():
            check_case(lib, **({"shared": 256, **case} if "packed" in case else case))
    return check


def check_chain(lib, args):
    """As the layers of a model, each with a residual and a norm after it, and with one workspace."""
    for tokens in () if args.quick else (1, 2, 8, 32, 64, 100):
        layers = [Case(tokens, 512, 64, 6, 128, 128, router="bf16", seed=i) for i in range(4)]
        room, ones = layers[0].params(lib), torch.ones(512)
        between = [torch.empty(tokens, 512, dtype=torch.bfloat16) for _ in range(4)]

        def link(i, x, y, overlap):
            mid, total = between[i % 2], between[2 + i % 2]
            p = layers[i % 4].fields(x=x, y=mid, overlap=overlap)
            p.workspace, p.workspace_bytes = room.workspace, room.workspace_bytes
            return call(lib.gdn_moe, p) or call(lib.gdn_residual, residual_params(mid, x, total, y, ones, "bf16", max(overlap, 0)))

        chain_repeats(f"chain T={tokens}", link, layers[0].x.view.contiguous(), reference_overlap=-1)


def check_status(lib, args):
    case = Case(4)
    expect("moe", lib.gdn_moe, lambda: case.params(lib), {
        "NULL_POINTER": one_by_one(x=[None], router=[None], gate_up=[None], down=[None], shared_gate_up=[None],
                                   shared_down=[None], y=[None]),
        "BAD_DTYPE": one_by_one(io_dtype=[0, 7]),
        "BAD_LENGTH": one_by_one(tokens=[-1, 1 << 30], hidden=[0], num_experts=[0, MOE_EXPERTS + 1, 3], inner=[0],
                                 top_k=[0, MOE_TOP_K + 1], shared_inner=[-64], router_parts=[0, 4]) + [dict(top_k=17, num_experts=16)],
        "BAD_ALGO": one_by_one(hidden=[96], inner=[40], shared_inner=[32], x=[case.x.view.data_ptr() + 2], x_stride=[260],
                               gate_up=[case.gate_up.data_ptr() + 8], algo=[3, -1]) + [
                                   dict(algo=MOE_FEW, tokens=MOE_FEW_TOKENS + 1)],
        "BAD_STRIDE": one_by_one(x_stride=[-8], y_stride=[-1]),
        "BAD_WORKSPACE": one_by_one(workspace=[None], workspace_bytes=[64]),
        "OK": [dict(tokens=0, x=None)]})
    scaled = Case(4, e4m3=64)
    expect("moe in e4m3", lib.gdn_moe, lambda: scaled.params(lib), {
        "NULL_POINTER": one_by_one(gate_up_scales__ptr=[None], down_scales__ptr=[None], shared_gate_up_scales__ptr=[None],
                                   shared_down_scales__ptr=[None]),
        "BAD_ALGO": one_by_one(down_scales__rows=[0, 48]), "BAD_STRIDE": one_by_one(down_scales__stride=[-1])})
    blocks = Case(4, inner=256, shared=256, packed=PACKED[3])
    blocks.pack(lib)
    expect("moe packed", lib.gdn_moe, lambda: blocks.params(lib), {
        "BAD_DTYPE": one_by_one(gate_up_type=[-1, 3], down_type=[3], shared_gate_up_type=[-1], shared_down_type=[7]),
        "NULL_POINTER": one_by_one(gate_up=[None], shared_down=[None]),
        "BAD_ALGO": one_by_one(algo=[MOE_MANY], tokens=[MOE_PACKED_TOKENS + 1], hidden=[128, MOE_PACKED_INPUTS // 2], inner=[128],
                               down=[blocks.stored["down"].data_ptr() + 16], gate_up_scales__ptr=[blocks.x.view.data_ptr()])})
    null_params(lib.gdn_moe)
    report("workspace of null", lib.gdn_moe_workspace(None, C.byref(C.c_int64(-1))) == NULL_POINTER)


# ---- times ----

class Layer(Case):
    """Weights of one layer. Of two layers the second call in a row finds nothing of its experts in the L2 cache."""

    def __init__(self, lib, packed=None, **sizes):
        super().__init__(1, router="bf16", packed=packed, **sizes)
        self.pack(lib)
        self.blocks.clear()
        if self.stored:
            self.gate_up = self.down = self.shared_gate_up = self.shared_down = None    # not in float64 beside

    def choice(self, x):
        """As torch would have it, in f32."""
        logits = x.float() @ self.router.T
        p, chosen = torch.softmax(logits[:, :self.experts], 1).topk(self.k)
        return chosen, p / p.sum(1, keepdim=True), torch.sigmoid(logits[:, self.experts:])

    def bytes(self, x):
        """What a launch has to read: the router, each chosen expert once, the shared one."""
        used = self.choice(x)[0].unique().numel()
        each = lambda name: BYTES[self.packed[name]] / INPUTS[self.packed[name]] if self.packed else 1 if self.stored else 2
        pair = lambda count, gate_up, down: count * (2 * each(gate_up) + each(down))
        return self.hidden * (2 * (self.experts + 1) + pair(used * self.inner, "gate_up", "down") +
                              pair(self.shared, "shared_gate_up", "shared_down"))

    def torch(self, x):
        """Up to 16 tokens the weights of each token's experts gathered, then batched products: what a graph can capture. Of more tokens each
        expert over its own, for which the host learns which experts have any."""
        chosen, weights, shared_gate = self.choice(x)
        gated = lambda gate_up: torch.nn.functional.silu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1]
        y = shared_gate * (gated(x @ self.shared_gate_up.T) @ self.shared_down.T).float()
        if x.shape[0] <= 16:
            h = gated(torch.einsum("th,tkih->tki", x, self.gate_up[chosen]))
            return y + (torch.einsum("tki,tkhi->tkh", h, self.down[chosen]).float() * weights[..., None]).sum(1)
        for e in chosen.unique().tolist():
            token, choice = (chosen == e).nonzero(as_tuple=True)
            y.index_add_(0, token, (gated(x[token] @ self.gate_up[e].T) @ self.down[e].T).float() * weights[token, choice, None])
        return y


def calls(lib, layers, xs, overlap=0, algo=MOE_AUTO):
    """A call for each x, by turns on the layers; they share a workspace, as the layers of a model do."""
    y = torch.empty_like(xs[0])
    params = [layers[i % 2].fields(x=x, y=y, overlap=overlap, algo=algo) for i, x in enumerate(xs)]
    workspace(lib.gdn_moe_workspace, *params)
    return calls_of(lib, [(lib.gdn_moe, p) for p in params])


def by_kernel(calls):
    """The short name and the median us of each kernel of these calls (CUPTI), in words."""
    run = lambda: [call() for call in calls]
    run()
    found = {}
    for e in device_events(run):
        if "_kernel" in e.name:
            name = e.name.split("_kernel")[0].split("::")[-1].split(" ")[-1]
            if name in ("many", "wide"):
                name += " down" if "false" in e.name or "(bool)0" in e.name else " gate_up"
            found.setdefault(name, []).append(e.time_range.elapsed_us())
    return ", ".join(f"{name} {statistics.median(t):.1f}" for name, t in found.items())


def times(lib, args):
    """"alone": no launch overlaps another one."""
    def table(every_tokens, algos=(), **kinds):
        for sizes in rows("experts k", (256, 8), (512, 10)):     # Qwen3.5-35B-A3B, Qwen3-Next-80B
            layers = [Layer(lib, hidden=2048, inner=512, shared=512, **sizes, **kinds) for _ in range(2)]
            for tokens in every_tokens:
                xs = [bf16(tokens, 2048) for _ in range(24 if tokens <= 64 else 4)]
                alone = calls(lib, layers, xs, -1)
                found = {"alone": alone, "": calls(lib, layers, xs), "overlapped": calls(lib, layers, xs, 1)}
                found.update({name: calls(lib, layers, xs, 1, algo) for name, algo in algos})
                if not kinds:
                    theirs = [lambda x=x, i=i: layers[i % 2].torch(x) for i, x in enumerate(xs[:6])]
                    found["torch"] = theirs if tokens <= 16 else f"{statistics.median(busy(f) for f in theirs):.0f}" if tokens > 64 else "-"
                flops = 6 * tokens * 2048 * (sizes["k"] * 512 + 512)
                yield f"{words(sizes)} T={tokens}", statistics.mean(layers[i % 2].bytes(x) for i, x in enumerate(xs)), {
                    **found, "by kernel": by_kernel(alone), "TFLOP": f"{flops / 1e12:.3f}"}

    busy = lambda f: sum(e.time_range.elapsed_us() for e in device_events(f))
    compare("few tokens, bf16, cold L2", table((1, 2, 4, 8, 16, 32), [("many", MOE_MANY)]))
    compare("many tokens", table((64, 128, 512, 2048, 8192)))
    compare("weights in e4m3", table((1, 2, 4, 8, 16, 32, 64), e4m3=128))
    for types in PACKED[:4]:
        compare(f"packed experts: {' '.join(types)}", table((1, 2, 4, 8, 16), packed=types))


GROUPS = {"quick": group(quick, True), "cases": group(cases), "e4m3": group(e4m3), "packed": group(packed), "models": group(models),
          "chain": check_chain, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times, models=True, self_test=self_test)
