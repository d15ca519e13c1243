"""The GDN workloads of FlashInfer's MLSys 2026 kernel contest, their formula and their tolerance.

Definitions gdn_decode_qk4_v8_d128_k_last and gdn_prefill_qk4_v8_d128_k_last: 4 query and key heads, 8 value heads of
128, bf16 inputs, an f32 state [sequence, head, V, K], raw gates, no L2 norm inside. The shapes stand in
benches/contest.json, which says where they come from.
"""
import json
import os

HK, HV = 4, 8
ATOL = RTOL = 1e-2

with open(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "contest.json")) as _f:
    _sets = json.load(_f)
DECODE = _sets["decode"]                              # batch of each workload
PREFILL = [tuple(lens) for lens in _sets["prefill"]]  # lengths of each workload's sequences


def reference(q, k, v, a, b, a_log, dt_bias, state, lens, scale):
    """The contest's formula, token by token, in the precision of its inputs.

    q and k [tokens, HK, K], v [tokens, HV, V], a and b [tokens, HV], state [sequence, HV, V, K]. It writes the update
    as "take the old value of the key out, put the blend of old and new in", which is the delta rule.
    Returns o [tokens, HV, V] and the new state. A Python loop over tokens: for small shapes and for tests.
    """
    ratio = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(ratio, 1), k.repeat_interleave(ratio, 1)
    decay = (-a_log.exp() * (a + dt_bias).exp().log1p()).exp()
    beta = b.sigmoid()
    o, state, start = v.new_empty(v.shape), state.clone(), 0
    for n, length in enumerate(lens):
        s = state[n]
        for t in range(start, start + length):
            s = decay[t, :, None, None] * s
            old = (s @ k[t, :, :, None]).squeeze(-1)
            new = beta[t, :, None] * v[t] + (1 - beta[t, :, None]) * old
            s = s + (new - old)[:, :, None] * k[t, :, None, :]
            o[t] = scale * (s @ q[t, :, :, None]).squeeze(-1)
        state[n] = s
        start += length
    return o, state


def passes(x, ref):
    """The contest's test of one tensor: an element is wrong when both its absolute error is over ATOL and its relative
    error is over RTOL; none may be. An o of zeros passes where |o| is small (it is about 0.004 for normalised q and k),
    so it stands beside the relative RMS error and never alone."""
    error = (x.double() - ref).abs()
    return bool(((error <= ATOL) | (error <= RTOL * (ref.abs() + 1e-8))).all())
