#!/usr/bin/env python3
"""gdn_replay and gdn_replay_step, over the pair (state, ring), against the plain recurrence in float64: one token and several,
folds, counts, drafts taken back, moved states, long runs; and gdn_replay_window.

The times are of whole cycles from fold to fold, next to today's decode and, where it can be imported, FlashInfer's ring.
"""
import harness
import replay_times
from abi import REPLAY_AUTO, REPLAY_FMA, REPLAY_MMA
from harness import expect, one_by_one, report, same
from replay_case import Sequences, drift
from replay_step_case import Steps, window, window_out, window_round_trip

ONE = (REPLAY_FMA, REPLAY_MMA)
HEADS = ((16, 16), (16, 32), (16, 48), (16, 64), (2, 8), (1, 8), (4, 8))
TYPES = [(io, state) for io in ("bf16", "f16", "f32") for state in ("f32", "bf16", "f16")]


# ---- what a run of launches does ----

def decode(s, steps=36):
    for _ in range(steps):
        s.call(1)


def staggered(s):
    """Every length of the ring at once, with sequences that now and then have no token."""
    for _ in range(2):
        s.call(8, [(5 * i) % 9 for i in range(s.n)])
    for step in range(18):
        s.call(1, [(i + step) % 4 != 0 for i in range(s.n)])


def verify(s, tokens=(4, 8, 2, 5, 16, 3, 1, 8, 7, 4, 16, 6)):
    for step, t in enumerate(tokens):
        counts = [(t + i + step) % (t + 1) for i in range(s.n)] if step % 3 == 2 else None
        s.call(t, counts, [(3 * i + step) % (t + 1) for i in range(s.n)])


def verify_8(s):
    verify(s, (4, 8, 2, 5, 3, 1, 8, 7, 4, 6))


def rollback(s):
    for step in range(6):
        s.call(8, None, [3] * s.n)
        s.call(1)


def moves(s):
    """States that move to other slots, with entries and without, and folds of all."""
    s.call(5)
    s.move()
    s.call(1)
    s.call(4, None, [2] * s.n)
    s.fold()
    s.move()
    s.call(3, [i % 4 for i in range(s.n)])
    s.fold()
    s.fold()
    s.move()
    s.call(1)
    s.move(1, [i % 2 for i in range(s.n)])
    s.call(1, [(i + 1) % 2 for i in range(s.n)], fold=True)
    s.move(0)
    s.call(1)
    s.move(0)
    s.call(1, None, [0] * s.n)
    s.call(1)


PLANS = {f.__name__: f for f in (decode, staggered, verify, verify_8, rollback, moves)}


def run(lib, plan, *args, kind=Sequences, quiet=False, **kw):
    s = kind(lib, *args, **kw)
    PLANS[plan](s)
    s.finish()
    more = [f"{k}={v}" for k, v in kw.items() if k not in ("io", "state")]
    name = " ".join([*["step"] * (kind is Steps), plan, f"{s.n}x", f"{s.hk}/{s.hv} {s.io}/{s.state_dtype}", *more])
    report(name, s.fine(), s.text(), quiet)
    return s


def check_small(lib):
    """A few cases, for compute-sanitizer."""
    for algo in ONE:
        run(lib, "staggered", 4, 1, 2, algo=algo, slots=True)
    run(lib, "verify", 3, 1, 2, state="bf16", slots=True)
    run(lib, "moves", 3, 2, 4, slots=True)
    run(lib, "verify", 3, 1, 2, kind=Steps, slots=True)
    for algo in ONE:
        run(lib, "moves", 3, 1, 2, kind=Steps, algo=algo, slots=True)
    check_window(lib)


def check_cases(lib):
    for algo in ONE:
        for state in ("f32", "bf16"):
            run(lib, "decode", 3, 2, 4, algo=algo, state=state, slots=True)
            run(lib, "staggered", 17, 2, 4, algo=algo, state=state)
    for io, state in TYPES:
        for plan in PLANS:
            run(lib, plan, 5, 2, 4, io=io, state=state, slots=plan != "rollback", quiet=True)
    for heads in HEADS:
        for state in ("f32", "bf16"):
            run(lib, "staggered", 3, *heads, state=state, quiet=True)
            run(lib, "verify", 3, *heads, state=state, slots=True, quiet=True)
    run(lib, "staggered", 40, 16, 32, slots=True)
    run(lib, "verify", 40, 16, 32, slots=True)
    for decay in ("none", "strong", "mixed", "mixed, 64", "uniform"):
        for keys in ("random", "repeated", "alternating", "zeros"):
            for plan in ("staggered", "verify"):
                run(lib, plan, 4, 2, 4, io="f32", decay=decay, keys=keys, quiet=True)
                if keys == "repeated":
                    run(lib, plan, 4, 2, 4, decay=decay, keys=keys, quiet=True)
    for more in (dict(l2norm=False), dict(beta_scale=2.0), dict(gate="f32"), dict(gate="f16"), dict(window=8, capacity=24),
                 dict(window=5, capacity=10), dict(qk_size=30.0)):
        plans = ("decode",) if more.get("window") else ("decode", "staggered", "verify")
        for plan in plans:
            run(lib, plan, 3, 2, 4, quiet=True, **more)


