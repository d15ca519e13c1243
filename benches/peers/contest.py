"""The GDN workloads of FlashInfer's MLSys 2026 kernel contest, and their tolerance.

Definitions gdn_decode_qk4_v8_d128_k_last and gdn_prefill_qk4_v8_d128_k_last: 4 query and key heads, 8 value heads of
128, bf16 inputs, an f32 state [sequence, head, V, K], raw gates, no L2 norm inside. The shapes stand in
benches/contest/workloads.json, which says where they come from.
"""
import json
import os

HK, HV = 4, 8
ATOL = RTOL = 1e-2

with open(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "contest", "workloads.json")) as _f:
    _sets = json.load(_f)
DECODE = _sets["decode"]                              # batch of each workload
PREFILL = [tuple(lens) for lens in _sets["prefill"]]  # lengths of each workload's sequences


def passes(x, ref):
    """The contest's test of one tensor: an element is wrong when both its absolute error is over ATOL and its relative
    error is over RTOL; none may be. An o of zeros passes where |o| is small (it is about 0.004 for normalised q and k),
    so it stands beside the relative RMS error and never alone."""
    error = (x.double() - ref).abs()
    return bool(((error <= ATOL) | (error <= RTOL * (ref.abs() + 1e-8))).all())
