"""The input projections of a layer in torch: as one product, as two (qkvz and ba, a checkpoint's own), or as six; beside
them the rule in its operations."""
import torch
from contenders.tensor_ops import TensorOps
from data import BF16, Case
from reference import linear, relative
from workloads import HIDDEN, projection_widths


class Torch(TensorOps):
    def includes(self, work, variant):
        return "q, k, v, z, b, a" if work.suite == "projections" else super().includes(work, variant)

    def bounds(self, work, variant):
        return (4e-3, 0.0) if work.suite == "projections" else super().bounds(work, variant)

    def projections_case(self, work, variant, sets):
        gen = torch.Generator(self.device).manual_seed(work.seed)
        randn = lambda *shape: torch.randn(sets, *shape, generator=gen, device=self.device, dtype=BF16)
        widths = projection_widths(work.hk, work.hv)
        parts = {"one": [sum(widths)], "two": [sum(widths[:4]), sum(widths[4:])], "six": widths}[variant]
        x, weight = randn(work.tokens, HIDDEN), randn(sum(widths), HIDDEN).mul_(HIDDEN ** -0.5)
        outs = [torch.full((sets, work.tokens, n), float("nan"), device=self.device, dtype=BF16) for n in parts]

        def call(i):
            pairs = [(w.T, out[i]) for w, out in zip(weight[i].split(parts), outs)]

            def run():
                for w, out in pairs:
                    torch.mm(x[i], w, out=out)
            return run

        return Case([call(i) for i in range(sets)], (x[0], weight[0]), lambda: torch.cat([out[0] for out in outs], 1))

    def projections_error(self, case):
        x, weight = case.math
        return relative(case.result(), linear(x, weight))