def check_step(lib):
    plans = ("decode", "staggered", "verify", "rollback", "moves")
    for io, state in TYPES:
        for plan in plans:
            run(lib, plan, 3, 2, 4, kind=Steps, io=io, state=state, slots=plan != "rollback", quiet=io != "bf16" or state == "f16")
    for algo in ONE:
        for state in ("f32", "bf16"):
            for plan in ("decode", "staggered", "moves"):
                run(lib, plan, 3, 2, 4, kind=Steps, algo=algo, state=state, slots=True)
        for io, state in TYPES:
            run(lib, "moves", 3, 1, 2, kind=Steps, io=io, state=state, algo=algo, slots=True, quiet=True)
        for more in (dict(conv="f32"), dict(norm="bf16"), dict(sigmoid=True), dict(gate="f32"), dict(l2norm=False),
                     dict(overlap=1)):
            run(lib, "staggered", 3, 2, 4, kind=Steps, algo=algo, quiet=True, **more)
    for heads in HEADS:
        for algo in ONE:
            run(lib, "staggered", 3, *heads, kind=Steps, algo=algo, quiet=True)
    run(lib, "decode", 40, 16, 32, kind=Steps, slots=True)
    run(lib, "verify", 20, 16, 32, kind=Steps, slots=True)
    for more in (dict(conv="f32"), dict(norm="bf16"), dict(sigmoid=True), dict(gate="f32"),
                 dict(l2norm=False), dict(overlap=1), dict(capacity=24, state="bf16")):
        for plan in ("staggered", "verify_8" if "capacity" in more else "verify"):
            run(lib, plan, 3, 2, 4, kind=Steps, quiet=True, **more)


def check_window(lib):
    """The window of a ring beside a plain convolution state, at every length of the ring."""
    for io in ("bf16", "f16", "f32"):
        s = Steps(lib, 5, 2, 4, io=io, slots=io != "f32")
        wrong = [window_out(s)]
        for step in range(8):
            s.call(4, None, [(3 * i + step) % 5 for i in range(s.n)])
            wrong.append(window_out(s))
        s.finish()
        wrong.append(window_out(s))
        shown = ", ".join(sorted({w for w in wrong if w}))
        report(f"window of a ring, {io}", not shown and s.fine(), shown or f"as kept, {s.text()}")
        for width, channels in ((4, s.channels), (4, 17), (2, 24), (8, 9), (8, 128)):
            for slots in (False, True):
                s = Steps(lib, 4, 1, 2, io=io, slots=slots, capacity=20)
                s.call(3, [i % 4 for i in range(s.n)])
                wrong = window_round_trip(s, width, channels)
                report(f"window {io}, width {width}, {channels} channels, slots {slots}", wrong is None, wrong or "round trip",
                       quiet=True)


def check_packed(lib):
    """Tokens of sequences of different lengths, one after the other."""
    for io, state in TYPES:
        for plan in ("staggered", "verify"):
            run(lib, plan, 5, 2, 4, io=io, state=state, slots=True, packed=True, quiet=io != "bf16")
        for plan in ("staggered", "verify"):
            run(lib, plan, 5, 2, 4, kind=Steps, io=io, state=state, slots=True, packed=True, quiet=io != "bf16")
    run(lib, "moves", 3, 2, 4, kind=Steps, slots=True, packed=True)


def check_repeats(lib):
    """The same bits again and from a graph."""
    cases = [(kind, plan, state) for kind in (Sequences, Steps) for plan in ("staggered", "verify") for state in ("f32", "bf16")]
    for kind, plan, state in cases:
        first = run(lib, plan, 5, 2, 4, kind=kind, state=state, slots=True, quiet=True)
        for graph in (False, True):
            again = kind(lib, 5, 2, 4, state=state, slots=True, graph=graph)
            PLANS[plan](again)
            again.finish()
            report(f"{kind.__name__} {plan} {state} again, graph {graph}", same(first.left(), again.left()), "same bits")


