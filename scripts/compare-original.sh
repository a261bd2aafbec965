#!/usr/bin/env bash
# Exports models to the original PowerInfer and compares the logits of its engine (CPU build) with ours. Also checks that the
# original's reader opens the exported indices. Fails if a logit differs by more than 0.3% of the largest logit, or if the most
# probable token differs at any position.
# Needs git, a C++ compiler and Python 3.9 or newer. The first run compiles the engine in `.original`, which takes two minutes.
#
# usage: scripts/compare-original.sh [MODEL...]
#   MODEL  ReLU models in Hugging Face layout [default: small ones of tests/golden/models]
# ORIGINAL=folder names a checkout of the engine, POWERINFER=path an existing binary.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
golden=$root/tests/golden/models
models=("$@")
[ $# -gt 0 ] || models=("$golden"/{llama-relu-gqa,mistral-swa-relu,opt-preln,opt-fp16,falcon-new-relu})
for model in "${models[@]}"; do
  [ -e "$model" ] || { echo "error: \`$model\` does not exist" >&2; exit 1; }
done
cd "$root"
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked -p powerinfer-cli
  POWERINFER=${CARGO_TARGET_DIR:-target}/release/powerinfer
fi
POWERINFER=$(realpath "$POWERINFER")
original=${ORIGINAL:-.original}
revision=d3ebd7c5666348cf43c22f0d62dfbc9a763cffb8
if [ ! -e "$original/llama.cpp" ]; then
  git clone --quiet https://github.com/SJTU-IPADS/PowerInfer "$original"
  git -C "$original" checkout --quiet "$revision"
fi
original=$(realpath "$original")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/logits.cpp" << 'END'
// Fails if the reader cannot open an index; writes the logits of each token of a sequence.
#include "ggml.h"
#include "llama.h"
#include <cstdio>
#include <cstdlib>

int main(int count, char ** arguments) {
    gguf_init_params only_head = {true, nullptr};
    if (!gguf_init_from_file(arguments[2], only_head)) return 1;
    llama_backend_init(false);
    llama_model * model = llama_load_model_from_file(arguments[1], llama_model_default_params());
    if (!model) return 2;
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = 128;
    parameters.n_threads = parameters.n_threads_batch = 1;
    llama_context * context = llama_new_context_with_model(model, parameters);
    FILE * out = fopen(arguments[3], "wb");
    for (int index = 4; index < count; index++) {
        llama_token token = atoi(arguments[index]);
        if (llama_decode(context, llama_batch_get_one(&token, 1, index - 4, 0))) return 3;
        fwrite(llama_get_logits(context), sizeof(float), llama_n_vocab(model), out);
    }
    return fclose(out);
}
END
if [ ! -e "$original/llama.o" ]; then
  echo "compiling the engine" >&2
  for file in ggml ggml-alloc ggml-backend ggml-quants; do
    (cd "$original" && cc -std=gnu11 -O2 -march=native -D_GNU_SOURCE -pthread -w -c "$file.c" -o "$file.o")
  done
  (cd "$original" && c++ -std=c++11 -O2 -march=native -D_GNU_SOURCE -pthread -w -c llama.cpp -o llama.o)
fi
c++ -std=c++11 -O2 -w -I"$original" "$work/logits.cpp" "$original"/{ggml,ggml-alloc,ggml-backend,ggml-quants,llama}.o -lpthread -o "$work/logits"
cd "$work"
for _ in $(seq 300); do echo "The quick brown fox jumps over the lazy dog and returns home."; done > text.txt
ids=(5 17 42 9 60 33 7 81 12 3 55 20)
for model in "${models[@]}"; do
  name=$(basename "$model")
  "$POWERINFER" -q prepare "$(cd "$root" && realpath "$model")" --data text.txt --tokens 2000 --policy exact --certify none --quant f16 \
    --vram 74M --hardware rtx4090 --out "$name" > log 2>&1 || { cat log >&2; exit 1; }
  "$POWERINFER" -q export "$name/bundle" --to powerinfer --quant f16 "$name.gguf" > /dev/null
  ./logits "$name.gguf" "$name.gguf.generated.gpuidx" theirs "${ids[@]}" > log 2>&1 || { tail -3 log >&2; exit 1; }
  "$POWERINFER" -q logits "$name/bundle" --ids "$(IFS=,; echo "${ids[*]}")" --out ours --device cpu > /dev/null
  python3 -B "$root/scripts/compare_original.py" "$name" ours theirs
done
