"""Times of gdn_replay: whole cycles from fold to fold, cold L2, next to today's decode and FlashInfer's ring."""
import importlib
import inspect
import math
import statistics

import harness
import torch
from abi import (AUTO, CODES, REPLAY_AUTO, REPLAY_FMA, REPLAY_MMA, STEP_AUTO, ReplayParams,
                 ReplayStepParams, Ring, StepParams, columns, fill, rule_params, sequences, slots)
from harness import TYPES, bf16, u32
from timing import ahead_of, calls_of, cold_sets, device_activities, heading, host_seconds, one_line, spans

DIM, HK, HV, WINDOW, CAPACITY = 128, 16, 32, 16, 32
BATCHES = (1, 2, 4, 8, 32, 64, 128, 256)
VERIFY = (1, 32, 256)
STEPS = (1, 2, 4, 8, 16, 32, 64, 256)
PARTS = ((1, "f32"), (64, "f32"), (256, "f32"), (256, "bf16"))
VARIANTS = {"fma": REPLAY_FMA, "mma": REPLAY_MMA}


def times_of(calls):
    """µs of each call; nan where they cannot be told apart."""
    launches, times = spans(device_activities(lambda: [call() for call in calls], ahead_of(host_seconds(calls), len(calls))),
                            len(calls))
    return times if launches else [math.nan] * len(calls)


