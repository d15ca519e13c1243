#!/usr/bin/env bash
# Traces of the kernels on the first GPU, into benches/results/<device>/profile, and from them benches/profile.md. Needs
# Rust and the CUDA toolkit, or in PROFILE a built examples/profile; python3.
set -euo pipefail
cd "$(dirname "$0")/../.."
profile=${PROFILE:-cargo run --quiet --release --features profile --example profile --}
device=$(nvidia-smi --query-gpu=name --format=csv,noheader --id=0)
commit=${COMMIT:-$(git rev-parse --short HEAD)}
out=benches/results/$(tr 'A-Z ' 'a-z-' <<<"$device")/profile
mkdir -p "$out"
: >"$out/about.tsv"

# trace NAME ARGUMENTS: four multiprocessors are enough to read, and small enough to keep.
trace() {
  local name=$1 call
  shift
  call=$($profile "$@" --trace-sms 4 --trace "$out/$name.json" --json "$out/$name-table.json" | tee >(cat >&2) | sed -n 1p)
  gzip -9nf "$out/$name.json"
  printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$device" "$commit" "profile $*" "$call" >>"$out/about.tsv"
}
trace prefill-1x2048 --op prefill --tokens 2048
trace prefill-1x8192 --op prefill --tokens 8192
trace decode-1 --op decode
trace decode-64 --op decode --batch 64
trace step-1 --op step
trace step-64 --op step --batch 64
python3 benches/profile/page.py "$out"
