#!/usr/bin/env python3
"""Checks gdn_moe, through the C ABI, against a mixture of experts in float64.

    python3 models/cuda/tests/check_moe.py --self-test  # of the reference alone, on the CPU

An error is the largest over tokens of ||y - ref|| / ||ref||. Outputs hold NaN before a launch, as does everything around
them, around x and in the workspace. Tokens whose k-th and next logit differ by less than f32 can tell are left out, but
where the logits are given and ties are exact.
"""
import ctypes as C
import math
import os
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "cuda", "tests"))

import harness
import reference
import torch
from abi import (CODES, MOE_AUTO, MOE_EXPERTS, MOE_FEW, MOE_FEW_TOKENS, MOE_MANY, MOE_PACKED_INPUTS, MOE_PACKED_TOKENS, MOE_TOP_K,
                 NULL_POINTER, OK, MoeParams, QuantizedPackParams, fill, stream, workspace)
from e4m3 import E4m3
from ggml import BYTES, INPUTS, NAMES as PACKED, Blocks
from harness import (TYPES, WAYS, bf16, call, chain_repeats, expect, framed, launch, normal, one_by_one, only_inside, refused,
                     report, same)
from timing import calls_of, device_activities, device_events, graph_us, heading, span_us

# Rounding of y, at most 2^-7 / sqrt(12) of it in bf16, and as much of silu(gate) * up before the last product; MOE_MANY
# rounds each expert's output too. Narrow cases average little. Weights in e4m3 are exact, for MOE_MANY rounded as the
# reference's are.
BOUND = {"bf16": 6e-3, "f16": 8e-4}

# ---- the definition, in float64 ----

def route(logits, k, normalise):
    """[tokens, k] experts, ties to the lower one, and their weights; and how far the k-th logit is from the next."""
    order = torch.sort(logits, dim=1, descending=True, stable=True)
    experts = order.indices[:, :k]
    weights = torch.softmax(logits, 1).gather(1, experts)
    if normalise:
        weights = weights / weights.sum(1, keepdim=True)
    gap = order.values[:, k - 1] - order.values[:, k] if k < logits.shape[1] else torch.ones_like(logits[:, 0])
    return experts, weights, gap


def parts_of(router):
    """A router in f32 as the sum of so many matrices in bf16 as it takes, at most three."""
    parts, rest = [], router.clone()
    while not parts or (len(parts) < 3 and bool(rest.any())):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    assert not bool(rest.any())
    return torch.stack(parts)


def mlp(x, gate_up, down, rounded=None):
    """`rounded`: a dtype that silu(gate) * up is kept in."""
    h = reference.linear(x, gate_up, with_swiglu=True)
    return (h if rounded is None else h.to(rounded).double()) @ down.double().T


def moe_reference(case):
    """y in float64, and the tokens whose choice is not a matter of rounding."""
    x, n = case.x.double(), case.experts
    # Random numbers in q4_K have a mean, which makes more of that rounding than of any other.
    rounded = TYPES[case.io] if case.packed else None
    logits = x @ case.router.double().T if case.logits is None else case.logits.double()
    experts, weights, gap = route(logits[:, :n], case.k, case.normalise)
    y = torch.zeros_like(x) if case.residual is None else case.residual.double()
    for e in experts.unique().tolist():
        token, choice = (experts == e).nonzero(as_tuple=True)
        y.index_add_(0, token, weights[token, choice, None] * mlp(x[token], case.gate_up[e], case.down[e], rounded))
    if case.shared:
        y = y + torch.sigmoid(logits[:, n:]) * mlp(x, case.shared_gate_up, case.shared_down, rounded)
    sure = torch.ones_like(gap, dtype=torch.bool)
    if case.logits is None:
        sure = gap > 2e-6 * (1 + logits[:, :n].abs().amax(1))
    return y, sure


# ---- one case ----

