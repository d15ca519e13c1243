"""What the kernels compute, in float64 on whatever device the tensors are. Needs torch, no GPU.

`rule` is the definition, token by token. `rule_by_chunks` is the same for long inputs; benches/peers/test_peers.py holds
the two together. `rule_in_16_bits` is what operands of 16 bits make of an input: it bounds the chunk forms where it is hard.
"""
import math

import torch

CHUNK = 64
# Elements of the largest tensor that rule_by_chunks makes at a time: value heads are taken in groups.
LIMIT = 1 << 27


def relative(x, ref):
    """||x - ref|| / ||ref||, or ||x|| where ref is zero; infinite where x is not a number."""
    x, ref = x.double(), ref.double()
    norm, error = ref.norm(), (x - ref).norm()
    error = (error / norm if norm > 0 else error).item()
    return math.inf if math.isnan(error) else error


def silu(x):
    return torch.nn.functional.silu(x.double())


# ---- the gated delta rule ----

def unit(x, eps=1e-6):
    """x over its length along the last dimension."""
    x = x.double()
    return x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()


def log_decay(a, a_log, dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias)."""
    x = a.double() + dt_bias.double()
    # torch's softplus turns linear at its threshold; past 40 that is exact in float64.
    return -a_log.double().exp() * torch.nn.functional.softplus(x, threshold=40)


def rule(q, k, v, a, b, a_log, dt_bias, state, lens, l2norm, eps, scale, beta_scale, typical=None):
    """[N, T, H, D] and [N, T, HV] in float64, state [N, HV, V, K]; tokens past a sequence's length change nothing.
    `typical` [N, T, HV], where given, gets ||S|| ||q|| / sqrt(K): the length of o for a q of no particular direction."""
    ratio = v.shape[2] // k.shape[2]
    if l2norm:
        q, k = unit(q, eps), unit(k, eps)
    q, k = (q * scale).repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2)
    g = log_decay(a, a_log, dt_bias).exp()
    beta = beta_scale * torch.sigmoid(b)
    o = torch.zeros_like(v)
    for t in range(v.shape[1]):
        live = (t < lens).view(-1, 1, 1, 1)
        s = g[:, t, :, None, None] * state
        d = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhvk,nhk->nhv", s, k[:, t]))
        s = s + d[..., None] * k[:, t, :, None, :]
        o[:, t] = torch.where(live[..., 0], torch.einsum("nhvk,nhk->nhv", s, q[:, t]), 0.0)
        if typical is not None:
            length = s.flatten(2).norm(dim=-1) * q[:, t].norm(dim=-1) * k.shape[-1] ** -0.5
            typical[:, t] = torch.where(live[..., 0, 0], length, 0.0)
        state = torch.where(live, s, state)
    return o, state


def chunk_table(lens, chunk):
    """Splits packed sequences into chunks: token indices [chunks, chunk], `tokens` where there is none, and the number
    of each sequence's first chunk."""
    tokens, rows, first, at = sum(lens), [], [], 0
    for length in lens:
        first.append(len(rows))
        for start in range(0, length, chunk):
            row = torch.arange(at + start, at + start + chunk)
            rows.append(torch.where(row < at + length, row, tokens))
        at += length
    return (torch.stack(rows) if rows else torch.empty(0, chunk, dtype=torch.long)), first


