#!/usr/bin/env bash
# Compares the perplexity of powerinfer and llama.cpp on the same file, token ids and windows. Fails if they
# differ by more than 0.5% (0.05% with both in float32), or if the token ids differ. Needs rustup, a C++
# compiler and Python 3.9 or newer. The first run compiles llama.cpp into `.venv`, in ten minutes on two cores.
#
# usage: scripts/compare-perplexity.sh [MODEL] [TEXT]
#   MODEL  a GGUF file, or a folder in Hugging Face layout that `powerinfer export` writes as GGUF.
#          A model in F16 or F32 is also quantised to Q8_0 and Q4_0 by llama.cpp and compared in these formats
#          [default: tests/golden/gguf/llama-rope3.f16.gguf]
#   TEXT   [default: README.md]
# TOKENS=4096 WINDOW=256 STRIDE=128 set the number of tokens and the windows; POWERINFER=path
# uses an existing binary.
set -euo pipefail
for path in "$@"; do
  [ -e "$path" ] || { echo "error: \`$path\` does not exist" >&2; exit 1; }
done
root=$(cd "$(dirname "$0")/.." && pwd)
model=$(realpath "${1:-$root/tests/golden/gguf/llama-rope3.f16.gguf}")
text=$(realpath "${2:-$root/README.md}")
cd "$root"
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked -p powerinfer-cli
  POWERINFER=${CARGO_TARGET_DIR:-target}/release/powerinfer
fi
[ -x .venv/bin/python ] || python3 -m venv .venv
# The package has only sources; only the library of llama.cpp is built.
CMAKE_ARGS="-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_COMMON=OFF" \
  .venv/bin/pip install --quiet --disable-pip-version-check llama-cpp-python==0.3.36 gguf==0.19.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -B scripts/compare_perplexity.py --powerinfer "$POWERINFER" --work "$work" \
  --tokens "${TOKENS:-4096}" --window "${WINDOW:-256}" --stride "${STRIDE:-128}" "$model" "$text"
