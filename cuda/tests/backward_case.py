"""Cases of the backward pass: inputs, gradients by torch's autograd in float64, and launches.

Whatever a launch must not read holds NaN, whatever it writes held NaN before, and all else is compared bit by bit.
"""
import ctypes as C
import json
import struct
from itertools import accumulate

import reference
import torch
from abi import (AUTO, CHUNKED_SM80, CODES, GATES_READY, ConvBackwardParams, NormBackwardParams, ReadyGatesBackwardParams, ReadyGatesParams,
                 RuleBackwardParams, columns, fill, heads, rule_params, sequences, slots, workspace)
from harness import TYPES, Frame, Launch, Output, cu_seqlens, normal
from rule_case import shorter, uniform

EXACT = 1e-5
BOUND = {"f32": EXACT, "bf16": 6e-3, "f16": 1e-3}     # of what is stored in this type
# By `odd`: columns after each row and elements before it. False: rows are aligned to 16 bytes, True: to nothing, None, for times: to 128.
GAPS = {False: (8, 8), True: (3, 1), None: (0, 0)}


def gradients(outputs, leaves):
    """Of sum(output * gradient) by the leaves: zeros where nothing depends on one."""
    loss = sum((x * g.double()).sum() for x, g in outputs)
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found)]


def leaf(x):
    return x.detach().double().clone().requires_grad_()


class Spots:
    """Where the tokens of sequences of these lengths are: packed, or, all being of one length, `between` rows apart."""

    def __init__(self, lens, packed=None, between=0):
        self.lens, self.packed = lens, len(set(lens)) > 1 if packed is None else packed
        between = 0 if self.packed else between
        self.first = [start for start in accumulate([0] + [n + between for n in lens[:-1]])]
        self.rows = sum(lens) + between * len(lens)
        self.per_seq = 0 if self.packed else max(lens) + between
        self.seqs = sequences(lens, cu_seqlens(lens) if self.packed else None)

    def of(self, i):
        return slice(self.first[i], self.first[i] + self.lens[i])

    def tokens(self):
        return torch.tensor([r for i in range(len(self.lens)) for r in range(self.first[i], self.first[i] + self.lens[i])], dtype=torch.long)

    def frame(self, width, dtype, odd=False, values=None):
        """A Frame whose rows of tokens hold `values`, drawn for all tokens in a row; all others are NaN."""
        frame = Frame(self.rows, width, dtype, *GAPS[odd])
        if values is not None:
            frame.view[self.tokens()] = values.to(frame.view.dtype)
        return frame

    def heads(self, frame, first=0, head_stride=0):
        return columns(frame.view, first, head_stride, self.per_seq)

    def output(self, name, frame, want, bound, first=0):
        """The columns from `first` on of the tokens' rows; `want` [tokens, width]."""
        shift = frame.index[1].start
        index = torch.zeros_like(frame.buffer, dtype=torch.bool)
        index[2 + self.tokens(), shift + first:shift + first + want.shape[1]] = True
        return Output(name, frame.buffer, index, want, bound)


# ---- gates ----

