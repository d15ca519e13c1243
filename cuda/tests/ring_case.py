"""Sequences that gdn_ring_step serves launch by launch, beside the plain recurrence in float64.

Whatever a launch must not read holds NaN: entries that were never written, slots that no sequence has, rows past a count. All that
a launch must not write is compared bit by bit.
"""
import math

import harness
import reference
import torch
from abi import (CODES, NO_SLOT, RING_AUTO, Ring, RingAdvanceParams, RingFlushParams, RingInputsParams, RingStepParams, columns, fill,
                 sequences, slots)
from harness import O_BOUND, ONCE, STATE_BOUND, TYPES, Launch, Output, cu_seqlens, nan, normal, u32, verify
from rule_case import gates, shorter, uniform

WIDTH = 4
ROUNDED = 2e-4      # where the convolution in float64 and in float32 are rounded to neighbours, once in 10,000


class Sequences:
    """`n` sequences of drawn inputs. With `slots` they have slots of a larger pool, and one of them is padding. Every launch is a check of
    its own, in all of the `ways`."""

    def __init__(self, lib, n, hk, hv, k=128, v=128, io="bf16", state="f32", gate=None, conv=None, norm="f32", sigmoid=False, entries=16, capacity=32,
                 slots=False, algo=RING_AUTO, keys="random", decay="normal", l2norm=True, beta_scale=1.0, qk_size=1.0, scale=None, l2_eps=1e-6,
                 ways=ONCE, name="", seed=0):
        self.lib, self.n, self.hk, self.hv, self.k, self.v, self.io, self.state_dtype, self.gate = lib, n, hk, hv, k, v, io, state, gate or io
        self.conv, self.norm, self.sigmoid, self.entries, self.capacity, self.algo = conv or io, norm, sigmoid, entries, capacity, algo
        self.keys, self.decay, self.l2norm, self.beta_scale, self.qk_size, self.ways, self.name = keys, decay, l2norm, beta_scale, qk_size, ways, name
        self.scale, self.l2_eps = k ** -0.5 if scale is None else scale, l2_eps
        self.randn, self.rand, self.size, self.channels = normal(seed), uniform(seed + 1), hv * v * k, 2 * hk * k + hv * v
        self.pool, self.named = 2 * n + 1 if slots else n, slots
        order = harness.shuffled(self.pool, seed) if slots else list(range(n))
        self.slots, self.free = order[:n], order[n:]
        self.padding = [n // 2] if slots and n > 1 else []
        self.live = [i for i in range(n) if i not in self.padding]
        for i in self.padding:
            self.slots[i] = NO_SLOT
        self.head, self.length = [(11 * i) % capacity for i in range(self.pool)], [0] * self.pool
        self.spans = u32([head << 16 for head in self.head])
        self.state = nan(self.pool, self.size + (16 if slots else 0), dtype=state)
        self.reference = 0.3 * self.randn(n, hv, v, k).double()
        self.ring_keys, self.updates = nan(self.pool, hk, capacity, k, dtype=io), nan(self.pool, hv, capacity, v, dtype="f32")
        self.decays, self.inputs = nan(self.pool, hv, capacity, dtype="f32"), nan(self.pool, capacity, self.channels, dtype=io)
        self.past = self.randn(n, WIDTH - 1, self.channels).to(TYPES[io])
        for i in self.live:
            self.state[self.slots[i], :self.size] = self.reference[i].flatten().to(TYPES[state])
            self.inputs[self.slots[i], self.window(self.slots[i])] = self.past[i]
        self.round_references(self.live, self.slots)
        self.conv_weight = (0.5 * self.randn(self.channels, WIDTH)).to(TYPES[self.conv])
        self.norm_weight = (1 + 0.1 * self.randn(v)).to(TYPES[norm])
        _, _, self.a_log, self.dt_bias = gates(self.randn, self.rand, 0, hv, decay)
        self.repeated, self.drawn, self.launches = self.randn(2, hk, k), 0, 0

    def rows(self, slot, first, count):
        """Rows of the ring of a slot, from the entry `first` after its last one."""
        return [(self.head[slot] + self.length[slot] + first + i) % self.capacity for i in range(count)]

    def window(self, slot, width=WIDTH):
        """The rows of the last inputs before the next entry."""
        return self.rows(slot, 1 - width, width - 1)

    def round_references(self, which, numbers):
        """The recurrence goes on from what is stored."""
        for i in which:
            self.reference[i] = self.state[numbers[i], :self.size].double().view(self.hv, self.v, self.k)

    def label(self, what):
        self.launches += 1
        return f"{self.name} launch {self.launches}: {what}"

    # ---- inputs, and what the recurrence makes of them ----

    def draw(self, tokens):
        """x [row, q | k | v], ba [row, b | a] and z of `tokens` of each sequence, and their rows."""
        rows, randn = self.n * tokens, self.randn
        q, k, v = randn(rows, self.hk, self.k), randn(rows, self.hk, self.k), randn(rows, self.hv, self.v)
        row = torch.arange(rows)
        if self.keys == "repeated":
            k[:] = self.repeated[0]
        elif self.keys == "alternating":
            k[:] = self.repeated[row % 2]
        elif self.keys == "zeros":
            k[(row + self.drawn) % 3 == 0] = 0
        q, k = q * self.qk_size, k * self.qk_size
        if not self.l2norm:
            q, k = shorter(self.rand, q), shorter(self.rand, k)
        b, a, _, _ = gates(randn, self.rand, rows, self.hv, self.decay)
        self.drawn += rows
        x = torch.cat([y.flatten(1) for y in (q, k, v)], 1).to(TYPES[self.io])
        return x, torch.cat([b, a], 1).to(TYPES[self.gate]), randn(rows, self.hv * self.v).to(TYPES[self.io])

    def recurrence(self, drawn, tokens, counts):
        """o [sequence, token, head, dim] and the states after so many tokens of each sequence."""
        x, ba, z = (y.view(self.n, tokens, -1) for y in drawn)
        y = reference.conv(self.past, x, self.conv_weight)[0].to(TYPES[self.io]).double()
        keys = self.hk * self.k
        q, k, v = (part.unflatten(2, (-1, dim)) for part, dim in zip(y.split([keys, keys, self.hv * self.v], 2), (self.k, self.k, self.v)))
        b, a = ba.double().chunk(2, 2)
        o, after = reference.rule(q, k, v, a, b, self.a_log.double(), self.dt_bias.double(), self.reference, torch.tensor(counts), self.l2norm,
                                  self.l2_eps, self.scale, self.beta_scale)
        return reference.gated_norm(o, z.view_as(o), self.norm_weight, self.sigmoid), after

    # ---- launches ----

    def where(self, outs, stride):
        numbers = [u32(self.slots), u32(outs)] if self.named else [None, None]
        return dict(zip(("in_slots", "out_slots"), (slots(number, self.pool, stride) for number in numbers)))

    def common(self, outs, state_out=None):
        """The fields that gdn_ring_step and gdn_ring_flush share."""
        ring = fill(Ring, keys=self.ring_keys, updates=self.updates, decays=self.decays, spans=self.spans, keys_stride=self.ring_keys.stride(0),
                    updates_stride=self.updates.stride(0), decays_stride=self.decays.stride(0), capacity=self.capacity, max_entries=self.entries)
        return dict(state_in=self.state, state_out=self.state if state_out is None else state_out, ring=ring, num_k_heads=self.hk,
                    num_v_heads=self.hv, head_k=self.k, head_v=self.v, io_dtype=CODES[self.io], gate_dtype=CODES[self.gate],
                    state_dtype=CODES[self.state_dtype], **self.where(outs, self.state.stride(0)))

    def params(self, rows, o, seqs, outs):
        """Of a step on rows of x, ba and z."""
        x, ba, z = rows
        per_seq = seqs.tokens_per_seq
        algo = self.algo if seqs.tokens_per_seq <= 1 and not seqs.cu_seqlens else RING_AUTO
        return fill(RingStepParams, x=columns(x, 0, 0, per_seq), z=columns(z, 0, self.v, per_seq), out=columns(o, 0, self.v, per_seq),
                    b=columns(ba, 0, 1, per_seq), a=columns(ba, self.hv, 1, per_seq), a_log=self.a_log, dt_bias=self.dt_bias,
                    conv_weight=self.conv_weight, norm_weight=self.norm_weight, inputs=self.inputs, inputs_stride=self.inputs.stride(0),
                    conv_width=WIDTH, conv_dtype=CODES[self.conv], norm_dtype=CODES[self.norm], sigmoid=int(self.sigmoid), norm_eps=1e-6,
                    l2norm=int(self.l2norm), l2_eps=self.l2_eps, scale=self.scale, beta_scale=self.beta_scale, seqs=seqs, algo=algo,
                    **self.common(outs))

    def flushed(self, count, i, outs):
        slot = self.slots[i]
        return slot != outs[i] or self.length[slot] + count > self.entries

    def states_of(self, which, numbers, buffer=None):
        """The output that has the states of these sequences."""
        buffer = self.state if buffer is None else buffer
        index = ([numbers[i] for i in which], slice(self.size)) if which else None
        return Output("state", buffer, index, self.reference[which], STATE_BOUND[self.state_dtype] + ROUNDED)

    def step(self, tokens, counts=None, accepted=None, outs=None):
        """A launch and the advance after it; `accepted` of each sequence's tokens stay. With `counts` tokens are packed."""
        counts, outs = counts and [int(c) for c in counts], outs or self.slots
        each = counts or [tokens] * self.n
        stay = [min(a, c) for a, c in zip(accepted or each, each)]
        drawn = self.draw(tokens)
        want, _ = self.recurrence(drawn, tokens, each) if tokens else (torch.zeros(self.n, 0, self.hv, self.v), None)
        taken = [i * tokens + t for i, count in enumerate(each) for t in range(count)]
        # A row of NaN after the last token, and columns after each.
        rows = [torch.cat([torch.cat([y[taken], torch.full_like(y[:1] if tokens else y.new_empty(1, y.shape[1]), math.nan)]),
                           torch.full((len(taken) + 1, 16), math.nan, dtype=y.dtype)], 1) for y in drawn]
        o = nan(len(taken) + 1, self.hv * self.v + 16, dtype=self.io)
        seqs = sequences(each, cu_seqlens(each) if counts else None)
        want[self.padding] = 0
        flushing = [i for i in self.live if self.flushed(each[i], i, outs)]
        written = {name: torch.zeros_like(getattr(self, name), dtype=torch.bool) for name in ("ring_keys", "updates", "decays", "inputs")}
        for i in self.live:
            new, slot = self.rows(self.slots[i], 0, each[i]), outs[i]
            for name in ("ring_keys", "updates", "decays"):
                written[name][slot, :, new] = True
            written["inputs"][slot, new] = True
            if slot != self.slots[i]:
                written["inputs"][slot, self.window(self.slots[i])] = True
        padding = torch.tensor([i in self.padding for i in range(self.n) for _ in range(each[i])], dtype=torch.bool)
        inside = (slice(len(taken)), slice(self.hv * self.v))
        rounded = 0.0 if self.state_dtype == "f32" else STATE_BOUND[self.state_dtype]     # a flush rounds the state
        outputs = [Output("o", o, inside, want.flatten(0, 1)[taken].flatten(1), max(O_BOUND[self.io], rounded) * 1.5),
                   self.states_of(flushing, outs), *(Output(name, getattr(self, name), mask) for name, mask in written.items())]
        after = lambda: ["padding not zero"] if bool((o[inside][padding] != 0).any()) else []
        verify(self.lib, self.label(f"step of {tokens}"), Launch(self.lib.gdn_ring_step, self.params(rows, o, seqs, outs), lambda: outputs, after=after),
               self.ways)
        if self.state_dtype != "f32":
            self.round_references(flushing, outs)
        self.advance(seqs, each, stay, accepted, outs)
        self.follow(drawn, tokens, stay)

    def advance(self, seqs, each, stay, accepted, outs, flushed=False):
        """Moves the spans, and knows where they must be."""
        for i in self.live:
            slot, out = self.slots[i], outs[i]
            head, length = self.head[slot], self.length[slot]
            if flushed or self.flushed(each[i], i, outs):
                head, length = (head + length) % self.capacity, 0
            self.head[out], self.length[out] = head, length + stay[i]
        p = fill(RingAdvanceParams, spans=self.spans, accepted=None if accepted is None else u32(stay), seqs=seqs, capacity=self.capacity,
                 max_entries=self.entries, flushed=int(flushed), **self.where(outs, 0))
        self.slots = list(outs)
        want = u32([head << 16 | length for head, length in zip(self.head, self.length)])
        verify(self.lib, self.label("advance"), Launch(self.lib.gdn_ring_advance, p, lambda: [Output("spans", self.spans, slice(None), want)]))

    def follow(self, drawn, tokens, stay):
        """The recurrence over the tokens that stay, and the last inputs."""
        if tokens:
            _, after = self.recurrence(drawn, tokens, stay)
            self.reference[self.live] = after[self.live]
        x = drawn[0].view(self.n, tokens, self.channels)
        for i in self.live:
            self.past[i] = torch.cat([self.past[i], x[i, :stay[i]]])[1 - WIDTH:]
            slot = self.slots[i]
            if not harness.same(self.inputs[slot, self.window(slot)], self.past[i]):
                harness.report(self.label("the ring's last inputs"), False, f"of sequence {i}")

    def move(self, tokens=1, counts=None):
        """All sequences but padding go to free slots, in a launch with tokens or none."""
        if self.named:
            outs = [NO_SLOT if i in self.padding else self.free.pop() for i in range(self.n)]
            left = [self.slots[i] for i in self.live]
            self.step(tokens, counts, outs=outs)
            self.free = left + self.free

    def flush(self):
        """All rings into another pool, which leaves everything as it is, and in place."""
        seqs = sequences([0] * self.n)
        other, order = torch.full_like(self.state, math.nan), self.slots
        if self.named:
            others = iter(harness.shuffled(self.pool, self.launches))
            order = [NO_SLOT if i in self.padding else next(others) for i in range(self.n)]
        kept = [Output(name, getattr(self, name)) for name in ("ring_keys", "updates", "decays", "inputs", "spans")]
        for outs, buffer, more in ((order, other, [Output("input states", self.state)]), (self.slots, self.state, [])):
            p = fill(RingFlushParams, seqs=seqs, **self.common(outs, buffer))
            verify(self.lib, self.label("flush"), Launch(self.lib.gdn_ring_flush, p, lambda: [self.states_of(self.live, outs, buffer), *kept, *more]),
                   self.ways[::2])
        if self.state_dtype != "f32":
            self.round_references(self.live, self.slots)
        self.advance(seqs, [0] * self.n, [0] * self.n, None, self.slots, flushed=True)

    # ---- the window of a ring beside a plain convolution state ----

    def inputs_params(self, width=WIDTH, rings=None, channels=None, **fields):
        """gdn_ring_inputs' parameters, and the plain states by slot: rows of NaN, a gap between slots."""
        rings, channels = self.inputs if rings is None else rings, channels or self.channels
        plain = nan(self.pool, (width - 1) * channels + (8 if channels % 8 == 0 else 3), dtype=self.io)
        p = fill(RingInputsParams, inputs=rings, conv_state=plain, spans=self.spans, inputs_stride=rings.stride(0), num_seqs=self.n,
                 channels=channels, conv_width=width, capacity=self.capacity, io_dtype=CODES[self.io], **fields,
                 **self.where(self.slots, plain.stride(0)))
        return p, plain

    def window_out(self):
        """The last inputs go out to plain states."""
        p, plain = self.inputs_params()
        want, owned = self.past[self.live].flatten(1), [self.slots[i] for i in self.live]
        verify(self.lib, self.label("inputs out"), Launch(self.lib.gdn_ring_inputs, p, lambda: [Output("window", plain, (owned, slice(want.shape[1])), want)]))

    def window_round_trip(self, width, channels):
        """Into rings of other inputs and out again: the rows before the next entry and no others are written."""
        draw = lambda *shape: self.randn(*shape).to(TYPES[self.io])
        rings = draw(self.pool, self.capacity * channels + (0 if channels % 8 == 0 else 1))
        p, plain = self.inputs_params(width, rings, channels, to_ring=1)
        size, owned = (width - 1) * channels, [self.slots[i] for i in self.live]
        plain[:, :size] = draw(self.pool, size)
        want, index = rings.clone(), torch.zeros_like(rings, dtype=torch.bool)
        for slot in owned:
            row = lambda x: x[slot, :self.capacity * channels].view(self.capacity, channels)
            row(want)[self.window(slot, width)] = plain[slot, :size].view(width - 1, channels)
            row(index)[self.window(slot, width)] = True
        name = self.label(f"inputs, width {width}, {channels} channels")
        verify(self.lib, f"{name}, in", Launch(self.lib.gdn_ring_inputs, p, lambda: [Output("rings", rings, index, want[index]), Output("window", plain)]))
        p, back = self.inputs_params(width, rings, channels)
        verify(self.lib, f"{name}, out", Launch(self.lib.gdn_ring_inputs, p, lambda: [Output("window", back, (owned, slice(size)), plain[owned, :size])]))
