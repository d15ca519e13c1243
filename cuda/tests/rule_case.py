"""A case of the gated delta rule for the check programs: inputs and states, the reference, launches, and what is wrong with
what they leave.

Whatever a launch must not read holds NaN, whatever it writes held NaN before, and all else is compared bit by bit.
"""
import ctypes as C
import math
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import reference
import torch
from abi import (ALGO_NAMES, AUTO, CHUNK, CHUNKED_SM80, CODES, OK, columns, rule_params, sequences, slots, workspace)
from harness import (CHUNKED_BOUND, O_BOUND, STATE_BOUND, TYPES, call, cu_seqlens, launch, nan, place, report, same,
                     same_outside)
from timing import calls_of

WORST = 4           # a (sequence, head) may have so many times the bound of its case
worst_seen = {}     # {(algo, name of the output): [largest error of a case, of a (sequence, head)]}

# {decay: (share of tokens with the strong gate, that gate, the gate of all others)}; None: anything from -10 to 30.
DECAYS = {"strong": (1.0, 30.0, 0.0), "mixed": (0.15, 30.0, -60.0), "mixed, 64": (0.15, 64.0, -5.0),
          "uniform": (0.0, 0.0, None)}


class RuleCase:
    """One projection [rows, q | k | v | extra columns], one of the gates [rows, b | a], a pool of states, and the reference.

    `x_frame` and `o_frame`: elements before the first row, and columns of NaN behind every row. `margin` and `between`: rows
    of NaN around the tokens, and, without cu_seqlens, behind each sequence. `slack`: rows more than cu_seqlens needs.
    `apart`: q, k and v are tensors of their own. `by_head`: the error of every single head counts too, and that of o is
    measured against what a query of no particular direction would have read at least, since one that is orthogonal to the
    state reads rounding alone."""

    def __init__(self, lens, hk=2, hv=4, k=128, v=128, io="bf16", gate=None, state="f32", varlen=None, slots="identity",
                 slot_gap=2, padding_by_either=False, keys="random", decay="normal", beta=None, beta_scale=1.0, l2norm=True,
                 qk_size=1.0, v_size=1.0, x_frame=(0, 0), o_frame=(0, 0), gates_gap=0, margin=0, between=0, slack=0, extra=0,
                 apart=False, by_head=False, seed=0):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        self.randn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
        self.rand = lambda *s: torch.rand(*s, generator=gen, device="cuda")
        self.lens, self.hk, self.hv, self.k, self.v = lens, hk, hv, k, v
        self.io, self.gate, self.state, self.l2norm, self.beta_scale = io, gate or io, state, l2norm, beta_scale
        self.slack, self.margin, self.o_frame, self.apart, self.by_head = slack, margin, o_frame, apart, by_head
        self.varlen = len(set(lens)) > 1 if varlen is None else varlen
        assert self.varlen or len(set(lens)) == 1
        self.cu = cu_seqlens(lens) if self.varlen else None
        between = 0 if self.varlen else between
        self.per_seq = 0 if self.varlen else max(lens) + between

        self.first = [margin + at for at in accumulate([0] + [length + between for length in lens[:-1]])]
        self.rows = max(sum(lens) + between * len(lens) + 2 * margin + slack, 1)    # total_tokens counts rows that are there
        self.tokens = self.rows_of(range(len(lens)))
        self.shape, self.size = (hv, v, k), hv * v * k
        self.where = place(len(lens), slots, seed, padding_by_either)
        self.in_place = slots in ("identity", "permuted", "shared")
        self.live = [i for i in range(len(lens)) if i not in self.where.padding]
        self.out_slots = [self.where.outs[i] for i in self.live]
        self.pool = nan(self.where.count, self.size + (slot_gap if self.where.count > len(lens) else 0), dtype=state)
        self.pool[self.in_slots(), :self.size] = (0.3 * self.randn(len(self.live), self.size)).to(self.pool.dtype)
        self.draw_inputs(keys, decay, beta, qk_size, v_size, x_frame, gates_gap, extra)
        self.referenced = self.emulated = None

    def rows_of(self, numbers):
        """The rows of the tokens of these sequences."""
        rows = [self.first[i] + t for i in numbers for t in range(self.lens[i])]
        return torch.tensor(rows, dtype=torch.long, device="cuda")

    def in_slots(self):
        """Of the live sequences."""
        return [self.where.ins[i] for i in self.live]

    def draw_inputs(self, keys, decay, beta, qk_size, v_size, frame, gates_gap, extra):
        live, randn, rand = self.rows_of(self.live), self.randn, self.rand
        hk, hv, n = self.hk, self.hv, len(live)
        q, k, v = randn(n, hk, self.k), randn(n, hk, self.k), randn(n, hv, self.v) * v_size
        token = torch.arange(n, device="cuda")
        if keys == "repeated" and n:
            k[:] = k[0]
        elif keys == "alternating" and n > 1:
            k[:] = k[token % 2]
        elif keys == "parallel" and n:
            k = k[:1] + 1e-2 * k
        elif keys == "zeros":
            q[token % 3 == 0], k[token % 5 < 2] = 0, 0
        q, k = q * qk_size, k * qk_size
        if not self.l2norm:
            # Short keys, or the recurrence itself would grow without bound.
            q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6) * (0.3 + 0.7 * rand(n, hk, 1)) for x in (q, k))
        b, a = randn(n, hv), randn(n, hv)
        if beta is not None:
            b.fill_(beta)
        self.a_log, self.dt_bias = (rand(hv) * 15 + 1).log(), randn(hv) - 4
        if decay == "none":
            self.a_log.fill_(-100.0)
        elif decay != "normal":
            self.a_log.fill_(0.0)
            self.dt_bias.fill_(0.0)
            share, strong, other = DECAYS[decay]
            a = torch.where(rand(n, hv) < share, strong, 40 * rand(n, hv) - 10 if other is None else other)

        parts = [x.flatten(1) for x in (q, k, v)] + ([randn(n, extra)] if extra else [])
        self.width = sum(x.shape[1] for x in parts)
        shift, gap = frame
        buffer = nan(shift + self.rows * (self.width + gap), dtype=self.io)
        self.x = buffer[shift:].view(self.rows, self.width + gap)
        self.ba = nan(self.rows, 2 * hv + gates_gap, dtype=self.gate)
        self.x[live, :self.width] = torch.cat(parts, 1).to(self.x.dtype)
        self.ba[live, :2 * hv] = torch.cat([b, a], 1).to(self.ba.dtype)
        keys = hk * self.k
        q, k, v = (self.x[:, start:stop] for start, stop in ((0, keys), (keys, 2 * keys), (2 * keys, 2 * keys + hv * self.v)))
        self.qkv = [x.contiguous() for x in (q, k, v)] if self.apart else [q, k, v]

    # ---- the reference ----

    def reference(self):
        if not self.referenced:
            self.referenced = self.walk(reference.rule, typical=self.by_head)
        return self.referenced

    def walk(self, rule, every=CHUNK, qkv=None, typical=False):
        """Of the live sequences: o and its typical length [N, T, HV, ..], the states after every so many tokens, the last."""
        n, t_max = len(self.live), max((self.lens[i] for i in self.live), default=0)
        lens = torch.tensor([self.lens[i] for i in self.live], device="cuda")
        row = lambda i, t: min(self.first[i] + min(t, max(self.lens[i] - 1, 0)), self.rows - 1)
        index = torch.tensor([[row(i, t) for t in range(t_max)] for i in self.live], dtype=torch.long,
                             device="cuda").view(n, t_max)
        # Past the end of a sequence stands whatever there is, but no NaN: it is multiplied by nothing.
        q, k, v, a, b = (x[index].double().nan_to_num(0.0) for x in (*(qkv or self.qkv), self.ba[:, self.hv:2 * self.hv],
                                                                     self.ba[:, :self.hv]))
        q, k = q.unflatten(-1, (self.hk, self.k)), k.unflatten(-1, (self.hk, self.k))
        inputs = q, k, v.unflatten(-1, (self.hv, self.v)), a, b
        state = self.pool[self.in_slots(), :self.size].view(n, *self.shape).double()
        o = torch.zeros(n, t_max, self.hv, self.v, device="cuda", dtype=torch.float64)
        length, states = torch.zeros(n, t_max, self.hv, device="cuda", dtype=torch.float64), []
        for t in range(0, t_max, every):
            part = slice(t, t + every)
            o[:, part], state = rule(*(y[:, part] for y in inputs), self.a_log.double(), self.dt_bias.double(), state,
                                     lens - t, self.l2norm, 1e-6, self.k ** -0.5, self.beta_scale,
                                     *([length[:, part]] if typical else []))
            states.append(state)
        within = torch.arange(t_max, device="cuda") < lens[:, None]
        return SimpleNamespace(o=o, typical=length, states=states, final=state, index=index, within=within)

    def ends(self, states, checkpoint):
        """Those of the states after every CHUNK tokens that are checkpoints."""
        return [states[(j + 1) * checkpoint // CHUNK - 1][at] for at, i in enumerate(self.live)
                for j in range(self.lens[i] // checkpoint if checkpoint else 0)]

    def errors(self, o, state, checkpoints, checkpoint):
        """{"o", "state", "checkpoints": (error, that of the worst head)}."""
        ref = self.reference()
        square = lambda x: x.pow(2).sum((1, 3))
        norm = torch.maximum(square(ref.o), ref.typical.pow(2).sum(1))      # the typical length is 0 but for `by_head`
        errors = {"o": relative_root(square(torch.where(ref.within[..., None, None], o - ref.o, 0.0)), norm),
                  "state": relative_states(state, ref.final)}
        if len(checkpoints):
            want = torch.stack(self.ends(ref.states, checkpoint))
            errors["checkpoints"] = relative_states(checkpoints.view(-1, *self.shape), want)
        return errors

    def costs(self, checkpoint):
        """errors() of what has operands of 16 bits and is exact otherwise."""
        if not self.emulated:
            self.emulated = self.walk(partial(reference.rule_in_16_bits, TYPES[self.io]))
        w, ends = self.emulated, self.ends(self.emulated.states, checkpoint)
        return self.errors(w.o, w.final, torch.stack(ends) if ends else [], checkpoint)

    # ---- launches ----

    def o_view(self, buffer):
        """o [rows, columns] in its buffer, or in another one like it."""
        shift, gap = self.o_frame
        width = self.hv * self.v
        return buffer[shift:].view(self.rows, width + gap)[:, :width]

    def buffers(self, checkpoint=0):
        """What launches write, and a copy of it from before."""
        shift, gap = self.o_frame
        b = SimpleNamespace(o_buf=nan(shift + self.rows * (self.hv * self.v + gap), dtype=self.io), checkpoints=None,
                            token_states=None)
        b.o = self.o_view(b.o_buf)
        b.state_in = self.pool.clone()
        b.state_out = b.state_in if self.in_place else torch.full_like(self.pool, math.nan)
        if checkpoint:      # two rows more than there can be
            b.checkpoints = nan(sum(self.lens) // checkpoint + 2, self.size, dtype=self.state)
        b.before = {"o_buf": b.o_buf.clone(), "state_out": b.state_out.clone()}
        if checkpoint:
            b.before["checkpoints"] = b.checkpoints.clone()
        return b

    def fields(self, b, algo, start=0, lens=None):
        """Of the structs of gdn_rule and gdn_step both."""
        view = lambda first: columns(self.ba[self.margin + start:], first, 1, self.per_seq)
        in_slots, out_slots = (slots(numbers, self.where.count, self.pool.stride(0)) for numbers in self.where.tensors)
        seqs = sequences(lens or self.lens, self.cu)
        seqs.max_tokens_per_seq += self.slack
        seqs.total_tokens += self.slack
        return dict(
            a=view(self.hv), b=view(0), a_log=self.a_log, dt_bias=self.dt_bias, state_in=b.state_in, state_out=b.state_out,
            token_states=b.token_states, in_slots=in_slots, out_slots=out_slots, seqs=seqs, num_k_heads=self.hk,
            num_v_heads=self.hv, head_k=self.k, head_v=self.v, io_dtype=CODES[self.io],
            gate_dtype=CODES[self.gate], state_dtype=CODES[self.state], l2norm=int(self.l2norm), algo=algo, l2_eps=1e-6,
            scale=self.k ** -0.5, beta_scale=self.beta_scale)

    def params(self, b, algo, segments=0, checkpoint=0, window=None):
        """`window`: of every sequence the tokens from .. to alone."""
        start, lens = (window[0], [window[1] - window[0]] * len(self.lens)) if window else (0, None)
        view = lambda x, dim: columns(x[self.margin + start:], 0, dim, self.per_seq)
        q, k, v = self.qkv
        return rule_params(q=view(q, self.k), k=view(k, self.k), v=view(v, self.v), o=view(b.o, self.v), segments=segments,
                           checkpoints=b.checkpoints, checkpoint_tokens=checkpoint, **self.fields(b, algo, start, lens))

    def launch(self, lib, b, algo, segments=0, checkpoint=0, window=None, graph=False):
        """The status, once the launch is done; b.overrun tells whether it wrote past its workspace."""
        p = self.params(b, algo, segments, checkpoint, window)
        room = workspace(lib.gdn_rule_workspace, p)
        status = launch(lambda: call(lib.gdn_rule, p), graph)
        b.overrun = not bool((room[p.workspace_bytes:] == 0xFF).all())
        return status

    # ---- what is wrong with the result ----

    def wrong(self, b, checkpoint_rows=()):
        """What a launch did that it must not do, in words."""
        left = {name: torch.ones_like(b.before[name], dtype=torch.bool) for name in ("o_buf", "state_out")}
        self.o_view(left["o_buf"])[self.tokens] = False
        left["state_out"][self.out_slots, :self.size] = False
        if b.checkpoints is not None:
            left["checkpoints"] = torch.ones_like(b.checkpoints, dtype=torch.bool)
            left["checkpoints"][list(checkpoint_rows)] = False
        found = [f"wrote outside: {name}" for name, mask in left.items()
                 if not same_outside(getattr(b, name), b.before[name], mask)]
        if bool((b.o[self.rows_of(self.where.padding)] != 0).any()):        # true for NaN
            found.append("padding not zero")
        if not self.in_place and not same(b.state_in, self.pool):
            found.append("wrote its input")
        if b.overrun:
            found.append("wrote past its workspace")
        return found

    def judge(self, b, checkpoint=0):
        """(errors, [what else is wrong])."""
        o = b.o[self.reference().index].unflatten(-1, (self.hv, self.v)).double()
        rows = [sum(self.lens[:i]) // checkpoint + j for i in self.live for j in range(self.lens[i] // checkpoint)
                ] if checkpoint else []
        errors = self.errors(o, b.state_out[self.out_slots, :self.size].view(-1, *self.shape),
                             b.checkpoints[rows] if rows else [], checkpoint)
        return errors, self.wrong(b, rows)

    def run(self, lib, algo, segments=0, checkpoint=0):
        """(whether all is within its bound, a line about it) of a launch."""
        b = self.buffers(checkpoint)
        status = self.launch(lib, b, algo, segments, checkpoint)
        if status != OK:
            return False, lib.gdn_status_string(status).decode()
        chosen = C.c_int32(algo)
        if algo == AUTO:
            lib.gdn_rule_choice(C.byref(self.params(b, algo, segments, checkpoint)), C.byref(chosen))
        return self.fine(chosen.value, *self.judge(b, checkpoint), checkpoint)

    def fine(self, algo, errors, wrong, checkpoint=0):
        """Whether all is within bounds, and a line about it; keeps the worst. An error over the bound of the chunk forms may
        be the input's: what operands of 16 bits cost is worked out then."""
        ok, hard, chunked = bool(errors) and not wrong, [], algo >= CHUNKED_SM80
        for name, (whole, worst) in errors.items():
            bound = CHUNKED_BOUND if chunked else O_BOUND[self.io] if name == "o" else STATE_BOUND
            within = lambda bound: whole <= bound and (worst <= WORST * bound or not self.by_head)      # false for NaN
            kind, passes = name, within(bound)
            if not passes and chunked and not wrong:
                cost, _ = self.costs(checkpoint)[name]
                passes, kind = within(reference.bound_of_hard(CHUNKED_BOUND, cost)), f"{name} of hard inputs"
                hard.append(f"hard: {name} error {whole:.1e}, emulated {cost:.1e}")
            ok = ok and passes
            seen = worst_seen.setdefault((algo, kind), [0.0, 0.0])
            seen[:] = max(seen[0], whole), max(seen[1], worst)
        text = " ".join(f"{name} {whole:.1e} ({worst:.1e})" for name, (whole, worst) in errors.items())
        return ok, ", ".join([text, *hard, *wrong] if text else wrong)

    def check_repeats(self, lib, algo, name, segments=0, checkpoint=0):
        """The same bits again, and from a graph."""
        first = self.buffers(checkpoint)
        status = self.launch(lib, first, algo, segments, checkpoint)
        for how in ("again", "graph"):
            b = self.buffers(checkpoint)
            status = status or self.launch(lib, b, algo, segments, checkpoint, graph=how == "graph")
            ok = status == OK and unchanged(b, first)
            report(f"{name}, {how}, {ALGO_NAMES[algo]}", ok, "same bits" if ok else f"differs, status {status}")

    def check(self, lib, algos, name, segments=(0,), checkpoint=0):
        for algo in algos:
            for n in segments:
                label = f"{name} {self.io}/{self.state} {ALGO_NAMES[algo]}" + (f" segments {n}" if n else "")
                report(label, *self.run(lib, algo, n, checkpoint))


def relative_root(squares, norms):
    """sqrt(sum / sum) of squared errors [N, H], and the largest of one of them; an error without a norm is absolute."""
    ratio = lambda e, n: torch.where(n > 0, e / n.clamp_min(1e-300), e).sqrt()
    if squares.numel() == 0:
        return 0.0, 0.0
    return ratio(squares.sum(), norms.sum()).item(), ratio(squares, norms).max().item()


def relative_states(x, ref):
    return relative_root((x.double() - ref).pow(2).sum((2, 3)), ref.pow(2).sum((2, 3)))


def unchanged(b, first):
    """Whether two launches left the same bits."""
    written = lambda b: [x for x in (b.o_buf, b.state_out, b.checkpoints) if x is not None]
    return same(written(b), written(first))


def rule_calls(lib, batch, tokens, hk, hv, dim, algo, sets, segments=0):
    """For the times: calls that each touch other memory than the last, but for the workspace; `sets` is enough of them to
    pass the L2 cache. A call's `params` and `buffers` are its own; its states are updated in place."""
    calls = []
    for seed in range(sets):
        case = RuleCase([tokens] * batch, hk, hv, dim, dim, seed=seed)
        b = case.buffers()
        params = case.params(b, algo, segments)
        [one] = calls_of(lib, [(lib.gdn_rule, params)])
        one.params, one.buffers = params, b
        calls.append(one)
    workspace(lib.gdn_rule_workspace, *(one.params for one in calls))
    return calls
