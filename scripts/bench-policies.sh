#!/usr/bin/env bash
# Measures the evidence for the defaults: cost and quality of each policy on the demo model, of predictors
# of other sizes and formats, and of thresholds on the same architecture with SiLU. Prints tables. Takes
# some minutes, and twenty more to train a checkpoint if SILU does not name an existing one.
#
# usage: scripts/bench-policies.sh [TASKS]   number of held-out tasks to judge [default: 200]
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

# Trains predictors, places a bundle with them and evaluates it: NAME [OPTION...].
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

try "default: 4 bits, at most 3% of the model, recall 95%, contribution recall 99.5%"
try "contribution recall 99%" --contribution-recall 0.99
try "calculated only" --method closed-form
try "trained from random weights, with ReLU" --method trained
try "trained from random weights, contribution recall 99%" --method trained --contribution-recall 0.99
try "smaller: at most 2.8% of the model" --max-bytes 2.8%
try "no size limit" --max-bytes 100%
try "8 bits, no size limit" --predictor-quant q8_0 --max-bytes 100%
try "recall 95%, no contribution recall" --contribution-recall 0.01
try "format of the paper: 16 bits, no size limit" --predictor-quant bf16 --max-bytes 100%
try "sizes of the paper: by sparsity and skewness, recall 95% at a threshold of one half, no contribution recall" --sizing paper

echo
echo "== sign-bit policy instead of a predictor"
rm -rf "$out/predictors" "$out/bundle"
"$POWERINFER" train-predictors demo --profile "$out/profile" --out "$out/predictors" 2>/dev/null
"$POWERINFER" place demo --profile "$out/profile" --predictors "$out/predictors" \
  --vram 24G --policy sign-bit --out "$out/bundle" -q >/dev/null
"$POWERINFER" eval fidelity "$out/bundle" --policy exact,sign-bit 2>/dev/null
"$POWERINFER" eval tasks "$out/bundle" --count "$tasks" --threads 1 --policy dense,exact,predicted,sign-bit 2>/dev/null

echo
echo "== policies chosen for this machine, and the certificate"
"$POWERINFER" doctor --write "$out/hardware.json" 2>/dev/null
"$POWERINFER" place demo --profile "$out/profile" --predictors "$out/predictors" \
  --vram 0G --hardware "$out/hardware.json" --out "$out/bundle" 2>/dev/null
"$POWERINFER" eval fidelity "$out/bundle" --certificate 2>&1 >/dev/null | tail -1

# A folder named `demo` uses the text and tasks of the demo.
silu=${SILU:-$out/silu/demo}
if [ ! -e "$silu/model.safetensors" ]; then
  scripts/train-demo.py --activation silu --steps 900 --out "$silu" 2>/dev/null
fi
echo
echo "== SiLU: thresholds within a perplexity budget of 1%"
"$POWERINFER" profile "$silu" --out "$out/silu/profile" >/dev/null
"$POWERINFER" train-predictors "$silu" --profile "$out/silu/profile" --out "$out/silu/predictors" 2>/dev/null
"$POWERINFER" place "$silu" --profile "$out/silu/profile" --predictors "$out/silu/predictors" \
  --vram 0G --hardware "$out/hardware.json" --out "$out/silu/bundle" 2>/dev/null
"$POWERINFER" eval fidelity "$out/silu/bundle" 2>/dev/null
"$POWERINFER" eval tasks "$out/silu/bundle" --count "$tasks" --threads 1 --policy dense,threshold 2>/dev/null
