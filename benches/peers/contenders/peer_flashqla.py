"""FlashQLA's chunked prefill. It allocates its outputs."""
from importlib.metadata import version

import torch
from data import Case, cumulative, draw, output_bytes, poison_allocator, unit_bf16
from workloads import DIM


class FlashQLA:
    def __init__(self, lib_path=None, device="cuda"):
        from flash_qla import chunk_gated_delta_rule_fwd
        self.prefill, self.device = chunk_gated_delta_rule_fwd, device
        self.version = version("flash-qla")

    def includes(self, work):
        return "neither gates nor L2 norm"

    def bounds(self, work):
        return 2e-2, 2e-2

    def rule_case(self, work, variant, sets):
        d = draw(work, sets, self.device)
        q, k = (unit_bf16(d.q), unit_bf16(d.k)) if work.l2norm else (d.q, d.k)
        g, beta = d.gates()
        # One cu_seqlens for all sets: what it derives from the lengths is kept by the tensor's identity.
        cu = cumulative(work, torch.int64, self.device)
        state = d.state.mT.contiguous()                 # [sequence, HV, K, V], its own layout
        left = {}

        def call(i):
            args = [x[i:i + 1] for x in (q, k, d.v, g, beta)]

            def run():
                left[i] = self.prefill(*args, scale=DIM ** -0.5, initial_state=state[i], cu_seqlens=cu,
                                       output_final_state=True, output_h=False)
            return run

        def result():
            _, _, o, _, final, _ = left[0]
            return o[0], final.mT

        poison_allocator(output_bytes(work), self.device)
        return Case([call(i) for i in range(sets)], (q[0], k[0], d.v[0], g[0], beta[0], d.state[0]), result)