def ready_gates(lib, backward=True, tokens=7, seqs=1, hv=5, gate="bf16", beta_scale=1.0, decay=0.0, seed=0):
    randn, spots = normal(seed), Spots([tokens] * seqs, packed=False, between=1)
    n, given = tokens * seqs, (spots.frame(2 * hv, gate, values=3 * randn(tokens * seqs, 2 * hv)))
    a_log, dt_bias = randn(hv) + decay, randn(hv) - 2
    a, b = (x.double() for x in given.view[spots.tokens()].split(hv, 1))
    leaves = [leaf(x) for x in (a, b, a_log, dt_bias)]
    g, beta = reference.log_decay(leaves[0], leaves[2], leaves[3]), beta_scale * torch.sigmoid(leaves[1])
    made = spots.frame(2 * hv, "f32")
    at = lambda frame, first: spots.heads(frame, first, 1)
    fields = dict(a=at(given, 0), b=at(given, hv), a_log=a_log, dt_bias=dt_bias, num_seqs=seqs, tokens_per_seq=tokens, heads=hv,
                  gate_dtype=CODES[gate], beta_scale=beta_scale)
    forward = fill(ReadyGatesParams, log_decay=at(made, 0), beta=at(made, hv), **fields)
    if not backward:
        want = torch.cat([g, beta], 1).detach()
        return Launch(lib.gdn_ready_gates, forward, lambda: [spots.output("gates", made, want, EXACT)], keep=(made, given), nbytes=n * hv * 12)
    upstream, to, of_heads = spots.frame(2 * hv, "f32", values=randn(n, 2 * hv)), spots.frame(2 * hv, gate), [torch.full((hv,), float("nan")) for _ in "ab"]
    dg, dbeta = upstream.view[spots.tokens()].split(hv, 1)
    want = gradients([(g, dg), (beta, dbeta)], leaves)
    p = fill(ReadyGatesBackwardParams, gates=fill(ReadyGatesParams, **fields), d_log_decay=at(upstream, 0), d_beta=at(upstream, hv), d_a=at(to, 0),
             d_b=at(to, hv), d_a_log=of_heads[0], d_dt_bias=of_heads[1])
    workspace(lib.gdn_ready_gates_backward_workspace, p)
    outputs = lambda: [spots.output("da db", to, torch.cat(want[:2], 1), BOUND[gate]),
                       *(Output(name, x, slice(None), y, EXACT) for name, x, y in zip(("dA_log", "ddt_bias"), of_heads, want[2:]))]
    return Launch(lib.gdn_ready_gates_backward, p, outputs, keep=(given, upstream, to, of_heads), nbytes=n * hv * 16)


# ---- convolution ----

class Conv:
    def __init__(self, lens, channels, width, io="bf16", w_dtype="f32", silu=True, odd=False, packed=None, state=True, timed=False, seed=0):
        randn, self.spots = normal(seed), Spots(lens, packed, between=2)
        self.lens, self.channels, self.width, self.io, self.silu, self.odd = lens, channels, width, io, silu, odd
        total = sum(lens)
        self.x, self.dy = (self.spots.frame(channels, io, odd, randn(total, channels)) for _ in range(2))
        self.weight = randn(channels, width).to(TYPES[w_dtype])
        self.state = randn(len(lens), width - 1, channels).to(TYPES[io]) if state else None
        self.w_dtype, self.timed = w_dtype, timed

    def reference(self):
        """dx [tokens, channels], dweight, dstate."""
        tokens = lambda frame: [leaf(frame.view[self.spots.of(i)]) for i in range(len(self.lens))]
        xs, weight = tokens(self.x), leaf(self.weight)
        state = leaf(self.state if self.state is not None else torch.zeros(len(self.lens), self.width - 1, self.channels))
        ys = [reference.conv(state[i], x, weight, self.silu)[0] for i, x in enumerate(xs)]
        *dx, dw, ds = gradients(list(zip(ys, tokens(self.dy))), [*xs, weight, state])
        return torch.cat(dx), dw, ds

    def launch(self, lib):
        spots, n = self.spots, len(self.lens)
        self.dx = spots.frame(self.channels, self.io, self.odd)
        self.dw, self.ds = torch.full((self.channels, self.width), float("nan")), torch.full((n, self.width - 1, self.channels), float("nan"), dtype=TYPES[self.io])
        p = fill(ConvBackwardParams, x=spots.heads(self.x), d_y=spots.heads(self.dy), d_x=spots.heads(self.dx), weight=self.weight, state_in=self.state,
                 d_weight=self.dw, d_state_in=self.ds, seqs=spots.seqs, channels=self.channels, width=self.width, io_dtype=CODES[self.io],
                 weight_dtype=CODES[self.w_dtype], silu=int(self.silu))
        workspace(lib.gdn_conv_backward_workspace, p)

        def outputs():
            dx, dw, ds = self.reference()
            return [spots.output("dx", self.dx, dx, BOUND[self.io]), Output("dweight", self.dw, slice(None), dw, EXACT),
                    Output("dstate", self.ds, slice(None), ds, BOUND[self.io])]
        return Launch(lib.gdn_conv_backward, p, outputs, keep=self, nbytes=3 * sum(self.lens) * self.channels * self.x.buffer.element_size())


def conv(lib, **case):
    return Conv(**case).launch(lib)


# ---- gated norm ----

