"""Sequences that gdn_replay_step serves: the convolution before the rule and the gated norm behind it."""
import reference
import torch
from abi import CODES, OK, REPLAY_AUTO, ReplayStepParams, ReplayWindowParams, columns, fill, slots
from harness import TYPES, call, launch, nan, same, same_outside, u32
from replay_case import DIM, Sequences, behind


class Steps(Sequences):
    WRITTEN = (*Sequences.WRITTEN, "conv_inputs")
    ROUNDED = 2e-4      # where the convolution in float64 and in float32 are rounded to neighbours, once in 10,000

    def __init__(self, *args, conv=None, norm="f32", sigmoid=False, overlap=0, **kw):
        super().__init__(*args, **kw)
        self.sigmoid, self.overlap, self.channels = sigmoid, overlap, (2 * self.hk + self.hv) * DIM
        self.conv_weight = (0.5 * self.randn(self.channels, 4)).to(TYPES[conv or self.io])
        self.norm_weight = (1 + 0.1 * self.randn(DIM)).to(TYPES[norm])
        self.conv_dtype, self.norm_dtype = CODES[conv or self.io], CODES[norm]
        self.conv_inputs = nan(self.pool, self.capacity, self.channels, dtype=self.io)
        self.past = self.randn(self.n, 3, self.channels).to(TYPES[self.io])
        for i in self.live:
            for back in (3, 2, 1):
                self.conv_inputs[self.slots[i], (self.first[self.slots[i]] - back) % self.capacity] = self.past[i, 3 - back]

    def launcher(self):
        return self.lib.gdn_replay_step

    def inputs(self, tokens):
        made = super().inputs(tokens)
        self.z = self.randn(max(self.n * tokens, 1), self.hv * DIM).to(TYPES[self.io])
        return made

    def params(self, inputs, *more):
        x, _, o, tokens = inputs
        return fill(ReplayStepParams, x=columns(x, 0, 0, tokens), z=columns(self.z, 0, DIM, tokens), out=columns(o, 0, DIM, tokens),
                    conv_weight=self.conv_weight, norm_weight=self.norm_weight, inputs=self.conv_inputs,
                    inputs_stride=self.conv_inputs.stride(0), conv_width=4, conv_dtype=self.conv_dtype,
                    norm_dtype=self.norm_dtype, sigmoid=int(self.sigmoid), overlap=self.overlap, norm_eps=1e-6,
                    algo=self.algo if tokens <= 1 else REPLAY_AUTO,
                    **self.shared(inputs, *more))

    def packed_params(self, inputs, each, *more):
        z, tokens = self.z, inputs[3]
        self.z = behind(z, [i * tokens + t for i, count in enumerate(each) for t in range(count)])
        made = super().packed_params(inputs, each, *more)
        self.z = z
        return made

    def qkv(self, inputs):
        x = inputs[0][:, :self.channels].view(self.n, inputs[3], -1)
        return reference.conv(self.past, x, self.conv_weight)[0].to(TYPES[self.io]).double()

    def recurrence(self, inputs, counts):
        o, after = super().recurrence(inputs, counts)
        return reference.gated_norm(o, self.z[:self.n * inputs[3]].view_as(o), self.norm_weight, self.sigmoid), after

    def appended(self, left, i, out, rows):
        left["conv_inputs"][out, rows] = False
        slot = self.slots[i]
        if out != slot:
            next_row = self.first[slot] + self.length[slot]
            left["conv_inputs"][out, [(next_row - back) % self.capacity for back in (3, 2, 1)]] = False

    def follow(self, inputs, counts, stay, outs, fold):
        super().follow(inputs, counts, stay, outs, fold)
        for i in self.live:
            rows = inputs[0][:, :self.channels].view(self.n, -1, self.channels)[i, :stay[i]] if stay[i] else self.past[i, :0]
            self.past[i] = torch.cat([self.past[i], rows])[-3:]
            slot = self.slots[i]
            before = [(self.first[slot] + self.length[slot] - back) % self.capacity for back in (3, 2, 1)]
            if not same(self.conv_inputs[slot, before], self.past[i]):
                self.wrong.append("not the last inputs")

    def left(self):
        return [*super().left(), self.conv_inputs]


# ---- the window of a ring beside a plain convolution state ----

def window(s, conv_width=4, inputs=None, channels=None, **fields):
    """gdn_replay_window's parameters for the rings of `s`, and the plain windows by slot: rows of NaN, a gap between slots."""
    inputs, channels = s.conv_inputs if inputs is None else inputs, channels or s.channels
    kept = nan(s.pool, (conv_width - 1) * channels + (8 if channels % 8 == 0 else 3), dtype=s.io)
    where = slots(u32(s.slots) if s.named else None, s.pool, kept.stride(0))
    p = fill(ReplayWindowParams, inputs=inputs, window=kept, cursors=s.cursors, in_slots=where, out_slots=where,
             inputs_stride=inputs.stride(0), num_seqs=s.n, channels=channels, conv_width=conv_width, capacity=s.capacity,
             io_dtype=CODES[s.io], **fields)
    return p, kept


def owned(s):
    """The slots that sequences have, in their order."""
    return [s.slots[i] for i in s.live]


def window_out(s):
    """What is wrong with the windows of `s`, whose last inputs are known: None, or words."""
    p, kept = window(s)
    if launch(lambda: call(s.lib.gdn_replay_window, p)) != OK:
        return "refused"
    size = 3 * s.channels
    if not same(kept[owned(s), :size].view(-1, 3, s.channels), s.past[s.live]):
        return "not the last inputs"
    kept[owned(s), :size] = float("nan")
    return None if kept.isnan().all() else "wrote outside"


def window_round_trip(s, conv_width, channels, seed=1):
    """Into rings of other inputs and out again: the rows before the next entry and no others are written. `channels` of any
    number. None, or what is wrong."""
    gen = torch.Generator(device=s.conv_inputs.device).manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=gen, device=s.conv_inputs.device).to(TYPES[s.io])
    rings = draw(s.pool, s.capacity * channels + (0 if channels % 8 == 0 else 1))
    p, kept = window(s, conv_width, rings, channels, to_ring=1)
    size = (conv_width - 1) * channels
    kept[:, :size] = draw(s.pool, size)
    want, before = kept.clone(), rings.clone()
    if launch(lambda: call(s.lib.gdn_replay_window, p)) != OK:
        return "refused"
    outside = torch.ones_like(rings, dtype=torch.bool)
    rows = outside[:, :s.capacity * channels].view(s.pool, s.capacity, channels)
    for slot in owned(s):
        at = [(s.first[slot] + s.length[slot] - back) % s.capacity for back in range(conv_width - 1, 0, -1)]
        rows[slot, at] = False
        there = rings[slot, :s.capacity * channels].view(s.capacity, channels)[at]
        if not same(there.flatten(), want[slot, :size]):
            return "not the window"
    if not same_outside(rings, before, outside):
        return "wrote outside"
    p, kept = window(s, conv_width, rings, channels)
    if launch(lambda: call(s.lib.gdn_replay_window, p)) != OK:
        return "refused"
    return None if same(kept[owned(s)], want[owned(s)]) else "not what went in"
