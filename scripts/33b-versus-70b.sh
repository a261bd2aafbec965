#!/usr/bin/env bash
# Regenerates docs/reports/33b-versus-70b.md and its plots: the speed of a 33B- and a 70B-class model by sparsity,
# VRAM and share of hot neurons, as predicted by `powerinfer simulate`. The output is deterministic.
# Needs rustup, a C compiler and Python 3; POWERINFER=path uses an existing binary.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked -p powerinfer-cli
  POWERINFER=${CARGO_TARGET_DIR:-target}/release/powerinfer
fi
python3 scripts/33b_versus_70b.py "$POWERINFER" docs/reports
