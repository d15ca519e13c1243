"""flash-linear-attention: its Triton kernels for decode, prefill and the whole layer. They allocate their outputs."""
import os
import sys
from importlib.metadata import version

# With FlashQLA or tilelang installed fla hands kernels over to them; here it is to run its own.
os.environ["FLA_FLASH_QLA"] = "0"
os.environ["FLA_TILELANG"] = "0"

import layer
import torch
from contenders.peer import Peer, allocating_prefill, ready_backward
from data import Case, draw, output_bytes, poison_allocator, raw_math
from workloads import DIM


class Fla(Peer):
    def __init__(self, lib_path=None, device="cuda"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        self.recurrent, self.chunk, self.device = fused_recurrent_gated_delta_rule, chunk_gated_delta_rule, device
        self.version = version("flash-linear-attention")

    def includes(self, work, variant):
        if work.suite == "layer":
            return "convolutions, gates, L2 norm, gated norm, the same two products"
        return super().includes(work, variant)

    def bounds(self, work, variant):
        return layer.BOUNDS if work.suite == "layer" else super().bounds(work, variant)

    def rule_case(self, work, variant, sets):
        if not work.decode:
            return allocating_prefill(work, sets, self.device, self.ready(variant), self.own)
        d = draw(work, sets, self.device)
        results, math = {}, raw_math(d, work)

        def call(i):
            q, k, v, a, b = (x[i].unsqueeze(1) for x in (d.q, d.k, d.v, d.a, d.b))

            def run():
                results[i] = self.recurrent(
                    q, k, v, g=a, beta=b, scale=work.k ** -0.5, initial_state=d.state[i], output_final_state=True,
                    use_qk_l2norm_in_kernel=work.l2norm, use_gate_in_kernel=True, A_log=d.a_log, dt_bias=d.dt_bias,
                    use_beta_sigmoid_in_kernel=True, state_v_first=True)
            return run

        poison_allocator(output_bytes(work), self.device)
        return Case([call(i) for i in range(sets)], math, lambda: (results[0][0][:, 0], results[0][1]))

    def ready(self, variant):
        """The rule with ready gates, in the order of arguments that the chunk form has."""
        if variant == "chunk":
            return self.chunk
        return lambda q, k, v, g, beta, **options: self.recurrent(q, k, v, g=g, beta=beta, **options)

    def backward_case(self, work, variant, sets):
        return ready_backward(work, sets, self.device, lambda *args, **options: self.own(self.chunk(*args, **options)))

    @staticmethod
    def own(found):
        """What a chunked kernel gave, once it is sure that it is fla's."""
        if "flash_qla" in sys.modules:
            raise RuntimeError("fla ran FlashQLA's kernels, not its own")
        return found

    def layer_case(self, work, variant, sets):
        """The composition of fla's GatedDeltaNet over one wide input product, and with the convolutions on its slices:
        that saves the copies which fla makes of strided q, k and v."""
        from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        d = layer.draw(work, sets, self.device)
        t, n, hv = work.tokens, len(work.lens), work.hv
        state_in = d.state[:1].clone()
        keys = work.hk * DIM
        # One token is contiguous however it is sliced: one convolution.
        parts = [d.channels] if t == 1 else [keys, keys, d.values]
        # fla keeps the last 4 inputs, ours the last 3: the oldest is not read.
        cache = torch.cat([d.conv_state[:, :, :1], d.conv_state], 2).mT        # [set, sequence, channels, 4]
        caches = [[c.contiguous() for c in cache[i].split(parts, 1)] for i in range(sets)]
        weights = [d.conv[i].split(parts, 0) for i in range(sets)]
        results = {}

        def convolve(x, i, j):
            if work.decode:
                return causal_conv1d_update(x, caches[i][j], weight=weights[i][j], activation="silu")[0]
            return causal_conv1d(x, weights[i][j], initial_state=caches[i][j], output_final_state=True,
                                 activation="silu")[0]

        def call(i):
            x = d.x[i].view(n, work.lens[0], layer.HIDDEN)

            def run():
                mixed = torch.nn.functional.linear(x, d.w_in[i])
                qkv, z, b, a = mixed.split([d.channels, d.values, hv, hv], -1)
                convolved = [convolve(c, i, j) for j, c in enumerate(qkv.split(parts, -1))]
                q, k, v = convolved if len(parts) == 3 else convolved[0].split([keys, keys, d.values], -1)
                op = self.chunk if variant == "chunk" else self.recurrent
                heads = lambda y: y.unflatten(-1, (-1, DIM))
                o, final = op(heads(q), heads(k), heads(v), g=a, beta=b, initial_state=d.state[i],
                              output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                              A_log=d.a_log, dt_bias=d.dt_bias, use_beta_sigmoid_in_kernel=True, state_v_first=True)
                o = rms_norm_gated(o, heads(z), d.norm[i], None, activation="swish", eps=1e-6)
                results[i] = torch.nn.functional.linear(o.flatten(-2), d.w_out[i]), final
            return run

        def result():
            y, final = self.own(results[0])
            return y.flatten(0, 1), final

        poison_allocator(output_bytes(work), self.device)
        return layer.LayerCase([call(i) for i in range(sets)], layer.reference(work, d, state_in), result)
