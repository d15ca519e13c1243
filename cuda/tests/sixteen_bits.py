"""What operands of 16 bits cost an input: the bounds of the chunk forms on tensor cores where it is hard. Needs torch, no GPU;
it is the port of ../tests/gdn/sixteen_bits.rs.

`rule` is exact but for what a kernel rounds because tensor cores multiply nothing wider: to the inputs' type the state
before a chunk, U = V - S K^T, T = (I + L)^-1 diag(beta), V' = T U with and without its decay to the chunk's end, and Q K^T;
to f16, whatever the type, the blocks that the inverse is merged from. On usual inputs that costs up to 3e-3 with bf16, 4e-4
with f16. Where a key repeats and little decays, the V' of a chunk cancel in their sum while their roundings add up; with
beta near 2 those of T do too, to a tenth and more, and for two keys in turn to more than the result itself. Noise of 1e-7
in q, k and v moves that by less than a tenth, for f16 too; 1e-6 before every rounding, for nearly parallel keys with beta 2
and bf16 alone, up to threefold."""
import torch
from abi import CHUNK


def bound(usual, cost):
    """Most that an output may be off: `usual`, or twice the cost where that is more than two thirds of it. Half is what
    nothing may be off."""
    return usual if 1.5 * cost <= usual else min(2 * cost, 0.5)


def rule(dtype, q, k, v, a, b, a_log, dt_bias, state, lens, l2norm, eps, scale, beta_scale):
    """check.rule_reference with operands of `dtype`."""
    rounded = lambda x: x.to(dtype).double()
    live = torch.arange(v.shape[1], device=v.device) < lens[:, None]
    ratio = v.shape[2] // k.shape[2]
    masked = lambda x: torch.where(live[..., None, None], x, 0.0)
    by_head = lambda x, times=1: masked(x).repeat_interleave(times, 2).transpose(1, 2)
    inverse_norm = lambda x: (x.pow(2).sum(-1, keepdim=True) + eps).rsqrt() if l2norm else torch.ones_like(x[..., :1])
    log_decay = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias, threshold=1e9)
    beta = beta_scale * torch.sigmoid(b)
    inputs = by_head(q, ratio), by_head(k, ratio), by_head(v), by_head(log_decay[..., None]), by_head(beta[..., None])
    o = []      # and all of `inputs`: [N, HV, T, ..]
    for t in range(0, v.shape[1], CHUNK):
        q, k, v, log_decay, beta = (x[:, :, t:t + CHUNK] for x in inputs)
        n, c, q_norm, k_norm = v.shape[2], log_decay.cumsum(2), scale * inverse_norm(q), inverse_norm(k)
        left = (c - c.mT).clamp_max(0).exp() * k_norm.mT        # at token i of what token j wrote, over the norm of j
        l = (beta * k_norm * left * (k @ k.mT)).tril(-1)
        inverse = inverted(torch.nn.functional.pad(l, (0, CHUNK - n) * 2))[..., :n, :n]
        attention = rounded((q_norm * left * (q @ k.mT)).tril())
        before = rounded(state).mT
        values = rounded(inverse * beta.mT) @ rounded(v - c.exp() * k_norm * (k @ before))
        o.append(c.exp() * q_norm * (q @ before) + attention @ rounded(values))
        last = c[:, :, -1:]
        state = last.exp() * state + rounded(values * (last - c).exp() * k_norm).mT @ k
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
