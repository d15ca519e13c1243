"""The suite `backward`: the gradients of the rule, from those of o and of the final state, and their check in float64."""
from dataclasses import dataclass, replace

import torch
from data import BF16
from reference import log_decay, packed_chunks, relative, unit
from workloads import Workload

# Gradients of what a kernel reads: raw inputs, or normalised q and k with ready gates.
RAW = ["q", "k", "v", "a", "b", "a_log", "dt_bias", "state"]
READY = ["q", "k", "v", "g", "beta", "state"]
# Autograd in float64 keeps all states: the check has a shape of its own.
CHECKED = Workload("backward", "2/4 256+63", 2, 4, (256, 63), False)


@dataclass
class GradientCase:
    """`calls`: one a set of buffers. `names`: RAW or READY. `inputs`: those of set 0, [token, ..], the state [sequence, HV, V, K].
    `upstream`: the gradients of o and of the final state, of set 0. `result()`: the gradients that the last call of set 0
    left, as `names`. `between`: bytes of buffers made beforehand: what the forward pass saves, gradients and workspace."""
    calls: list
    names: list
    inputs: list
    upstream: tuple
    result: object
    between: int
    math: object = None


def upstream(work, sets, device):
    """Gradients of o [set, token, HV, V] in bf16 and of the final state [set, sequence, HV, V, K] in f32."""
    gen = torch.Generator(device).manual_seed(work.seed + 1)
    randn = lambda *shape, dtype: torch.randn(sets, *shape, generator=gen, device=device, dtype=dtype)
    return (randn(work.tokens, work.hv, work.v, dtype=BF16),
            randn(len(work.lens), work.hv, work.v, work.k, dtype=torch.float32).mul_(0.1))


def exact(names, inputs, d_out, d_state, lens, beta_scale=1.0):
    """The gradients in float64, by autograd through the recurrence."""
    with torch.enable_grad():
        leaves = [x.detach().double().requires_grad_() for x in inputs]
        if names == RAW:
            q, k, v, a, b, a_log, dt_bias, state = leaves
            q, k, g, beta = unit(q), unit(k), log_decay(a, a_log, dt_bias), beta_scale * b.sigmoid()
        else:
            q, k, v, g, beta, state = leaves
        o, final = packed_chunks(q, k, v, g, beta, state, list(lens), q.shape[-1] ** -0.5)
        return torch.autograd.grad((o, final), leaves, (d_out.double(), d_state.double()))


def errors(contender, work, variant):
    """Relative RMS of every gradient, on a shape of its own with the work's head sizes."""
    checked = replace(CHECKED, k=work.k, v=work.v)
    case = contender.backward_case(checked, variant, 1)
    case.calls[0]()
    want = exact(case.names, case.inputs, *case.upstream, checked.lens)
    return {f"d{name}": relative(x, ref) for name, x, ref in zip(case.names, case.result(), want)}


def by_autograd(forward, names, sets, given, inputs, device):
    """The case of a function with a backward pass of its own. `inputs`: [set, ..] as `names`; `given`: the gradients [set, ..] of
    what forward(set, leaves) returns."""
    outs, leaves, results = [], [], {}
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with torch.enable_grad():
        for i in range(sets):
            leaves.append([x[i].detach().clone().requires_grad_() for x in inputs])
            outs.append(forward(i, leaves[i]))
    copies = sum(x.numel() * x.element_size() for own in leaves for x in own)
    saved = torch.cuda.memory_allocated() - before - copies if device == "cuda" else 0

    def call(i):
        def run():
            results[i] = torch.autograd.grad(outs[i], leaves[i], [x[i] for x in given], retain_graph=True)
        return run

    return GradientCase([call(i) for i in range(sets)], names, leaves[0], tuple(x[0] for x in given), lambda: results[0],
                        saved // sets)
