"""A GatedDeltaNet layer of Qwen3-Next's size: its weights and inputs, and the whole of it in float64."""
from dataclasses import dataclass

import torch
from data import BF16
from reference import conv, gated_norm, linear, log_decay, packed_chunks, unit
from workloads import DIM, HIDDEN, projection_widths

# bf16 between the steps: an error of some 2^-9 at each of five.
BOUNDS = 2e-2, 2e-2


@dataclass
class Layer:
    """[set, ...]: each set is another layer with its own weights, inputs and states.

    x [token, HIDDEN]; w_in [rows, HIDDEN], its rows q | k | v | z | b | a; conv [channels, 4]; norm [V]; w_out [HIDDEN,
    values]; conv_state [sequence, 3, channels], oldest input first; state [sequence, HV, V, K] f32. The rest bf16.
    """
    x: torch.Tensor
    w_in: torch.Tensor
    conv: torch.Tensor
    norm: torch.Tensor
    w_out: torch.Tensor
    conv_state: torch.Tensor
    state: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    rows: int
    channels: int
    values: int


@dataclass
class LayerCase:
    """`calls`: one a set. `math`: y [token, HIDDEN] and the final state of set 0 in float64. `result()`: those of the
    last call of set 0. `between`: bytes of buffers made beforehand for what a call passes from kernel to kernel."""
    calls: list
    math: tuple
    result: object
    between: int = 0


def draw(work, sets, device):
    gen = torch.Generator(device).manual_seed(work.seed)
    randn = lambda *shape, dtype=BF16: torch.randn(sets, *shape, generator=gen, device=device, dtype=dtype)
    rows, values, n = sum(projection_widths(work.hk, work.hv)), work.hv * DIM, len(work.lens)
    channels = 2 * work.hk * DIM + values
    # Weights that keep the size of what passes through.
    return Layer(
        x=randn(work.tokens, HIDDEN), w_in=randn(rows, HIDDEN).mul_(HIDDEN ** -0.5), conv=randn(channels, 4).mul_(0.5),
        norm=randn(DIM), w_out=randn(HIDDEN, values).mul_(values ** -0.5), conv_state=randn(n, 3, channels),
        state=randn(n, work.hv, DIM, DIM, dtype=torch.float32).mul_(0.1),
        a_log=(torch.rand(work.hv, generator=gen, device=device) * 15 + 1).log(),
        dt_bias=torch.randn(work.hv, generator=gen, device=device) - 4, rows=rows, channels=channels, values=values)


def reference(work, d, state):
    """y [token, HIDDEN] and the final state [sequence, HV, V, K] of set 0, from its states before the call. All
    sequences have one length."""
    n, length, hk, hv = len(work.lens), work.lens[0], work.hk, work.hv
    mixed = linear(d.x[0], d.w_in[0])
    qkv, z, b, a = mixed.split([d.channels, d.values, hv, hv], 1)
    y, _ = conv(d.conv_state[0].double(), qkv.view(n, length, -1), d.conv[0])
    q, k, v = y.reshape(work.tokens, -1).split([hk * DIM, hk * DIM, d.values], 1)
    heads = lambda x: x.unflatten(1, (-1, DIM))
    o, state = packed_chunks(unit(heads(q)), unit(heads(k)), heads(v), log_decay(a, d.a_log, d.dt_bias), b.sigmoid(), state[0],
                    work.lens, DIM ** -0.5)
    return linear(gated_norm(o, heads(z), d.norm[0]).flatten(1), d.w_out[0]), state
