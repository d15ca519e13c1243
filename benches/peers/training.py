#!/usr/bin/env python3
"""A layer in training beside torch with fla: forward and backward pass with both products, hidden 2048, 16/32 heads of 128, bf16.

    python3 benches/peers/training.py --lib LIB [--tokens 2048,8192]

LIB: as built by `cuda/tests/abi.py --build`. Ours: torch's products and the launches that TrainableGatedDeltaNet makes, into buffers
made beforehand. fla: its convolutions, rule with L2 norm and gates, and gated norm under torch's autograd, over one input product
as ours and over one each for q, k, v, z, b and a. Every gradient is compared with fla's. Writes training.md under --out.
"""
import argparse
import ctypes as C
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(TOP, "cuda", "tests")]
os.environ["FLA_FLASH_QLA"] = os.environ["FLA_TILELANG"] = "0"

import abi
import clocks
import records
import torch
from data import BF16
from workloads import DIM, HIDDEN, projection_widths

HK, HV = 16, 32
KEYS, VALUES = HK * DIM, HV * DIM
CHANNELS = 2 * KEYS + VALUES
NAMES = ["x", "w_in", "conv", "a_log", "dt_bias", "norm", "w_out"]
BOUND = 3e-2        # of a gradient against fla's: two computations in bf16
F32, IO = abi.CODES["f32"], abi.CODES["bf16"]


def draw(tokens):
    """Weights and inputs as NAMES, then the gradient of y."""
    gen = torch.Generator("cuda").manual_seed(1)
    randn = lambda *shape, dtype=BF16: torch.randn(*shape, generator=gen, device="cuda", dtype=dtype)
    rows = sum(projection_widths(HK, HV))
    inputs = [randn(tokens, HIDDEN), randn(rows, HIDDEN).mul_(HIDDEN ** -0.5), randn(CHANNELS, 4).mul_(0.5),
              (torch.rand(HV, generator=gen, device="cuda") * 15 + 1).log(), randn(HV, dtype=torch.float32) - 4,
              randn(DIM, dtype=torch.float32), randn(HIDDEN, VALUES).mul_(VALUES ** -0.5)]
    return inputs, randn(tokens, HIDDEN)


