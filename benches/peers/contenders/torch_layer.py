"""The layer in PyTorch's own operations around our kernel of the rule, eager and through torch.compile: what a model has that
takes the kernel alone. `one` is one wide input product, `six` one each for q, k, v, z, b and a."""
import abi
import layer
import torch
from contenders.candle_gdn import ALGOS, CandleGdn, rule_params, widths
from data import BF16
from workloads import DIM, projection_widths


def convolve(x, taps, past):
    """SiLU of the causal convolution of x [sequence, token, channels]; `past`, the last 3 inputs before it, is replaced."""
    window = torch.cat([past, x], 1)
    past.copy_(window[:, -3:])
    y = torch.nn.functional.conv1d(window.mT, taps.unsqueeze(1), groups=taps.shape[0]).mT
    return torch.nn.functional.silu(y).contiguous()


def convolve_by_terms(x, taps, past):
    """The same in what torch.compile makes one kernel of: a convolution remains a call of cuDNN."""
    window = torch.cat([past, x], 1)
    past.copy_(window[:, -3:])
    y = sum(window[:, j:j + x.shape[1]].float() * taps[:, j].float() for j in range(4))
    return torch.nn.functional.silu(y).to(BF16)


def input_side(convolution, x, weights, taps, pasts, splits):
    """The rows that the rule takes, and z. `splits`: the widths that each product is cut into; `taps` and `pasts` one a
    convolution, of the first parts."""
    parts = [part for w, split in zip(weights, splits) for part in torch.nn.functional.linear(x, w).split(split, -1)]
    n = len(taps)
    return [convolution(part, tap, past) for part, tap, past in zip(parts, taps, pasts)], *parts[n:]


def output_side(o, z, norm, weight):
    """The norm of each head of o, times the norm's weight and SiLU of z, through the last product."""
    heads = lambda y: y.float().unflatten(-1, (-1, DIM))
    x = heads(o)
    x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.float() * torch.nn.functional.silu(heads(z))
    return torch.nn.functional.linear(x.flatten(-2).to(BF16), weight)


class TorchLayer:
    """`function` makes of a function what is run in its place."""
    def __init__(self, lib_path, device, function, compiled):
        self.crate, self.device = CandleGdn(lib_path, device), device
        self.convolution = convolve_by_terms if compiled else convolve
        self.input_side, self.output_side = function(input_side), function(output_side)

    def case(self, work, variant, sets):
        d = layer.draw(work, sets, self.device)
        state_in, n, per_seq = d.state[:1].clone(), len(work.lens), work.lens[0]
        # q, k and v of six products are convolved one by one.
        if variant == "six":
            products = projection_widths(work.hk, work.hv)
            splits, convolved = [[width] for width in products], widths(work)
        else:
            products, splits, convolved = [d.rows], [[d.channels, d.values, work.hv, work.hv]], [d.channels]
        pasts = [[past.contiguous() for past in d.conv_state[i].split(convolved, -1)] for i in range(sets)]
        rows = lambda *shape: torch.empty(work.tokens, *shape, device=self.device, dtype=BF16)

        def rule(i, qkv, b, a, o):
            """The parameters for tensors [token, columns]; qkv in one or in three."""
            qkv = qkv if len(qkv) == 3 else qkv[0].split(widths(work), 1)
            return rule_params(work, ALGOS["auto"], qkv, [b, a], o, d.state[i], d.state[i], d.a_log, d.dt_bias, None)

        # One workspace for all calls, as an allocator would hand it out.
        first = rule(0, [rows(d.channels)], rows(work.hv), rows(work.hv), rows(d.values))
        abi.workspace(self.crate.lib.gdn_rule_workspace, first, device=self.device)
        results = {}

        def call(i):
            x = d.x[i].view(n, per_seq, layer.HIDDEN)
            weights, taps = d.w_in[i].split(products), d.conv[i].split(convolved)

            def run():
                qkv, z, b, a = self.input_side(self.convolution, x, weights, taps, pasts[i], splits)
                o = rows(d.values)
                params = rule(i, *([y.flatten(0, 1) for y in qkv], *(y.flatten(0, 1) for y in (b, a))), o)
                params.workspace, params.workspace_bytes = first.workspace, first.workspace_bytes
                self.crate.launch("gdn_rule", params)
                results[i] = self.output_side(o.view(n, per_seq, -1), z, d.norm[i], d.w_out[i]), first.room
            return run

        return layer.LayerCase([call(i) for i in range(sets)], layer.reference(work, d, state_in),
                               lambda: (results[0][0].flatten(0, 1), d.state[0]), first.workspace_bytes)
