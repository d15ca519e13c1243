#!/usr/bin/env bash
# How fast, how close to the limit, how far ahead of FlashInfer, FlashQLA and fla: what `cargo bench --bench gpu` and
# bench.py measure, about an hour. Needs Rust, the CUDA toolkit, and python3 with torch; a peer that is not installed is a gap.
# Piece by piece: each suite that bench.py is called with writes a file of its own.
# Results: benches/results/<device>/table.md and the plots beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo bench --features cupti --bench gpu -- decode prefill conv norm layer --algo all --heads 16/32
cargo bench --features cupti --bench gpu -- model --kernels --models demo,qwen3.5-4b,qwen3.5-35b-a3b,qwen3.5-35b-a3b-fp8 \
  --batch 1,8,32,64 --tokens 512,8192 --file gpu-model.json
python3 benches/peers/bench.py --warm-up-compile
python3 benches/report.py
