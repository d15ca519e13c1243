"""FlashInfer's decode. It updates states in place, so that the old ones are copied first."""
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose


def run(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state):
    new_state.copy_(state)
    gated_delta_rule_decode_pretranspose(q, k, v, new_state, A_log, a, dt_bias, b, scale=scale, output=output,
                                         use_qk_l2norm=False)
