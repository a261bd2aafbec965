#!/usr/bin/env bash
# What a machine with an NVIDIA GPU has to say: runs all tests of the GPU's half on the card, times kernels, launches
# and synchronisations, then prompts, decoding and profiling with synthetic models, all on the GPU and with a half and a fifth of
# the weights there, beside the time that each plan predicts. Needs a driver and nothing else; a quarter of an hour. Where
# there is a compute-sanitizer, the tests of the kernels run under it too.
#
# usage: scripts/gpu-check.sh [FOLDER] [REPORT]
#   FOLDER  with what `gpu-pack.sh` built [default: target/gpu-check]
#   REPORT  [default: docs/gpu-results.md]
# SHAPES="llama-7b llama-13b llama-70b:16" (with numbers of layers where not all) and QUANT=q4_0 change what
# is run; SKIP_TESTS=1 leaves the tests out, SKIP_PROFILES=1 the times of profiling, DEVICE=cpu HARDWARE=rtx4090 tries the rest without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
packed=$(realpath "${1:-target/gpu-check}")
report=$(realpath -m "${2:-docs/gpu-results.md}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for file in "$packed"/*.xz; do
  xz -dc "$file" > "$work/$(basename "$file" .xz)"
done
chmod +x "$work"/*
powerinfer=$work/powerinfer
# What drivers compile is kept only here.
export CUDA_CACHE_PATH=$work/cache
card=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | head -1) || card="no GPU"
{
  echo "# What a GPU does"
  echo
  echo "Written by \`scripts/gpu-check.sh\`. Machine: $card; $(nproc) processor cores."
  echo
} > "$report"

if [ -z "${SKIP_TESTS:-}" ]; then
  echo "| tests on the card | outcome |" >> "$report"
  echo "| :-- | :-- |" >> "$report"
  failed=0
  # Runs a test and writes down how it ends: what of it is told, its name and folder, and what it runs under.
  try() {
    local told=$1 name=${2%%:*} folder=${2#*:} code=0
    shift 2
    POWERINFER_TEST_DEVICE=gpu CARGO_MANIFEST_DIR=$PWD/$folder "$@" "$work/$name" --test-threads=1 2>&1 |
      tee "$work/$name.log" || code=$?
    echo "| $told | $(grep '^test result' "$work/$name.log" || echo "ended with $code") |" >> "$report"
    [ "$code" = 0 ] || failed=1
  }
  kernels="test-kernels:kernels test-prompts:kernels test-staging:kernels test-observe:kernels"
  for test in $kernels test-hybrid:crates/runtime test-profile:crates/profile; do
    try "${test%%:*}" "$test"
  done
  if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck synccheck; do
      for test in $kernels; do
        try "${test%%:*}, $tool" "$test" compute-sanitizer --tool "$tool" --error-exitcode 9
      done
    done
  else
    echo "| compute-sanitizer | is not installed here |" >> "$report"
  fi
  echo >> "$report"
  if [ "$failed" = 1 ]; then
    echo "a test failed on the card; nothing is timed" | tee -a "$report" >&2
    exit 1
  fi
fi

emulate=()
[ "${DEVICE:-gpu}" = gpu ] || emulate=(--emulate)
POWERINFER_REQUIRE_GPU=1 "$work/bench-kernels" "${emulate[@]}" | tee -a "$report"
hardware=${HARDWARE:-$work/machine.toml}
"$powerinfer" doctor --write "$work/machine.toml" > "$work/doctor.log" 2>&1 || cat "$work/doctor.log"
{
  echo "## Models"
  echo
  echo "Decoding 64 tokens one after the other, and a prompt of 512, tokens a second; 90 % of FFN activations zero, predictors of 4 bits; the plan is for this machine as \`powerinfer doctor\` measured it. Microseconds of a decoded token: the GPU's kernels, the CPU's neurons, and what the CPU waits."
  echo
  echo "| model | VRAM | neurons and attention on the GPU | planned | measured | prompt | GPU µs | CPU µs | waiting µs |"
  echo "| :-- | --: | :-- | --: | --: | --: | --: | --: | --: |"
} >> "$report"
quant=${QUANT:-q4_0}
seq 1 12000 | awk '{ printf "%s word%d ", $1 % 7 ? "the" : "a", $1 % 97 }' > "$work/text.txt"
for shape in ${SHAPES:-llama-7b llama-13b llama-70b:16}; do
  name=${shape%%:*}
  layers=()
  [ "$name" = "$shape" ] || layers=(--layers "${shape#*:}")
  model=$work/model
  "$powerinfer" synth --like "$name" "${layers[@]}" --sparsity 0.9 --predictor-rank 256 --out "$model" --quiet
  "$powerinfer" profile "$model" --data "$work/text.txt" --tokens 64 --out "$work/profile" --quiet > /dev/null
  # How fast profiling is: many tokens on the GPU, few on the CPU.
  for run in "${DEVICE:-gpu}:8192" cpu:256; do
    if [ -n "${SKIP_PROFILES:-}" ]; then break; fi
    tokens=${run#*:}
    before=$(date +%s.%N)
    "$powerinfer" profile "$model" --data "$work/text.txt" --tokens "$tokens" --device "${run%%:*}" \
      --out "$work/timed" --quiet > /dev/null
    after=$(date +%s.%N)
    rm -rf "$work/timed"
    awk -v shape="$shape" -v device="${run%%:*}" -v tokens="$tokens" -v a="$before" -v b="$after" \
      'BEGIN { printf "| %s | %s | %d | %.1f | %.0f |\n", shape, device, tokens, b - a, tokens / (b - a) }' >> "$work/profiles"
  done
  "$powerinfer" place "$model" --profile "$work/profile" --predictors "$model/predictors" --quant "$quant" \
    --policy predicted --certify-tokens 0 --context 1024 --vram 0G --hardware "$hardware" --out "$work/bundle" --quiet > /dev/null
  rm -rf "$model"
  mebibytes=$(du -sm "$work/bundle" | cut -f1)
  for tenths in 12 5 2; do
    vram=$((mebibytes * tenths / 10 + 640))
    "$powerinfer" place "$work/bundle" --vram "${vram}MiB" --hardware "$hardware" > "$work/plan" 2>&1 ||
      { cat "$work/plan"; continue; }
    planned=$(sed -n 's/^predicted: \([0-9.]*\) tokens.*/\1/p' "$work/plan")
    "$powerinfer" bench "$work/bundle" --device "${DEVICE:-gpu}" -p 512 -n 64 --repeats 3 > "$work/out" 2>&1 ||
      tail -3 "$work/out"
    speed() { sed -n "s/^$1 *\([0-9.]*\) .*/\1/p" "$work/out" | head -1; }
    measured=$(speed "decoding 64")
    what=$(sed -n 's/.*: \([0-9]* of [0-9]* neurons.*\); .* taken of .*/\1/p' "$work/out")
    sides=$(awk '$1 == "all" { print $2 " | " $4 " | " $6; exit }' "$work/out")
    echo "| $shape, $quant | $vram MiB | ${what:-} | $planned | ${measured:-failed} | $(speed "prompt of 512") | ${sides:- |  | } |" >> "$report"
    cat "$work/out"
  done
  rm -rf "$work/bundle" "$work/profile"
done
if [ -s "$work/profiles" ]; then
  {
    echo
    echo "Profiling, from the first byte of the checkpoint on:"
    echo
    echo "| model | on | tokens | seconds | tokens/s |"
    echo "| :-- | :-- | --: | --: | --: |"
    cat "$work/profiles"
  } >> "$report"
fi
# The demo with the line between hot and cold here and there: nothing but speed may change.
(
  cd "$work"
  "$powerinfer" -q prepare demo --vram 24G --hardware "$hardware" > /dev/null
  where=(--device "${DEVICE:-gpu}")
  [ "${DEVICE:-gpu}" = gpu ] || where+=(--run-placements)
  "$powerinfer" sweep demo "${where[@]}" --level exact,predicted --hot-threshold 1,0.5,0.1,0.01,0 --activations f32 \
    --tokens 4096 --layer-tokens 0 --tasks 100 --out sweep.jsonl
) > "$work/sweep" 2> "$work/sweep.log" || cat "$work/sweep.log"
{
  echo
  echo "The demo, hot neurons on the card, the others on the CPU, and what that changes beside \`dense\` on the CPU:"
  echo
  echo '```text'
  cat "$work/sweep" "$work/sweep.log"
  echo '```'
} >> "$report"
cat "$report"
