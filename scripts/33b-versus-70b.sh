#!/usr/bin/env bash
# Writes docs/33b-versus-70b.md and its plots anew: how the speed of a 33B- and a 70B-class model
# depends on sparsity, on VRAM and on the line between hot and cold, as `powerinfer simulate` predicts
# it. The same program writes the same bytes. Needs rustup, a C compiler and Python 3;
# POWERINFER=path uses a binary that is there already.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked -p powerinfer-cli
  POWERINFER=${CARGO_TARGET_DIR:-target}/release/powerinfer
fi
python3 scripts/33b_versus_70b.py "$POWERINFER" docs
