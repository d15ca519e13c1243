"""What the peers have in common."""
import torch
from data import Case, cumulative, draw, output_bytes, poison_allocator, unit_bf16
from gradients import READY, by_autograd, upstream


class Peer:
    def includes(self, work, variant):
        if work.suite == "backward":
            return "neither gates nor L2 norm"
        if not work.decode:
            return "neither gates nor L2 norm"
        return "gates, L2 norm" if work.l2norm else "gates"

    def bounds(self, work, variant):
        """Of gradients, or of o and the state: wide enough for any precision that a peer may choose, too narrow for a wrong call."""
        if work.suite == "backward":
            return (2e-2,) * len(READY)
        return (1e-2, 1e-3) if work.decode else (2e-2, 2e-2)


def ready(d, work):
    """q, k, g and beta of a kernel that neither normalises nor computes gates."""
    q, k = (unit_bf16(d.q), unit_bf16(d.k)) if work.l2norm else (d.q, d.k)
    return q, k, *d.gates()


def ready_math(d, q, k, g, beta):
    """`Case.math` of such a kernel."""
    return q[0], k[0], d.v[0], g[0], beta[0], d.state[0]


def allocating_prefill(work, sets, device, prefill, outputs):
    """The case of a prefill with states [sequence, HV, K, V] that allocates what it gives: `outputs` picks o and the
    states from that."""
    d = draw(work, sets, device)
    q, k, g, beta = ready(d, work)
    # One cu_seqlens for all sets: what it derives from the lengths is kept by the tensor's identity.
    cu = cumulative(work, torch.int64, device)
    state = d.state.mT.contiguous()
    results = {}

    def call(i):
        args = [x[i:i + 1] for x in (q, k, d.v, g, beta)]

        def run():
            results[i] = prefill(*args, scale=work.k ** -0.5, initial_state=state[i], cu_seqlens=cu, output_final_state=True)
        return run

    def result():
        o, final = outputs(results[0])
        return o[0], final.mT

    poison_allocator(output_bytes(work), device)
    return Case([call(i) for i in range(sets)], ready_math(d, q, k, g, beta), result)


def ready_backward(work, sets, device, rule):
    """The case of a differentiable rule with states [sequence, HV, K, V], normalised q and k and ready gates."""
    d = draw(work, sets, device)
    q, k, g, beta = ready(d, work)
    cu = cumulative(work, torch.int64, device)
    d_out, d_state = upstream(work, sets, device)

    def forward(i, leaves):
        q, k, v, g, beta, state = leaves
        o, final = rule(*(x.unsqueeze(0) for x in (q, k, v, g, beta)), scale=work.k ** -0.5, initial_state=state.mT.contiguous(),
                        cu_seqlens=cu, output_final_state=True)
        return o[0], final.mT

    return by_autograd(forward, READY, sets, (d_out, d_state), (q, k, d.v, g, beta, d.state), device)
