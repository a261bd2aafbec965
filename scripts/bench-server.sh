#!/usr/bin/env bash
# Measures `powerinfer serve` under 1, 4, 16 and 64 clients: tokens/s of all, time to the first token and between tokens, on
# the demo and on a synthetic 1B with 90% zeros, with llama.cpp's llama-server on the same shape. Then what the server costs
# compared with `powerinfer run`, and ten minutes of 64 clients whose every answer is checked. Writes a report in Markdown.
# Run nothing else on the machine. Takes an hour on two cores and 8 GB of disk; the first build of llama.cpp ten minutes more.
#
# usage: scripts/bench-server.sh [FOLDER] [REPORT]
#   FOLDER  work folder [default: a temporary folder]
#   REPORT  [default: docs/reports/server.md]
# SHAPES="demo llama-1b", CLIENTS="1 4 16 64" and SOAK=600 (seconds) select what is measured; LLAMA_CPP_BIN=folder uses an
# existing llama-server, POWERINFER=path an existing binary.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
report=$(realpath -m "${2:-$root/docs/reports/server.md}")
if [ -z "${POWERINFER:-}" ]; then
  (cd "$root" && cargo build --release --locked -p powerinfer-cli)
  POWERINFER=${CARGO_TARGET_DIR:-$root/target}/release/powerinfer
fi
POWERINFER=$(realpath "$POWERINFER")
folder=${1:-}
temporary=
[ -n "$folder" ] || folder=$(mktemp -d) temporary=$folder
mkdir -p "$folder"
folder=$(realpath "$folder")
. "$root/scripts/llama-cpp.sh"
llama_cpp "$folder" llama-server
cd "$folder"
clients=${CLIENTS:-1 4 16 64}
server=
stop() { [ -z "$server" ] || { kill "$server" && wait "$server" || true; server=; }; }
trap 'stop; [ -z "$temporary" ] || rm -rf "$temporary"' EXIT

start() { # command of the server
  "$@" > server.out 2> server.err &
  server=$!
  port=
  for _ in $(seq 600); do
    port=$(grep -ho 'listening on http://[0-9.]*:[0-9]*' server.out server.err | grep -o '[0-9]*$' | head -1 || true)
    [ -z "$port" ] || return 0
    sleep 0.1
  done
  cat server.err >&2
  exit 1
}

bench() { python3 -B "$root/scripts/bench_server.py" "$@"; }

{
  printf '# Server under load\n\nMade by `scripts/bench-server.sh` on %s, %s cores, which the clients share. Answers have 128 tokens. Prompts differ, so that no prefix is reused.\n' \
    "$(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | sed 's/^ *//')" "$(nproc)"
  for shape in ${SHAPES:-demo llama-1b}; do
    if [ "$shape" = demo ]; then
      [ -d demo.powerinfer ] || "$POWERINFER" prepare demo --quiet >&2
      bundle=demo
      vocabulary=1000
      repeats=40
      title='demo'
      low=128
      high=384
    else
      bundle=$shape-bundle
      if [ ! -d "$bundle" ]; then
        "$POWERINFER" synth --like "$shape" --sparsity 0.9 --predictor-rank 256 --out "$shape" --quiet >&2
        # The profile only sorts neurons within layers, so few tokens are enough.
        cp "$root/README.md" text.txt
        "$POWERINFER" profile "$shape" --data text.txt --tokens 96 --out "$shape-profile" --quiet >&2
        "$POWERINFER" place "$shape" --profile "$shape-profile" --predictors "$shape/predictors" --vram 0 \
          --context 1024 --quant q4_0 --policy exact --certify none --hardware cpu-only --out "$bundle" --quiet >&2
      fi
      vocabulary=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["vocab_size"] - 1)' "$shape/config.json")
      repeats=8
      title="$shape, q4_0, random weights with 90% zeros"
      low=128
      high=512
    fi
    printf '\n## %s\n\nPrompts of %s to %s tokens.\n' "$title" "$low" "$high"
    for policy in exact predicted; do
      printf '\n### `%s`\n\n' "$policy"
      start "$POWERINFER" serve "$bundle" --port 0 --parallel 64 --policy "$policy"
      bench load "$port" --vocabulary "$vocabulary" --prompt "$low" "$high" --clients $clients
      stop
    done
    printf '\n### Compared with `powerinfer run`\n\n`exact`, medians of one request at a time, in turn with `run`.\n\n'
    start "$POWERINFER" serve "$bundle" --port 0 --parallel 1 --policy exact
    bench overhead "$port" --requests "$repeats" --run "$POWERINFER run $bundle --policy exact"
    stop
    [ "$shape" = demo ] && continue
    if [ ! -e "$shape.gguf" ]; then
      "$POWERINFER" export "$shape" --to gguf "$shape.gguf" --quant q4_0 --any-activation --quiet >&2
    fi
    printf '\n### llama-server (llama-cpp-python %s) on the same shape\n\nIts `llama` computes SiLU, so all neurons.\n\n' "$LLAMA_CPP_VERSION"
    start "$LLAMA_CPP_BIN/llama-server" -m "$shape.gguf" --port 18080 --parallel 64 --ctx-size 65536 --threads "$(nproc)"
    bench load "$port" --vocabulary "$vocabulary" --prompt "$low" "$high" --clients $clients
    stop
  done
  printf '\n## Ten minutes\n\nThe demo, with prompts of 8 to 200 tokens and answers of 1 to 128. '
  start "$POWERINFER" serve demo --port 0 --parallel 16
  bench soak "$port" --pid "$server" --clients 64 --prompt 8 200 --seconds "${SOAK:-600}"
  stop
} > >(tee "$report.part")
mv "$report.part" "$report"