def rule_by_chunks(q, k, v, g, beta, state, lens, scale):
    """o [tokens, HV, V] and the final states [sequence, HV, V, K]: the chunk form over all heads and chunks at once, and a
    loop over chunks for the state alone.

    q and k [tokens, HK, K] as the recurrence takes them (normalised where it normalises); v [tokens, HV, V]; g, the log
    decay, and beta [tokens, HV]; state [sequence, HV, V, K]; any dtype. Sequences lie one after the other and may be
    empty.
    """
    chunk = min(CHUNK, max(max(lens), 1))
    table, first = chunk_table(lens, chunk)
    table = table.to(v.device)
    ratio = v.shape[1] // k.shape[1]
    out, final = torch.empty(v.shape, dtype=torch.float64, device=v.device), state.double().clone()
    widest = max(table.numel() * max(chunk, k.shape[2] + v.shape[2]), len(lens) * v.shape[2] * k.shape[2], 1)
    step = max(1, LIMIT // (widest * ratio))        # key heads at a time
    for h in range(0, k.shape[1], step):
        keys = slice(h, h + step)
        values = slice(h * ratio, (h + step) * ratio)
        o, final[:, values] = _heads(q[:, keys].repeat_interleave(ratio, 1), k[:, keys].repeat_interleave(ratio, 1),
                                     v[:, values], g[:, values], beta[:, values], final[:, values], lens, scale, table,
                                     first)
        out[:, values] = o
    return out, final


def _heads(q, k, v, g, beta, state, lens, scale, table, first):
    """rule_by_chunks for heads that all fit, q and k repeated to the value heads. [chunk, head, token, ...] inside."""
    chunk, tokens = table.shape[1], v.shape[0]
    pad = lambda x: torch.cat([x.double(), x.new_zeros((1, *x.shape[1:]), dtype=torch.float64)])[table].transpose(1, 2)
    # A token past the end has k = v = 0, beta = 0 and g = 0: it changes nothing.
    q, k, v, g, beta = pad(q) * scale, pad(k), pad(v), pad(g), pad(beta)
    c = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    decay = (c[..., :, None] - c[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    mix = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    right = torch.cat([beta[..., None] * v, (beta * c.exp())[..., None] * k], -1)
    # (I + L) [U | W] = [beta V | beta e^c K]; the solver takes the diagonal to be one.
    solved = torch.linalg.solve_triangular(mix, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    inner = (q @ k.mT) * decay
    q = c.exp()[..., None] * q
    last = c[..., -1:]
    k = (last - c).exp()[..., None] * k
    last = last.exp()[..., None]

    out = torch.empty_like(v)
    state = state.clone()
    counts = [-(-length // chunk) for length in lens]
    for i in range(max(counts, default=0)):
        live = [n for n, count in enumerate(counts) if count > i]
        rows = torch.tensor([first[n] + i for n in live], device=v.device)
        seqs = torch.tensor(live, device=v.device)
        s = state[seqs]
        fresh = u[rows] - w[rows] @ s.mT
        out[rows] = q[rows] @ s.mT + inner[rows] @ fresh
        state[seqs] = last[rows] * s + fresh.mT @ k[rows]

    flat = torch.empty(tokens + 1, *out.transpose(1, 2).shape[2:], dtype=torch.float64, device=v.device)
    flat[table] = out.transpose(1, 2)
    return flat[:tokens], state


# ---- the rule with operands of 16 bits ----
#
# It is exact but for what a kernel rounds because tensor cores multiply nothing wider: to the inputs' type the state
# before a chunk, U = V - S K^T, T = (I + L)^-1, V' = T U as it is and times beta and its decay to the chunk's end, and
# Q K^T diag(beta); to f16, whatever the type, the blocks that the inverse is merged from. On usual inputs that costs up to
# 3e-3 with bf16, 4e-4 with f16. Where a key repeats and little decays, the V' of a chunk cancel in their sum while their
# roundings add up; with beta near 2 those of T do too, to a tenth and more, and for two keys in turn to more than the result
# itself. Noise of 1e-7 in q, k and v moves that by less than a tenth, for f16 too; 1e-6 before every rounding, for nearly
# parallel keys with beta 2 and bf16 alone, up to threefold. tests/gdn/sixteen_bits.rs is the same in Rust.

def bound_of_hard(usual, cost):
    """Most that an output may be off: `usual`, or twice the cost where that is more than two thirds of it. A tenth is what
    nothing may be off."""
    return usual if 1.5 * cost <= usual else min(2 * cost, 0.1)


def rule_in_16_bits(dtype, q, k, v, a, b, a_log, dt_bias, state, lens, l2norm, eps, scale, beta_scale):
    """`rule` with operands of `dtype`."""
    rounded = lambda x: x.to(dtype).double()
    live = torch.arange(v.shape[1], device=v.device) < lens[:, None]
    ratio = v.shape[2] // k.shape[2]
    masked = lambda x: torch.where(live[..., None, None], x, 0.0)
    by_head = lambda x, times=1: masked(x).repeat_interleave(times, 2).transpose(1, 2)
    inverse_norm = lambda x: (x.pow(2).sum(-1, keepdim=True) + eps).rsqrt() if l2norm else torch.ones_like(x[..., :1])
    beta = beta_scale * torch.sigmoid(b)
    inputs = (by_head(q, ratio), by_head(k, ratio), by_head(v), by_head(log_decay(a, a_log, dt_bias)[..., None]),
              by_head(beta[..., None]))
    o = []      # and all of `inputs`: [N, HV, T, ..]
    for t in range(0, v.shape[1], CHUNK):
        q, k, v, g, beta = (x[:, :, t:t + CHUNK] for x in inputs)
        n, c, q_norm, k_norm = v.shape[2], g.cumsum(2), scale * inverse_norm(q), inverse_norm(k)
        weight = beta * k_norm
        left = (c - c.mT).clamp_max(0).exp() * weight.mT        # at token i of what token j wrote
        l = (k_norm * left * (k @ k.mT)).tril(-1)
        inverse = inverted(torch.nn.functional.pad(l, (0, CHUNK - n) * 2))[..., :n, :n]
        attention = rounded((q_norm * left * (q @ k.mT)).tril())
        before = rounded(state).mT
        values = rounded(inverse) @ rounded(v - c.exp() * k_norm * (k @ before))
        o.append(c.exp() * q_norm * (q @ before) + attention @ rounded(values))
        last = c[:, :, -1:]
        state = last.exp() * state + rounded(values * (last - c).exp() * weight).mT @ k
    return (torch.cat(o, 2) if o else inputs[2]).transpose(1, 2), state


def inverted(l):
    """(I + L)^-1 by blocks, [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']]. Those of 8 are made in f32: exact here."""
    half = l.shape[-1] // 2
    if half == 4:
        eye = torch.eye(8, dtype=l.dtype, device=l.device).expand_as(l)
        return torch.linalg.solve_triangular(l + eye, eye, upper=False, unitriangular=True)
    rounded = lambda x: x.to(torch.float16).double()
    a, b = inverted(l[..., :half, :half]), inverted(l[..., half:, half:])
    c = rounded(rounded(b) @ rounded(l[..., half:, :half])) @ rounded(a)
    return torch.cat([torch.cat([a, torch.zeros_like(a)], -1), torch.cat([-c, b], -1)], -2)


# ---- what stands around it ----

def conv(past, x, weight, with_silu=True):
    """(y, the inputs to keep): x [.., token, channel] behind past [.., width - 1, channel], weight [channel, width]."""
    length, width = x.shape[-2], weight.shape[1]
    inputs = torch.cat([past, x], -2)
    y = sum(inputs[..., j:j + length, :].double() * weight[:, j].double() for j in range(width))
    return silu(y) if with_silu else y, inputs[..., length:, :]


def rms_norm(x, weight, eps=1e-6):
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def gated_norm(x, z, weight, sigmoid=False):
    return rms_norm(x, weight) * (torch.sigmoid(z.double()) if sigmoid else silu(z))


def swiglu(gate, up):
    return silu(gate) * up.double()


def linear(x, weight, with_swiglu=False):
    """x w^T; with SwiGLU the weight has the gate's rows, then up's."""
    y = x.double() @ weight.double().T
    return swiglu(*y.chunk(2, 1)) if with_swiglu else y
