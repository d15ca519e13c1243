"""What the kernels compute, in float64 on whatever device the tensors are. Needs torch, no GPU.

`recurrence` is the definition, token by token; `rule` is the same from raw gates, and `packed_chunks`
the same in chunks, for the benchmarks' long sequences. `rule_in_16_bits` is what operands of 16 bits make
of an input: it bounds the chunk forms where an input is hard.
"""
import math

import torch

CHUNK = 64


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
    """recurrence() of raw gates, and of q and k before their norm."""
    if l2norm:
        q, k = unit(q, eps), unit(k, eps)
    return recurrence(q, k, v, log_decay(a, a_log, dt_bias), beta_scale * torch.sigmoid(b), state, lens, scale, typical)


def recurrence(q, k, v, g, beta, state, lens, scale, typical=None):
    """o [N, T, HV, V] and the final states of q and k [N, T, HK, K], v [N, T, HV, V], the log decay g and beta [N, T, HV] in float64,
    state [N, HV, V, K]; tokens past a sequence's length change nothing. `typical` [N, T, HV], where given, gets
    ||S|| ||q|| / sqrt(K): the length of o for a q of no particular direction."""
    ratio = v.shape[2] // k.shape[2]
    q, k, g = (q * scale).repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2), g.exp()
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


def packed_chunks(q, k, v, g, beta, state, lens, scale):
    """recurrence() of sequences one after the other, tensors [token, ..] of any dtype, a chunk of tokens at a time. The numbers are the
    same up to rounding in float64, and long sequences take far fewer launches. Padding has k = 0, beta = 0 and g = 0: it changes no state."""
    counts, ratio, o = torch.tensor(lens, device=v.device), v.shape[1] // k.shape[1], []
    pad = lambda x: torch.nn.utils.rnn.pad_sequence(x.double().split(lens), batch_first=True)
    padded = [pad(x) for x in (q * scale, k, v, g[..., None], beta[..., None])]
    state = state.double()
    for t in range(0, max(lens), CHUNK):
        by_head = lambda x, times=1: x[:, t:t + CHUNK].repeat_interleave(times, 2).transpose(1, 2)    # [sequence, HV, token, ..]
        q, k, v, g, beta = (by_head(x, times) for x, times in zip(padded, (ratio, ratio, 1, 1, 1)))
        c = g.cumsum(2)
        left = (c - c.mT).clamp_max(0).exp().tril()        # at token i of what token j wrote
        # An update is beta (v - S k), and S has the updates before it in the chunk: a triangular system.
        l = (beta * left * (k @ k.mT)).tril(-1)
        updates = torch.linalg.solve_triangular(l, beta * (v - c.exp() * (k @ state.mT)), upper=False, unitriangular=True)
        o.append((c.exp() * (q @ state.mT) + left * (q @ k.mT) @ updates).transpose(1, 2))
        last = c[:, :, -1:]
        state = last.exp() * state + ((last - c).exp() * updates).mT @ k
    live = torch.arange(max(lens), device=counts.device) < counts[:, None]
    return (torch.cat(o, 1) if o else padded[2])[live], state


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


# ---- the other kernels ----

def conv(past, x, weight, with_silu=True):
    """(y, the inputs to keep): x [.., token, channel] after past [.., width - 1, channel], weight [channel, width]."""
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


def rotary(x, weight, inv_freq, positions, eps, zero_centred):
    """x [tokens, heads, dim], positions [tokens]: RMS norm, then rotation of values i and i + pairs."""
    x = rms_norm(x, weight.double() + (1.0 if zero_centred else 0.0), eps)
    pairs = inv_freq.numel()
    angle = positions.double()[:, None, None] * inv_freq.double()
    a, b = x[..., :pairs], x[..., pairs:2 * pairs]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), x[..., 2 * pairs:]], -1)


def attention(q, k, v, first, scale, gate=None, window=0):
    """q [tokens, heads, dim] at positions first + t, k and v [keys, kv_heads, dim]: every query sees keys up to its own
    position, or all there are; with a window so many of these, the last ones."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    parts = []
    step = max(1, (1 << 27) // max(k.shape[0] * k.shape[1], 1))    # scores of so many queries fit
    for part in q.split(step):
        scores = torch.einsum("thd,jhd->htj", part, k) * scale
        ahead = torch.arange(k.shape[0], device=q.device)[None] - first - torch.arange(part.shape[0], device=q.device)[:, None]
        seen = ahead <= 0
        if window:
            seen &= ahead > -window
        p = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        parts.append(torch.einsum("htj,jhd->thd", p, v))
        first += part.shape[0]
    o = torch.cat(parts)
    return o if gate is None else o * torch.sigmoid(gate.double())
