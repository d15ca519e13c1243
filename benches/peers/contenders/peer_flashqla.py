"""FlashQLA's chunked prefill, and its backward pass. It allocates its outputs."""
from functools import partial
from importlib.metadata import version

from contenders.peer import Peer, allocating_prefill, ready_backward


class FlashQLA(Peer):
    def __init__(self, lib_path=None, device="cuda"):
        from flash_qla import chunk_gated_delta_rule_fwd
        self.prefill, self.device = partial(chunk_gated_delta_rule_fwd, output_h=False), device
        self.version = version("flash-qla")

    def rule_case(self, work, variant, sets):
        # It gives g, A, o, h, the final state and one more.
        return allocating_prefill(work, sets, self.device, self.prefill, lambda found: (found[2], found[4]))

    def backward_case(self, work, variant, sets):
        from flash_qla import chunk_gated_delta_rule
        return ready_backward(work, sets, self.device, chunk_gated_delta_rule)
