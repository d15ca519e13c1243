"""A mixture of experts for check_moe.py: its definition in float64, a case, and its launches."""
import math
import os

import reference
import torch
from abi import CODES, MOE_AUTO, MOE_FEW, MOE_FEW_TOKENS, MoeParams, QuantizedPackParams, fill, workspace
from e4m3 import E4m3
from ggml import BYTES, INPUTS, NAMES as PACKED, Blocks, packed_room
from harness import TYPES, Frame, call, launch, normal, u32

WEIGHTS = "gate_up", "down", "shared_gate_up", "shared_down"


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


TILES_OF_32_ROWS = 102400       # bytes of shared memory; where there are fewer, tiles have 64 rows
SUMS_OF_A_TOKEN = 16 * 20 * 4   # in down_kernel, of 16 warps
SUMS_OF_TWO_ITEMS = 81920       # in stream_gate_up_kernel


def takes_exact_numbers(c):
    """Whether the kernels take weights in e4m3 as they are: for few tokens, and for few rows of each expert, where shared memory has room."""
    room = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    room = min(room, int(os.environ.get("CANDLE_GDN_CUDA_SHARED_LIMIT", room)))
    of_few = SUMS_OF_A_TOKEN * c.tokens + 16 * (1 + c.tokens * (c.k + (c.shared > 0)))
    if c.algo == MOE_FEW or (c.algo == MOE_AUTO and c.tokens <= MOE_FEW_TOKENS and of_few <= room):
        return True
    rows_of = lambda inputs: 32 * (2 * inputs + 16)
    of_stream = max(rows_of(c.hidden) + SUMS_OF_TWO_ITEMS, rows_of(max(c.inner, c.shared)), TILES_OF_32_ROWS)
    return c.tokens * c.k // c.experts <= 20 and of_stream <= room


class Case:
    """`favour`: an expert that all tokens take. `ties`: a router of few distinct rows, whose logits are equal. `e4m3`: rows of a block of
    the weights' scales. `packed`: the ggml types of WEIGHTS; pack() packs them. `broken`: tokens with a NaN in x."""

    def __init__(self, tokens, hidden=256, experts=16, k=4, inner=64, shared=64, io="bf16", router="f32", normalise=True, ties=False,
                 favour=None, gaps=(0, 0), algo=MOE_AUTO, overlap=0, scale=1.0, seed=0, e4m3=0, packed=None, broken=()):
        randn = normal(seed)
        self.tokens, self.hidden, self.experts, self.k = tokens, hidden, experts, k
        self.inner, self.shared = inner, shared
        self.io, self.normalise, self.algo, self.overlap = io, normalise, algo, overlap
        self.x, self.y = Frame(tokens, hidden, io, gaps[0], values=scale * randn(tokens, hidden)), Frame(tokens, hidden, io, gaps[1])
        scored = experts + (shared > 0)
        # Logits are of `distinct` rows; each expert has one of them.
        self.distinct = (randn(4 if ties else scored, hidden) * hidden ** -0.5).to(TYPES[router]).float()
        self.row = u32([(5 * i + i // 3) % 4 if ties else i for i in range(scored)]).long()
        if favour is not None:
            self.x.view[:, 0] = 4.0
            self.distinct[favour, 0] = 100.0
        for token in broken:
            self.x.view[token, 3] = math.nan
        self.router = self.distinct[self.row]
        self.router_parts = parts_of(self.router)
        self.stored, self.blocks = {}, {}
        self.packed = dict(zip(WEIGHTS, packed or ()))
        exact = takes_exact_numbers(self) if e4m3 else None

        def weight(name, *shape):
            if packed:
                self.blocks[name] = Blocks(self.packed[name], math.prod(shape[:-1]), shape[-1], shape[-1] ** -0.5, 8 * seed + len(self.blocks))
                return self.blocks[name].numbers().view(shape)
            if not e4m3:
                return (randn(*shape) * shape[-1] ** -0.5).to(TYPES[io])
            self.stored[name] = E4m3(math.prod(shape[:-1]), shape[-1], e4m3, shape[-1] ** -0.5, seed + len(self.stored))
            return (self.stored[name].exact() if exact else self.stored[name].numbers().to(TYPES[io])).view(shape)

        self.gate_up = weight("gate_up", experts, 2 * inner, hidden)
        self.down = weight("down", experts, hidden, inner)
        self.shared_gate_up = weight("shared_gate_up", 2 * shared, hidden) if shared else None
        self.shared_down = weight("shared_down", hidden, shared) if shared else None

    def reference(self):
        """y in float64, and the tokens whose choice is not a matter of rounding."""
        x, n = self.x.view.double(), self.experts
        # Random numbers in q4_K have a mean, which makes more of that rounding than of any other.
        rounded = TYPES[self.io] if self.packed else None
        logits = (x @ self.distinct.double().T)[:, self.row]
        experts, weights, gap = route(logits[:, :n], self.k, self.normalise)
        y = torch.zeros_like(x)
        for e in experts.unique().tolist():
            token, choice = (experts == e).nonzero(as_tuple=True)
            y.index_add_(0, token, weights[token, choice, None] * mlp(x[token], self.gate_up[e], self.down[e], rounded))
        if self.shared:
            y = y + torch.sigmoid(logits[:, n:]) * mlp(x, self.shared_gate_up, self.shared_down, rounded)
        return y, (gap == 0) | (gap > 2e-6 * (1 + logits[:, :n].abs().amax(1)))

    def pack(self, lib):
        """As the library does, into `stored`."""
        for name, blocks in self.blocks.items():
            self.stored[name] = packed_room(blocks.bytes.numel())
            paired = {"gate_up": self.inner, "shared_gate_up": self.shared}.get(name, 0)
            p = fill(QuantizedPackParams, **{"from": blocks.bytes}, to=self.stored[name], type=PACKED[blocks.name],
                     outputs=blocks.outputs, inputs=blocks.inputs, paired=paired)
            assert not launch(lambda: call(lib.gdn_quantized_pack, p))

    def nbytes(self):
        """What a launch has to read: the router, the chosen experts once, the shared one."""
        used = min(self.experts, self.tokens * self.k)      # as if no two tokens had an expert in common
        number = lambda name: BYTES[self.packed[name]] / INPUTS[self.packed[name]] if self.packed else 1 if self.stored else 2
        pair = lambda count, gate_up, down: count * (2 * number(gate_up) + number(down))
        return self.hidden * (2 * (self.experts + 1) + pair(used * self.inner, *WEIGHTS[:2]) + pair(self.shared, *WEIGHTS[2:]))

    def fields(self, **changes):
        """The struct of a launch, without a workspace."""
        given = dict(x=self.x.view, y=self.y.view, overlap=self.overlap, algo=self.algo)
        given.update(changes)
        if self.packed:
            given.update({"quantized": 1, **{f"{name}_type": PACKED[self.packed[name]] for name in self.packed}, **self.stored})
        else:
            given.update({f"{name}_scales": weight.struct() for name, weight in self.stored.items()})
            given.update({name: self.stored[name].bytes if name in self.stored else getattr(self, name) for name in WEIGHTS})
        x, y = given["x"], given["y"]
        return fill(
            MoeParams, router=self.router_parts, router_parts=len(self.router_parts), x_stride=x.stride(0), y_stride=y.stride(0),
            tokens=x.shape[0], hidden=self.hidden, num_experts=self.experts, top_k=self.k, inner=self.inner, shared_inner=self.shared,
            io_dtype=CODES[self.io], normalise=int(self.normalise), **given)

    def params(self, lib):
        p = self.fields()
        workspace(lib.gdn_moe_workspace, p)
        return p
