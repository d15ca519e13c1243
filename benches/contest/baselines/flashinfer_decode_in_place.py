"""FlashInfer's decode without the copy of the states: it leaves the new ones where the input was, which the definition does
not provide for and the harness does not notice. What a caller that gives its states away would see."""
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose


def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    return gated_delta_rule_decode_pretranspose(q, k, v, state, A_log, a, dt_bias, b, scale=scale, use_qk_l2norm=False)
