#!/usr/bin/env python3
"""Checks gdn_conv and gdn_norm, through the C ABI, against float64.

An error is ||x - ref|| / ||ref||; the convolution's new state has to be the same bits.
"""
import math

import harness
import reference
import torch
from abi import CODES, ConvParams, NormParams, columns, fill, heads, sequences, slots
from cases import every
from check_rule import IO, MIXED
from harness import O_BOUND, TYPES, Frame, Launch, Output, cu_seqlens, expect, group, normal, place, rows_of

# ---- convolution ----

def conv(lib, lens, channels, width, io="bf16", w_dtype=None, silu=True, odd=False, moved=False, seed=0):
    randn, w_dtype, n, total = normal(seed), w_dtype or io, len(lens), sum(lens)
    gap = (2, 1) if odd else (16, 8)
    x, y = Frame(total, channels, io, *gap, randn(total, channels)), Frame(total, channels, io, *gap)
    weight = randn(channels, width).to(TYPES[w_dtype])
    size = (width - 1) * channels
    where = place(n, "moved" if moved else "identity", seed)
    state_in = randn(where.count, size + ((5 if odd else 8) if moved else 0)).to(TYPES[io])
    live = [i for i in range(n) if i not in where.padding]
    past, written = (state_in[[where.ins[i] for i in live], :size].view(len(live), width - 1, channels), [where.outs[i] for i in live])
    state_out = torch.randn_like(state_in) if moved else state_in
    want, kept = torch.zeros(total, channels, dtype=torch.float64), past
    if total == n == len(live):    # all at once
        want, kept = reference.conv(past, x.view[:, None], weight, silu)
    elif live:
        parts = [reference.conv(old, x.view[rows_of(lens)[i]], weight, silu) for old, i in zip(past, live)]
        for i, (part, _) in zip(live, parts):
            want[rows_of(lens)[i]] = part
        kept = torch.stack([new for _, new in parts])
    if moved:
        state_out[written, :size] = math.nan
    in_slots, out_slots = (slots(numbers, where.count, state_in.shape[1]) for numbers in where.tensors)
    cu = cu_seqlens(lens) if len(set(lens)) > 1 else None
    view = lambda x: columns(x.buffer[2:, x.index[1].start:], 0, 0, 0 if cu is not None else max(lens))
    p = fill(ConvParams, x=view(x), y=view(y), weight=weight, state_in=state_in, state_out=state_out, in_slots=in_slots,
             out_slots=out_slots, seqs=sequences(lens, cu), channels=channels, width=width, io_dtype=CODES[io],
             weight_dtype=CODES[w_dtype], silu=int(silu))
    return Launch(lib.gdn_conv, p, lambda: [Output("y", y.buffer, y.index, want.view(total, channels), O_BOUND[io]),
                                            Output("state", state_out, (written, slice(size)), kept)],
                  nbytes=channels * (2 * (total + n * (width - 1)) * state_in.element_size() + width * weight.element_size()))


CONV_QUICK = [dict(lens=[0, 2, 40, 1], channels=64, width=4, moved=True), dict(lens=[1] * 3, channels=40, width=4, io="f32"),
              dict(lens=[1, 2, 3, 9], channels=21, width=8, odd=True)]


def conv_cases():
    kinds = [dict(channels=104), dict(channels=53, odd=True)]
    return [*every(kinds, io=IO, width=[2, 4, 5, 6, 7, 8], moved=[False, True], lens=[[*MIXED[:-1], 2]]),
            *every(kinds, io=IO, width=3, silu=False, moved=[False, True], lens=[[*MIXED[:-1], 2]]),
            # Enough work for the kernels that take 16 bytes of channels at a time.
            *every(io=IO, width=[2, 4, 6, 8], moved=True, lens=[[300, 0, 5, 1500]], channels=8192),
            *every(io=IO, width=[3, 5, 7], lens=[[300, 0, 5, 1500]], channels=8192),
            *every(io=IO, lens=[[n] * 3 for n in (0, 1, 2, 3, 8, 9, 64, 65, 1000)], channels=512, width=4),
            *every(io=IO, lens=[[1] * 64], channels=8192, width=4, w_dtype="f32", moved=True),
            *every(io=IO, lens=[[70]], channels=256, width=4, w_dtype="f32"),
            dict(lens=[1] * 70000, channels=8, width=4)]


# ---- gated norm ----

def norm(lib, tokens, hv, dim, io="bf16", w_dtype=None, sigmoid=False, odd=False, seed=0):
    randn, w_dtype, gap = normal(seed), w_dtype or io, (2, 1) if odd else (8, 8)
    x, z = (Frame(tokens, hv * dim, io, *gap, 2 * randn(tokens, hv * dim)) for _ in range(2))
    out = Frame(tokens, hv * dim, io, *gap)
    weight, split = randn(dim).to(TYPES[w_dtype]), lambda x: x.view.unflatten(1, (hv, dim))
    p = fill(NormParams, x=heads(split(x)), z=heads(split(z)), out=heads(split(out)), weight=weight, tokens=tokens, heads=hv, head_v=dim,
             io_dtype=CODES[io], weight_dtype=CODES[w_dtype], sigmoid=int(sigmoid), eps=1e-6)
    want = reference.gated_norm(split(x), split(z), weight, sigmoid)
    return Launch(lib.gdn_norm, p, lambda: [Output("out", out.buffer, out.index, want, O_BOUND[io])], nbytes=3 * x.view.numel() * x.view.element_size())


NORM_CASES = [*every(io=IO, dim=[1, 7, 32, 40, 96, 128, 192, 250, 256], odd=[False, True], tokens=13, hv=5),
              *every(io=IO, dim=64, odd=[False, True], tokens=13, hv=5, sigmoid=True),
              *every(io=IO, tokens=3000, hv=32, dim=128, w_dtype="f32"), *every(io=IO, tokens=1, hv=1, dim=128), dict(tokens=200000, hv=8, dim=8)]


def check_status(lib, args):
    expect("conv", lib.gdn_conv, ConvParams, {"BAD_CONV_WIDTH": [dict(width=9)]})
    expect("norm", lib.gdn_norm, NormParams, {"OK": [dict(head_v=8)], "BAD_HEAD_DIM": [dict(head_v=300)]})


def times(args):
    lens = [[1] * n for n in (1, 8, 32, 128, 256)] + [[64], [512], [2048], [8192], [1024] * 8]
    return [("convolution, bf16, in place", conv, every(lens=lens, channels=8192, width=4)),
            ("gated norm, bf16", norm, every(tokens=[1, 8, 32, 128, 512, 2048, 8192], hv=32, dim=128, w_dtype="f32"))]


GROUPS = {"conv": group(conv, conv_cases, CONV_QUICK), "norm": group(norm, NORM_CASES, every(dim=[128, 40], odd=[False, True], tokens=13, hv=5)),
          "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times)