class Case:
    """`favour`: an expert that all tokens take. `ties`: given logits of few distinct values. `e4m3`: rows of a block of
    the weights' scales. `packed`: the ggml types of gate_up, down, shared_gate_up and shared_down; pack() packs them."""

    def __init__(self, tokens, hidden=256, experts=16, k=4, inner=64, shared=64, io="bf16", router="f32",
                 normalise=True, residual=False, given=False, ties=False, favour=None, gaps=(0, 0, 0), algo=MOE_AUTO,
                 overlap=0, scale=1.0, seed=0, e4m3=0, packed=None):
        randn = normal(seed)
        self.tokens, self.hidden, self.experts, self.k = tokens, hidden, experts, k
        self.inner, self.shared = inner, shared
        self.io, self.normalise, self.algo, self.overlap = io, normalise, algo, overlap
        dt = TYPES[io]
        self.x_buf, self.x = framed(tokens, hidden, gaps[0], io)
        self.x.copy_(scale * randn(tokens, hidden))
        self.y_buf, self.y = framed(tokens, hidden, gaps[1], io)
        self.residual = None
        if residual:
            self.residual_buf, self.residual = framed(tokens, hidden, gaps[2], io)
            self.residual.copy_(randn(tokens, hidden))
        scored = experts + (shared > 0)
        self.router = (randn(scored, hidden) * hidden ** -0.5).to(TYPES[router]).float()
        if favour is not None:
            self.x[:, 0] = 4.0
            self.router[favour, 0] = 100.0
        self.router_parts = parts_of(self.router)
        self.logits = None
        if ties:
            gen = torch.Generator(device=harness.device).manual_seed(seed)
            self.logits = torch.randint(0, 4, (tokens, scored), generator=gen, device=harness.device).float()
        elif given:
            self.logits = self.x.float() @ self.router.T
        self.stored, self.blocks = {}, {}
        self.packed = dict(zip(("gate_up", "down", "shared_gate_up", "shared_down"), packed or ()))
        exact = algo == MOE_FEW or (algo == MOE_AUTO and tokens <= MOE_FEW_TOKENS)

        def weight(name, *shape):
            if packed:
                self.blocks[name] = Blocks(self.packed[name], math.prod(shape[:-1]), shape[-1], shape[-1] ** -0.5, 8 * seed + len(self.blocks))
                return self.blocks[name].numbers().view(shape)
            if not e4m3:
                return (randn(*shape) * shape[-1] ** -0.5).to(dt)
            self.stored[name] = E4m3(math.prod(shape[:-1]), shape[-1], e4m3, shape[-1] ** -0.5, seed + len(self.stored))
            return (self.stored[name].exact() if exact else self.stored[name].numbers().to(dt)).view(shape)

        self.gate_up = weight("gate_up", experts, 2 * inner, hidden)
        self.down = weight("down", experts, hidden, inner)
        self.shared_gate_up = weight("shared_gate_up", 2 * shared, hidden) if shared else None
        self.shared_down = weight("shared_down", hidden, shared) if shared else None

    def pack(self, lib):
        """As the library does, into `stored`."""
        for name, blocks in self.blocks.items():
            room = torch.empty(blocks.bytes.numel() + 128, dtype=torch.uint8, device=harness.device)
            self.stored[name] = room[-room.data_ptr() % 128:]
            paired = {"gate_up": self.inner, "shared_gate_up": self.shared}.get(name, 0)
            p = fill(QuantizedPackParams, **{"from": blocks.bytes}, to=self.stored[name], type=PACKED[blocks.name],
                     outputs=blocks.outputs, inputs=blocks.bytes.shape[1] * INPUTS[blocks.name], paired=paired)
            assert launch(lambda: call(lib.gdn_quantized_pack, p)) == OK

    def fields(self, **changes):
        """The struct of a launch, without a workspace."""
        stride = lambda x: 0 if x is None else x.stride(0)
        given = dict(x=self.x, y=self.y, logits=self.logits, residual=self.residual, overlap=self.overlap, algo=self.algo)
        given.update(changes)
        x = given["x"]
        names = "gate_up", "down", "shared_gate_up", "shared_down"
        if self.packed:
            given.update({"quantized": 1, **{f"{name}_type": PACKED[self.packed[name]] for name in self.packed}, **self.stored})
            given.update({name: None for name in names if name not in self.stored})
        else:
            given.update({f"{name}_scales": weight.struct() for name, weight in self.stored.items()})
            given.update({name: self.stored[name].bytes if name in self.stored else getattr(self, name) for name in names})
        return fill(
            MoeParams, router=self.router_parts, router_parts=len(self.router_parts), x_stride=stride(x), y_stride=stride(given["y"]),
            logits_stride=stride(given["logits"]), residual_stride=stride(given["residual"]), tokens=x.shape[0],
            hidden=self.hidden, num_experts=self.experts, top_k=self.k, inner=self.inner, shared_inner=self.shared,
            io_dtype=CODES[self.io], normalise=int(self.normalise), **given)

    def params(self, lib):
        p = self.fields()
        workspace(lib.gdn_moe_workspace, p, device=harness.device)
        return p

    def run(self, lib, graph=False):
        """(status, the whole buffer of y, guard untouched)"""
        self.y_buf.fill_(math.nan)
        p = self.params(lib)
        status = launch(lambda: call(lib.gdn_moe, p), graph, replays=2)
        return status, self.y_buf.clone(), bool((p.room[p.workspace_bytes:] == 0xFF).all())


