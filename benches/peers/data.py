"""Random inputs of a workload, equal for every contender and drawn again for every set of buffers."""
from dataclasses import dataclass

import torch
from reference import log_decay, unit

BF16 = torch.bfloat16


@dataclass
class Draw:
    """Tensors [set, ...]: q, k [token, HK, K], v [token, HV, V], a, b [token, HV] in bf16, state [sequence, HV, V, K]
    in f32; a_log and dt_bias [HV] in f32, the same for all sets."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    state: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    beta_scale: float

    def gates(self):
        """The log decay g and beta, computed beforehand, in f32."""
        return log_decay_f32(self.a, self.a_log, self.dt_bias), self.beta_scale * self.b.float().sigmoid()


def log_decay_f32(a, a_log, dt_bias):
    return -a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)


def unit_bf16(x):
    """x over its length along the last dimension, rounded: what a kernel that does not normalise is fed."""
    return (x.float() * (x.float().pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()).to(BF16)


def draw(work, sets, device):
    gen = torch.Generator(device).manual_seed(work.seed)
    randn = lambda *shape, dtype=BF16: torch.randn(sets, *shape, generator=gen, device=device, dtype=dtype)
    t, n = work.tokens, len(work.lens)
    q, k = randn(t, work.hk, work.k), randn(t, work.hk, work.k)
    if not work.l2norm:
        q, k = unit_bf16(q), unit_bf16(k)
    v, a, b = randn(t, work.hv, work.v), randn(t, work.hv), randn(t, work.hv)
    state = randn(n, work.hv, work.v, work.k, dtype=torch.float32).mul_(0.1)
    # Decays as a model has them: A in 1..16, dt_bias such that most tokens keep most of the state.
    a_log = (torch.rand(work.hv, generator=gen, device=device) * 15 + 1).log()
    dt_bias = torch.randn(work.hv, generator=gen, device=device) - 4
    d = Draw(q, k, v, a, b, state, a_log, dt_bias, work.beta_scale)
    harden(d, work.hard, randn)
    return d


def harden(d, kind, randn):
    """Makes drawn inputs what `kind`, some of workloads.HARD's words, says of them."""
    tokens = d.k.shape[1]
    if "keys" in kind:
        # Nearly parallel: a direction of each head, or two that take turns, and a hundredth of noise.
        several = 2 if "two keys" in kind else 1
        turn = torch.arange(tokens, device=d.k.device) % several
        d.k.copy_(d.k[:, :several][:, turn] + 0.01 * randn(*d.k.shape[1:]))
        d.b.add_(3)
    if "no decay" in kind:
        d.a_log.fill_(-20)
    if "decays" in kind:
        d.a_log.fill_(0)
        d.a.uniform_(0, 30)
    if "norms" in kind:
        for x in (d.q, d.k, d.v):
            x.mul_(300)
    if "beta" in kind:
        d.b.add_(6)


def cumulative(work, dtype, device):
    """cu_seqlens [sequences + 1]."""
    return torch.tensor([0, *work.lens], device=device).cumsum(0).to(dtype)


@dataclass
class Case:
    """A contender ready to run one workload.

    `calls`: one a set of buffers. `math`: what the rule sees of set 0, the arguments q .. state of `packed_chunks`;
    the state as it is before the first call. `result()`: o [token, HV, V] and the final state [sequence, HV, V, K] that
    the last call of set 0 left.
    """
    calls: list
    math: tuple
    result: object


def raw_math(d, work):
    """`Case.math` of a kernel that takes the raw inputs."""
    q, k = (unit(d.q[0]), unit(d.k[0])) if work.l2norm else (d.q[0], d.k[0])
    return q, k, d.v[0], log_decay(d.a[0], d.a_log, d.dt_bias), work.beta_scale * d.b[0].double().sigmoid(), d.state[0].clone()


def poison(*tensors):
    for x in tensors:
        x.fill_(float("nan"))


def output_bytes(work):
    """Of o in bf16 and the final states in f32."""
    return 2 * work.tokens * work.hv * work.v + work.state_bytes()


def poison_allocator(nbytes, device):
    """For kernels that allocate their outputs: the memory that they will most likely be handed holds NaN."""
    if device == "cuda":
        torch.cuda.empty_cache()
    x = torch.full((nbytes // 4 + (1 << 20),), float("nan"), device=device)
    del x
