#!/usr/bin/env bash
# Compares powerinfer with llama.cpp on this machine's CPU: synthetic models of real shapes, the same weights
# in the same format, the same thread counts, alternating runs, and the read bandwidth probed before and after
# each run. Also measures the speedup of sparse policies over `dense`. Writes a report in Markdown, and all
# figures in JSON to FOLDER/figures.json; an interrupted run of the same program resumes from it. Run nothing
# else on the machine. Takes more than an hour on two cores, not counting the first build of llama.cpp, and
# 25 GB of disk and 20 GB of memory. Needs rustup, a C++ compiler, CMake and Python 3.9 or newer with pip.
#
# usage: scripts/bench-cpu.sh [FOLDER] [REPORT]
#   FOLDER  work folder; llama.cpp is built there once [default: a temporary folder]
#   REPORT  [default: docs/reports/cpu-results.md]
# SHAPES="llama-1b llama-7b:16 llama-70b:4" (":N" limits a shape to N layers, "/q4_0,q8_0" to these formats),
# QUANTS="f16 q8_0 q4_0", THREADS="1 2" and REPEATS=3 select what is measured. PROMPT_SHAPES=llama-1b lists the shapes
# with a prefill of 512 tokens; SPARSE="" skips the sparse policies. Mixtures of experts, such as qwen3-30b-a3b:8, are
# measured without predictors. HUMAN_EVAL=HumanEval.jsonl.gz, PLAIN_TEXT=wikitext-2-test.txt and TOKENIZER=folder (of a
# model with the vocabulary of the shapes) add speculative decoding of COMPLETIONS=4 texts of each. LLAMA_CPP_BIN=folder
# uses an existing llama-bench, POWERINFER=path an existing binary.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
report=$(realpath -m "${2:-$root/docs/reports/cpu-results.md}")
if [ -z "${POWERINFER:-}" ]; then
  (cd "$root" && cargo build --release --locked -p powerinfer-cli)
  POWERINFER=${CARGO_TARGET_DIR:-$root/target}/release/powerinfer
fi
POWERINFER=$(realpath "$POWERINFER")
folder=${1:-}
if [ -z "$folder" ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"
folder=$(realpath "$folder")

. "$root/scripts/llama-cpp.sh"
llama_cpp "$folder" llama-bench
export POWERINFER
"$folder/venv/bin/python" -B "$root/scripts/bench_cpu.py" "$folder" "$report"
