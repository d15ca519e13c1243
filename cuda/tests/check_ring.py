#!/usr/bin/env python3
"""gdn_ring_step, gdn_ring_flush, gdn_ring_advance and gdn_ring_inputs, over the pair (state, ring), against the plain recurrence in
float64: one token and several, flushes, drafts taken back, moved states, long runs.
"""
import math
import re

import harness
import torch
from abi import RING_AUTO, RING_FMA, RING_MMA, RING_STEP_TOKENS, RingAdvanceParams, RingFlushParams, fill, sequences
from cases import CONSTANTS, every, rows, words
from check_rule import HEADS, IO
from check_step import Case
from harness import WAYS, Launch, add, call, expect, launch, null_params, one_by_one, report, same, u32
from reference import relative
from ring_case import Sequences

ALGOS = [RING_FMA, RING_MMA]
OTHER = dict(k=96, v=192)      # sizes beside 128


# ---- what a run of launches does ----

def decode(s, steps=36):
    for _ in range(steps):
        s.step(1)


def staggered(s):
    """Every length of the ring at once, with sequences that now and then have no token."""
    for _ in range(2):
        s.step(8, [(5 * i) % 9 for i in range(s.n)])
    for step in range(18):
        s.step(1, [(i + step) % 4 != 0 for i in range(s.n)] if step % 2 else None)


def verification(s, tokens=(4, 8, 2, 5, 16, 3, 1, 8, 7, 4, 16, 6)):
    for step, t in enumerate(tokens):
        t = min(t, s.entries, s.capacity - s.entries)
        counts = [(t + i + step) % (t + 1) for i in range(s.n)] if step % 3 == 2 else None
        s.step(t, counts, [(3 * i + step) % (t + 1) for i in range(s.n)])


def rollback(s):
    for step in range(6):
        s.step(8, None, [3] * s.n)
        s.step(1)


def moves(s):
    """States that move to other slots, with entries and without, and flushes of all."""
    s.step(5)
    s.move()
    s.step(1)
    s.step(4, None, [2] * s.n)
    s.flush()
    s.move()
    s.step(3, [i % 4 for i in range(s.n)])
    s.flush()
    s.flush()
    s.move()
    s.step(1)
    s.move(1, [i % 2 for i in range(s.n)])
    s.flush()
    s.step(1, [(i + 1) % 2 for i in range(s.n)])
    s.move(0)
    s.step(1)
    s.move(0)
    s.step(1, None, [0] * s.n)
    s.step(1)


PLANS = {f.__name__: f for f in (decode, staggered, verification, rollback, moves)}


def run(lib, plan, n, hk, hv, **more):
    s = Sequences(lib, n, hk, hv, name=f"{plan} {n}x {hk}/{hv} {words(more)}", **more)
    PLANS[plan](s)
    s.flush()
    s.window_out()


def cases():
    types = every(plan=list(PLANS), io=IO, state=["f32", "bf16"])
    yield from every(types, n=5, hk=2, hv=4, slots=True)
    yield from every(plan=list(PLANS), io="bf16", n=17, hk=2, hv=4)
    yield from every(rows("hk hv", *HEADS), plan=["staggered", "verification"], state=["f32", "bf16"], n=3, slots=True)
    yield from every(rows("plan n", ("decode", 40), ("staggered", 40), ("verification", 40)), hk=16, hv=32, slots=True)
    yield from every(algo=ALGOS, plan=["decode", "staggered", "moves"], io=IO, state=["f32", "bf16"], n=3, hk=1, hv=2, slots=True)
    yield from every(rows("hk hv", *HEADS), algo=ALGOS, plan="decode", n=3)
    yield from every(types, n=5, hk=2, hv=4, **OTHER, slots=True)
    yield from every(rows("hk hv", (30, 30), (3, 3), (1, 8), (2, 6)), plan=["staggered", "verification"], state=["f32", "bf16"], n=3, **OTHER, slots=True)
    yield from every(algo=ALGOS, plan=["decode", "staggered", "moves"], io=IO, state=["f32", "bf16"], n=3, hk=1, hv=2, **OTHER, slots=True)
    decays, keys = ["none", "strong", "mixed", "mixed, 64", "uniform"], ["random", "repeated", "alternating", "zeros"]
    yield from every(decay=decays, keys=keys, plan=["staggered", "verification"], io="f32", n=4, hk=2, hv=4)
    yield from every(decay=decays, keys="repeated", plan=["staggered", "verification"], n=4, hk=2, hv=4)
    yield from every(decay=decays, keys=keys, plan=["staggered", "verification"], io="f32", n=4, hk=2, hv=2, **OTHER)
    options = [dict(conv="f32"), dict(norm="bf16"), dict(sigmoid=True), dict(gate="f32"), dict(gate="f16"), dict(l2norm=False),
               dict(beta_scale=2.0), dict(qk_size=30.0), *CONSTANTS]
    yield from every(options, plan=["decode", "staggered", "verification"], n=3, hk=2, hv=4)
    yield from every(options, algo=ALGOS, plan="staggered", n=3, hk=2, hv=4)
    yield from every(options, plan=["staggered", "verification"], n=3, hk=2, hv=2, **OTHER)
    yield from every(rows("entries capacity", (8, 24), (5, 10), (16, 24)), plan=["decode", "verification"], state=["f32", "bf16"], n=3, hk=2, hv=4)
    # Rings as small as a call needs, in shapes that read the keys where they are.
    yield from every(plan="verification", io="f32", n=5, hk=2, hv=4, entries=5, capacity=10)
    yield from every(plan="verification", io="f32", n=2, hk=2, hv=2, entries=3, capacity=6, **OTHER)
    # The same bits again, from a graph and overlapped.
    yield from every(plan=["staggered", "verification", "moves"], state=["f32", "bf16"], n=5, hk=2, hv=4, slots=True, ways=WAYS)
    yield from every(plan=["staggered", "verification", "moves"], state=["f32", "bf16"], n=5, hk=3, hv=3, **OTHER, slots=True, ways=WAYS)


