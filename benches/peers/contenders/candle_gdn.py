"""Our kernels, through the C ABI."""
import ctypes as C
import os
import re

import abi
import layer
import torch
from data import BF16, Case, cumulative, draw, poison, raw_math
from gradients import RAW, GradientCase, upstream
from workloads import DIM, FUSED_TOKENS

ALGOS = {name: code for code, name in enumerate(abi.ALGO_NAMES)}
F32, IO = abi.CODES["f32"], abi.CODES["bf16"]
PRODUCT_ROWS = 8            # of a layer of these sizes, up to which the crate takes gdn_linear; where launches overlap
OVERLAP_ROWS = 16           # up to these, of one token each


def version():
    """The crate's."""
    manifest = os.path.join(os.path.dirname(abi.CUDA), "Cargo.toml")
    with open(manifest, encoding="utf-8") as f:
        found = re.search(r'^version = "(.*)"', f.read(), re.M)
    return found.group(1) if found else "unknown"


def widths(work):
    """Columns of q, k, v."""
    return [work.hk * work.k, work.hk * work.k, work.hv * work.v]


def rule_params(work, algo, qkv, ba, o, state_in, state_out, a_log, dt_bias, cu):
    """The parameters of one launch. qkv: rows of q, of k and of v; ba: of b and of a; all may be views of one wider
    projection."""
    hk, hv = work.hk, work.hv
    per_seq = 0 if cu is not None else work.lens[0]
    (q, k, v), (b, a) = (abi.columns(x, 0, n, per_seq) for x, n in zip(qkv, (work.k, work.k, work.v))), (abi.columns(x, 0, 1, per_seq) for x in ba)
    slots = abi.slots(None, len(work.lens), hv * work.v * work.k)
    return abi.rule_params(
        q=q, k=k, v=v, a=a, b=b, a_log=a_log, dt_bias=dt_bias, o=abi.columns(o, 0, work.v, per_seq), state_in=state_in, state_out=state_out,
        in_slots=slots, out_slots=slots,
        seqs=abi.sequences(work.lens, cu), num_k_heads=hk, num_v_heads=hv, head_k=work.k, head_v=work.v, io_dtype=IO,
        gate_dtype=IO, l2norm=int(work.l2norm), algo=algo, beta_scale=work.beta_scale)


