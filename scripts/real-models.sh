#!/usr/bin/env bash
# What skipping by thresholds costs small models of stories: the table of docs/reports/real-models.md. Calibrates on the first three
# quarters of 150 stories sampled from the model itself, and evaluates on the rest. POWERINFER=path uses an existing binary.
#
# usage: scripts/real-models.sh MODEL…      folders in Hugging Face layout
set -euo pipefail
models=()
for model in "$@"; do models+=("$(realpath "$model")"); done
cd "$(dirname "$0")/.."
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked
  POWERINFER=target/release/powerinfer
fi
POWERINFER=$(realpath "$POWERINFER")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
for _ in $(seq 60); do printf 'Once upon a time, there was a little girl who liked to play in the park.\n\n'; done > any.txt
printf '| model | `--max-ppl-increase` | computed | perplexity, dense | perplexity | rise (95%%) |\n|---|--:|--:|--:|--:|--:|\n'
for model in "${models[@]}"; do
  name=$(basename "$model")
  rm -rf any profile predictors dense bundle
  "$POWERINFER" -q profile "$model" --data any.txt --out any > /dev/null
  "$POWERINFER" -q place "$model" --profile any --vram 0G --hardware cpu-only --policy dense --quant f32 --certify none --out dense > /dev/null
  context=$("$POWERINFER" -q inspect dense --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["plan"]["budget"]["context_tokens"])')
  for seed in $(seq 150); do
    "$POWERINFER" -q run dense --prompt 'Once upon a time' --max-tokens $((context * 4 / 5)) --temperature 1 --seed "$seed"
    printf '\n\n'
  done > stories
  bytes=$(wc -c < stories)
  head -c $((bytes * 3 / 4)) stories > train.txt
  tail -c $((bytes / 4)) stories > held-out.txt
  "$POWERINFER" -q profile "$model" --data train.txt --out profile > /dev/null
  "$POWERINFER" -q train-predictors "$model" --profile profile --out predictors > /dev/null
  for rise in 1% 5% 20%; do
    "$POWERINFER" -q place "$model" --profile profile --predictors predictors --vram 0G --hardware cpu-only --quant f32 \
      --max-ppl-increase "$rise" --out bundle > /dev/null
    "$POWERINFER" -q eval perplexity bundle --data held-out.txt --window 256 --json \
      | python3 -c '
import json, sys
report = json.load(sys.stdin)
row = report["policies"][-1]
rise = row["perplexity_rise"]
cells = [sys.argv[1], sys.argv[2], "%.1f %%" % (100 * row["ffn_neurons_computed"]), "%.3f" % report["dense_perplexity"], "%.3f" % row["perplexity"]]
cells += ["%.1f %% (%.1f to %.1f)" % tuple(100 * rise[key] for key in ("value", "low", "high"))]
print("|", " | ".join(cells), "|")' "$name" "$rise"
  done
done
