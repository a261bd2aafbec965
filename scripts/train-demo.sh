#!/usr/bin/env bash
# Trains the demo checkpoint anew, on two cores in about twenty minutes, and writes it to datasets/demo.
#
# usage: scripts/train-demo.sh [--out DIR] [--tokens N] …      see --help
set -euo pipefail
cd "$(dirname "$0")/.."
# One thread a micro-batch is faster than threads inside each product, and memory that is kept
# is faster than memory that is asked for again at every step.
export RAYON_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=268435456
exec cargo run --release --locked -p powerinfer-demo-trainer -- train "$@"