def norm(lib, tokens, hv, dim, io="bf16", w_dtype="f32", sigmoid=False, odd=False, in_place=False, seed=0):
    randn, width = normal(seed), hv * dim
    x, z, dy = (Frame(tokens, width, io, *GAPS[odd], randn(tokens, width) * size) for size in (2.0, 2.0, 1.0))
    weight, split = randn(dim).to(TYPES[w_dtype]), lambda frame: frame.view.unflatten(1, (hv, dim))
    dx, dz = (dy, z) if in_place else (Frame(tokens, width, io, *GAPS[odd]) for _ in range(2))
    dw = torch.full((dim,), float("nan"))
    p = fill(NormBackwardParams, x=heads(split(x)), z=heads(split(z)), d_out=heads(split(dy)), d_x=heads(split(dx)), d_z=heads(split(dz)), weight=weight,
             d_weight=dw, tokens=tokens, heads=hv, head_v=dim, io_dtype=CODES[io], weight_dtype=CODES[w_dtype], sigmoid=int(sigmoid), eps=1e-6)
    workspace(lib.gdn_norm_backward_workspace, p)

    def outputs():
        leaves = [leaf(split(x)), leaf(split(z)), leaf(weight)]
        want = gradients([(reference.gated_norm(*leaves, sigmoid), split(dy))], leaves)
        return [Output("dx", dx.buffer, dx.index, want[0].flatten(1), BOUND[io]), Output("dz", dz.buffer, dz.index, want[1].flatten(1), BOUND[io]),
                Output("dweight", dw, slice(None), want[2], EXACT)]
    return Launch(lib.gdn_norm_backward, p, outputs, keep=(x, z, dy), nbytes=5 * tokens * width * x.buffer.element_size())


# ---- the rule ----

DECAYS = {"none": (0.0, 0.0), "weak": (0.1, 0.0), "usual": (1.0, 0.0), "fast": (4.0, 0.0), "strong": (16.0, 0.0), "thirty": (0.0, 30.0)}


