"""The gated delta rule for one token of each sequence, in float64."""
import torch
import torch.nn.functional as F


def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    ratio = v.shape[2] // k.shape[2]
    q, k = (x[:, 0].double().repeat_interleave(ratio, 1) for x in (q, k))
    v, a, beta = v[:, 0].double(), a[:, 0].double(), b[:, 0].double().sigmoid()
    decay = (-A_log.double().exp() * F.softplus(a + dt_bias.double(), threshold=40)).exp()

    s = decay[..., None, None] * state.double()
    write = beta[..., None] * (v - torch.einsum("nhvk,nhk->nhv", s, k))
    s = s + write[..., None] * k[:, :, None, :]
    o = scale * torch.einsum("nhvk,nhk->nhv", s, q)
    return o[:, None].bfloat16(), s.float()
