#!/usr/bin/env bash
# Compares the decode time per token that plans predict with the time that `run` measures, over model
# shapes, densities, policies and thread counts. Measures the machine, creates synthetic models with few
# layers (up to 3 GB at a time, removed afterwards) and prints a table in Markdown. Run nothing else on the
# machine: it would distort the figures. Takes ten minutes on two cores. Needs Python 3.9 or newer.
#
# usage: scripts/check-speed.sh [FOLDER]   work folder [default: a temporary folder]
# SHAPES="llama-1b:8 llama-7b:3", DENSITIES="5 10 25 50" (in percent; 100 is always included),
# THREADS="1 2" and QUANT=q8_0 select what is measured; POWERINFER=path uses an existing binary.
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