class Rule:
    """`decay`: g is drawn between 0 and minus the first number, minus the second one; "mixed": a seventh of the tokens forget all."""

    def __init__(self, lens, hk=2, hv=4, k=128, v=128, io="bf16", decay="usual", keys="random", beta_scale=1.0, l2norm=True, packed=None, odd=False,
                 state=True, d_state=True, segments=0, recompute=False, scale=None, l2_eps=1e-6, seed=0):
        randn, rand, self.spots = normal(seed), uniform(seed + 1), Spots(lens, packed, between=1)
        self.lens, self.hk, self.hv, self.k, self.v, self.io, self.l2norm = lens, hk, hv, k, v, io, l2norm
        self.odd, self.segments, self.recompute, total, n = odd, segments, recompute, sum(lens), len(lens)
        self.scale, self.l2_eps = k ** -0.5 if scale is None else scale, l2_eps
        q, key, value = randn(total, hk, k), randn(total, hk, k), randn(total, hv, v)
        if keys == "repeated" and total:
            key[:] = key[0]
        elif keys == "zeros":
            q[torch.arange(total) % 3 == 0], key[torch.arange(total) % 5 < 2] = 0, 0
        if not l2norm:
            q, key = shorter(rand, q), shorter(rand, key)
        spread, least = DECAYS.get(decay, (0.05, 0.0))
        g = -least - spread * rand(total, hv)
        if decay == "mixed":
            g = torch.where(rand(total, hv) < 0.15, -200.0, g)
        beta = beta_scale * torch.sigmoid(randn(total, hv) + (3.0 if keys == "repeated" else 0.0))
        self.widths = [hk * k, hk * k, hv * v]
        self.x = self.spots.frame(sum(self.widths), io, odd, torch.cat([x.flatten(1) for x in (q, key, value)], 1))
        self.gates = self.spots.frame(2 * hv, "f32", odd, torch.cat([g, beta], 1))
        self.do = self.spots.frame(hv * v, io, odd, randn(total, hv * v))
        self.state = 0.3 * randn(n, hv, v, k) if state else None
        self.d_state = randn(n, hv, v, k) if d_state else None
        self.fresh()

    def fresh(self):
        """Allocates what a launch writes."""
        self.dx = self.spots.frame(sum(self.widths), self.io, self.odd)
        self.d_gates = self.spots.frame(2 * self.hv, "f32", self.odd)
        self.ds = torch.full((len(self.lens), self.hv, self.v, self.k), float("nan"))

    def reference(self):
        """dq, dk, dv, dg, dbeta [tokens, ..] and dstate."""
        pad = lambda frame, widths: [torch.nn.utils.rnn.pad_sequence([x[self.spots.of(i)].double() for i in range(len(self.lens))], batch_first=True)
                                     for x in frame.view.split(widths, 1)]
        q, k, v = pad(self.x, self.widths)
        g, beta = pad(self.gates, [self.hv] * 2)
        shape = [(self.hk, self.k), (self.hk, self.k), (self.hv, self.v)]
        leaves = [leaf(x.unflatten(-1, s)) for x, s in zip((q, k, v), shape)] + [leaf(g), leaf(beta), leaf(torch.zeros_like(self.ds) if self.state is None else self.state)]
        unit = lambda x: reference.unit(x, self.l2_eps) if self.l2norm else x
        lens = torch.tensor(self.lens)
        o, final = reference.recurrence(unit(leaves[0]), unit(leaves[1]), *leaves[2:], lens, self.scale)
        do = pad(self.do, [self.hv * self.v])[0].unflatten(-1, (self.hv, self.v))
        want = gradients([(o, do)] + ([(final, self.d_state)] if self.d_state is not None else []), leaves)
        within = torch.arange(q.shape[1])[None] < lens[:, None]
        return [x[within].flatten(1) for x in want[:5]] + [want[5]]

    def common(self):
        spots, at = self.spots, lambda first: self.spots.heads(self.gates, first, 1)
        return dict(a=at(0), b=at(self.hv), state_in=self.state, seqs=spots.seqs, num_k_heads=self.hk, num_v_heads=self.hv, head_k=self.k, head_v=self.v,
                    io_dtype=CODES[self.io], gate_dtype=CODES["f32"], state_dtype=CODES["f32"], l2norm=int(self.l2norm), l2_eps=self.l2_eps,
                    scale=self.scale, beta_scale=1.0)

    def columns(self, frame):
        """q, k and v of a frame."""
        return {name: self.spots.heads(frame, first, size) for name, first, size in
                zip("qkv", (0, self.widths[0], 2 * self.widths[0]), (self.k, self.k, self.v))}

    def params(self, lib, algo=AUTO):
        spots = self.spots
        p = fill(RuleBackwardParams, **self.common(), **self.columns(self.x), **{f"d_{name}": x for name, x in self.columns(self.dx).items()},
                 d_o=spots.heads(self.do, 0, self.v), d_state_out=self.d_state, d_log_decay=spots.heads(self.d_gates, 0, 1),
                 d_beta=spots.heads(self.d_gates, self.hv, 1), d_state_in=self.ds, segments=self.segments,
                 recompute=int(self.recompute), algo=algo)
        workspace(lib.gdn_rule_backward_workspace, p)
        return p

    def outputs(self, chunked):
        dq, dk, dv, dg, dbeta, ds = self.reference()
        io, gates = (BOUND["bf16"], BOUND["bf16"]) if chunked else (BOUND[self.io], EXACT)
        out, first = self.spots.output, self.widths
        together = [out(name, self.dx, want, io, at) for name, want, at in (("dq", dq, 0), ("dk", dk, first[0]), ("dv", dv, 2 * first[0]))]
        return [*merged(together), *merged([out("dg", self.d_gates, dg, gates), out("dbeta", self.d_gates, dbeta, gates, self.hv)]),
                Output("dstate", self.ds, slice(None), ds, gates)]


def merged(outputs):
    """One Output of outputs that share a buffer, each of which judges its own elements."""
    whole = torch.zeros_like(outputs[0].index)
    for out in outputs:
        whole |= out.index

    def judge(_):
        found = [(out.name, *out.error(out.buffer[out.index])) for out in outputs]
        return all(fine for _, fine, _ in found), " ".join(f"{name} {text}" for name, _, text in found)
    return [Output("", outputs[0].buffer, whole, error=judge)]


def rule(lib, algo=AUTO, **case):
    c, chosen = Rule(**case), C.c_int32(algo)
    p = c.params(lib, algo)
    if algo == AUTO:
        lib.gdn_rule_backward_choice(C.byref(p), C.byref(chosen))
    moved = 2 * sum(c.widths) + c.hv * c.v
    return Launch(lib.gdn_rule_backward, p, lambda: c.outputs(chosen.value >= CHUNKED_SM80), keep=c,
                  nbytes=sum(c.lens) * moved * c.x.buffer.element_size())


# ---- golden files ----