def check_case(lib, name, quiet=True, repeats=False, broken=(), **kw):
    """`broken`: tokens with a NaN in x; theirs must show it, and no other may."""
    case = Case(**kw)
    name = f"{case.io} {case.experts}/{case.k} {case.hidden}x{case.inner}+{case.shared} T={case.tokens} {name}"
    for token in broken:
        case.x[token, 3] = math.nan
    case.pack(lib)
    status, out, guard = case.run(lib)
    if refused(lib, name, status):
        return
    y = out[2:2 + case.tokens, :case.hidden].double()
    ref, sure = moe_reference(case)
    wrong = [] if guard else ["wrote past its workspace"]
    for token in broken:
        sure[token] = False
        if not bool(y[token].isnan().all()):
            wrong.append(f"token {token} hides its NaN")
    errors = ((y - ref).norm(dim=1) / ref.norm(dim=1))[sure]
    error = errors.max().item() if errors.numel() else 0.0
    if not only_inside(out, case.y):
        wrong.append("wrote outside of y")
    if not bool(errors.isfinite().all()):
        wrong.append("not finite")
    if repeats:
        for overlap, graph in (*WAYS, (-1, True)):
            case.overlap = overlap
            status, again, _ = case.run(lib, graph)
            if status != OK or not same(again, out):
                wrong.append(f"graph {graph} overlap {overlap}: status {status}, other bits")
    report(name, error <= BOUND[case.io] and not wrong,
           f"{error:.1e}, {int(sure.sum())} of {case.tokens} tokens {', '.join(wrong)}", quiet)


def check_quick(lib):
    for io in ("bf16", "f16"):
        for algo in (MOE_FEW, MOE_MANY):
            for tokens in (1, 3, 11):
                check_case(lib, f"algo {algo}", quiet=False, tokens=tokens, io=io, algo=algo)
        for tokens in (70, 200):
            check_case(lib, "prefill", quiet=False, tokens=tokens, io=io, residual=True)
        for tokens, algo in ((1, MOE_FEW), (50, MOE_FEW), (3, MOE_MANY)):
            check_case(lib, f"e4m3 algo {algo}", quiet=False, tokens=tokens, io=io, algo=algo, e4m3=32)
        for tokens, types in ((1, ("q4_K", "q6_K", "q8_0", "q8_0")), (3, ("q8_0", "q8_0", "q4_K", "q6_K")), (11, ("q6_K", "q4_K", "q6_K", "q4_K"))):
            check_case(lib, f"packed {types}", quiet=False, tokens=tokens, io=io, inner=256, shared=256, packed=types)


