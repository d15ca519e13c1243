"""Sequences that gdn_replay serves launch by launch, beside the plain recurrence in float64.

Whatever a launch must not read holds NaN: entries that were never written, slots of nobody, rows past a count. All that a
launch must not write is compared bit by bit.
"""
import harness
import reference
import torch
from abi import (AUTO, CODES, NO_SLOT, OK, REPLAY_AUTO, ReplayAdvanceParams, ReplayParams, Ring, columns, fill, rule_params,
                 sequences, slots)
from harness import O_BOUND, TYPES, call, launch, nan, normal, same_outside, u32
from reference import relative
from rule_case import DECAYS

DIM = 128
# A state that is folded was rounded once.
STATE_BOUND = {"f32": 1e-5, "bf16": 2e-3, "f16": 3e-4}


def behind(x, rows):
    """Those rows of x, and one of NaN."""
    return torch.cat([x[rows], torch.full_like(x[:1], float("nan"))])


class Sequences:
    """`n` sequences of drawn inputs. With `slots` they have slots of a larger pool, and one of them is padding."""

    WRITTEN = ("state", "ring_keys", "updates", "decays", "cursors")
    ROUNDED = 0.0       # relative error of q, k and v

    def __init__(self, lib, n, hk, hv, io="bf16", state="f32", gate=None, window=16, capacity=32, slots=False, algo=REPLAY_AUTO,
                 keys="random", decay="normal", l2norm=True, beta_scale=1.0, qk_size=1.0,
                 graph=False, packed=False, seed=0):
        self.lib, self.n, self.hk, self.hv, self.io, self.state_dtype, self.gate = lib, n, hk, hv, io, state, gate or io
        self.window, self.capacity, self.algo, self.graph = window, capacity, algo, graph
        self.packed = packed
        self.keys, self.decay, self.l2norm, self.beta_scale, self.qk_size = (
            keys, decay, l2norm, beta_scale, qk_size)
        self.randn, self.size = normal(seed), hv * DIM * DIM
        self.gen = torch.Generator(device=harness.device).manual_seed(seed + 1)
        self.pool = 2 * n + 1 if slots else n
        order = harness.shuffled(self.pool, seed) if slots else list(range(n))
        self.slots, self.free = order[:n], order[n:]
        self.padding = [n // 2] if slots and n > 1 else []
        self.live = [i for i in range(n) if i not in self.padding]
        for i in self.padding:
            self.slots[i] = NO_SLOT
        self.named = slots
        gap = 16 if slots else 0
        self.state = nan(self.pool, self.size + gap, dtype=state)
        self.reference = 0.3 * self.randn(n, hv, DIM, DIM).double()
        for i in self.live:
            self.state[self.slots[i], :self.size] = self.reference[i].flatten().to(TYPES[state])
            self.reference[i] = self.state[self.slots[i], :self.size].double().view(hv, DIM, DIM)
        self.ring_keys = nan(self.pool, hk, capacity, DIM, dtype=io)
        self.updates = nan(self.pool, hv, capacity, DIM, dtype="f32")
        self.decays = nan(self.pool, hv, capacity, dtype="f32")
        self.first, self.length = [(11 * i) % capacity for i in range(self.pool)], [0] * self.pool
        self.cursors = u32([first << 16 for first in self.first])
        self.a_log, self.dt_bias = (self.rand(hv) * 15 + 1).log(), self.randn(hv) - 4
        if decay == "none":
            self.a_log.fill_(-100.0)
        elif decay != "normal":
            self.a_log.fill_(0.0)
            self.dt_bias.fill_(0.0)
        self.repeated = self.randn(2, hk, DIM)
        self.drawn, self.worst_o, self.worst_state, self.wrong = 0, 0.0, 0.0, []

    def rand(self, *shape):
        return torch.rand(*shape, generator=self.gen, device=harness.device)

    # ---- inputs ----

    def inputs(self, tokens):
        """x [rows, q | k | v | gap] and ba [rows, b | a] of a launch."""
        rows = self.n * tokens
        q, k, v = self.randn(rows, self.hk, DIM), self.randn(rows, self.hk, DIM), self.randn(rows, self.hv, DIM)
        if self.keys == "repeated":
            k[:] = self.repeated[0]
        elif self.keys == "alternating":
            k[:] = self.repeated[torch.arange(rows, device=k.device) % 2]
        elif self.keys == "zeros":
            k[(torch.arange(rows, device=k.device) + self.drawn) % 3 == 0] = 0
        q, k = q * self.qk_size, k * self.qk_size
        if not self.l2norm:
            shorter = lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6) * (0.3 + 0.7 * self.rand(rows, self.hk, 1))
            q, k = shorter(q), shorter(k)
        b, a = self.randn(rows, self.hv), self.randn(rows, self.hv)
        if self.decay in DECAYS:
            share, strong, other = DECAYS[self.decay]
            other = 40 * self.rand(rows, self.hv) - 10 if other is None else other
            a = torch.where(self.rand(rows, self.hv) < share, strong, other)
        self.drawn += rows
        width = (2 * self.hk + self.hv) * DIM
        x = nan(max(rows, 1), width + 16, dtype=self.io)
        x[:rows, :width] = torch.cat([y.flatten(1) for y in (q, k, v)], 1).to(x.dtype)
        ba = torch.cat([b, a], 1).to(TYPES[self.gate])
        o = nan(max(rows, 1), self.hv * DIM + 16, dtype=self.io)
        return x, ba, o, tokens

    def launcher(self):
        return self.lib.gdn_replay

    def shared(self, inputs, counts, ins, outs, fold):
        """What the structs of the rule and of the step both have."""
        _, ba, _, tokens = inputs
        ring = fill(Ring, keys=self.ring_keys, updates=self.updates, decays=self.decays, cursors=self.cursors,
                    keys_stride=self.ring_keys.stride(0), updates_stride=self.updates.stride(0),
                    decays_stride=self.decays.stride(0), capacity=self.capacity, window=self.window)
        numbers = [u32(ins), u32(outs)] if self.named else [None, None]
        where = [slots(number, self.pool, self.state.stride(0)) for number in numbers]
        return dict(b=columns(ba, 0, 1, tokens), a=columns(ba, self.hv, 1, tokens), a_log=self.a_log, dt_bias=self.dt_bias,
                    state_in=self.state, state_out=self.state, counts=counts, ring=ring, in_slots=where[0], out_slots=where[1],
                    num_seqs=self.n, tokens_per_seq=tokens, num_k_heads=self.hk, num_v_heads=self.hv, head_k=DIM, head_v=DIM,
                    io_dtype=CODES[self.io], gate_dtype=CODES[self.gate], state_dtype=CODES[self.state_dtype],
                    l2norm=int(self.l2norm), fold=int(fold), l2_eps=1e-6, scale=DIM ** -0.5, beta_scale=self.beta_scale)

    def params(self, inputs, *more):
        x, _, o, tokens = inputs
        keys = self.hk * DIM
        return fill(ReplayParams, q=columns(x, 0, DIM, tokens), k=columns(x, keys, DIM, tokens),
                    v=columns(x, 2 * keys, DIM, tokens), o=columns(o, 0, DIM, tokens),
                    algo=self.algo if tokens == 1 else REPLAY_AUTO, **self.shared(inputs, *more))

    def packed_params(self, inputs, each, outs, fold):
        """Of the tokens that there are, one after the other, with a row of NaN behind them; and what puts o back."""
        x, ba, o, tokens = inputs
        rows = [i * tokens + t for i, count in enumerate(each) for t in range(count)]
        o_rows = nan(len(rows) + 1, o.shape[1], dtype=self.io)
        p = self.params((behind(x, rows), behind(ba, rows), o_rows, tokens), None, self.slots, outs, fold)
        cu = u32([sum(each[:i]) for i in range(self.n + 1)])
        p.cu_seqlens, p.fields["cu_seqlens"] = cu.data_ptr(), cu

        def spread():
            o[rows] = o_rows[:-1]
            if not bool(o_rows[-1].isnan().all()):
                self.wrong.append("wrote behind the last token")
            for i in self.padding:
                o[i * tokens + each[i]:(i + 1) * tokens, :self.hv * DIM] = 0    # as a launch of as many tokens each leaves them

        return p, spread

    # ---- launches ----

    def call(self, tokens, counts=None, accepted=None, fold=False, outs=None):
        """A launch and the advance behind it; `accepted` of each sequence's tokens stay."""
        counts = None if counts is None else [int(c) for c in counts]
        each = counts or [tokens] * self.n
        stay = [min(a, c) for a, c in zip(accepted or each, each)]
        outs, inputs = outs or self.slots, self.inputs(tokens)
        p, spread = self.packed_params(inputs, each, outs, fold) if self.packed and tokens else (
            self.params(inputs, None if counts is None else u32(counts), self.slots, outs, fold), lambda: None)
        before = {name: getattr(self, name).clone() for name in self.WRITTEN}
        status = launch(lambda: call(self.launcher(), p), self.graph)
        if status != OK:
            self.wrong.append(self.lib.gdn_status_string(status).decode())
            return
        spread()
        self.judge(inputs, each, outs, fold, before)
        advance = fill(ReplayAdvanceParams, cursors=self.cursors, counts=p.fields.get("counts"), cu_seqlens=p.fields.get("cu_seqlens"),
                       accepted=None if accepted is None else u32(stay), in_slots=p.in_slots, out_slots=p.out_slots,
                       num_seqs=self.n, tokens_per_seq=tokens, capacity=self.capacity, window=self.window, fold=int(fold))
        assert launch(lambda: call(self.lib.gdn_replay_advance, advance)) == OK
        self.follow(inputs, each, stay, outs, fold)

    def fold(self):
        self.call(0, fold=True)

    def move(self, tokens=1, counts=None):
        """All sequences but padding go to free slots, in a launch with a token or none."""
        if self.named:
            outs = [NO_SLOT if i in self.padding else self.free.pop() for i in range(self.n)]
            left = [self.slots[i] for i in self.live]
            self.call(tokens, counts, outs=outs)
            self.free = left + self.free

    def finish(self):
        """Folds all, and compares the states that are left."""
        self.fold()
        self.compare_states(self.live, self.slots)

    def folds(self, i, count, outs, fold):
        """Whether a launch folds sequence i."""
        slot = self.slots[i]
        return fold or slot != outs[i] or self.length[slot] + count > self.window

    # ---- what a launch left ----

    def judge(self, inputs, counts, outs, fold, before):
        x, ba, o, tokens = inputs
        folded = [i for i in self.live if self.folds(i, counts[i], outs, fold)]
        self.compare_states(folded, outs)
        want = self.recurrence(inputs, counts)[0] if tokens else None
        if self.state_dtype != "f32":       # from here on the recurrence has what is stored
            for i in folded:
                self.reference[i] = self.state[outs[i], :self.size].double().view(self.hv, DIM, DIM)
        if tokens:
            live = torch.arange(tokens, device=x.device) < torch.tensor(counts, device=x.device)[:, None]
            live[self.padding] = False
            width = self.hv * DIM
            got = o[:, :width].view(self.n, tokens, self.hv, DIM)
            if live.any():
                self.worst_o = max(self.worst_o, relative(got[live], want[live]))
            left = ~live
            left[self.padding] = False
            if not got[left].isnan().all() or not o[:, width:].isnan().all():
                self.wrong.append("o past a count")
            if self.padding and bool((got[self.padding] != 0).any()):
                self.wrong.append("padding not zero")
        self.untouched(before, counts, outs, folded)

    def untouched(self, before, counts, outs, folded):
        left = {name: torch.ones_like(x, dtype=torch.bool) for name, x in before.items()}
        for i in folded:
            left["state"][outs[i], :self.size] = False
        for i in self.live:
            slot = self.slots[i]
            rows = [(self.first[slot] + self.length[slot] + t) % self.capacity for t in range(counts[i])]
            for name in ("ring_keys", "updates", "decays"):
                left[name][outs[i], :, rows] = False
            self.appended(left, i, outs[i], rows)
        for name, mask in left.items():
            if not same_outside(getattr(self, name), before[name], mask):
                self.wrong.append(f"wrote outside: {name}")

    def appended(self, left, i, out, rows):
        """What else a launch may write of sequence i."""

    def compare_states(self, which, numbers):
        if which:
            got = self.state[[numbers[i] for i in which], :self.size].view(-1, self.hv, DIM, DIM)
            error = relative(got, self.reference[which])
            self.worst_state = max(self.worst_state, error)

    def qkv(self, inputs):
        """In float64, [sequence, token, q | k | v]."""
        return inputs[0][:, :(2 * self.hk + self.hv) * DIM].double().view(self.n, inputs[3], -1)

    def recurrence(self, inputs, counts):
        x, ba, _, tokens = inputs
        keys = self.hk * DIM
        parts = self.qkv(inputs).split([keys, keys, self.hv * DIM], 2)
        q, k, v = (part.unflatten(2, (-1, DIM)) for part in parts)
        b, a = ba.double().view(self.n, tokens, -1).chunk(2, 2)
        lens = torch.tensor(counts, device=x.device)
        return reference.rule(q, k, v, a, b, self.a_log.double(), self.dt_bias.double(), self.reference, lens, self.l2norm,
                              1e-6, DIM ** -0.5, self.beta_scale)

    def follow(self, inputs, counts, stay, outs, fold):
        """The recurrence over the tokens that stay, and where the cursors must be."""
        if inputs[3]:
            _, after = self.recurrence(inputs, stay)
            self.reference[self.live] = after[self.live]
        for i in self.live:
            slot, out = self.slots[i], outs[i]
            first, length = self.first[slot], self.length[slot]
            if self.folds(i, counts[i], outs, fold):
                first, length = (first + length) % self.capacity, 0
            self.first[out], self.length[out] = first, length + stay[i]
        self.slots = list(outs)
        want = [self.first[i] << 16 | self.length[i] for i in range(self.pool)]
        if not torch.equal(self.cursors, u32(want)):
            self.wrong.append("cursors")

    def left(self):
        return [self.state, self.ring_keys, self.updates, self.decays, self.cursors]

    def fine(self):
        # A fold rounds a state of 16 bits behind the update that it is followed by.
        rounded = 0.0 if self.state_dtype == "f32" else STATE_BOUND[self.state_dtype]
        state = STATE_BOUND[self.state_dtype] + self.ROUNDED
        o = max(O_BOUND[self.io], rounded) * (1.5 if self.ROUNDED else 1.0)
        return self.worst_o <= o and self.worst_state <= state and not self.wrong

    def text(self):
        return ", ".join([f"o {self.worst_o:.1e} state {self.worst_state:.1e}", *sorted(set(self.wrong))])


