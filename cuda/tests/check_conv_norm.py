#!/usr/bin/env python3
"""Checks gdn_conv and gdn_norm, through the C ABI, against float64.

An error is ||x - ref|| / ||ref||; the convolution's new state has to be the same bits.
"""
import math

import harness
import reference
import torch
from abi import CODES, ConvParams, NormParams, columns, fill, heads, sequences, slots
from cases import every, words
from check_rule import IO, MIXED
from harness import O_BOUND, TYPES, Frame, Output, bf16, cu_seqlens, expect, normal, one_by_one, place, rows_of, verify
from timing import calls_of, cold_sets, compare

# ---- convolution ----

def check_conv_case(lib, lens, channels, width, io="bf16", w_dtype=None, silu=True, odd=False, moved=False, seed=0):
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
    name = words(dict(lens=lens, channels=channels, width=width, io=io, weights=w_dtype, silu=silu, odd=odd, moved=moved))
    verify(lib, f"conv {name}", lib.gdn_conv, p, [Output("y", y.buffer, y.index, want.view(total, channels), O_BOUND[io]),
                                                  Output("state", state_out, (written, slice(size)), kept)])


def conv_cases(quick):
    if quick:
        return [dict(lens=[0, 2, 40, 1], channels=64, width=4, moved=True), dict(lens=[1] * 3, channels=40, width=4, io="f32"),
                dict(lens=[1, 2, 3, 9], channels=21, width=8, odd=True)]
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


def check_conv(lib, args):
    for case in conv_cases(args.quick):
        check_conv_case(lib, **case)
    expect("conv", lib.gdn_conv, ConvParams, {"BAD_CONV_WIDTH": [dict(width=9)]})


# ---- gated norm ----

def check_norm_case(lib, tokens, hv, dim, io="bf16", w_dtype=None, sigmoid=False, odd=False, seed=0):
    randn, w_dtype, gap = normal(seed), w_dtype or io, (2, 1) if odd else (8, 8)
    x, z = (Frame(tokens, hv * dim, io, *gap, 2 * randn(tokens, hv * dim)) for _ in range(2))
    out = Frame(tokens, hv * dim, io, *gap)
    weight, split = randn(dim).to(TYPES[w_dtype]), lambda x: x.view.unflatten(1, (hv, dim))
    p = fill(NormParams, x=heads(split(x)), z=heads(split(z)), out=heads(split(out)), weight=weight, tokens=tokens, heads=hv, head_v=dim,
             io_dtype=CODES[io], weight_dtype=CODES[w_dtype], sigmoid=int(sigmoid), eps=1e-6)
    want = reference.gated_norm(split(x), split(z), weight, sigmoid)
    name = words(dict(tokens=tokens, hv=hv, dim=dim, io=io, weights=w_dtype, sigmoid=sigmoid, odd=odd))
    verify(lib, f"norm {name}", lib.gdn_norm, p, [Output("out", out.buffer, out.index, want, O_BOUND[io])])


def check_norm(lib, args):
    dims = [128, 40] if args.quick else [1, 7, 32, 40, 96, 128, 192, 250, 256]
    cases = every(io="bf16" if args.quick else IO, dim=dims, odd=[False, True], tokens=13, hv=5)
    if not args.quick:
        cases += [*every(io=IO, dim=64, odd=[False, True], tokens=13, hv=5, sigmoid=True),
                  *every(io=IO, tokens=3000, hv=32, dim=128, w_dtype="f32"), *every(io=IO, tokens=1, hv=1, dim=128),
                  dict(tokens=200000, hv=8, dim=8)]
    for case in cases:
        check_norm_case(lib, **case)
    expect("norm", lib.gdn_norm, NormParams, {"OK": [dict(head_v=8)], "BAD_HEAD_DIM": [dict(head_v=300)]})


def times(lib, args):
    def conv(batch, tokens):
        state, where = bf16(batch, 3, 8192), slots(None, batch, 3 * 8192)
        return lib.gdn_conv, fill(
            ConvParams, x=columns(bf16(batch * tokens, 12288), 0, 0, tokens), y=columns(bf16(batch * tokens, 8192), 0, 0, tokens),
            weight=bf16(8192, 4), state_in=state, state_out=state, in_slots=where, out_slots=where, seqs=sequences([tokens] * batch),
            channels=8192, width=4, io_dtype=CODES["bf16"], weight_dtype=CODES["bf16"], silu=1)

    def norm(tokens):
        x, z, out = (columns(bf16(tokens, 4096), 0, 128) for _ in range(3))
        return lib.gdn_norm, fill(NormParams, x=x, z=z, out=out, weight=torch.randn(128), tokens=tokens, heads=32, head_v=128,
                                  io_dtype=CODES["bf16"], weight_dtype=CODES["f32"], eps=1e-6)

    def rows(make, shapes, nbytes):
        for shape in shapes:
            moved = nbytes(*shape)
            yield str(shape), moved, {"": calls_of(lib, [make(*shape) for _ in range(cold_sets(moved, least=2))])}

    shapes = [(1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (1, 64), (1, 512), (1, 2048), (1, 8192), (8, 1024)]
    compare("convolution, 8192 channels, width 4, bf16, in place: (batch, tokens)",
            rows(conv, shapes, lambda batch, tokens: batch * 8192 * 2 * (2 * tokens + 6) + 8192 * 8))
    compare("gated norm, 32 heads of 128, bf16: (tokens)", rows(norm, [(n,) for n in (1, 8, 32, 128, 512, 2048, 8192)], lambda n: n * 24576))


GROUPS = {"conv": check_conv, "norm": check_norm}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times)
