"""A case of check_prefill.py: its inputs and reference, a run of it by a kernel, and what is wrong with the result.

An error is relative RMS, ||x - ref|| / ||ref||, of a whole case and of its worst (sequence, head); for o, ||ref|| is at
least what a query of no particular direction would have read, since one that is orthogonal to the state reads rounding
alone. A case over the fixed bound may be hard for any kernel with operands of 16 bits: what they cost it is worked out then
(sixteen_bits.py), bounds it, and stands in its line, after "hard". Whatever a launch must not read holds NaN, whatever it
writes held NaN before, and all else is compared bit by bit.
"""
import ctypes as C
import math
from functools import partial
from types import SimpleNamespace

import sixteen_bits
import torch
from abi import (CHUNK, CHUNKED_SM80, CHUNKED_SM90, DTYPES, NO_SLOT, OK, Heads, Slots, ptr, rule_params, sequences,
                 stream, u32, workspace)
from check import CHUNKED_BOUND, O_BOUND, STATE_BOUND, rule_reference
from checks import bits

WORST = 4           # a (sequence, head) may have so many times the bound of its case
MARGIN, BETWEEN = 3, 2    # rows of NaN around the tokens, and without cu_seqlens between the sequences
ALGOS = [CHUNKED_SM80, CHUNKED_SM90]


def scattered(buf, written):
    """What of buf is not `written`, a view of it or several."""
    left = torch.ones(buf.numel(), dtype=torch.bool, device=buf.device)
    for x in written:
        left.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return bits(buf.view(-1))[left]


