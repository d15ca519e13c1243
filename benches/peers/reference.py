"""The gated delta rule in float64, exact and fast enough for 32768 tokens: the chunk form over all heads and chunks at
once, and a loop over chunks for the state alone."""
import torch

CHUNK = 64
# Elements of the largest float64 tensor that is made at a time: value heads are taken in groups.
LIMIT = 1 << 27


def relative(x, ref):
    """||x - ref|| / ||ref|| over the whole tensor: NaN in x gives NaN."""
    ref = ref.double()
    norm = ref.norm()
    error = (x.double() - ref).norm()
    return (error / norm).item() if norm > 0 else error.item()


def unit(x, eps=1e-6):
    """x over its length along the last dimension, in float64."""
    x = x.double()
    return x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()


def log_decay(a, a_log, dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias), in float64."""
    x = a.double() + dt_bias.double()
    # torch's softplus turns linear at its threshold; past 40 that is exact in float64.
    return -a_log.double().exp() * torch.nn.functional.softplus(x, threshold=40)


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


def rule(q, k, v, g, beta, state, lens, scale):
    """o [tokens, HV, V] and the final states [sequence, HV, V, K] in float64.

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
    """`rule` for heads that all fit, q and k repeated to the value heads. [chunk, head, token, ...] inside."""
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