def drift(lib, tokens, state, decay, n=2, hk=2, hv=4):
    """((error of all o, of the last state) of gdn_replay token by token, the same of gdn_rule or None), against float64."""
    s = Sequences(lib, n, hk, hv, state=state, decay=decay)
    exact, plain = s.reference.clone(), s.state.clone()
    square = {"ours": 0.0, "today": 0.0, "want": 0.0}
    for _ in range(tokens):
        inputs = s.inputs(1)
        p = s.params(inputs, None, s.slots, s.slots, False)
        advance = fill(ReplayAdvanceParams, cursors=s.cursors, in_slots=p.in_slots, out_slots=p.out_slots, num_seqs=n,
                       tokens_per_seq=1, capacity=s.capacity, window=s.window)
        assert call(lib.gdn_replay, p) == OK and call(lib.gdn_replay_advance, advance) == OK
        s.reference = exact
        want, exact = s.recurrence(inputs, [1] * n)
        width = hv * DIM
        ours = inputs[2][:, :width].double().view_as(want)
        square["ours"] += (ours - want).pow(2).sum()
        square["want"] += want.pow(2).sum()
        if state != "f16":
            o = nan(n, width, dtype="bf16")
            r = rule_params(q=p.q, k=p.k, v=p.v, a=p.a, b=p.b, o=columns(o, 0, DIM, 1), a_log=s.a_log, dt_bias=s.dt_bias,
                            state_in=plain, state_out=plain, in_slots=p.in_slots, out_slots=p.out_slots, seqs=sequences([1] * n),
                            num_k_heads=hk, num_v_heads=hv, head_k=DIM, head_v=DIM, io_dtype=p.io_dtype,
                            gate_dtype=p.gate_dtype, state_dtype=p.state_dtype, l2norm=1, algo=AUTO)
            assert call(lib.gdn_rule, r) == OK
            square["today"] += (o.double().view_as(want) - want).pow(2).sum()
    p = s.params(s.inputs(0), None, s.slots, s.slots, True)
    assert call(lib.gdn_replay, p) == OK
    error = lambda name: (square[name] / square["want"]).sqrt().item()
    states = lambda x: relative(x.view_as(exact), exact)
    ours = error("ours"), states(s.state)
    return ours, (error("today"), states(plain)) if state != "f16" else None
