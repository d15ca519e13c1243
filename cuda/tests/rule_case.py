"""A case of the gated delta rule: inputs and states, the reference, launches, and what is wrong with what they leave.

Whatever a launch must not read holds NaN, whatever it writes held NaN before, and all else is compared bit by bit.
"""
import ctypes as C
from functools import partial
from itertools import accumulate

import reference
import torch
from abi import AUTO, CHUNKED_SM80, CODES, GATES_READY, columns, rule_params, sequences, slots, workspace
from harness import CHUNKED_BOUND, O_BOUND, ONCE, STATE_BOUND, TYPES, Launch, Output, cu_seqlens, nan, normal, place

WORST = 4           # a (sequence, head) may have so many times the bound of its case
worst_seen = {}     # {(algo, name of the output): [largest error of a case, of a (sequence, head)]}
REPEATS = (*ONCE, *ONCE, (0, True))

# {decay: (share of tokens with the strong gate, that gate, the gate of all others)}; None: anything from -10 to 30.
DECAYS = {"strong": (1.0, 30.0, 0.0), "mixed": (0.15, 30.0, -60.0), "mixed, 64": (0.15, 64.0, -5.0),
          "uniform": (0.0, 0.0, None)}


def gates(randn, rand, rows, hv, decay, beta=None):
    """Raw b and a [rows, hv], a_log and dt_bias [hv] of a kind of decay."""
    b, a = randn(rows, hv), randn(rows, hv)
    if beta is not None:
        b.fill_(beta)
    a_log, dt_bias = (rand(hv) * 15 + 1).log(), randn(hv) - 4
    if decay == "none":
        a_log.fill_(-100.0)
    elif decay != "normal":
        a_log.fill_(0.0)
        dt_bias.fill_(0.0)
        if decay == "late":    # nothing is forgotten before the last third
            return b, torch.where(torch.arange(rows)[:, None] * 3 < rows * 2, -60.0, 3.0).expand(rows, hv), a_log, dt_bias
        share, strong, other = DECAYS[decay]
        a = torch.where(rand(rows, hv) < share, strong, 40 * rand(rows, hv) - 10 if other is None else other)
    return b, a, a_log, dt_bias