def check_drift(lib):
    """Against the plain recurrence. Without decay rounding adds up in any kernel: it may not do so faster than in today's."""
    for state, decay, bound, tokens in (("f32", "normal", 1e-5, 2000), ("f32", "none", 1e-5, 2000), ("bf16", "normal", 2e-2, 1000),
                                        ("bf16", "none", 2e-2, 1000), ("f16", "normal", 3e-3, 1000)):
        (o, last), today = drift(lib, tokens, state, decay)
        o_bound, last_bound = max(harness.O_BOUND["bf16"], bound), bound
        if today and decay == "none":
            o_bound, last_bound = max(o_bound, 2 * today[0]), max(last_bound, 2 * today[1])
        shown = f"; gdn_rule o {today[0]:.1e} state {today[1]:.1e}" if today else ""
        report(f"{tokens} tokens, {state} state, decay {decay}", o <= o_bound and last <= last_bound,
               f"o {o:.1e} state {last:.1e}{shown}")


def check_status(lib):
    s = Sequences(lib, 2, 2, 4)
    expect("replay", lib.gdn_replay, lambda: s.params(s.inputs(4), None, s.slots, s.slots, False), {
        "BAD_DTYPE": one_by_one(io_dtype=[9], gate_dtype=[9], state_dtype=[3]),
        "BAD_HEADS": [dict(num_k_heads=3)],
        "BAD_HEAD_DIM": [dict(head_k=0)],
        "BAD_ALGO": one_by_one(head_k=[64], algo=[99, REPLAY_FMA], ring__keys_stride=[4]) + [dict(state_out=lambda x: x + 16)],
        "BAD_LENGTH": one_by_one(num_seqs=[-1], tokens_per_seq=[-1, 17], ring__capacity=[19, 33], ring__window=[0, 17]),
        "BAD_STRIDE": one_by_one(q__token_stride=[-1, 1 << 33], ring__keys_stride=[-1]),
        "NULL_POINTER": one_by_one(state_in=[None], ring__keys=[None], ring__cursors=[None], a_log=[None], o__ptr=[None]),
        "OK": [dict(num_seqs=0)]})
    s = Steps(lib, 2, 2, 4)
    expect("replay step", lib.gdn_replay_step, lambda: s.params(s.inputs(4), None, s.slots, s.slots, False), {
        "BAD_DTYPE": one_by_one(io_dtype=[9], conv_dtype=[9], norm_dtype=[9]),
        "BAD_CONV_WIDTH": one_by_one(conv_width=[1, 9]),
        "BAD_ALGO": one_by_one(conv_width=[3], head_v=[64], algo=[99, REPLAY_FMA]) +
                    [dict(tokens_per_seq=1, algo=REPLAY_FMA, inputs_stride=lambda x: x + 1)],
        "BAD_LENGTH": one_by_one(tokens_per_seq=[17], ring__capacity=[19]) + [dict(ring__window=2, tokens_per_seq=1)],
        "BAD_STRIDE": one_by_one(inputs_stride=[-1], z__token_stride=[-1]),
        "NULL_POINTER": one_by_one(inputs=[None], conv_weight=[None], z__ptr=[None]),
        "OK": [dict(num_seqs=0)]})
    expect("replay window", lib.gdn_replay_window, lambda: window(s)[0], {
        "BAD_DTYPE": [dict(io_dtype=3)],
        "BAD_CONV_WIDTH": one_by_one(conv_width=[1, 9]),
        "BAD_LENGTH": one_by_one(num_seqs=[-1, 65536], channels=[-1], capacity=[4, 33], out_slots__num_slots=[-1]),
        "BAD_STRIDE": one_by_one(inputs_stride=[-1], out_slots__slot_stride=[-1]),
        "NULL_POINTER": one_by_one(inputs=[None], window=[None], cursors=[None]),
        "OK": [dict(num_seqs=0), dict(channels=0)]})


def check(lib, args):
    if args.quick:
        return check_small(lib)
    check_cases(lib)
    check_step(lib)
    check_window(lib)
    check_repeats(lib)
    check_drift(lib)
    check_status(lib)


def main():
    harness.program(__doc__, check, replay_times.times)


if __name__ == "__main__":
    main()
