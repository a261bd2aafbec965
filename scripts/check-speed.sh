#!/usr/bin/env bash
# Holds the time that plans predict for a decoded token against the time that `run` takes, over shapes
# of models, shares of active neurons, policies and numbers of threads. Measures the machine, makes
# synthetic models with few layers (up to 3 GB at a time, removed when done), and prints a table in
# Markdown. Leave the machine alone meanwhile: whatever else runs is in the figures. Ten minutes on two
# cores. Needs Python 3.9 or newer.
#
# usage: scripts/check-speed.sh [FOLDER]   where to work [default: a temporary folder]
# SHAPES="llama-1b:8 llama-7b:3", DENSITIES="5 10 25 50" (in percent; 100 is always there),
# THREADS="1 2" and QUANT=q8_0 change what is tried; POWERINFER=path uses a binary that is there already.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${POWERINFER:-}" ]; then
  (cd "$root" && cargo build --release --locked -p powerinfer-cli)
  POWERINFER=${CARGO_TARGET_DIR:-$root/target}/release/powerinfer
fi
POWERINFER=$(realpath "$POWERINFER")
export POWERINFER
folder=${1:-}
if [ -z "$folder" ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"
python3 "$root/scripts/check_speed.py" "$folder"
