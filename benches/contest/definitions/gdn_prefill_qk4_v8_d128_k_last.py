"""The gated delta rule over packed sequences, in float64 and 64 tokens at a time: token by token a call takes seconds."""
import torch
import torch.nn.functional as F

CHUNK = 64


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    ratio = v.shape[1] // k.shape[1]
    by_head = lambda x: x.double().transpose(0, 1)
    q, k = (by_head(x.repeat_interleave(ratio, 1)) for x in (q, k))
    v, beta = by_head(v), by_head(b.double().sigmoid()[..., None])
    g = by_head((-A_log.double().exp() * F.softplus(a.double() + dt_bias.double(), threshold=40))[..., None])

    output, new_state = torch.empty_like(v), state.clone()
    bounds = cu_seqlens.tolist()
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        if begin < end:
            parts = (x[:, begin:end] for x in (q, k, v, g, beta))
            output[:, begin:end], new_state[n] = sequence(*parts, state[n].double())
    return (scale * output).transpose(0, 1).bfloat16(), new_state


def sequence(q, k, v, g, beta, s):
    """[head, token, ..] and the state before: o and the state after. Inside [head, chunk, token, ..]; tokens past the end
    are zeros, which change nothing.

    With c the sum of g up to a token of its chunk, what the tokens of a chunk write solves
    w_i = beta_i (v_i - e^c_i S k_i - sum_(j < i) e^(c_i - c_j) (k_i . k_j) w_j), linear in S: w = of_v - of_k S^T."""
    tokens = q.shape[1]
    q, k, v, g, beta = (F.pad(x, (0, 0, 0, -tokens % CHUNK)).unflatten(1, (-1, CHUNK)) for x in (q, k, v, g, beta))
    c = g.cumsum(2)
    decay = (c - c.mT).exp().tril()
    right = torch.cat([beta * v, beta * c.exp() * k], -1)
    solved = torch.linalg.solve_triangular(beta * decay * (k @ k.mT), right, upper=False, unitriangular=True)
    of_v, of_k = solved.split([v.shape[-1], k.shape[-1]], -1)
    mix, q, last = decay * (q @ k.mT), c.exp() * q, c[:, :, -1:]
    k, last = (last - c).exp() * k, last.exp()

    o = torch.empty_like(v)
    for i in range(o.shape[1]):
        written = of_v[:, i] - of_k[:, i] @ s.mT
        o[:, i] = q[:, i] @ s.mT + mix[:, i] @ written
        s = last[:, i] * s + written.mT @ k[:, i]
    return o.flatten(1, 2)[:, :tokens], s
