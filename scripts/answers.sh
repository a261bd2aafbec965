#!/usr/bin/env bash
# Measures accuracy and speed of computing only the active neurons, and regenerates docs/reports/answers.md and docs/reports/answers.json.
# Takes about half an hour on two cores, including twelve minutes to train the demo with SiLU on the first run. Results
# are cached in target/answers and reused. Needs rustup, a C++ compiler and Python 3. If the emulated GPU does not run,
# its figures are skipped, and the answers state this.
#
# usage: scripts/answers.sh [--render]     --render writes the documents from cached results and measures nothing
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
if [ "${1:-}" != --render ]; then
  cargo build --release --locked -p powerinfer-cli --features emulator
  mkdir -p "$target/answers"
  cp "$target/release/powerinfer" "$target/answers/powerinfer"
  silu=$target/answers/silu/demo
  if [ ! -e "$silu/model.safetensors" ]; then
    scripts/train-demo.py --activation silu --steps 900 --out "$silu"
  fi
fi
python3 scripts/answers.py "$target/answers" docs/reports "$@"