class Ours:
    """forward(), inference() and backward() of one set of buffers; `gradients` as NAMES."""

    def __init__(self, lib, inputs, d_y):
        self.lib, self.inputs, self.d_y = lib, inputs, d_y
        x, w_in, conv, a_log, dt_bias, norm, w_out = inputs
        t, rows = len(x), len(w_in)
        empty = lambda *shape, dtype=BF16: torch.full(shape, float("nan"), device="cuda", dtype=dtype)
        self.mixed, self.y, self.o, self.normed, self.out = (empty(t, n) for n in (rows, CHANNELS, VALUES, VALUES, HIDDEN))
        self.d_mixed, self.d_y_conv, self.d_o, self.d_normed, self.d_x = (empty(t, n) for n in (rows, CHANNELS, VALUES, VALUES, HIDDEN))
        self.d_w_in, self.d_w_out = torch.empty_like(w_in), torch.empty_like(w_out)
        small = {name: empty(*shape, dtype=torch.float32) for name, shape in
                 {"conv": (CHANNELS, 4), "a_log": (HV,), "dt_bias": (HV,), "norm": (DIM,)}.items()}
        ready = [empty(t, HV, dtype=torch.float32) for _ in range(4)]
        self.gradients = [self.d_x, self.d_w_in, small["conv"], small["a_log"], small["dt_bias"], small["norm"], self.d_w_out]
        flat = lambda z, first=0: abi.columns(z, first, DIM, t)
        gate = lambda z, first: abi.columns(z, CHANNELS + VALUES + first, 1, t)
        qkv = lambda z: dict(zip("qkv", (flat(z), flat(z, KEYS), flat(z, 2 * KEYS))))
        g, beta, d_g, d_beta = (abi.heads(z, t) for z in ready)
        window, state = torch.zeros(1, 3, CHANNELS, device="cuda", dtype=BF16), torch.zeros(1, HV, DIM, DIM, device="cuda")
        seqs = abi.sequences([t])
        sizes = {"seqs": seqs, "num_k_heads": HK, "num_v_heads": HV, "head_k": DIM, "head_v": DIM, "io_dtype": IO, "l2norm": 1}
        one = {"in_slots": abi.slots(None, 1, HV * DIM * DIM), "out_slots": abi.slots(None, 1, HV * DIM * DIM)}
        own_window = {"in_slots": abi.slots(None, 1, 3 * CHANNELS), "out_slots": abi.slots(None, 1, 3 * CHANNELS)}
        of_conv = {"x": flat(self.mixed), "weight": conv, "seqs": seqs, "channels": CHANNELS, "width": 4, "io_dtype": IO, "weight_dtype": IO,
                   "silu": 1}
        of_norm = {"x": flat(self.o), "z": flat(self.mixed, CHANNELS), "weight": norm, "tokens": t, "heads": HV, "head_v": DIM,
                   "io_dtype": IO, "weight_dtype": F32, "eps": 1e-6}
        convolve = abi.fill(abi.ConvParams, y=flat(self.y), state_in=window, state_out=window, **own_window, **of_conv)
        gates = abi.fill(abi.ReadyGatesParams, a=gate(self.mixed, HV), b=gate(self.mixed, 0), log_decay=g, beta=beta, a_log=a_log,
                         dt_bias=dt_bias, num_seqs=1, tokens_per_seq=t, heads=HV, gate_dtype=IO, beta_scale=1.0)
        rule = lambda state_out, **more: abi.rule_params(**qkv(self.y), o=flat(self.o), state_out=state_out, **one, **sizes, **more)
        ready_rule = rule(state, a=g, b=beta, gate_dtype=F32, gates=abi.ABI.constants["GDN_GATES_READY"])
        raw_rule = rule(state, a=gate(self.mixed, HV), b=gate(self.mixed, 0), gate_dtype=IO, a_log=a_log, dt_bias=dt_bias)
        normalise = abi.fill(abi.NormParams, out=flat(self.normed), **of_norm)
        abi.workspace(lib.gdn_rule_workspace, ready_rule, raw_rule, device="cuda")
        back = [
            ("gdn_norm_backward", abi.fill(abi.NormBackwardParams, d_out=flat(self.d_normed), d_x=flat(self.d_o),
                                           d_z=flat(self.d_mixed, CHANNELS), d_weight=small["norm"], **of_norm)),
            ("gdn_rule_backward", abi.fill(
                abi.RuleBackwardParams, **qkv(self.y), a=g, b=beta, gate_dtype=F32, state_dtype=F32, l2_eps=1e-6, scale=DIM ** -0.5,
                beta_scale=1.0, d_o=flat(self.d_o), d_log_decay=d_g, d_beta=d_beta,
                **{f"d_{name}": heads for name, heads in qkv(self.d_y_conv).items()}, **one, **sizes)),
            ("gdn_ready_gates_backward", abi.fill(
                abi.ReadyGatesBackwardParams, gates=gates, d_log_decay=d_g, d_beta=d_beta, d_a=gate(self.d_mixed, HV),
                d_b=gate(self.d_mixed, 0), d_a_log=small["a_log"], d_dt_bias=small["dt_bias"])),
            ("gdn_conv_backward", abi.fill(abi.ConvBackwardParams, d_y=flat(self.d_y_conv), d_x=flat(self.d_mixed), d_weight=small["conv"],
                                           **of_conv))]
        for name, params in back:
            abi.workspace(getattr(lib, f"{name}_workspace"), params, device="cuda")
        self.kept = ready, window, state
        self.train = [("gdn_conv", convolve), ("gdn_ready_gates", gates), ("gdn_rule", ready_rule), ("gdn_norm", normalise)]
        self.infer = [("gdn_conv", convolve), ("gdn_rule", raw_rule), ("gdn_norm", normalise)]
        self.back = back

    def launch(self, launches):
        for name, params in launches:
            status = getattr(self.lib, name)(C.byref(params), abi.stream())
            if status != abi.OK:
                raise RuntimeError(f"{name}: {self.lib.gdn_status_string(status).decode()}")

    def pass_through(self, launches):
        torch.mm(self.inputs[0], self.inputs[1].T, out=self.mixed)
        self.launch(launches)
        torch.mm(self.normed, self.inputs[6].T, out=self.out)

    def forward(self):
        self.pass_through(self.train)

    def inference(self):
        self.pass_through(self.infer)

    def backward(self):
        torch.mm(self.d_y, self.inputs[6], out=self.d_normed)
        torch.mm(self.d_y.T, self.normed, out=self.d_w_out)
        self.launch(self.back)
        torch.mm(self.d_mixed, self.inputs[1], out=self.d_x)
        torch.mm(self.d_mixed.T, self.inputs[0], out=self.d_w_in)

    def step(self):
        self.forward()
        self.backward()