class CandleGdn:
    def __init__(self, lib_path, device="cuda"):
        self.lib, self.device = abi.load(lib_path), device
        self.version = version()

    def includes(self, work, variant):
        if work.suite == "layer":
            if self.fuses(work, variant):
                return "convolution, gates, L2 norm, gated norm; both products, few rows by ours"
            return "convolution, gates, L2 norm, gated norm, the same two products"
        return "gates, L2 norm" if work.l2norm else "gates"

    def bounds(self, work, variant):
        """Of o and the state: o is rounded to bf16; a chunked prefill may round inside."""
        if work.suite == "layer":
            return layer.BOUNDS
        if work.suite == "backward":
            return (6e-3,) * len(RAW)
        return (4e-3, 1e-5) if work.decode and not variant.startswith("chunked") else (5e-3, 5e-3)

    def launch(self, name, params):
        status = getattr(self.lib, name)(C.byref(params), abi.stream())
        if status != abi.OK:
            raise RuntimeError(f"{name}: {self.lib.gdn_status_string(status).decode()}")

    def backward_case(self, work, variant, sets):
        """The rule's launches, then that of the gates: from the gradients of o and of the state to those of raw inputs."""
        d = draw(work, sets, self.device)
        d_out, d_state = upstream(work, sets, self.device)
        cu = cumulative(work, torch.int32, self.device)
        like = lambda x: torch.full_like(x, float("nan"))
        ready = [torch.empty(sets, work.tokens, work.hv, device=self.device) for _ in range(2)]
        d_ready = [like(x) for x in ready]
        d_inputs = [like(x) for x in (d.q, d.k, d.v, d.a, d.b)]
        d_vectors, d_states = [like(d.a_log.expand(sets, -1)) for _ in range(2)], like(d.state)
        rules, gates = [], []
        for i in range(sets):
            (g, beta), (d_g, d_beta) = ([abi.heads(x[i]) for x in pair] for pair in (ready, d_ready))
            forward = abi.fill(
                abi.ReadyGatesParams, a=abi.heads(d.a[i]), b=abi.heads(d.b[i]), log_decay=g, beta=beta, a_log=d.a_log,
                dt_bias=d.dt_bias, num_seqs=1, tokens_per_seq=work.tokens, heads=work.hv, gate_dtype=IO, beta_scale=1.0)
            self.launch("gdn_ready_gates", forward)
            d_q, d_k, d_v, d_a, d_b = (abi.heads(x[i]) for x in d_inputs)
            gates.append(abi.fill(abi.ReadyGatesBackwardParams, gates=forward, d_log_decay=d_g, d_beta=d_beta, d_a=d_a, d_b=d_b,
                                  d_a_log=d_vectors[0][i], d_dt_bias=d_vectors[1][i]))
            slots = abi.slots(None, len(work.lens), work.hv * work.v * work.k)
            rules.append(abi.fill(
                abi.RuleBackwardParams, a=g, b=beta, state_in=d.state[i], in_slots=slots, out_slots=slots,
                seqs=abi.sequences(work.lens, cu), num_k_heads=work.hk, num_v_heads=work.hv, head_k=work.k, head_v=work.v,
                io_dtype=IO, gate_dtype=F32, state_dtype=F32, l2norm=1, l2_eps=1e-6, scale=work.k ** -0.5, beta_scale=1.0,
                q=abi.heads(d.q[i]), k=abi.heads(d.k[i]), v=abi.heads(d.v[i]), d_o=abi.heads(d_out[i]), d_state_out=d_state[i],
                d_q=d_q, d_k=d_k, d_v=d_v, d_log_decay=d_g, d_beta=d_beta, d_state_in=d_states[i], algo=ALGOS[variant]))
        rooms = [abi.workspace(self.lib.gdn_rule_backward_workspace, *rules, device=self.device),
                 abi.workspace(self.lib.gdn_ready_gates_backward_workspace, *gates, device=self.device)]

        def call(i):
            def run():
                self.launch("gdn_rule_backward", rules[i])
                self.launch("gdn_ready_gates_backward", gates[i])
            return run

        gradients = [*d_inputs, *d_vectors, d_states]
        made = [*ready, *d_ready, *gradients]
        between = sum(x.numel() * x.element_size() for x in made) // sets + sum(room.numel() for room in rooms)
        inputs = [x[0] for x in (d.q, d.k, d.v, d.a, d.b)] + [d.a_log, d.dt_bias, d.state[0]]
        return GradientCase([call(i) for i in range(sets)], RAW, inputs, (d_out[0], d_state[0]),
                            lambda: [x[0] for x in gradients], between)

    def rule_case(self, work, variant, sets):
        d = draw(work, sets, self.device)
        math = raw_math(d, work)
        # As a layer has them: views of one projection.
        mixed = torch.cat([d.q.flatten(2), d.k.flatten(2), d.v.flatten(2)], 2).split(widths(work), 2)
        ba = torch.cat([d.b, d.a], 2).split(work.hv, 2)
        o = torch.empty(sets, work.tokens, work.hv * work.v, device=self.device, dtype=BF16)
        out = d.state if work.decode else torch.empty_like(d.state)
        cu = None if work.decode else cumulative(work, torch.int32, self.device)
        pick = lambda parts, i: [part[i] for part in parts]
        params = [rule_params(work, ALGOS[variant], pick(mixed, i), pick(ba, i), o[i], d.state[i], out[i], d.a_log, d.dt_bias, cu)
                  for i in range(sets)]
        # One for all calls, as an allocator would hand it out.
        abi.workspace(self.lib.gdn_rule_workspace, *params, device=self.device)
        poison(o, *([] if work.decode else [out]))
        # The closures hold the tensors that the parameters point into.
        calls = [lambda p=p, keep=(mixed, ba, cu, d): self.launch("gdn_rule", p) for p in params]
        return Case(calls, math, lambda: (o[0].unflatten(1, (work.hv, work.v)), out[0]))

    def layer_case(self, work, variant, sets):
        """Two products and three launches of ours, all in place of pre-made buffers; one launch for up to FUSED_TOKENS tokens a
        sequence, unless a kernel of the rule is asked for."""
        d = layer.draw(work, sets, self.device)
        state_in = d.state[:1].clone()
        columns = (d.rows, d.channels, d.values, d.values, layer.HIDDEN)
        buffers = [torch.empty(sets, work.tokens, n, device=self.device, dtype=BF16) for n in columns]
        make = self.step_calls if self.fuses(work, variant) else self.layer_calls
        calls, between = make(work, variant, d, *buffers)
        poison(*buffers)
        return layer.LayerCase(calls, layer.reference(work, d, state_in), lambda: (buffers[-1][0], d.state[0]), between)

    @staticmethod
    def fuses(work, variant):
        return work.lens[0] <= FUSED_TOKENS and variant in ("auto", "no_overlap", "no_clusters")

    def layer_calls(self, work, variant, d, mixed, y, o, normed, out):
        t, n, sets, per_seq = work.tokens, len(work.lens), len(mixed), work.lens[0]
        flat = lambda x, first=0: abi.columns(x, first, DIM, per_seq)
        slots = abi.slots(None, n, 3 * d.channels)
        seqs = abi.sequences(work.lens)
        ba = mixed[:, :, d.channels + d.values:].split(work.hv, 2)
        rules = [rule_params(work, ALGOS.get(variant, 0), y[i].split(widths(work), 1), [x[i] for x in ba], o[i], d.state[i],
                             d.state[i], d.a_log, d.dt_bias, None) for i in range(sets)]
        abi.workspace(self.lib.gdn_rule_workspace, *rules, device=self.device)

        def call(i):
            conv = abi.fill(
                abi.ConvParams, x=flat(mixed[i]), y=flat(y[i]), weight=d.conv[i], state_in=d.conv_state[i],
                state_out=d.conv_state[i], in_slots=slots, out_slots=slots, seqs=seqs, channels=d.channels, width=4,
                io_dtype=IO, weight_dtype=IO, silu=1)
            norm = abi.fill(abi.NormParams, x=flat(o[i]), z=flat(mixed[i], d.channels), out=flat(normed[i]), weight=d.norm[i],
                            tokens=t, heads=work.hv, head_v=DIM, io_dtype=IO, weight_dtype=IO, sigmoid=0, eps=1e-6)

            def run(keep=(y, o)):       # `conv`, `rules` and `norm` hold their addresses alone
                torch.mm(d.x[i], d.w_in[i].T, out=mixed[i])
                self.launch("gdn_conv", conv)
                self.launch("gdn_rule", rules[i])
                self.launch("gdn_norm", norm)
                torch.mm(normed[i], d.w_out[i].T, out=out[i])
            return run

        return [call(i) for i in range(sets)], sum(x[0].nbytes for x in (mixed, y, o, normed, out)) + rules[0].workspace_bytes

    def product(self, x, w, y, overlap):
        """y = x w^T: ours while reading w is all the work."""
        if x.shape[0] > (OVERLAP_ROWS if overlap else PRODUCT_ROWS):
            torch.mm(x, w.T, out=y)
            return
        self.launch("gdn_linear", abi.fill(
            abi.LinearParams, x=x, w=w, y=y, x_stride=x.stride(0), w_stride=w.stride(0), y_stride=y.stride(0),
            rows=x.shape[0], inputs=w.shape[1], outputs=w.shape[0], dtype=IO, overlap=overlap))

    def step_calls(self, work, variant, d, mixed, _y, _o, normed, out):
        slots = abi.slots(None, len(work.lens), work.hv * DIM * DIM)
        overlap = int(work.decode and work.tokens <= OVERLAP_ROWS and variant != "no_overlap")
        algo = abi.STEP_NAMES.index("whole" if variant == "no_clusters" else "auto")

        def call(i):
            flat = lambda x, first=0: abi.columns(x, first, DIM, work.lens[0])
            gates = lambda first: abi.columns(mixed[i], d.channels + d.values + first, 1, work.lens[0])
            step = abi.fill(
                abi.StepParams, x=flat(mixed[i]), z=flat(mixed[i], d.channels), b=gates(0), a=gates(work.hv),
                out=flat(normed[i]), conv_weight=d.conv[i], norm_weight=d.norm[i], a_log=d.a_log, dt_bias=d.dt_bias,
                conv_in=d.conv_state[i], conv_out=d.conv_state[i], state_in=d.state[i], state_out=d.state[i],
                in_slots=slots, out_slots=slots, conv_in_stride=3 * d.channels, conv_out_stride=3 * d.channels,
                seqs=abi.sequences(work.lens), num_k_heads=work.hk, num_v_heads=work.hv, head_k=DIM, head_v=DIM,
                conv_width=4, io_dtype=IO, gate_dtype=IO, state_dtype=F32, conv_dtype=IO, norm_dtype=IO, l2norm=1,
                algo=algo, overlap=overlap, l2_eps=1e-6, scale=DIM ** -0.5, beta_scale=1.0, norm_eps=1e-6)

            def run():
                self.product(d.x[i], d.w_in[i], mixed[i], overlap)
                self.launch("gdn_step", step)
                self.product(normed[i], d.w_out[i], out[i], overlap)
            return run

        return [call(i) for i in range(len(mixed))], sum(x[0].nbytes for x in (mixed, normed, out))