def shorter(rand, x):
    """Keys and queries without a norm: short, or the recurrence itself would grow without bound."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6) * (0.3 + 0.7 * rand(*x.shape[:-1], 1))


def uniform(seed):
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
    return lambda *shape: torch.rand(*shape, generator=generator)


class RuleCase:
    """One projection [rows, q | k | v | extra columns], one of the gates [rows, b | a], a pool of states, and the reference.

    `x_frame` and `o_frame`: elements before the first row, and columns of NaN after every row. `margin` and `between`: rows
    of NaN around the tokens, and, without cu_seqlens, after each sequence. `slack`: rows more than cu_seqlens needs.
    `apart`: q, k and v are tensors of their own. `by_head`: the error of every single head counts too, and that of o is
    measured against what a query of no particular direction would have read at least, since one that is orthogonal to the
    state reads rounding alone. `by_sequence`: that of the states is the worst of one sequence.
    `ready`: a launch gets the log decay and beta in f32. `zeros`: it gets no initial state."""
    by_sequence = False

    def __init__(self, lens, hk=2, hv=4, k=128, v=128, io="bf16", gate=None, state="f32", varlen=None, slots="identity",
                 slot_gap=4, padding_by_either=False, keys="random", decay="normal", beta=None, beta_scale=1.0, l2norm=True,
                 qk_size=1.0, v_size=1.0, x_frame=(0, 0), o_frame=(0, 0), gates_gap=0, margin=0, between=0, slack=0, extra=0,
                 apart=False, by_head=False, ready=False, zeros=False, scale=None, l2_eps=1e-6, seed=0):
        self.randn, self.rand = normal(seed), uniform(seed + 1)
        self.lens, self.hk, self.hv, self.k, self.v = lens, hk, hv, k, v
        self.io, self.gate, self.state, self.l2norm, self.beta_scale = io, gate or io, state, l2norm, beta_scale
        self.slack, self.margin, self.o_frame, self.apart, self.by_head = slack, margin, o_frame, apart, by_head
        self.ready, self.zeros = ready, zeros
        self.scale, self.l2_eps = k ** -0.5 if scale is None else scale, l2_eps
        self.varlen = len(set(lens)) > 1 if varlen is None else varlen
        assert self.varlen or len(set(lens)) == 1
        self.cu = cu_seqlens(lens) if self.varlen else None
        between = 0 if self.varlen else between
        self.per_seq = 0 if self.varlen else max(lens) + between
        self.first = [margin + start for start in accumulate([0] + [length + between for length in lens[:-1]])]
        self.rows = max(sum(lens) + between * len(lens) + 2 * margin + slack, 1)    # total_tokens counts rows that are there
        self.shape, self.size = (hv, v, k), hv * v * k
        self.where = place(len(lens), slots, seed, padding_by_either)
        self.in_place = slots in ("identity", "permuted", "shared")
        self.live = [i for i in range(len(lens)) if i not in self.where.padding]
        self.in_slots, self.out_slots = ([numbers[i] for i in self.live] for numbers in (self.where.ins, self.where.outs))
        self.pool = nan(self.where.count, self.size + (slot_gap if self.where.count > len(lens) else 0), dtype=state)
        self.pool[self.in_slots, :self.size] = (0.3 * self.randn(len(self.live), self.size)).to(self.pool.dtype)
        if zeros:
            self.pool[self.in_slots, :self.size] = 0
        self.draw_inputs(keys, decay, beta, qk_size, v_size, x_frame, gates_gap, extra)
        self.referenced = self.emulated = None

    def rows_of(self, numbers):
        """The rows of the tokens of these sequences."""
        return torch.tensor([self.first[i] + t for i in numbers for t in range(self.lens[i])], dtype=torch.long)

    def draw_inputs(self, keys, decay, beta, qk_size, v_size, frame, gates_gap, extra):
        live, randn = self.rows_of(self.live), self.randn
        hk, hv, n = self.hk, self.hv, len(live)
        q, k, v = randn(n, hk, self.k), randn(n, hk, self.k), randn(n, hv, self.v) * v_size
        token = torch.arange(n)
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
            q, k = shorter(self.rand, q), shorter(self.rand, k)
        b, a, self.a_log, self.dt_bias = gates(randn, self.rand, n, hv, decay, beta)
        parts = [x.flatten(1) for x in (q, k, v)] + ([randn(n, extra)] if extra else [])
        self.width = sum(x.shape[1] for x in parts)
        shift, gap = frame
        buffer = nan(shift + self.rows * (self.width + gap), dtype=self.io)
        self.x = buffer[shift:].view(self.rows, self.width + gap)
        self.ba = nan(self.rows, 2 * hv + gates_gap, dtype=self.gate)
        self.x[live, :self.width] = torch.cat(parts, 1).to(self.x.dtype)
        self.ba[live, :2 * hv] = torch.cat([b, a], 1).to(self.ba.dtype)
        self.gates_of_launch = self.ba
        if self.ready:
            b, a = (x.double() for x in self.ba[:, :2 * hv].split(hv, 1))
            made = [self.beta_scale * torch.sigmoid(b), reference.log_decay(a, self.a_log, self.dt_bias)]
            self.gates_of_launch = torch.cat([*made, self.ba[:, 2 * hv:]], 1).float()
        self.qkv = list(self.x[:, :2 * hk * self.k + hv * self.v].split([hk * self.k, hk * self.k, hv * self.v], 1))
        if self.apart:
            self.qkv = [x.contiguous() for x in self.qkv]

    # ---- the reference ----

    def reference(self):
        if not self.referenced:
            self.referenced = self.walk(reference.rule, typical=self.by_head)
        return self.referenced

    def walk(self, rule, qkv=None, typical=False):
        """Of the live sequences: o, its typical length [N, T, HV, ..] and the final states. self.index: the row of each token
        [N, T], self.within: whether there is one."""
        n, t_max = len(self.live), max((self.lens[i] for i in self.live), default=0)
        lens = torch.tensor([self.lens[i] for i in self.live])
        first = torch.tensor([self.first[i] for i in self.live])
        token = torch.arange(t_max)[None]
        last = torch.minimum(token, (lens[:, None] - 1).clamp_min(0))
        self.index = (first[:, None] + last).clamp_max(self.rows - 1).long().view(n, t_max)
        self.within = (token < lens[:, None]).view(n, t_max)
        # Past the end of a sequence stands whatever there is, but no NaN: it is multiplied by nothing.
        q, k, v, a, b = (x[self.index].double().nan_to_num(0.0) for x in (
            *(qkv or self.qkv), self.ba[:, self.hv:2 * self.hv], self.ba[:, :self.hv]))
        state = self.pool[self.in_slots, :self.size].view(n, *self.shape).double()
        length = torch.zeros(n, t_max, self.hv, dtype=torch.float64)
        o, state = rule(q.unflatten(-1, (self.hk, self.k)), k.unflatten(-1, (self.hk, self.k)), v.unflatten(-1, (self.hv, self.v)), a, b,
                        self.a_log.double(), self.dt_bias.double(), state, lens, self.l2norm, self.l2_eps, self.scale, self.beta_scale,
                        *([length] if typical else []))
        return o, length, state

    def error_of_o(self, o):
        """(error, error of the worst head) of o [N, T, HV, V]."""
        want, typical, _ = self.reference()
        square = lambda x: x.pow(2).sum((1, 3))
        norm = torch.maximum(square(want), typical.pow(2).sum(1))      # the typical length is 0 but for `by_head`
        return relative_root(square(torch.where(self.within[..., None, None], o - want, 0.0)), norm)

    def error_of_state(self, state):
        want, square = self.reference()[2], lambda x: x.pow(2).sum((2, 3))
        if self.by_sequence:
            return max((reference.relative(x, y) for x, y in zip(state, want)), default=0.0), 0.0
        return relative_root(square(state.double() - want), square(want))

    def cost(self, name):
        """The error of what has operands of 16 bits and is exact otherwise."""
        if not self.emulated:
            self.emulated = self.walk(partial(reference.rule_in_16_bits, TYPES[self.io]))
        return self.error_of_o(self.emulated[0])[0] if name == "o" else self.error_of_state(self.emulated[2])[0]

    # ---- launches ----

    def buffers(self):
        """Allocates again what a launch writes."""
        shift, gap = self.o_frame
        width = self.hv * self.v
        self.o_buffer = nan(shift + self.rows * (width + gap), dtype=self.io)
        self.o_rows = lambda x: x[shift:].view(self.rows, width + gap)[:, :width]
        self.o, self.state_in = self.o_rows(self.o_buffer), self.pool.clone()
        self.state_out = self.state_in if self.in_place and not self.zeros else torch.full_like(self.pool, float("nan"))

    def outputs(self, algo):
        """What a launch of this kernel, not AUTO, has to leave."""
        self.reference()
        chunked = algo >= CHUNKED_SM80
        o_bound, state_bound = [CHUNKED_BOUND] * 2 if chunked else [O_BOUND[self.io], STATE_BOUND[self.state]]
        rows, states = (torch.zeros_like(x, dtype=torch.bool) for x in (self.o_buffer, self.state_out))
        self.o_rows(rows)[self.rows_of(range(len(self.lens)))] = True
        states[self.out_slots, :self.size] = True
        o_of = lambda: self.error_of_o(self.o[self.index].unflatten(-1, (self.hv, self.v)).double())
        state_of = lambda: self.error_of_state(self.state_out[self.out_slots, :self.size].view(-1, *self.shape))
        return [Output("o", self.o_buffer, rows, error=lambda _: self.fine(algo, "o", o_of(), o_bound)),
                Output("state", self.state_out, states, error=lambda _: self.fine(algo, "state", state_of(), state_bound)),
                *([] if self.in_place else [Output("input states", self.state_in)])]

    def fields(self, algo, start=0, lens=None):
        """The fields that the structs of gdn_rule and gdn_step share, after buffers()."""
        view = lambda first: columns(self.gates_of_launch[self.margin + start:], first, 1, self.per_seq)
        gate = "f32" if self.ready else self.gate
        in_slots, out_slots = (slots(numbers, self.where.count, self.pool.stride(0)) for numbers in self.where.tensors)
        seqs = sequences(lens or self.lens, self.cu)
        seqs.max_tokens_per_seq += self.slack
        seqs.total_tokens += self.slack
        return dict(
            a=view(self.hv), b=view(0), a_log=self.a_log, dt_bias=self.dt_bias, state_in=self.state_in, state_out=self.state_out,
            in_slots=in_slots, out_slots=out_slots, seqs=seqs, num_k_heads=self.hk, num_v_heads=self.hv, head_k=self.k,
            head_v=self.v, io_dtype=CODES[self.io], gate_dtype=CODES[gate], state_dtype=CODES[self.state],
            l2norm=int(self.l2norm), algo=algo, l2_eps=self.l2_eps, scale=self.scale, beta_scale=self.beta_scale)

    def params(self, lib, algo, segments=0, window=None):
        """`window`: of every sequence the tokens from .. to alone."""
        start, lens = (window[0], [window[1] - window[0]] * len(self.lens)) if window else (0, None)
        view = lambda x, dim: columns(x[self.margin + start:], 0, dim, self.per_seq)
        q, k, v = self.qkv
        p = rule_params(q=view(q, self.k), k=view(k, self.k), v=view(v, self.v), o=view(self.o, self.v), segments=segments,
                        **self.fields(algo, start, lens))
        if self.ready:
            p.gates, p.a_log, p.dt_bias = GATES_READY, None, None
        if self.zeros:
            p.state_in = None
        workspace(lib.gdn_rule_workspace, p)
        return p

    def after(self):
        """What else is wrong with the last launch."""
        padding = self.o[self.rows_of(self.where.padding)]
        return ["padding not zero"] if bool((padding != 0).any()) else []      # true for NaN

    def fine(self, algo, name, error, bound):
        """(whether an error is within its bound, words); keeps the worst. An error over the bound of the chunk forms may be the
        input's: what operands of 16 bits cost is worked out then."""
        whole, worst = error
        text, kind = f"{whole:.1e} ({worst:.1e})", name
        within = lambda bound: whole <= bound and (worst <= WORST * bound or not self.by_head)      # false for NaN
        passes = within(bound)
        if not passes and algo >= CHUNKED_SM80:
            cost = self.cost(name)
            passes, kind = within(reference.bound_of_hard(bound, cost)), f"{name} of hard inputs"
            text += f" hard: emulated {cost:.1e}"
        seen = worst_seen.setdefault((algo, kind), [0.0, 0.0])
        seen[:] = max(seen[0], whole), max(seen[1], worst)
        return passes, text