class Fla:
    """The same by fla under autograd; `split`: a product each for q, k, v, z, b and a, as fla's own layer has them."""

    def __init__(self, inputs, d_y, split):
        self.d_y, self.split = d_y, split
        self.leaves = [x.detach().clone().requires_grad_() for x in inputs]
        if split:
            self.leaves[1:2] = [w.clone().requires_grad_() for w in inputs[1].split([KEYS, KEYS, VALUES, VALUES, HV, HV])]
        self.gradients = None

    def forward(self):
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        x, *w_in, conv, a_log, dt_bias, norm, w_out = self.leaves
        x, linear = x.unsqueeze(0), torch.nn.functional.linear
        sizes = [KEYS, KEYS, VALUES, VALUES, HV, HV]
        *qkv, z, b, a = [linear(x, w) for w in w_in] if self.split else linear(x, w_in[0]).split(sizes, -1)
        heads = lambda y: y.unflatten(-1, (-1, DIM))
        q, k, v = (heads(causal_conv1d(y, w, activation="silu")[0]) for y, w in zip(qkv, conv.split(sizes[:3])))
        o, _ = chunk_gated_delta_rule(q, k, v, g=a, beta=b, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=a_log,
                                      dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True)
        o = rms_norm_gated(o, heads(z), norm, None, activation="swish", eps=1e-6)
        return linear(o.flatten(-2), w_out)[0]

    def step(self):
        self.gradients = torch.autograd.grad(self.forward(), self.leaves, self.d_y)

    def joined(self):
        """The gradients as NAMES."""
        return [self.gradients[0], torch.cat(self.gradients[1:7]), *self.gradients[7:]] if self.split else self.gradients


def rows(lib, tokens):
    inputs, d_y = draw(tokens)
    ours = Ours(lib, inputs, d_y)
    ours.step()
    found = {"candle-gdn": ours.step, "candle-gdn, forward": ours.forward, "candle-gdn, forward of inference": ours.inference}
    try:
        for name, split in (("fla", False), ("fla, a product each", True)):
            fla = Fla(inputs, d_y, split)
            fla.step()
            for arg, own, other in zip(NAMES, ours.gradients, fla.joined()):
                error = ((own.double() - other.double()).norm() / other.double().norm()).item()
                if not error <= BOUND:
                    raise SystemExit(f"training.py: d_{arg} differs from that of {name} by {error:.1e}")
            found[name] = fla.step
    except ImportError as e:
        print(f"training.py: fla is missing: {e}", file=sys.stderr)
    for name, call in found.items():
        clock = clocks.measure([call])
        yield name, tokens, [clock[c]["median"] if clock[c] else None for c in ("gpu", "event", "wall")]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", required=True, help="our shared library")
    p.add_argument("--tokens", default="2048,8192", help="of one sequence")
    p.add_argument("--out", metavar="DIR", help="default: benches/results/<device>")
    args = p.parse_args()
    lib, device = abi.load(args.lib), torch.cuda.get_device_name()
    command = f"python3 benches/peers/training.py --lib LIB --tokens {args.tokens}"
    lines = [f"# A layer in training\n\n{device}, commit {records.commit(TOP)}, `{command}`. One sequence, 16/32 heads of 128, hidden 2048, bf16, "
             "forward and backward pass with all products, µs: the kernels' own time, in a CUDA graph, and by the host's clock. Without a graph "
             "fla's time on the host's clock includes what torch's autograd needs there.\n", "| T | who | kernels | graph | wall |", "|---|---|--:|--:|--:|"]
    for tokens in map(int, args.tokens.split(",")):
        for name, t, times in rows(lib, tokens):
            lines.append(f"| {t} | {name} | " + " | ".join("–" if x is None else f"{x:.0f}" for x in times) + " |")
            print(lines[-1], flush=True)
    folder = args.out or os.path.join(TOP, "benches", "results", records.slug(device))
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "training.md"), "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
