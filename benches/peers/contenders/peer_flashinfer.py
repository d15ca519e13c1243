"""FlashInfer's gated delta rule: decode with f32 states in place, and the chunked prefill."""
from importlib.metadata import version

import torch
from contenders.peer import Peer, ready, ready_math
from data import Case, cumulative, draw, poison, raw_math
from workloads import DIM


class FlashInfer(Peer):
    def __init__(self, lib_path=None, device="cuda"):
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
        from flashinfer.gdn_prefill import chunk_gated_delta_rule
        self.decode, self.prefill, self.device = gated_delta_rule_decode_pretranspose, chunk_gated_delta_rule, device
        self.version = version("flashinfer-python")

    def rule_case(self, work, variant, sets):
        d = draw(work, sets, self.device)
        o = torch.empty_like(d.v)
        if work.decode:
            math = raw_math(d, work)
            one = lambda x, i: x[i].unsqueeze(1)        # [batch, 1, ...]

            def call(i):
                q, k, v, a, b, out = (one(x, i) for x in (d.q, d.k, d.v, d.a, d.b, o))
                return lambda: self.decode(q, k, v, d.state[i], d.a_log, a, d.dt_bias, b, scale=DIM ** -0.5, output=out,
                                           use_qk_l2norm=work.l2norm)
            poison(o)
            return Case([call(i) for i in range(sets)], math, lambda: (o[0], d.state[0]))

        q, k, g, beta = ready(d, work)
        alpha = g.exp()                                 # it takes the decay itself, not its logarithm
        cu = cumulative(work, torch.int32, self.device)
        final = torch.empty_like(d.state)
        # "cp", its default, splits a sequence over SMs where it thinks that pays; "nocp" never does.
        use_cp = {"cp": "auto", "nocp": False}[variant]

        def call(i):
            args = q[i], k[i], d.v[i], alpha[i], beta[i], DIM ** -0.5, d.state[i], True, cu
            return lambda: self.prefill(*args, output=o[i], output_state=final[i], use_cp=use_cp,
                                        max_seqlen=max(work.lens))
        poison(o, final)
        return Case([call(i) for i in range(sets)], ready_math(d, q, k, g, beta), lambda: (o[0], final[0]))