made = {}


def once(kind, **case):
    """A case, made only where it is not the last one: several launches of it share its reference."""
    key = kind, repr(case)
    if made.get("key") != key:
        made.update(key=key, case=kind(**case))
    return made["case"]


def rule(lib, algo=AUTO, segments=0, kind=RuleCase, **case):
    """A launch of gdn_rule."""
    c = once(kind, **case)
    c.buffers()
    p, chosen = c.params(lib, algo, segments), C.c_int32(algo)
    if algo == AUTO:
        lib.gdn_rule_choice(C.byref(p), C.byref(chosen))
    states = 2 * len(c.lens) * c.size * c.pool.element_size()
    return Launch(lib.gdn_rule, p, lambda: c.outputs(chosen.value), after=c.after, keep=c,
                  nbytes=states + sum(c.lens) * 2 * (c.hk * c.k + c.hv * c.v) * c.x.element_size())


def relative_root(squares, norms):
    """sqrt(sum / sum) of squared errors [N, H], and the largest of one of them; an error without a norm is absolute."""
    ratio = lambda e, n: torch.where(n > 0, e / n.clamp_min(1e-300), e).sqrt()
    if squares.numel() == 0:
        return 0.0, 0.0
    return ratio(squares.sum(), norms.sum()).item(), ratio(squares, norms).max().item()