def check_cases(lib, args):
    if args.quick:
        table = [*every(algo=ALGOS, plan=["staggered", "moves"], n=3, hk=1, hv=2, slots=True),
                 *every(state=["f32", "bf16"], plan="verification", n=3, hk=1, hv=2, slots=True), dict(plan="moves", n=3, hk=2, hv=4, slots=True),
                 *every(plan=["staggered", "verification", "moves"], state=["f32", "bf16"], n=3, hk=2, hv=2, **OTHER, slots=True)]
    for case in table if args.quick else cases():
        if re.search(args.cases, words(case)):
            run(lib, **case)


def check_inputs(lib, args):
    """The window of a ring beside a plain convolution state, at every length of the ring."""
    for io in IO:
        s = Sequences(lib, 5, 2, 4, io=io, slots=io != "f32", name=f"inputs {io}")
        s.window_out()
        for step in range(8):
            s.step(4, None, [(3 * i + step) % 5 for i in range(s.n)])
            s.window_out()
        for width, channels in ((4, s.channels), (4, 17), (2, 24), (8, 9), (8, 128)):
            for slots in (False, True):
                s = Sequences(lib, 4, 1, 2, io=io, slots=slots, capacity=20, name=f"inputs {io} slots {slots}")
                s.step(3, [i % 4 for i in range(s.n)])
                s.window_round_trip(width, channels)


def drift(lib, tokens, state, decay, n=2, hk=2, hv=4, k=128, v=128):
    """((error of all o, of the last state) of gdn_ring_step token by token, the same of gdn_step), against float64."""
    s, plain = (Sequences(lib, n, hk, hv, k, v, state=state, decay=decay) for _ in range(2))
    step = Case([1] * n, hk, hv, k, v, state=state)       # the launches of gdn_step, on the inputs and weights of `s`
    step.buffers()
    kept = s.past.clone()
    seqs, square = sequences([1] * n), dict.fromkeys(("ring", "plain", "want"), 0.0)
    for _ in range(tokens):
        drawn, o = s.draw(1), [torch.empty(n, hv * s.v, dtype=torch.bfloat16) for _ in range(2)]
        want, s.reference = s.recurrence(drawn, 1, [1] * n)
        s.past = torch.cat([s.past, drawn[0].view(n, 1, -1)], 1)[:, 1:]
        ring = s.params(drawn, o[0], seqs, s.slots)
        p = step.params(lib, 0)
        for name in ("x", "z", "a", "b", "a_log", "dt_bias", "conv_weight", "norm_weight", "scale"):
            setattr(p, name, getattr(ring, name))
        p.out__ptr, p.state_in, p.state_out, p.conv_in, p.conv_out = o[1], plain.state, plain.state, kept, kept
        p.in_slots__slot_stride = p.out_slots__slot_stride = plain.state.stride(0)
        p.conv_in_stride = p.conv_out_stride = kept.stride(0)
        assert not call(lib.gdn_ring_step, ring) and not call(lib.gdn_step, p)
        advance = fill(RingAdvanceParams, spans=s.spans, seqs=seqs, capacity=s.capacity, max_entries=s.entries, **s.where(s.slots, 0))
        assert not call(lib.gdn_ring_advance, advance)
        for name, value in (("ring", o[0].double().view_as(want) - want), ("plain", o[1].double().view_as(want) - want), ("want", want)):
            square[name] += value.pow(2).sum()
    assert not call(lib.gdn_ring_flush, fill(RingFlushParams, seqs=seqs, **s.common(s.slots)))
    return [((square[name] / square["want"]).sqrt().item(), relative(x.state.view_as(s.reference), s.reference))
            for name, x in (("ring", s), ("plain", plain))]