class Case:
    """One projection [rows, q | k | v | gap] and [rows, b | a | gap], a pool of states, and the reference."""

    def __init__(self, lens, hk=2, hv=4, k=128, v=128, io="bf16", gate=None, state="f32", varlen=None, slots="identity",
                 keys="random", decay="normal", beta="random", beta_scale=1.0, l2norm=True, qk_size=1.0, v_size=1.0,
                 odd_o=False, slack=0, gap=2, seed=0):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        self.randn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
        self.rand = lambda *s: torch.rand(*s, generator=gen, device="cuda")
        self.lens, self.hk, self.hv, self.k, self.v = lens, hk, hv, k, v
        self.io, self.gate, self.state, self.l2norm, self.beta_scale = io, gate or io, state, l2norm, beta_scale
        self.varlen = len(set(lens)) > 1 if varlen is None else varlen
        self.cu = u32([0] + torch.tensor(lens).cumsum(0).tolist()) if self.varlen else None
        self.slack, self.odd_o, self.seed = slack, odd_o, seed
        self.place_states(slots, gap)

        gap = 0 if self.varlen else BETWEEN
        self.first = [MARGIN + sum(lens[:i]) + gap * i for i in range(len(lens))]
        self.rows = sum(lens) + gap * len(lens) + 2 * MARGIN + slack    # total_tokens counts rows that are there
        self.live = [i for i in range(len(lens)) if i not in self.padding]
        self.tokens = torch.tensor([t for i in self.live for t in range(self.first[i], self.first[i] + lens[i])],
                                   dtype=torch.long, device="cuda")
        self.draw_inputs(keys, decay, beta, qk_size, v_size)
        self.referenced = self.emulated = None

    def place_states(self, slots, gap):
        """identity: in place, no slots; apart: no slots, out of place; permuted: in place; shared: the same with a sequence
        of padding; moved: other slots of another pool, with padding by either slot number."""
        n, size = len(self.lens), self.hv * self.v * self.k
        self.in_place, self.padding = slots in ("identity", "permuted", "shared"), []
        self.in_slots = self.out_slots = list(range(n))
        self.num_slots, self.slot_tensors = n, (None, None)
        if slots in ("permuted", "shared", "moved"):
            self.num_slots = 2 * n + 1
            perm = torch.randperm(self.num_slots, generator=torch.Generator().manual_seed(self.seed)).tolist()
            self.in_slots, self.out_slots = perm[:n], perm[:n] if self.in_place else perm[n:2 * n]
            if slots != "permuted" and n > 1:
                self.padding = [n // 2]
                self.in_slots[n // 2] = NO_SLOT
                if self.in_place:
                    self.out_slots[n // 2] = NO_SLOT
                if not self.in_place and n > 3:
                    self.padding.append(0)
                    self.out_slots[0] = self.num_slots
            self.slot_tensors = u32(self.in_slots), u32(self.out_slots)
        self.shape = self.hv, self.v, self.k
        # The default gap is what the header asks of the alignment of states and no more.
        gap = gap if self.num_slots > n else 0
        self.pool = torch.full((self.num_slots, size + gap), math.nan, device="cuda", dtype=DTYPES[self.state][1])
        for i in range(n):
            if i not in self.padding:
                self.pool[self.in_slots[i], :size] = 0.3 * self.randn(size)

    def draw_inputs(self, keys, decay, beta, qk_size, v_size):
        hk, hv, n, randn, rand = self.hk, self.hv, len(self.tokens), self.randn, self.rand
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
        if beta == "one":
            b.fill_(20.0)
        self.a_log, self.dt_bias = (rand(hv) * 15 + 1).log(), randn(hv) - 4
        if decay == "none":
            self.a_log.fill_(-100.0)
        elif decay != "normal":
            self.a_log.fill_(0.0)
            self.dt_bias.fill_(0.0)
            strong = {"strong": 1.0, "mixed": 0.15, "uniform": 0.0}[decay]
            a = torch.where(rand(n, hv) < strong, 30.0, -60.0 if decay == "mixed" else 40 * rand(n, hv) - 10)
        width = 2 * hk * self.k + hv * self.v
        self.x = torch.full((self.rows, width + 8), math.nan, device="cuda", dtype=DTYPES[self.io][1])
        self.ba = torch.full((self.rows, 2 * hv + 3), math.nan, device="cuda", dtype=DTYPES[self.gate][1])
        self.x[self.tokens, :width] = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1).to(self.x.dtype)
        self.ba[self.tokens, :2 * hv] = torch.cat([b, a], 1).to(self.ba.dtype)

    def reference(self):
        if not self.referenced:
            self.referenced = self.walk(rule_reference, typical=True)
        return self.referenced

    def walk(self, rule, typical=False):
        """Of the live sequences: o and its typical length [N, T, HV, ..], the states after every CHUNK tokens, the last."""
        n, t_max = len(self.live), max((self.lens[i] for i in self.live), default=0)
        lens = torch.tensor([self.lens[i] for i in self.live], device="cuda")
        index = torch.tensor([[self.first[i] + min(t, max(self.lens[i] - 1, 0)) for t in range(t_max)] for i in self.live],
                             dtype=torch.long, device="cuda").view(n, t_max)
        # Past the end of a sequence stands whatever there is, but no NaN: it is multiplied by nothing.
        x, ba = (y[index].double().nan_to_num(0.0) for y in (self.x, self.ba))
        keys, hk, hv = self.hk * self.k, self.hk, self.hv
        inputs = (x[..., :keys].unflatten(-1, (hk, self.k)), x[..., keys:2 * keys].unflatten(-1, (hk, self.k)),
                  x[..., 2 * keys:2 * keys + hv * self.v].unflatten(-1, (hv, self.v)), ba[..., hv:2 * hv], ba[..., :hv])
        size = math.prod(self.shape)
        state = self.pool[[self.in_slots[i] for i in self.live], :size].view(n, *self.shape).double()
        o = torch.zeros(n, t_max, hv, self.v, device="cuda", dtype=torch.float64)
        length, states = torch.zeros(n, t_max, hv, device="cuda", dtype=torch.float64), []
        for t in range(0, t_max, CHUNK):
            part = slice(t, t + CHUNK)
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
        norm = torch.maximum(square(ref.o), ref.typical.pow(2).sum(1))
        errors = {"o": relative(square(torch.where(ref.within[..., None, None], o - ref.o, 0.0)), norm),
                  "state": relative_states(state, ref.final)}
        if checkpoints:
            want = self.ends(ref.states, checkpoint)
            errors["checkpoints"] = relative_states(*(torch.stack(x).view(-1, *self.shape) for x in (checkpoints, want)))
        return errors

    def costs(self, checkpoint):
        """errors() of what has operands of 16 bits and is exact otherwise."""
        if not self.emulated:
            self.emulated = self.walk(partial(sixteen_bits.rule, DTYPES[self.io][1]))
        w = self.emulated
        return self.errors(w.o, w.final, self.ends(w.states, checkpoint), checkpoint)

    def buffers(self, checkpoint=0):
        """What launches write, and a copy of it from before."""
        nan = lambda *shape, dtype: torch.full(shape, math.nan, device="cuda", dtype=DTYPES[dtype][1])
        shift, gap = (8, 24) if self.odd_o else (0, 8)
        width = self.hv * self.v
        b = SimpleNamespace(o_buf=nan(shift + self.rows * (width + gap), dtype=self.io), checkpoints=None)
        b.o = b.o_buf[shift:].view(self.rows, width + gap)[:, :width]
        b.state_in = self.pool.clone()
        b.state_out = b.state_in if self.in_place else torch.full_like(self.pool, math.nan)
        if checkpoint:      # two rows more than there can be
            b.checkpoints = nan((sum(self.lens) // checkpoint + 2) * math.prod(self.shape), dtype=self.state)
        b.before = [x.clone() if x is not None else None for x in (b.o_buf, b.state_out, b.checkpoints)]
        return b

    def params(self, b, algo, segments=0, checkpoint=0, window=None):
        """`window`: of every sequence the tokens from .. to alone."""
        start, stop = window or (0, max(self.lens))
        lens = [stop - start] * len(self.lens) if window else self.lens
        seqs = sequences(lens, self.cu)
        seqs.max_tokens_per_seq += self.slack
        seqs.total_tokens += self.slack
        per_seq = 0 if self.varlen else max(self.lens) + BETWEEN
        view = lambda x, first, head: Heads(ptr(x) + ((MARGIN + start) * x.stride(0) + first) * x.element_size(),
                                            per_seq * x.stride(0), x.stride(0), head)
        slot = lambda s: Slots(ptr(s), self.num_slots, self.pool.stride(0))
        keys = self.hk * self.k
        return rule_params(
            q=view(self.x, 0, self.k), k=view(self.x, keys, self.k), v=view(self.x, 2 * keys, self.v),
            a=view(self.ba, self.hv, 1), b=view(self.ba, 0, 1), a_log=self.a_log, dt_bias=self.dt_bias,
            o=view(b.o, 0, self.v), state_in=b.state_in, state_out=b.state_out, checkpoints=b.checkpoints,
            checkpoint_tokens=checkpoint, in_slots=slot(self.slot_tensors[0]), out_slots=slot(self.slot_tensors[1]),
            seqs=seqs, num_k_heads=self.hk, num_v_heads=self.hv, head_k=self.k, head_v=self.v, io_dtype=DTYPES[self.io][0],
            gate_dtype=DTYPES[self.gate][0], state_dtype=DTYPES[self.state][0], l2norm=int(self.l2norm), algo=algo,
            segments=segments, beta_scale=self.beta_scale)

    def launch(self, lib, b, algo, segments=0, checkpoint=0, window=None, graph=False):
        """The status, once the launch is done; b.overrun tells whether it wrote past its workspace."""
        p = self.params(b, algo, segments, checkpoint, window)
        room = workspace(lib, p)
        if graph:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                status = lib.gdn_rule(C.byref(p), stream())
            g.replay()
        else:
            status = lib.gdn_rule(C.byref(p), stream())
        torch.cuda.synchronize()
        b.overrun = not bool((room[p.workspace_bytes:] == 0xFF).all())
        return status

    def judge(self, b, checkpoint=0):
        """(errors, [what else is wrong])."""
        size, wrong, slots = math.prod(self.shape), [], [self.out_slots[i] for i in self.live]
        written = {"o": [b.o[self.first[i]:self.first[i] + n] for i, n in enumerate(self.lens)],
                   "state": [b.state_out[s, :size] for s in slots], "checkpoints": []}
        if checkpoint:
            rows = [sum(self.lens[:i]) // checkpoint + j for i in self.live for j in range(self.lens[i] // checkpoint)]
            written["checkpoints"] = [b.checkpoints[row * size:(row + 1) * size] for row in rows]
        o = b.o[self.reference().index].unflatten(-1, (self.hv, self.v)).double()
        errors = self.errors(o, b.state_out[slots, :size].view(-1, *self.shape), written["checkpoints"], checkpoint)
        if any((written["o"][i] != 0).any() for i in self.padding):     # true for NaN
            wrong.append("padding not zero")
        for (name, views), buf, before in zip(written.items(), (b.o_buf, b.state_out, b.checkpoints), b.before):
            if buf is not None and not torch.equal(scattered(buf, views), scattered(before, views)):
                wrong.append(f"wrote outside: {name}")
        if not self.in_place and not torch.equal(bits(b.state_in), bits(self.pool)):
            wrong.append("wrote its input")
        if b.overrun:
            wrong.append("wrote past its workspace")
        return errors, wrong

    def run(self, lib, algo, segments=0, checkpoint=0):
        b = self.buffers(checkpoint)
        status = self.launch(lib, b, algo, segments, checkpoint)
        if status != OK:
            return {}, [lib.gdn_status_string(status).decode()]
        return self.judge(b, checkpoint)


def relative(squares, norms):
    """sqrt(sum / sum) of squared errors [N, H], and the largest of one of them; an error without a norm is absolute."""
    ratio = lambda e, n: torch.where(n > 0, e / n.clamp_min(1e-300), e).sqrt()
    if squares.numel() == 0:
        return 0.0, 0.0
    return ratio(squares.sum(), norms.sum()).item(), ratio(squares, norms).max().item()


def relative_states(x, ref):
    return relative((x.double() - ref).pow(2).sum((2, 3)), ref.pow(2).sum((2, 3)))


def bounds_of(algo, case):
    if algo in ALGOS:
        return {name: CHUNKED_BOUND for name in ("o", "state", "checkpoints")}
    return {"o": O_BOUND[case.io], "state": STATE_BOUND, "checkpoints": STATE_BOUND}


worst_seen = {}


def fine(algo, case, errors, wrong, checkpoint=0):
    """Whether all is within bounds, and a line about it; keeps the worst. An error over the bound of the chunk forms may be
    the input's: what operands of 16 bits cost is worked out then."""
    ok, hard = bool(errors) and not wrong, []
    for name, (whole, worst) in errors.items():
        within = lambda bound: whole <= bound and worst <= WORST * bound        # false for NaN
        kind, passes = name, within(bounds_of(algo, case)[name])
        if not passes and algo in ALGOS and not wrong:
            cost, _ = case.costs(checkpoint)[name]
            passes, kind = within(sixteen_bits.bound(CHUNKED_BOUND, cost)), f"{name} of hard inputs"
            hard.append(f"hard: {name} error {whole:.1e}, emulated {cost:.1e}")
        ok = ok and passes
        seen = worst_seen.setdefault((algo, kind), [0.0, 0.0])
        seen[:] = max(seen[0], whole), max(seen[1], worst)
    text = " ".join(f"{name} {whole:.1e} ({worst:.1e})" for name, (whole, worst) in errors.items())
    return ok, ", ".join([text, *hard, *wrong] if text else wrong)