def safetensors(path):
    """(metadata, {name: tensor}) of a file in the safetensors format."""
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64}
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    made = {}
    for name, x in header.items():
        if name != "__metadata__":
            begin, end = x["data_offsets"]
            kind = kinds[x["dtype"]]
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=kind) if end > begin else torch.zeros(0, dtype=kind)
            made[name] = flat.to(torch.get_default_device()).reshape(x["shape"])
    return header.get("__metadata__", {}), made


class Golden:
    """A case of op_grads.safetensors as a layer runs it: gates, the rule, the rule's backward, the gates' backward."""

    def __init__(self, tensors, about, io):
        get = lambda name: tensors[name]
        self.about, self.io, self.get, kind = about, io, get, TYPES[io]
        self.hk, self.hv, self.k, self.v, self.lens = (about[x] for x in ("H", "HV", "K", "V", "seqs"))
        self.q, self.key, self.value, self.a, self.b, self.do = (get(x).to(kind).contiguous() for x in ("q", "k", "v", "a", "b", "do"))
        self.seqs, self.tokens = sequences(self.lens, cu_seqlens(self.lens)), sum(self.lens)
        self.scale, empty = about.get("beta_scale", 1.0), lambda x, kind=None: torch.full(x.shape, float("nan"), dtype=kind or x.dtype)
        self.g, self.beta, self.dg, self.dbeta = (empty(self.a, torch.float32) for _ in range(4))
        self.o, self.final, self.ds = empty(self.do), empty(get("state")), empty(get("state"))
        self.made = [empty(x) for x in (self.q, self.key, self.value, self.a, self.b)]
        self.of_heads = [empty(get("A_log")) for _ in range(2)]

    def common(self, final=None):
        return dict(a=heads(self.g[..., None]), b=heads(self.beta[..., None]), state_in=self.get("state"), state_out=final, seqs=self.seqs, num_k_heads=self.hk,
                    num_v_heads=self.hv, head_k=self.k, head_v=self.v, io_dtype=CODES[self.io], gate_dtype=CODES["f32"], state_dtype=CODES["f32"],
                    l2norm=1, l2_eps=1e-6, scale=self.k ** -0.5, beta_scale=1.0)

    def launches(self, lib, forward, backward):
        """[(function, parameters)] of the four launches; algos of the rule."""
        of = lambda x: heads(x[..., None])
        gates = dict(a=of(self.a), b=of(self.b), a_log=self.get("A_log"), dt_bias=self.get("dt_bias"), num_seqs=1, tokens_per_seq=self.tokens, heads=self.hv,
                     gate_dtype=CODES[self.io], beta_scale=self.scale)
        first = fill(ReadyGatesParams, log_decay=of(self.g), beta=of(self.beta), **gates)
        place = slots(None, len(self.lens), self.hv * self.v * self.k)
        run = rule_params(q=heads(self.q), k=heads(self.key), v=heads(self.value), o=heads(self.o), gates=GATES_READY, algo=forward, in_slots=place, out_slots=place,
                          **self.common(self.final))
        workspace(lib.gdn_rule_workspace, run)
        dq, dk, dv, da, db = self.made
        back = fill(RuleBackwardParams, q=heads(self.q), k=heads(self.key), v=heads(self.value), d_o=heads(self.do), d_state_out=self.get("dstate"), d_q=heads(dq),
                    d_k=heads(dk), d_v=heads(dv), d_log_decay=of(self.dg), d_beta=of(self.dbeta), d_state_in=self.ds, algo=backward, **self.common())
        workspace(lib.gdn_rule_backward_workspace, back)
        last = fill(ReadyGatesBackwardParams, gates=fill(ReadyGatesParams, **gates), d_log_decay=of(self.dg), d_beta=of(self.dbeta), d_a=of(da), d_b=of(db),
                    d_a_log=self.of_heads[0], d_dt_bias=self.of_heads[1])
        workspace(lib.gdn_ready_gates_backward_workspace, last)
        return [(lib.gdn_ready_gates, first), (lib.gdn_rule, run), (lib.gdn_rule_backward, back), (lib.gdn_ready_gates_backward, last)]

    def results(self):
        """(name, what was made, what it has to be)."""
        made = [self.o, self.final, *self.made, *self.of_heads, self.ds]
        names = ["out", "new_state", *(f"grad.{x}" for x in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state"))]
        return [(name, x, self.get(name)) for name, x in zip(names, made)]
