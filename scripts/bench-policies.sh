#!/usr/bin/env bash
# What each policy reads and costs on the demo model, what predictors of other sizes and formats
# would, and what thresholds do to the same architecture trained with SiLU: the evidence for the
# defaults. Prints tables; takes some minutes, and twenty more where SILU names no checkpoint
# that is there: then one is trained.
#
# usage: scripts/bench-policies.sh [TASKS]   number of held-out tasks to judge, 200 unless given
set -euo pipefail
cd "$(dirname "$0")/.."
tasks=${1:-200}
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked -p powerinfer-cli
  POWERINFER=${CARGO_TARGET_DIR:-target}/release/powerinfer
fi
out=${BENCH_FOLDER:-${CARGO_TARGET_DIR:-target}/bench-policies}
mkdir -p "$out"
"$POWERINFER" profile demo --out "$out/profile" >/dev/null

# One bundle for each way to make predictors.
try() {
  local name=$1
  shift
  echo
  echo "== $name"
  rm -rf "$out/predictors" "$out/bundle"
  "$POWERINFER" train-predictors demo --profile "$out/profile" --out "$out/predictors" "$@" 2>/dev/null
  echo
  "$POWERINFER" place demo --profile "$out/profile" --predictors "$out/predictors" \
    --vram 24G --policy predicted --out "$out/bundle" -q >/dev/null
  "$POWERINFER" eval fidelity "$out/bundle" --policy exact,predicted 2>/dev/null
  "$POWERINFER" eval tasks "$out/bundle" --count "$tasks" --threads 1 2>/dev/null
}

try "as shipped: 4 bits, within 3 % of the model, 95 % of the neurons and 99 % of the contributions"
try "narrower: within 2.8 % of the model" --max-bytes 2.8%
try "as wide as pays" --max-bytes 100%
try "8 bits, as wide as pays" --predictor-quant q8_0 --max-bytes 100%
try "neurons alone: 95 % of them, whatever they contribute" --contribution-recall 0.01
try "the paper's form: 16 bits, as wide as pays" --predictor-quant bf16 --max-bytes 100%
try "the paper's sizes: by sparsity and skewness, 95 % of the neurons at even odds, nothing asked of contributions" --sizing paper

echo
echo "== signs of gates instead of a predictor"
rm -rf "$out/predictors" "$out/bundle"
"$POWERINFER" train-predictors demo --profile "$out/profile" --out "$out/predictors" 2>/dev/null
"$POWERINFER" place demo --profile "$out/profile" --predictors "$out/predictors" \
  --vram 24G --policy sign-bit --out "$out/bundle" -q >/dev/null
"$POWERINFER" eval fidelity "$out/bundle" --policy exact,sign-bit 2>/dev/null
"$POWERINFER" eval tasks "$out/bundle" --count "$tasks" --threads 1 --policy dense,exact,predicted,sign-bit 2>/dev/null

echo
echo "== what is decided for this machine, and the certificate"
"$POWERINFER" doctor --write "$out/hardware.json" 2>/dev/null
"$POWERINFER" place demo --profile "$out/profile" --predictors "$out/predictors" \
  --vram 0G --hardware "$out/hardware.json" --out "$out/bundle" 2>/dev/null
"$POWERINFER" eval fidelity "$out/bundle" --certificate 2>&1 >/dev/null | tail -1

# Where a folder is called `demo`, its text and its tasks are the demo's.
silu=${SILU:-$out/silu/demo}
if [ ! -e "$silu/model.safetensors" ]; then
  scripts/train-demo.sh --activation silu --steps 900 --out "$silu" 2>/dev/null
fi
echo
echo "== SiLU: thresholds to a rise of perplexity of at most 1 %"
"$POWERINFER" profile "$silu" --out "$out/silu/profile" >/dev/null
"$POWERINFER" train-predictors "$silu" --profile "$out/silu/profile" --out "$out/silu/predictors" 2>/dev/null
"$POWERINFER" place "$silu" --profile "$out/silu/profile" --predictors "$out/silu/predictors" \
  --vram 0G --hardware "$out/hardware.json" --out "$out/silu/bundle" 2>/dev/null
"$POWERINFER" eval fidelity "$out/silu/bundle" 2>/dev/null
"$POWERINFER" eval tasks "$out/silu/bundle" --count "$tasks" --threads 1 --policy dense,threshold 2>/dev/null
