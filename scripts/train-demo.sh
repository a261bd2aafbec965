#!/usr/bin/env bash
# Trains the demo checkpoint, in about twenty minutes on two cores, and writes it to datasets/demo.
#
# usage: scripts/train-demo.sh [--out DIR] [--tokens N] …      see --help
set -euo pipefail
cd "$(dirname "$0")/.."
# One thread per micro-batch is faster than threads within each GEMM, and keeping freed memory is faster
# than allocating it again at every step.
export RAYON_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=268435456
exec cargo run --release --locked -p powerinfer-demo-trainer -- train "$@"