def check_drift(lib, args):
    """Against the plain recurrence. Without decay rounding adds up in any kernel: it may not do so faster than in gdn_step."""
    for state, decay, bound, tokens, sizes in () if args.quick else (
            ("f32", "normal", 1e-5, 2000, {}), ("f32", "none", 1e-5, 2000, {}), ("bf16", "normal", 2e-2, 1000, {}), ("bf16", "none", 2e-2, 1000, {}),
            ("f32", "none", 1e-5, 1000, OTHER), ("bf16", "none", 2e-2, 1000, OTHER)):
        (o, last), plain = drift(lib, tokens, state, decay, **sizes)
        o_bound, last_bound = max(harness.O_BOUND["bf16"], bound), bound + 2e-4     # the convolution's rounding, see ring_case
        if decay == "none":
            o_bound, last_bound = max(o_bound, 2 * plain[0]), max(last_bound, 2 * plain[1])
        report(" ".join([f"{tokens} tokens, {state} state, decay {decay}", words(sizes)]).strip(), o <= o_bound and last <= last_bound,
               f"o {o:.1e} state {last:.1e}; gdn_step o {plain[0]:.1e} state {plain[1]:.1e}", quiet=False)


def check_strides(lib, args):
    """Outputs 2^31 elements apart are those of a dense tensor."""
    for state, tokens in () if args.quick else (("f32", 1), ("f32", 3), ("bf16", 3)):
        s = Sequences(lib, 1, 2, 4, state=state)
        drawn, near = s.draw(tokens), torch.empty(tokens, 4 * s.v, dtype=torch.bfloat16)
        stride = 1 << 31
        far = torch.empty((tokens - 1) * stride + 4 * s.v, dtype=torch.bfloat16)
        rows = far.as_strided((tokens, 4 * s.v), (stride, 1)).fill_(math.nan)
        p = s.params(drawn, near, sequences([tokens]), s.slots)
        status = launch(lambda: call(lib.gdn_ring_step, p))
        p.out__ptr, p.out__token_stride = far, stride
        status = status or launch(lambda: call(lib.gdn_ring_step, p))
        report(f"outputs far apart, {tokens} tokens, {state} state", status == 0 and same(rows, near), f"status {status}")