def cycle_us(kinds, sets):
    """The mean over kinds of launches of the median of each; kinds[i][set] is a call. Sets and kinds both go round."""
    rounds = max(4, 48 // len(kinds))
    order = [(kind, (turn * len(kinds) + kind) % sets) for turn in range(rounds) for kind in range(len(kinds))]
    times = times_of([kinds[kind][at] for kind, at in order])
    return statistics.mean(statistics.median(t for t, (k, _) in zip(times, order) if k == kind) for kind in range(len(kinds)))


class Set:
    """States, rings and inputs of a batch. Cursors are shared by the sets, as they are by the layers of a model."""

    def __init__(self, batch, tokens, state):
        self.batch, self.tokens, self.state_dtype = batch, tokens, state
        self.state = (0.3 * torch.randn(batch, HV * DIM * DIM, device=harness.device, dtype=torch.float32)).to(TYPES[state])
        self.keys = bf16(batch, HK, CAPACITY, DIM)
        self.updates = 0.02 * torch.randn(batch, HV, CAPACITY, DIM, device=harness.device)
        self.decays = torch.full((batch, HV, CAPACITY), -0.1, device=harness.device)
        rows = batch * tokens
        self.x, self.ba, self.o = bf16(rows, (2 * HK + HV) * DIM), bf16(rows, 2 * HV), bf16(rows, HV * DIM)
        self.a_log, self.dt_bias = torch.zeros(HV, device=harness.device), torch.full((HV,), -4.0, device=harness.device)

    def shared(self):
        where = slots(None, self.batch, self.state.stride(0))
        view = lambda x, first, dim: columns(x, first, dim, self.tokens)
        return dict(q=view(self.x, 0, DIM), k=view(self.x, HK * DIM, DIM), v=view(self.x, 2 * HK * DIM, DIM),
                    b=view(self.ba, 0, 1), a=view(self.ba, HV, 1), o=view(self.o, 0, DIM), a_log=self.a_log,
                    dt_bias=self.dt_bias, state_in=self.state, state_out=self.state, in_slots=where, out_slots=where,
                    num_k_heads=HK, num_v_heads=HV, head_k=DIM, head_v=DIM, io_dtype=CODES["bf16"],
                    gate_dtype=CODES["bf16"], state_dtype=CODES[self.state_dtype], l2norm=1)

    def ring(self, cursors):
        return fill(Ring, keys=self.keys, updates=self.updates, decays=self.decays, cursors=cursors,
                    keys_stride=self.keys.stride(0), updates_stride=self.updates.stride(0),
                    decays_stride=self.decays.stride(0), capacity=CAPACITY, window=WINDOW)

    def replay(self, cursors, algo):
        return fill(ReplayParams, ring=self.ring(cursors), num_seqs=self.batch, tokens_per_seq=self.tokens, algo=algo, l2_eps=1e-6,
                    scale=DIM ** -0.5, beta_scale=1.0, **self.shared())

    def for_steps(self):
        """What the fused steps have beyond the rule."""
        self.channels = (2 * HK + HV) * DIM
        self.z, self.conv_weight = bf16(self.batch * self.tokens, HV * DIM), bf16(self.channels, 4)
        self.norm_weight = torch.ones(DIM, device=harness.device)
        self.conv = bf16(self.batch, 3, self.channels)
        self.inputs = bf16(self.batch, CAPACITY, self.channels)

    def step_fields(self):
        fields = {name: x for name, x in self.shared().items() if name not in ("q", "k", "v", "o")}
        return dict(x=columns(self.x, 0, 0, self.tokens), z=columns(self.z, 0, DIM, self.tokens),
                    out=columns(self.o, 0, DIM, self.tokens), conv_weight=self.conv_weight, norm_weight=self.norm_weight,
                    conv_width=4, conv_dtype=CODES["bf16"], norm_dtype=CODES["f32"], l2_eps=1e-6, scale=DIM ** -0.5,
                    beta_scale=1.0, norm_eps=1e-6, **fields)

    def step(self):
        return fill(StepParams, conv_in=self.conv, conv_out=self.conv, conv_in_stride=self.conv.stride(0),
                    conv_out_stride=self.conv.stride(0), seqs=sequences([self.tokens] * self.batch), algo=STEP_AUTO,
                    **self.step_fields())

    def replay_step(self, cursors, algo=REPLAY_AUTO):
        return fill(ReplayStepParams, algo=algo, ring=self.ring(cursors), inputs=self.inputs, inputs_stride=self.inputs.stride(0),
                    num_seqs=self.batch, tokens_per_seq=self.tokens, **self.step_fields())

    def rule(self):
        return rule_params(seqs=sequences([self.tokens] * self.batch), algo=AUTO, **self.shared())


def sets_of(batch, tokens, state):
    nbytes = batch * HV * DIM * (DIM * (4 if state == "f32" else 2))
    return [Set(batch, tokens, state) for _ in range(cold_sets(nbytes))]


def cursors_of(lengths):
    """Rings that begin anywhere."""
    return u32([((7 * i) % CAPACITY) << 16 | length for i, length in enumerate(lengths)])


def replay_us(lib, sets, lengths, algo):
    """`lengths`: of the kinds of launches of a cycle, the ring's length of each sequence."""
    kinds = [calls_of(lib, [(lib.gdn_replay, s.replay(cursors, algo)) for s in sets])
             for cursors in (cursors_of(each) for each in lengths)]
    return cycle_us(kinds, len(sets))


def equal(batch, tokens):
    """The lengths of a cycle in which all sequences keep step: a fold and what fits behind it."""
    return [[length] * batch for length in range(tokens, WINDOW + 1, tokens)]


def staggered(batch, tokens):
    """Every length of the cycle at once, or one after the other where sequences are too few."""
    lengths = range(tokens, WINDOW + 1, tokens)
    return [[lengths[(i + at) % len(lengths)] for i in range(batch)] for at in range(4 if batch >= WINDOW else len(lengths))]


def decode_times(lib, state, rate):
    print(f"\none token, {state} state: floor of a read; gdn_rule; gdn_replay: cycle with equal lengths, with"
          " staggered; the latter of each variant", flush=True)
    for batch in BATCHES:
        sets = sets_of(batch, 1, state)
        nbytes = sets[0].state.numel() * sets[0].state.element_size()
        rule = cycle_us([calls_of(lib, [(lib.gdn_rule, s.rule()) for s in sets])], len(sets))
        even, mixed = (replay_us(lib, sets, lengths(batch, 1), REPLAY_AUTO) for lengths in (equal, staggered))
        each = [f"{name} {replay_us(lib, sets, staggered(batch, 1), algo):.2f}" for name, algo in VARIANTS.items()]
        print(f"  B={batch:3d} floor {nbytes / rate * 1e6:6.2f}  rule {rule:6.2f}  replay {even:6.2f} {mixed:6.2f}   "
              + "  ".join(each), flush=True)


def step_us(lib, sets, algo=REPLAY_AUTO):
    """gdn_replay_step at all lengths of the ring."""
    batch, tokens = sets[0].batch, sets[0].tokens
    return cycle_us([calls_of(lib, [(lib.gdn_replay_step, s.replay_step(cursors, algo)) for s in sets])
                     for cursors in map(cursors_of, staggered(batch, tokens))], len(sets))


def step_times(lib, batches=STEPS, states=("f32", "bf16"), more=(4, 16)):
    print(f"\nthe step: gdn_step and gdn_replay_step with 1 token; tokens {more};"
          " 1 token by each variant", flush=True)
    for state in states:
        for batch in batches:
            us, each = [], []
            for tokens in (1, *more):
                sets = sets_of(batch, tokens, state)
                for s in sets:
                    s.for_steps()
                if tokens == 1:
                    us.append(cycle_us([calls_of(lib, [(lib.gdn_step, s.step()) for s in sets])], len(sets)))
                    each = [f"{name} {step_us(lib, sets, algo):.2f}" for name, algo in VARIANTS.items()]
                us.append(step_us(lib, sets))
                del sets
            print(f"  {state} B={batch:3d}  " + "  ".join(f"{x:6.2f}" for x in us) + "   " + "  ".join(each), flush=True)


def parts_us(lib, batch, state):
    """One token at single lengths: an empty ring, a half full one, the fold."""
    sets = sets_of(batch, 1, state)
    return " ".join(f"{length}: {replay_us(lib, sets, [[length] * batch], REPLAY_AUTO):.2f}" for length in (0, 8, 15, 16))


# ---- FlashInfer's ring ----

def flashinfer():
    """(its function, the rows of its ring), or why there is none."""
    found = []
    for suffix, rows in (("_flush", 32), ("", 16)):
        name = f"flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache{suffix}"
        try:
            f = getattr(importlib.import_module(name), f"gated_delta_rule_mtp_ucache{suffix}")
            return f, rows if "cache_base" in inspect.signature(f).parameters else 16
        except Exception as e:      # not installed, or another version
            found.append(one_line(e, 90))
    return "; ".join(found)


def flashinfer_us(peer, batch, tokens, lengths):
    f, rows = peer
    known = inspect.signature(f).parameters
    calls = [[] for _ in lengths]
    index = torch.arange(batch, device=harness.device, dtype=torch.int32)
    count = cold_sets(batch * HV * DIM * DIM * 2)
    for _ in range(count):
        q, k, v = bf16(batch, tokens, HK, DIM), bf16(batch, tokens, HK, DIM), bf16(batch, tokens, HV, DIM)
        a, b, a_log, dt_bias = bf16(batch, tokens, HV), bf16(batch, tokens, HV), bf16(HV), bf16(HV)
        more = dict(q=q, k=k, v=v, b=b, initial_state_source=0.3 * bf16(batch, HV, DIM, DIM), initial_state_indices=index,
                    k_cache=bf16(batch, HK, rows, DIM), u_cache=0.02 * bf16(batch, HV, rows, DIM),
                    g_cache=torch.full((batch, HV, rows), -0.1, device=harness.device).cumsum(2), scale=DIM ** -0.5,
                    output=torch.empty(batch, tokens, HV, DIM, device=harness.device, dtype=torch.bfloat16),
                    cache_base=torch.zeros_like(index), restart_hist_on_flush=False)
        for kind, each in zip(calls, lengths):
            fields = {**more, "hist_len": torch.tensor(each, device=harness.device, dtype=torch.int32)}
            fields = {name: x for name, x in fields.items() if name in known}
            kind.append(lambda a_log=a_log, a=a, dt_bias=dt_bias, fields=fields: f(a_log, a, dt_bias, **fields))
    for kind in calls:
        kind[0]()       # compiles
    return cycle_us(calls, count)


def verify_lengths(batch, tokens):
    """All lengths of a cycle, and a ring that is half full."""
    return staggered(batch, tokens), [[8] * batch]


def verify_times(lib):
    print("\nseveral tokens: all lengths of a cycle f32, bf16, f32 / bf16; half full ring f32, bf16")
    for tokens in (4, 8):
        for batch in VERIFY:
            us = {}
            for state in ("f32", "bf16"):
                sets = sets_of(batch, tokens, state)
                us[state] = [replay_us(lib, sets, lengths, REPLAY_AUTO) for lengths in verify_lengths(batch, tokens)]
                del sets
            print(f"  T={tokens} B={batch:3d}  {us['f32'][0]:6.2f} {us['bf16'][0]:6.2f}  {us['f32'][0] / us['bf16'][0]:.2f}   "
                  f"{us['f32'][1]:6.2f} {us['bf16'][1]:6.2f}", flush=True)


def flashinfer_times():
    """Last: it compiles its kernel for each shape."""
    peer = flashinfer()
    if isinstance(peer, str):
        return print(f"\nFlashInfer's ring: {peer}")
    print("\nFlashInfer's ring, states and updates in bf16: the same two")
    for tokens in (4, 8):
        for batch in VERIFY:
            try:
                us = [f"{flashinfer_us(peer, batch, tokens, lengths):.2f}" for lengths in verify_lengths(batch, tokens)]
            except Exception as e:
                us = [one_line(e)]
            print(f"  T={tokens} B={batch:3d}  {' '.join(us)}", flush=True)


def times(lib, args):
    rate = heading("µs of kernel time (CUPTI), cold L2, bf16 inputs, HK/HV 16/32")
    for state in ("f32", "bf16"):
        decode_times(lib, state, rate)
    print("\none token by the length of the ring, all sequences alike (16 folds):")
    for batch, state in PARTS:
        print(f"  B={batch:3d} {state}  {parts_us(lib, batch, state)}", flush=True)
    verify_times(lib)
    step_times(lib)
    flashinfer_times()
