#!/usr/bin/env bash
# Answers the questions that everyone asks about computing only the neurons that fire, and writes docs/answers.md and
# docs/answers.json anew: about half an hour on two cores, twelve minutes of it for training the demo with SiLU where that
# is not there yet. What was measured already is kept in target/answers and gone on with. Needs rustup, a C++ compiler
# and Python 3; without a C++ compiler the emulated GPU is left out, and the answers say so.
#
# usage: scripts/answers.sh [--render]     --render writes the documents of what is there, and measures nothing
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
if [ "${1:-}" != --render ]; then
  cargo build --release --locked -p powerinfer-cli --features emulator
  mkdir -p "$target/answers"
  cp "$target/release/powerinfer" "$target/answers/powerinfer"
  silu=$target/answers/silu/demo
  if [ ! -e "$silu/model.safetensors" ]; then
    scripts/train-demo.sh --activation silu --steps 900 --out "$silu"
  fi
fi
python3 scripts/answers.py "$target/answers" docs "$@"
