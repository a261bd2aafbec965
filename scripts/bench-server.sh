#!/usr/bin/env bash
# Measures `powerinfer serve` under 1, 4, 16 and 64 clients: tokens/s of all, time to the first token and between tokens, on
# the demo and on a synthetic 1B with 90 % zeros. Where
# LLAMA_SERVER names a llama-server and LLAMA_MODEL a GGUF file of the same shape, it is measured in the same run.
# Writes a report in Markdown. Run nothing else on the machine. Takes 15 minutes on two cores and 4 GB of disk.
#
# usage: scripts/bench-server.sh [FOLDER] [REPORT]
#   FOLDER  work folder [default: a temporary folder]
#   REPORT  [default: docs/reports/server.md]
# SHAPES="demo llama-1b" and CLIENTS="1 4 16 64" select what is measured; POWERINFER=path uses an existing binary.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
report=$(realpath -m "${2:-$root/docs/reports/server.md}")
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
cd "$folder"
clients=${CLIENTS:-1 4 16 64}
server=
stop() { [ -z "$server" ] || { kill "$server" && wait "$server" || true; server=; }; }
trap 'stop' EXIT

measure() { # title, vocabulary, prompt range, command of the server
  local title=$1 vocabulary=$2 from=$3 to=$4
  shift 4
  : > server.out
  "$@" > server.out 2> server.err &
  server=$!
  local port=
  for _ in $(seq 600); do
    port=$(grep -ho 'listening on http://[0-9.]*:[0-9]*' server.out server.err | grep -o '[0-9]*$' | head -1 || true)
    [ -z "$port" ] || break
    sleep 0.1
  done
  [ -n "$port" ] || { cat server.err >&2; exit 1; }
  printf '\n## %s\n\n' "$title"
  python3 -B "$root/scripts/bench_server.py" --port "$port" --vocabulary "$vocabulary" --prompt "$from" "$to" --clients $clients
  stop
}

{
  printf '# Server under load\n\nMade by `scripts/bench-server.sh`'
  printf ' on %s (%s cores). The clients run on the same cores. Answers have 128 tokens; prompts differ, so no prefix is reused.\n' \
    "$(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | sed 's/^ *//')" "$(nproc)"
  for shape in ${SHAPES:-demo llama-1b}; do
    case $shape in
      demo)
        [ -d demo.powerinfer/bundle ] || "$POWERINFER" prepare demo --quiet >&2
        measure "demo, prompts of 128–384 tokens" 1024 128 384 \
          "$POWERINFER" serve demo --port 0 --parallel 64
        printf '\n`powerinfer run` decodes the same model alone at %s tokens/s.\n' \
          "$("$POWERINFER" run demo --json --quiet | python3 -c 'import json, sys; print(round(json.load(sys.stdin)["decode_tokens_per_second"]))')"
        ;;
      *)
        if [ ! -d "$shape-bundle" ]; then
          "$POWERINFER" synth --like "$shape" --sparsity 0.9 --predictor-rank 256 --out "$shape" --quiet >&2
          # The profile only sorts neurons within layers, so few tokens are enough.
          cp "$root/README.md" text.txt
          "$POWERINFER" profile "$shape" --data text.txt --tokens 64 --out "$shape-profile" --quiet >&2
          "$POWERINFER" place "$shape" --profile "$shape-profile" --predictors "$shape/predictors" --vram 0 \
            --context 1024 --quant q4_0 --policy "${POLICY:-exact}" --certify none --hardware cpu-only \
            --out "$shape-bundle" --quiet >&2
        fi
        vocabulary=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["vocab_size"])' "$shape/config.json")
        measure "$shape, q4_0, 90 % zeros, prompts of 128–512 tokens" "$vocabulary" 128 512 \
          "$POWERINFER" serve "$shape-bundle" --port 0 --parallel 64
        ;;
    esac
  done
  if [ -n "${LLAMA_SERVER:-}" ]; then
    measure "llama-server with the same shape, prompts of 128–512 tokens" "${vocabulary:-32000}" 128 512 \
      "$LLAMA_SERVER" -m "$LLAMA_MODEL" --port 18080 --parallel 64 --ctx-size 65536 --threads "$(nproc)"
  fi
} | tee "$report.part"
mv "$report.part" "$report"