def check_cases(lib):
    seed = 0
    for io in ("bf16", "f16"):
        for tokens in (*range(1, 34), 40, 63, 64, 65, 100, 128, 129, 200, 257):
            algos = (MOE_FEW, MOE_MANY) if tokens <= MOE_FEW_TOKENS else (MOE_MANY,)
            for algo in algos:
                for experts, k, hidden, inner, shared in ((16, 4, 256, 64, 64), (8, 8, 128, 128, 0),
                                                          (60, 3, 320, 192, 64), (300, 10, 192, 64, 320),
                                                          (1, 1, 64, 64, 64)):
                    seed += 1
                    check_case(lib, f"algo {algo}", tokens=tokens, hidden=hidden, experts=experts, k=k, inner=inner,
                               shared=shared, io=io, router=("f32", "bf16")[seed % 2], normalise=seed % 3 != 0,
                               residual=seed % 4 == 0, given=seed % 7 == 0, algo=algo,
                               gaps=(8 * (seed % 3), seed % 4, seed % 2), seed=seed)
        for experts, k, router in ((16, 4, "f32"), (300, 10, "bf16")):    # several tokens a warp of choose_kernel
            seed += 1
            check_case(lib, "many blocks", tokens=4100, experts=experts, k=k, io=io, router=router, residual=True, seed=seed)
        for tokens in (1, 2, 7, 8, 9, 32, 33, 64, 150):
            for algo in (MOE_FEW, MOE_MANY) if tokens <= MOE_FEW_TOKENS else (MOE_MANY,):
                for kw in ({"ties": True}, {"ties": True, "experts": 33, "k": 16}, {"favour": 5},
                           {"favour": 15, "k": 1}, {"experts": 1000, "k": 16, "hidden": 64},
                           {"experts": 512, "k": 10, "shared": 0}, {"hidden": 2112, "inner": 64}, {"hidden": 4096},
                           {"hidden": 2048, "inner": 512, "shared": 512}, {"inner": 320, "shared": 576},
                           {"given": True}, {"scale": 20.0}):
                    seed += 1
                    check_case(lib, f"algo {algo} {kw}", tokens=tokens, io=io, algo=algo, seed=seed, **kw)
                for broken in ((0,), (tokens - 1,), tuple(range(tokens))):
                    check_case(lib, f"algo {algo} NaN in {len(broken)}", tokens=tokens, io=io, algo=algo, broken=broken,
                               seed=seed)
                check_case(lib, f"algo {algo} NaN, shared", tokens=tokens, io=io, algo=algo, broken=(tokens // 2,),
                           shared=128, normalise=False, seed=seed)


def check_e4m3(lib):
    seed = 0
    for io in ("bf16", "f16"):
        for tokens in (*range(1, 18), 31, 32, 33, 64, 100, 129, 257):
            for algo in (MOE_FEW, MOE_MANY) if tokens <= MOE_FEW_TOKENS else (MOE_MANY,):
                for experts, k, hidden, inner, shared in ((16, 4, 256, 64, 64), (8, 8, 128, 128, 0), (60, 3, 320, 192, 64),
                                                          (300, 10, 192, 64, 320), (8, 2, 2112, 64, 64)):
                    seed += 1
                    check_case(lib, f"algo {algo} e4m3", tokens=tokens, hidden=hidden, experts=experts, k=k, inner=inner,
                               shared=shared, io=io, residual=seed % 4 == 0, given=seed % 7 == 0, algo=algo,
                               gaps=(8 * (seed % 3), seed % 4, seed % 2), seed=seed, e4m3=(128, 64, 16, 1)[seed % 4])
    for tokens in (1, 2, 8, 32, 33, 512):
        check_case(lib, "model e4m3", quiet=False, repeats=True, tokens=tokens, hidden=2048, experts=512, k=10, inner=512,
                   shared=512, seed=tokens, e4m3=128)
        torch.cuda.empty_cache()
    case = Case(4, e4m3=64)
    expect("moe in e4m3", lib.gdn_moe, lambda: case.params(lib), {
        "NULL_POINTER": one_by_one(gate_up_scales__ptr=[None], down_scales__ptr=[None], shared_gate_up_scales__ptr=[None],
                                   shared_down_scales__ptr=[None]),
        "BAD_ALGO": one_by_one(down_scales__rows=[0, 48]), "BAD_STRIDE": one_by_one(down_scales__stride=[-1])})


PACKED_TYPES = (("q4_K",) * 4, ("q8_0",) * 4, ("q6_K",) * 4, ("q4_K", "q6_K", "q8_0", "q8_0"), ("q8_0", "q4_K", "q4_K", "q6_K"))


def check_packed(lib):
    seed = 0
    for io in ("bf16", "f16"):
        for tokens in range(1, MOE_PACKED_TOKENS + 1):
            for experts, k, hidden, inner, shared in ((16, 4, 256, 256, 256), (8, 8, 512, 512, 0), (60, 3, 1280, 256, 512),
                                                      (300, 10, 256, 768, 256), (1, 1, 256, 256, 1280), (8, 2, 4096, 256, 256)):
                seed += 1
                check_case(lib, f"packed {seed % 5}", tokens=tokens, hidden=hidden, experts=experts, k=k, inner=inner,
                           shared=shared, io=io, residual=seed % 4 == 0, given=seed % 7 == 0, gaps=(8 * (seed % 3), seed % 4, seed % 2),
                           normalise=seed % 3 != 0, repeats=seed % 4 == 0, seed=seed, packed=PACKED_TYPES[seed % 5])
            for kw in ({"favour": 5}, {"ties": True}, {"broken": (0,)}, {"broken": (tokens - 1,), "shared": 512}):
                seed += 1
                check_case(lib, f"packed {seed % 5} {kw}", tokens=tokens, inner=256, io=io, seed=seed, packed=PACKED_TYPES[seed % 5],
                           **{"shared": 256, **kw})
    for inner, shared in ((128, 128), (384, 128)):    # of q8_0 alone
        check_case(lib, "packed", tokens=5, hidden=384, inner=inner, shared=shared, packed=("q8_0",) * 4)
    for tokens in (1, 2, 8, 16):
        check_case(lib, "model packed", quiet=False, repeats=True, tokens=tokens, hidden=2048, experts=256, k=8, inner=512,
                   shared=512, seed=tokens, packed=PACKED_TYPES[3])
        torch.cuda.empty_cache()
    case = Case(4, inner=256, shared=256, packed=PACKED_TYPES[3])
    case.pack(lib)
    expect("moe packed", lib.gdn_moe, lambda: case.params(lib), {
        "BAD_DTYPE": one_by_one(gate_up_type=[-1, 3], down_type=[3], shared_gate_up_type=[-1], shared_down_type=[7]),
        "NULL_POINTER": one_by_one(gate_up=[None], shared_down=[None]),
        "BAD_ALGO": one_by_one(algo=[MOE_MANY], tokens=[MOE_PACKED_TOKENS + 1], hidden=[128, MOE_PACKED_INPUTS // 2], inner=[128],
                               down=[case.stored["down"].data_ptr() + 16], gate_up_scales__ptr=[case.x.data_ptr()])})


def check_models(lib):
    """The shapes that matter, and that every launch gives the same bits."""
    for experts, k in ((256, 8), (512, 10)):
        for i, tokens in enumerate((1, 2, 4, 8, 16, 31, 32, 33, 64, 65, 96, 512, 2048)):
            check_case(lib, "model", quiet=False, repeats=True, tokens=tokens, hidden=2048, experts=experts, k=k,
                       inner=512, shared=512, router=("bf16", "f32")[i % 2], residual=tokens % 4 == 0, seed=tokens)
            torch.cuda.empty_cache()


def check_chain(lib, tokens, layers=4):
    """As the layers of a model, with one workspace."""
    cases = [Case(tokens, 512, 64, 6, 128, 128, residual=True, router="bf16", seed=i) for i in range(layers)]
    room = cases[0].params(lib)

    def link(i, x, y, overlap):
        p = cases[i % layers].fields(x=x, residual=x, y=y, overlap=overlap)
        p.workspace, p.workspace_bytes = room.workspace, room.workspace_bytes
        return call(lib.gdn_moe, p)

    # Small: SwiGLU grows with the square, and 24 of them must stay finite.
    chain_repeats(f"chain T={tokens}", link, cases[0].x * 0.02, reference_overlap=-1)


def check_arguments(lib):
    case = Case(4)
    expect("moe", lib.gdn_moe, lambda: case.params(lib), {
        "NULL_POINTER": one_by_one(x=[None], router=[None], gate_up=[None], down=[None], shared_gate_up=[None],
                                   shared_down=[None], y=[None]),
        "BAD_DTYPE": one_by_one(io_dtype=[0, 7]),
        "BAD_LENGTH": one_by_one(tokens=[-1, 1 << 30], hidden=[0], num_experts=[0, MOE_EXPERTS + 1, 3], inner=[0],
                                 top_k=[0, MOE_TOP_K + 1], shared_inner=[-64], router_parts=[0, 4]) + [dict(top_k=17, num_experts=16)],
        "BAD_ALGO": one_by_one(hidden=[96], inner=[40], shared_inner=[32], x=[case.x.data_ptr() + 2], x_stride=[260],
                               gate_up=[case.gate_up.data_ptr() + 8], algo=[3, -1]) + [
                                   dict(algo=MOE_FEW, tokens=MOE_FEW_TOKENS + 1)],
        "BAD_STRIDE": one_by_one(x_stride=[-8], y_stride=[-1]),
        "BAD_WORKSPACE": one_by_one(workspace=[None], workspace_bytes=[64]),
        "OK": [dict(tokens=0, x=None)]})
    size = C.c_int64(-1)
    report("null parameters", lib.gdn_moe(None, stream()) == NULL_POINTER
           and lib.gdn_moe_workspace(None, C.byref(size)) == NULL_POINTER, quiet=True)


# ---- times ----

SHAPES = {"Qwen3.5-35B-A3B: 256 experts, top 8": (256, 8, 2048, 512, 512),
          "Qwen3-Next-80B: 512 experts, top 10": (512, 10, 2048, 512, 512)}
FEW_TOKENS = (1, 2, 4, 8, 16, 32)
MANY_TOKENS = (64, 128, 512, 2048, 8192)


class Layer(Case):
    """Weights of one layer. Of two layers the second call in a row finds nothing of its experts in the L2 cache."""

    def __init__(self, experts, k, hidden, inner, shared, e4m3=0, packed=None):
        super().__init__(1, hidden, experts, k, inner, shared, e4m3=e4m3, router="bf16", packed=packed)
        if e4m3 or packed:
            self.gate_up = self.down = None    # not in float64 beside

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
        return used, self.hidden * (2 * (self.experts + 1) + pair(used * self.inner, "gate_up", "down") +
                                    pair(self.shared, "shared_gate_up", "shared_down"))

    def flops(self, tokens):
        return 6 * tokens * self.hidden * (self.k * self.inner + self.shared)

    def torch_bmm(self, x):
        """The weights of each token's experts gathered, then batched products: what a graph can capture."""
        chosen, weights, shared_gate = self.choice(x)
        gate, up = torch.einsum("th,tkih->tki", x, self.gate_up[chosen]).chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up
        y = (torch.einsum("tki,tkhi->tkh", h, self.down[chosen]).float() * weights[..., None]).sum(1)
        return (y + shared_gate * self.torch_shared(x).float()).to(x.dtype)

    def torch_shared(self, x):
        gate, up = (x @ self.shared_gate_up.T).chunk(2, 1)
        return (torch.nn.functional.silu(gate) * up) @ self.shared_down.T

    def torch_loop(self, x):
        """Each expert over its tokens; asks the host which have any."""
        chosen, weights, gate = self.choice(x)
        y = torch.zeros_like(x, dtype=torch.float32)
        for e in chosen.unique().tolist():
            token, choice = (chosen == e).nonzero(as_tuple=True)
            g, up = (x[token] @ self.gate_up[e].T).chunk(2, 1)
            out = (torch.nn.functional.silu(g) * up) @ self.down[e].T
            y.index_add_(0, token, out.float() * weights[token, choice, None])
        return (y + gate * self.torch_shared(x).float()).to(x.dtype)


def calls(lib, layers, xs, overlap=0, algo=MOE_AUTO):
    """A call for each x, by turns on the layers; they share a workspace, as the layers of a model do. And its bytes."""
    y = torch.empty_like(xs[0])
    params = [layers[i % 2].fields(x=x, y=y, overlap=overlap, algo=algo) for i, x in enumerate(xs)]
    workspace(lib.gdn_moe_workspace, *params)
    return calls_of(lib, [(lib.gdn_moe, p) for p in params]), params[0].workspace_bytes


def by_kernel(calls):
    """The short name and the median us of each kernel of these calls (CUPTI), in words."""
    go = lambda: [call() for call in calls]
    go()
    times = {}
    for e in device_events(go):
        if "_kernel" in e.name:
            name = e.name.split("_kernel")[0].split("::")[-1].split(" ")[-1]
            if name in ("many", "wide"):
                name += " down" if "false" in e.name or "(bool)0" in e.name else " gate_up"
            times.setdefault(name, []).append(e.time_range.elapsed_us())
    return ", ".join(f"{name} {statistics.median(t):.1f}" for name, t in times.items())


def or_dash(f):
    """A time, where torch has the memory and the operation for it."""
    try:
        return f"{f():.1f}"
    except Exception as e:    # noqa: BLE001 - out of memory comes as several classes
        torch.cuda.empty_cache()
        return "-" if "memory" in str(e) else f"- ({type(e).__name__})"


def times(lib, args):
    rate = heading("bf16, cold L2. us a call: CUPTI without overlap (-1); in a graph without; in a graph, its own "
                   "kernels overlapping (0); and with the call before it (1)")
    for name, sizes in SHAPES.items():
        layers = [Layer(*sizes) for _ in range(2)]
        times_few(lib, name, layers, rate)
        times_many(lib, name, layers, rate)
        del layers
        torch.cuda.empty_cache()
    for name, sizes in SHAPES.items():
        times_packed(lib, name, sizes, rate)


def times_packed(lib, name, sizes, rate):
    print(f"\n{name}, packed: gate_up, down, shared gate_up, shared down\n| types | tokens | experts | MB | floor | CUPTI | graph, none | "
          "graph | overlapped | of copy | each kernel, alone |")
    print("|---" * 11 + "|")
    for types in PACKED_TYPES[:4]:
        layers = [Layer(*sizes, packed=types) for _ in range(2)]
        for layer in layers:
            layer.pack(lib)
            layer.blocks.clear()
        for tokens in (1, 2, 4, 8, 16):
            xs = [bf16(tokens, layers[0].hidden) for _ in range(24)]
            facts = [layers[i % 2].bytes(x) for i, x in enumerate(xs)]
            used, nbytes = (statistics.mean(f[i] for f in facts) for i in range(2))
            floor = nbytes / rate * 1e6
            alone, _ = calls(lib, layers, xs, -1)
            cupti, plain = span_us(alone), graph_us(alone)
            own, over = (graph_us(calls(lib, layers, xs, overlap)[0]) for overlap in (0, 1))
            print(f"| {' '.join(types)} | {tokens} | {used:.0f} | {nbytes / 1e6:.1f} | {floor:.1f} | {cupti:.1f} | {plain:.1f} | {own:.1f} | "
                  f"{over:.1f} | {100 * floor / over:.0f} % | {by_kernel(alone)} |", flush=True)
        del layers
        torch.cuda.empty_cache()


def times_few(lib, name, layers, rate):
    print(f"\n{name}\n| tokens | experts | MB | floor | CUPTI | graph, none | graph | overlapped | of copy | many | "
          "torch bmm, graph | each kernel, alone |")
    print("|---" * 12 + "|")
    for tokens in FEW_TOKENS:
        xs = [bf16(tokens, layers[0].hidden) for _ in range(24)]
        facts = [layers[i % 2].bytes(x) for i, x in enumerate(xs)]
        used, nbytes = (statistics.mean(f[i] for f in facts) for i in range(2))
        floor = nbytes / rate * 1e6
        alone, _ = calls(lib, layers, xs, -1)
        cupti, plain = span_us(alone), graph_us(alone)
        own, over = (graph_us(calls(lib, layers, xs, overlap)[0]) for overlap in (0, 1))
        many = graph_us(calls(lib, layers, xs, 1, MOE_MANY)[0])
        theirs = or_dash(lambda: graph_us([lambda x=x, i=i: layers[i % 2].torch_bmm(x) for i, x in enumerate(xs[:6])], 3))
        print(f"| {tokens} | {used:.0f} | {nbytes / 1e6:.1f} | {floor:.1f} | {cupti:.1f} | {plain:.1f} | {own:.1f} | "
              f"{over:.1f} | {100 * floor / over:.0f} % | {many:.1f} | {theirs} | {by_kernel(alone)} |", flush=True)


def times_many(lib, name, layers, rate):
    print(f"\n{name}, many tokens\n"
          "| tokens | floor: weights | CUPTI | graph | overlapped | TFLOP/s | workspace, MB | torch's loop, CUPTI | "
          "each kernel, alone |")
    print("|---" * 9 + "|")
    for tokens in MANY_TOKENS:
        xs = [bf16(tokens, layers[0].hidden) for _ in range(4)]
        floor = statistics.mean(layers[i % 2].bytes(x)[1] for i, x in enumerate(xs)) / rate * 1e6
        alone, size = calls(lib, layers, xs, -1)
        cupti, graph = span_us(alone * 2), graph_us(alone)
        over = graph_us(calls(lib, layers, xs, 1)[0])
        busy = lambda i, x: sum(t for _, t in device_activities(lambda: layers[i % 2].torch_loop(x)))
        loop = or_dash(lambda: statistics.median(busy(i, x) for i, x in enumerate(xs[:2] * 2)))
        print(f"| {tokens} | {floor:.0f} | {cupti:.0f} | {graph:.0f} | {over:.0f} | "
              f"{layers[0].flops(tokens) / over / 1e6:.0f} | {size / 1e6:.0f} | {loop} | {by_kernel(alone)} |", flush=True)


def self_test():
    """The reference against all experts of every token, those that were not chosen with a weight of zero; runs anywhere."""
    torch.manual_seed(0)

    def expert(x, gate_up, down):
        gate, up = (x @ gate_up.double().T).chunk(2, 1)
        return (gate / (1 + (-gate).exp()) * up) @ down.double().T

    for kw in ({}, {"ties": True}, {"favour": 2}, {"shared": 0, "normalise": False}, {"gaps": (8, 3, 1), "residual": True}):
        case = Case(5, 64, 6, 2, 64, **{"shared": 64, **kw})
        x = case.x.double()
        logits = case.logits.double() if case.logits is not None else x @ case.router.double().T
        weights = torch.zeros(5, 6, dtype=torch.float64)
        for t in range(5):
            chosen = sorted(range(6), key=lambda e: (-logits[t, e].item(), e))[:2]
            p = logits[t, :6].exp() / logits[t, :6].exp().sum()
            weights[t, chosen] = p[chosen] / (p[chosen].sum() if case.normalise else 1.0)
        want = sum(weights[:, e, None] * expert(x, case.gate_up[e], case.down[e]) for e in range(6))
        if case.residual is not None:
            want += case.residual.double()
        if case.shared:
            want += expert(x, case.shared_gate_up, case.shared_down) / (1 + (-logits[:, 6:]).exp())
        y, sure = moe_reference(case)
        assert sure.all() and (y - want).abs().max() < 1e-9, kw
        assert "favour" not in kw or weights[:, 2].all()


def check(lib, args):
    check_quick(lib)
    if not args.quick:
        check_cases(lib)
        check_e4m3(lib)
        check_packed(lib)
        check_models(lib)
        for tokens in (1, 2, 8, 32, 64, 100):
            check_chain(lib, tokens)
        check_arguments(lib)


def main():
    harness.program(__doc__, check, times, models=True, self_test=self_test)


if __name__ == "__main__":
    main()
