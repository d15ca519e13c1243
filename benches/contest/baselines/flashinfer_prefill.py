"""FlashInfer's prefill with its default, "auto", for context parallelism. It takes ready gates: one small kernel makes them."""
import torch
import triton
import triton.language as tl
from flashinfer.gdn_prefill import chunk_gated_delta_rule

BLOCK = 1024
CONTEXT_PARALLEL = "auto"


@triton.jit
def gates_kernel(a, b, A_log, dt_bias, decay, beta, total, heads: tl.constexpr, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    there = i < total
    x = tl.load(a + i, there).to(tl.float32) + tl.load(dt_bias + i % heads)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    tl.store(decay + i, tl.exp(-tl.exp(tl.load(A_log + i % heads)) * softplus), there)
    tl.store(beta + i, tl.sigmoid(tl.load(b + i, there).to(tl.float32)), there)


def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale, output, new_state):
    decay, beta = torch.empty((2, *a.shape), dtype=torch.float32, device=a.device)
    gates_kernel[(triton.cdiv(a.numel(), BLOCK),)](a, b, A_log, dt_bias, decay, beta, a.numel(), a.shape[1], BLOCK)
    chunk_gated_delta_rule(q, k, v, decay, beta, scale, state, True, cu_seqlens, output=output, output_state=new_state,
                           use_cp=CONTEXT_PARALLEL)
