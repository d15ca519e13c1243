"""What operands of 16 bits cost an input: the bounds of the chunk forms on tensor cores where it is hard. The port of
tests/gdn/sixteen_bits.rs.

`rule` is exact but for what a kernel rounds because tensor cores multiply nothing wider: to the inputs' type the state
before a chunk, U = V - S K^T, T = (I + L)^-1 diag(beta), V' = T U with and without its decay to the chunk's end, and Q K^T;
to f16, whatever the type, the blocks that the inverse is merged from. On usual inputs that costs up to 3e-3 with bf16. Where
a key repeats and little decays, the V' of a chunk cancel in their sum while their roundings add up; with beta near 2 those of
T do too, to a tenth and more."""
import torch

CHUNK = 64
NOISES = 3


def bound(usual, cost):
    """Most that an output may be off: `usual`, or twice the cost where that is more than two thirds of it. Half is what
    nothing may be off."""
    return usual if 1.5 * cost <= usual else min(2 * cost, 0.5)


def rule(dtype, noise, q, k, v, a, b, a_log, dt_bias, state, lens, l2norm, eps, scale, beta_scale):
    """check.rule_reference with operands of `dtype`; `noise` is the seed of 1e-7 in q, k and v, what f32 sums may do."""
    gen = torch.Generator(q.device).manual_seed(noise)
    rounded = lambda x: x.to(dtype).double()
    live = torch.arange(v.shape[1], device=v.device) < lens[:, None]
    masked = lambda x: torch.where(live.view(*live.shape, *[1] * (x.dim() - 2)), x, 0.0)
    noisy = lambda x: masked(x * (1 + 1e-7 * torch.randn(x.shape, generator=gen, device=x.device, dtype=x.dtype)))
    length = lambda x: (x.pow(2).sum(-1, keepdim=True) + eps).sqrt() if l2norm else torch.ones_like(x[..., :1])
    heads = lambda x: x.repeat_interleave(v.shape[2] // k.shape[2], 2).transpose(1, 2)
    q, k, v = heads(noisy(q)), heads(noisy(k)), noisy(v).transpose(1, 2)        # [N, HV, T, ..] from here on
    q_norm, k_norm = scale / length(q), 1 / length(k)
    beta = (beta_scale * torch.sigmoid(b)).transpose(1, 2)[..., None]
    log_decay = masked(-a_log.exp() * torch.nn.functional.softplus(a + dt_bias, threshold=1e9)).transpose(1, 2)[..., None]
    inputs, o = (q, k, v, q_norm, k_norm, beta, log_decay), []
    for t in range(0, v.shape[2], CHUNK):
        q, k, v, q_norm, k_norm, beta, log_decay = (x[:, :, t:t + CHUNK] for x in inputs)
        n, c = v.shape[2], log_decay.cumsum(2)
        left = (c - c.mT).clamp_max(0).exp() * k_norm.mT        # at token i of what token j wrote, and the norm of j
        l = torch.nn.functional.pad((beta * k_norm * left * (k @ k.mT)).tril(-1), (0, CHUNK - n) * 2)
        inverse = rounded(inverted(l)[..., :n, :n] * beta.mT)
        attention = rounded((q_norm * left * (q @ k.mT)).tril())
        before = rounded(state).mT
        values = inverse @ rounded(v - c.exp() * k_norm * (k @ before))
        o.append(c.exp() * q_norm * (q @ before) + attention @ rounded(values))
        last = c[:, :, -1:]
        state = last.exp() * state + rounded(values * (last - c).exp() * k_norm).mT @ k
    return (torch.cat(o, 2) if o else inputs[2]).transpose(1, 2), state


def inverted(l):
    """(I + L)^-1 by blocks: [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']]; those of 8 are f32's, which is exact here."""
    half = l.shape[-1] // 2
    if half == 4:
        eye = torch.eye(8, dtype=l.dtype, device=l.device).expand_as(l)
        return torch.linalg.solve_triangular(l + eye, eye, upper=False, unitriangular=True)
    rounded = lambda x: x.to(torch.float16).double()
    a, b = inverted(l[..., :half, :half]), inverted(l[..., half:, half:])
    c = rounded(rounded(b) @ rounded(l[..., half:, :half])) @ rounded(a)
    return torch.cat([torch.cat([a, torch.zeros_like(a)], -1), torch.cat([-c, b], -1)], -2)
