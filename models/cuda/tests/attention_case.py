"""A case of attention over a cache for check_attention.py, and its launches.

Caches hold NaN wherever no token is (values with a window zeros), slots that no sequence has are NaN throughout, and so are outputs before a launch and
the gaps of strided tensors.
"""
import abi
import torch
from abi import CODES, NO_SLOT, AdvanceParams, AttentionParams, AttentionPrepareParams, KvCache, fill, sequences, workspace
from harness import TYPES, call, cu_seqlens, launch, nan, normal, rows_of, shuffled, u32


class Case:
    """Sequences with `before[n]` tokens in the cache and `lens[n]` new ones, columns of one projection
    [tokens, heads x (q | gate) | k | v]."""

    def __init__(self, before, lens, heads=8, kv_heads=2, dim=128, rotary=None, io="bf16", capacity=None, slots=False,
                 varlen=False, gap=0, gated=True, zero_centred=True, low=True, max_len=0, splits=0, overlap=0,
                 transposed=False, sharpness=1.0, scale=None, window=0, seed=0):
        randn = normal(seed)
        self.before, self.lens, self.heads, self.kv_heads, self.dim, self.io = before, lens, heads, kv_heads, dim, io
        self.rotary = dim // 4 // 2 * 2 if rotary is None else rotary
        self.varlen, self.gated, self.zero_centred, self.max_len, self.splits = varlen, gated, zero_centred, max_len, splits
        self.overlap, self.window = overlap, window
        self.scale = dim ** -0.5 if scale is None else scale
        dt, n = TYPES[io], len(lens)
        assert varlen or len(set(lens)) == 1
        self.total, self.rows = sum(lens), list(enumerate(rows_of(lens)))
        self.capacity = capacity or max(b + t for b, t in zip(before, lens)) + 5
        self.cu = cu_seqlens(lens) if varlen else None

        rows, width = max(self.total, 1), (2 * heads + 2 * kv_heads) * dim
        self.x = nan(rows, width + gap, dtype=io)
        self.x[:, :width] = randn(rows, width)
        qg = self.x[:, :2 * heads * dim].unflatten(1, (heads, 2 * dim))
        self.q, self.gate = qg[..., :dim], qg[..., dim:]
        self.k = self.x[:, 2 * heads * dim:][:, :kv_heads * dim].unflatten(1, (kv_heads, dim))
        self.v = self.x[:, (2 * heads + kv_heads) * dim:][:, :kv_heads * dim].unflatten(1, (kv_heads, dim))
        centre = 0.0 if zero_centred else 1.0
        self.q_weight, self.k_weight = centre + 0.2 * randn(dim), centre + 0.2 * randn(dim)
        if sharpness != 1.0:
            self.q_weight = (1 + self.q_weight) * sharpness - 1 if zero_centred else self.q_weight * sharpness
        exact = 1e7 ** (-torch.arange(0, self.rotary, 2, dtype=torch.float64) / max(self.rotary, 1))
        self.high = exact.float()
        self.low = (exact - exact.float().double()).float() if low else None
        self.frequencies = (self.high.double() + self.low.double()) if low else self.high.double()

        self.slots, self.num_slots = list(range(n)), n
        if slots:
            self.num_slots = 2 * n + 1
            self.slots = shuffled(self.num_slots, seed)[:n]
            if n > 2:
                self.slots[n // 2] = NO_SLOT
                self.slots[-1] = self.num_slots + 3
        self.slot_map = u32(self.slots) if slots else None
        self.live = [i for i in range(n) if self.slots[i] < self.num_slots]
        shape = (self.num_slots, self.capacity, kv_heads, dim) if transposed else (self.num_slots, kv_heads, self.capacity, dim)
        view = (lambda c: c.transpose(1, 2)) if transposed else (lambda c: c)
        self.pools = [nan(*shape, dtype=io) for _ in range(2)]
        if window:
            self.pools[1].zero_()
        self.caches = [view(c) for c in self.pools]
        for i in self.live:
            for cache in self.caches:
                rows = self.rows_of(before[i] - self.capacity, before[i])
                cache[self.slots[i]][:, rows] = randn(kv_heads, len(rows), dim).to(dt)
        # 8 is where a padding row may point to.
        self.positions = u32([b if i in self.live else 8 for i, b in enumerate(before)])

    def rows_of(self, first, end):
        """Where the caches have a sequence's tokens from position `first` to the one before `end`."""
        positions = torch.arange(max(first, 0), end)
        return positions % self.capacity if self.window else positions[positions < self.capacity]

    def view(self, x):
        """A tensor [rows, head, dim] as the ABI has it."""
        return abi.heads(x, 0 if self.varlen else self.lens[0])

    def common(self, caches):
        """The fields that both structs share, with these caches or the case's own."""
        k, v = caches or self.caches
        cache = fill(KvCache, k=k, v=v, slots=abi.slots(self.slot_map, self.num_slots, k.stride(0)), head_stride=k.stride(1),
                     token_stride=k.stride(2), capacity=self.capacity, window=self.window)
        return dict(positions=self.positions, cache=cache, seqs=sequences(self.lens, self.cu), num_heads=self.heads,
                    num_kv_heads=self.kv_heads, head_dim=self.dim, io_dtype=CODES[self.io], overlap=self.overlap)

    def prepare_params(self, q_out, caches=None):
        view, rotated = self.view, self.rotary > 0
        return fill(AttentionPrepareParams, q=view(self.q), k=view(self.k), v=view(self.v), q_out=view(q_out),
                    q_weight=self.q_weight, k_weight=self.k_weight, inv_freq=self.high if rotated else None,
                    inv_freq_low=self.low if rotated else None, rotary_dim=self.rotary, zero_centred=int(self.zero_centred),
                    eps=1e-6, **self.common(caches))

    def attention_params(self, lib, q, o, caches=None):
        p = fill(AttentionParams, q=self.view(q), o=self.view(o), max_len=self.max_len, splits=self.splits,
                 scale=self.scale, **self.common(caches))
        if self.gated:
            p.gate = self.view(self.gate)
        workspace(lib.gdn_attention_workspace, p)
        return p

    def advance_params(self):
        return fill(AdvanceParams, positions=self.positions, slots=abi.slots(self.slot_map, self.num_slots, 0),
                    seqs=sequences(self.lens, self.cu), overlap=self.overlap)

    def empty(self):
        return nan(max(self.total, 1), self.heads, self.dim, dtype=self.io)


def run(lib, case, graph=False):
    """Both launches on copies of the caches: (status, q, caches, o, guard untouched)."""
    pools = [c.clone() for c in case.pools]
    caches = [p.as_strided(c.shape, c.stride()) for p, c in zip(pools, case.caches)]
    q, o = case.empty(), case.empty()
    first, second = case.prepare_params(q, caches), case.attention_params(lib, q, o, caches)
    status = launch(lambda: call(lib.gdn_attention_prepare, first) or call(lib.gdn_attention, second), graph)
    return status, q, caches, o, bool((second.room[second.workspace_bytes:] == 0xFF).all())
