"""Who is timed. Each contender has a module here, imported in its own process alone."""
import importlib

from workloads import FUSED_TOKENS, QUICK

RULE = ["decode", "prefill", "contest-decode", "contest-prefill", "hard"]
PREFILLS = ["prefill", "contest-prefill", "hard"]
ALGOS = ["auto", "recurrent", "recurrent_128", "decode", "chunked_sm80", "chunked_sm90"]    # gdn_algo of cuda/gdn.h

# The layer's step taken apart: launches that wait for each other; no cluster of blocks, and so nothing that one block sends
# another; a launch each for convolution, rule and norm, and cuBLAS.
APART = ["no_overlap", "no_clusters", "unfused"]

# torch.compile's own choice of products and of their shapes by measurement, in TF32.
TUNED = "max-autotune"
# fla's layer takes the recurrent form up to so many tokens, its chunk form from there on.
RECURRENT_TOKENS = 64
# name: module, class, {suite: variants}. Where `--algo` has a say the variants are those it may name, and APART.
CONTENDERS = {
    "candle-gdn": ("candle_gdn", "CandleGdn", {**{s: ALGOS for s in RULE}, "layer": [*ALGOS, *APART],
                                                "backward": ["auto", "recurrent", "chunked_sm80", "chunked_sm90"]}),
    "flashinfer": ("peer_flashinfer", "FlashInfer", {"decode": [""], "contest-decode": [""],
                                                     **{s: ["cp", "nocp"] for s in PREFILLS}}),
    "flashqla": ("peer_flashqla", "FlashQLA", {s: [""] for s in [*PREFILLS, "backward"]}),
    "fla": ("peer_fla", "Fla", {**{s: [""] for s in ("decode", "contest-decode", "backward")},
                                 **{s: ["chunk", "recurrent"] for s in [*PREFILLS, "layer"]}}),
    "torch": ("projections", "Torch", {"decode": ["", "tf32"], "prefill": ["", "tf32"], "backward": ["", "tf32"],
                                       "layer": ["one", "six"], "projections": ["one", "two", "six"]}),
    "torch-compile": ("tensor_ops", "Compiled", {"decode": ["", TUNED], "prefill": ["", TUNED], "layer": ["one", "six", f"one {TUNED}"]}),
}
# What is slow, or slow to compile, has a few shapes of a suite: the rule without kernels of its own those of `--quick`.
CHAIN = {"B=1", "T=16", "T=128", "T=512", "T=2048", "T=8192"}
BASELINES = {"torch": {s: QUICK[s] for s in ("decode", "prefill", "backward")},
             "torch-compile": {**{s: QUICK[s] for s in ("decode", "prefill")}, "layer": CHAIN}}
PEERS = ["flashinfer", "flashqla", "fla"]

# Suites whose kernels a peer compiles at first use and keeps on disk, so that compiling ahead in other processes
# helps. flashinfer's prefill kernels are not among them: it keeps what cute.compile returns in memory only, and the
# CuTe DSL itself stores nothing that was compiled explicitly. They do not depend on the heads: a process compiles once.
ON_DISK = {
    "flashinfer": ["decode", "contest-decode"],     # exported objects under ~/.cache/flashinfer
    "flashqla": [*PREFILLS, "backward"],                           # tilelang's ~/.tilelang/cache
    "fla": [*RULE, "layer", "backward"],                        # Triton's ~/.triton/cache
}
# Tuning results are measured, so they must not be those of a compile-ahead run with others on the GPU.
COMPILE_AHEAD_ENV = {"fla": {"FLA_CACHE_RESULTS": "0"}}


def variants(name, suite, algos=("auto",)):
    """The variants of a contender in a suite; none where it has no part in it."""
    own = CONTENDERS[name][2].get(suite, [])
    return [v for v in own if v in algos or v not in ALGOS] if name == "candle-gdn" else own


def takes(name, variant, work):
    """Whether a contender that is in the work's suite is timed on it."""
    if variant in APART:        # where there is a step, and what it is to be without
        has = {"no_overlap": work.decode, "no_clusters": len(work.lens) == 1, "unfused": True}
        return work.lens[0] <= FUSED_TOKENS and has[variant]
    if variant == "recurrent" and name == "fla":
        return max(work.lens) <= RECURRENT_TOKENS
    if variant == "chunk":
        return not work.decode
    return work.name in BASELINES.get(name, {}).get(work.suite, [work.name])


def load(name):
    """The contender's class. Raises ImportError and what else the package raises."""
    module, cls, _ = CONTENDERS[name]
    return getattr(importlib.import_module(f"contenders.{module}"), cls)
