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
# SHAPES="llama-1b llama-7b:16 llama-70b:4" (":N" limits a shape to N layers), QUANTS="f16 q8_0 q4_0",
# THREADS="1 2" and REPEATS=3 select what is measured. PROMPT_SHAPES=llama-1b lists the shapes with a prefill of
# 512 tokens; SPARSE="" skips the sparse policies. LLAMA_CPP_BIN=folder uses an existing llama-bench and
# llama-quantize, POWERINFER=path an existing binary.
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

# The gguf package converts the models for llama.cpp.
[ -x "$folder/venv/bin/python" ] || python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check gguf==0.19.0

# llama.cpp is built from the source package of llama-cpp-python, its Python binding.
export LLAMA_CPP_VERSION=0.3.36
if [ -z "${LLAMA_CPP_BIN:-}" ]; then
  LLAMA_CPP_BIN=$folder/llama.cpp/bin
  if [ ! -x "$LLAMA_CPP_BIN/llama-bench" ] || [ ! -x "$LLAMA_CPP_BIN/llama-quantize" ]; then
    "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-binary llama-cpp-python --no-deps \
      --dest "$folder" "llama-cpp-python==$LLAMA_CPP_VERSION"
    tar -xzf "$folder/llama_cpp_python-$LLAMA_CPP_VERSION.tar.gz" -C "$folder"
    cmake -S "$folder/llama_cpp_python-$LLAMA_CPP_VERSION/vendor/llama.cpp" -B "$folder/llama.cpp" \
      -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF \
      -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TOOLS=ON
    cmake --build "$folder/llama.cpp" --config Release --parallel "$(nproc)" \
      --target llama-bench llama-quantize
  fi
fi
LLAMA_CPP_BIN=$(realpath "$LLAMA_CPP_BIN")
export POWERINFER LLAMA_CPP_BIN
"$folder/venv/bin/python" -B "$root/scripts/bench_cpu.py" "$folder" "$report"
