#!/usr/bin/env bash
# Compares methods of making predictors and thresholds, and rewrites the tables of docs/reports/predictors.md. The models are the demo, a
# layer with the shape of a 7B model, the demo with SiLU, and the checkpoints given. Takes about 20 minutes on two cores, and 12 more to
# train the demo with SiLU if it has not been trained. Results are cached in target/methods. Seconds are comparable only if the machine
# is idle. Needs rustup and Python 3.
#
# usage: scripts/compare-methods.sh [CHECKPOINT …]   small Llama checkpoints with SiLU, on which scores are compared
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked -p powerinfer-cli
  POWERINFER=$target/release/powerinfer
fi
silu=${SILU:-$target/answers/silu/demo} # a folder named `demo` uses the text and tasks of the demo
if [ ! -e "$silu/model.safetensors" ]; then
  scripts/train-demo.py --activation silu --steps 900 --out "$silu"
fi
venv=$target/methods-venv
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet numpy
fi
"$venv/bin/python" scripts/compare_methods.py "$POWERINFER" "$target/methods" docs/reports/predictors.md "$silu" "$@"