def check_status(lib, args):
    s = Sequences(lib, 2, 2, 4)
    drawn, o = s.draw(4), torch.empty(8, 4 * s.v, dtype=torch.bfloat16)
    expect("ring step", lib.gdn_ring_step, lambda: s.params(drawn, o, sequences([4] * 2), s.slots), {
        "BAD_DTYPE": one_by_one(io_dtype=[9], gate_dtype=[9], state_dtype=[2, 3], conv_dtype=[9], norm_dtype=[9]),
        "BAD_HEADS": [dict(num_k_heads=3)],
        "BAD_HEAD_DIM": [dict(head_k=0)],
        "BAD_CONV_WIDTH": one_by_one(conv_width=[1, 9]),
        "BAD_ALGO": one_by_one(conv_width=[3], head_k=[64, 96], head_v=[64, 192], algo=[99, RING_FMA], ring__keys_stride=[4], state_out=[add(16)]) +
                    [dict(tokens_per_seq=1, algo=RING_FMA, inputs_stride=add(1))],
        "BAD_LENGTH": one_by_one(num_seqs=[-1], tokens_per_seq=[-1, RING_STEP_TOKENS + 1], ring__capacity=[19, 33], ring__max_entries=[0, 17]) +
                      [dict(ring__max_entries=2, tokens_per_seq=1)],
        "BAD_STRIDE": one_by_one(x__token_stride=[-1, 1 << 33], z__token_stride=[-1], ring__keys_stride=[-1], inputs_stride=[-1]),
        "NULL_POINTER": one_by_one(state_in=[None], ring__keys=[None], ring__spans=[None], a_log=[None], x__ptr=[None], out__ptr=[None],
                                   inputs=[None], conv_weight=[None], z__ptr=[None]),
        "OK": [dict(num_seqs=0)]})
    expect("flush", lib.gdn_ring_flush, lambda: fill(RingFlushParams, seqs=sequences([0] * 2), **s.common(s.slots)), {
        "BAD_DTYPE": one_by_one(io_dtype=[9], state_dtype=[2, 3]),
        "BAD_ALGO": one_by_one(head_k=[64, 96], head_v=[192], ring__keys_stride=[4]),
        "BAD_LENGTH": one_by_one(num_seqs=[-1], ring__capacity=[33], ring__max_entries=[0, 17]),
        "BAD_STRIDE": one_by_one(ring__keys_stride=[-1]),
        "NULL_POINTER": one_by_one(state_in=[None], ring__keys=[None], ring__spans=[None]),
        # Gates and tokens are not read.
        "OK": one_by_one(num_seqs=[0], gate_dtype=[9], a__token_stride=[-1], b__head_stride=[-1], tokens_per_seq=[-1, 17]) +
              [dict(ring__capacity=16, tokens_per_seq=1)]})
    expect("ring inputs", lib.gdn_ring_inputs, lambda: s.inputs_params()[0], {
        "BAD_DTYPE": [dict(io_dtype=3)],
        "BAD_CONV_WIDTH": one_by_one(conv_width=[1, 9]),
        "BAD_LENGTH": one_by_one(num_seqs=[-1, 65536], channels=[-1], capacity=[4, 33], out_slots__num_slots=[-1]),
        "BAD_STRIDE": one_by_one(inputs_stride=[-1], out_slots__slot_stride=[-1]),
        "NULL_POINTER": one_by_one(inputs=[None], conv_state=[None], spans=[None]),
        "OK": [dict(num_seqs=0), dict(channels=0)]})
    null_params(lib.gdn_ring_step, lib.gdn_ring_flush, lib.gdn_ring_advance, lib.gdn_ring_inputs)


# ---- times ----

def timed(lib, batch, tokens, state="f32", algo=RING_AUTO, length=None, flush=False, hk=16, hv=32, k=128, v=128, seed=0):
    """A launch on rings full of numbers: all of this length, or every length of a cycle at once."""
    s = Sequences(lib, batch, hk, hv, k, v, state=state, algo=algo, seed=seed)
    for x in (s.ring_keys, s.updates, s.inputs):
        x.normal_(0, 0.02)
    s.decays.fill_(-0.1)
    s.spans = u32([(7 * i) % s.capacity << 16 | (tokens * (i % (s.entries // tokens) + 1) if length is None else length) for i in range(batch)])
    seqs = sequences([tokens] * batch)
    p = fill(RingFlushParams, seqs=seqs, **s.common(s.slots)) if flush else s.params(
        s.draw(tokens), torch.empty(batch * tokens, hv * v, dtype=torch.bfloat16), seqs, s.slots)
    return Launch(lib.gdn_ring_flush if flush else lib.gdn_ring_step, p, nbytes=s.state.numel() * s.state.element_size(), keep=s)


def times(args):
    """The floor is one read of the state."""
    batches = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    other = dict(hk=30, hv=30, **OTHER)
    return [("one token, rings of every length", timed, every(tokens=1, state=["f32", "bf16"], batch=batches)),
            ("one token, by kernel", timed, every(tokens=1, algo=ALGOS, batch=batches)),
            ("one token by the ring's length; 16 flushes", timed, every(tokens=1, batch=[1, 64, 256], length=[0, 8, 15, 16])),
            ("the flush", timed, every(tokens=1, state=["f32", "bf16"], batch=[1, 64, 256], length=16, flush=True)),
            ("several tokens", timed, every(tokens=[4, 8, 16], state=["f32", "bf16"], batch=[1, 32, 256])),
            ("one token, K 96, V 192", timed, every(tokens=1, state=["f32", "bf16"], batch=[1, 32, 64, 128], **other)),
            ("the flush, K 96, V 192", timed, every(tokens=1, state=["f32", "bf16"], batch=[1, 32, 128], length=16, flush=True, **other)),
            ("several tokens, K 96, V 192", timed, every(tokens=[4, 8, 16], state=["f32", "bf16"], batch=[1, 32, 128], **other))]


GROUPS = {"cases": check_cases, "inputs": check_inputs, "drift": check_drift, "strides": check_strides, "status": check_status}

if __name__ == "__main__":
    harness.program(__doc__, GROUPS, times)
