#!/usr/bin/env bash
# Measures and tests a machine with an NVIDIA GPU: copies, launches, synchronisations and kernels; decode, batches, prefill and
# profiling of synthetic models with all, half and a quarter of the weights on the GPU, compared with the predicted time of
# each plan and with all neurons; decoding on 1, 2, 4, 8 and 16 threads without the GPU; llama.cpp, if LLAMA is set; the demo; then
# all tests of CUDA kernels; five kernels in Nsight Compute and the tests under compute-sanitizer, if these are installed.
#
# Each step runs in its own process with a time limit, and its result is appended to the report immediately. A failing or
# hanging step does not stop the others. Needs only a driver.
#
# usage: scripts/gpu-check.sh [FOLDER] [REPORT]
#   FOLDER  made by `gpu-pack.sh` [default: target/gpu-check]
#   REPORT  [default: $OUT/gpu-results.md where OUT is set, or docs/reports/gpu-results.md]; next to it a file `.jsonl` with a
#           line per step, and a folder with their logs
# Variables: BUDGET=570, total seconds; SHAPES="llama-7b:32", models with their numbers of layers, of which the first is made while the
# kernels are measured; QUANT=q4_0; LLAMA=folder with `llama-bench` and one GGUF file of the first shape, to compare with;
# DEVICE=cpu HARDWARE=rtx4090 tries the script without a GPU. The exit status is 1 if a step failed.
set -uo pipefail
cd "$(dirname "$0")/.."
packed=$(realpath "${1:-target/gpu-check}")
report=$(realpath -m "${2:-${OUT:-docs/reports}/gpu-results.md}")
logs=${report%.md}-logs
deadline=$((SECONDS + ${BUDGET:-570}))
export work device=${DEVICE:-gpu} quant=${QUANT:-q4_0}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
lines=${report%.md}.jsonl
mkdir -p "$logs"
: > "$lines"
for file in "$packed"/*.xz; do
  case $file in
    *.tar.xz) tar -xJf "$file" -C "$work" ;;
    *) xz -dc "$file" > "$work/$(basename "$file" .xz)" ;;
  esac
done
chmod +x "$work"/*
# In a checkout without data, the hybrid test runs the packed demo.
[ -e datasets/demo ] || { mkdir -p datasets && cp -r "$work/datasets/demo" datasets/demo; }
export powerinfer=$work/powerinfer hardware=${HARDWARE:-$work/machine.toml}
# Cache of the PTX that the driver compiles.
export CUDA_CACHE_PATH=$work/cache

# Text as a JSON string.
json_string() { tr -d '\000-\010\013-\037' | sed 's/\\/\\\\/g; s/"/\\"/g; s/\t/\\t/g' | awk '{ printf "%s%s", (NR > 1 ? "\\n" : "\""), $0 } END { print (NR ? "\"" : "\"\"") }'; }

summary=()
failed=0
# step NAME LIMIT COMMAND...  Runs a command for at most LIMIT seconds. Writes its output to a log and the outcome to the report.
step() {
  local name=$1 limit=$2 left=$((deadline - SECONDS)) started=$SECONDS code=0 outcome
  shift 2
  log=$logs/${name//[^a-zA-Z0-9.-]/_}.log
  : > "$log"
  if ((left <= 0)); then
    outcome="not started, out of time"
    code=124
  else
    ((limit <= left)) || limit=$left
    timeout --kill-after=5 "$limit" "$@" > "$log" 2>&1 < /dev/null || code=$?
    case $code in
      0) outcome=ok ;;
      124 | 137) outcome="timed out after $limit s" ;;
      *) outcome="failed with $code: $({ grep -m 1 -i '^error' "$log" || tail -1 "$log"; } | tr '|' '/' | cut -c1-160)" ;;
    esac
    outcome+=$(sed -n 's/^test result: /; /p' "$log" | tail -1)
  fi
  [ "$code" = 0 ] || failed=1
  printf '{"step": %s, "seconds": %s, "exit_status": %s, "outcome": %s, "log": %s}\n' "$(json_string <<< "$name")" \
    "$((SECONDS - started))" "$code" "$(json_string <<< "$outcome")" "$(json_string < "$log")" >> "$lines"
  summary+=("| $name | $((SECONDS - started)) | $outcome |")
  printf '\n%s: %s (%s s)\n' "$name" "$outcome" "$((SECONDS - started))" | tee -a "$report"
  return "$code"
}
# As `step`; also appends the output to the report.
shown() {
  step "$@"
  local code=$?
  [ ! -s "$log" ] || printf '\n%s\n' "$(cat "$log")" >> "$report"
  return "$code"
}
# As `shown`, in a block of plain text.
quoted() {
  step "$@"
  local code=$?
  [ ! -s "$log" ] || printf '\n```text\n%s\n```\n' "$(cat "$log")" >> "$report"
  return "$code"
}

# Creates a model, its profile and its bundle: SHAPE LAYERS.
make_model() {
  set -e
  seq 1 12000 | awk '{ printf "%s word%d ", $1 % 7 ? "the" : "a", $1 % 97 }' > "$work/text.txt"
  rm -rf "$work/model" "$work/profile" "$work/bundle"
  "$powerinfer" synth --like "$1" --layers "$2" --sparsity 0.9 --predictor-rank 256 --out "$work/model" --quiet
  # On the CPU, so that decoding is measured even if profiling on the GPU fails.
  "$powerinfer" profile "$work/model" --data "$work/text.txt" --tokens 96 --device cpu --out "$work/profile" --quiet
  # `place_model` plans it again for the measured machine.
  "$powerinfer" place "$work/model" --profile "$work/profile" --predictors "$work/model/predictors" --quant "$quant" \
    --policy predicted --certify none --context 4096 --vram 0G --hardware rtx4090 --out "$work/bundle" --quiet
}
# Places the bundle with PERCENT of its weights on the GPU; with 100, all neurons must be on it.
place_model() {
  local size plan
  size=$(du -sm "$work/bundle" | cut -f1)
  # Beyond the weights: keys and values of 4096 positions, buffers.
  (($1 < 100)) && size=$((size * $1 / 100 + 256)) || size=$((2 * size + 8192))
  plan=$("$powerinfer" place "$work/bundle" --vram "${size}MiB" --hardware "$hardware") || return
  echo "$plan"
  (($1 < 100)) || grep -Eq '^GPU +([0-9]+) of \1 neurons' <<< "$plan" || { echo "error: not all neurons are on the GPU"; return 1; }
}
# Decodes without the GPU on THREADS threads.
time_threads() {
  "$powerinfer" bench "$work/bundle" --device cpu --threads "$1" -n 16 -p 0 --repeats 1
}
# Benchmarks llama.cpp: OPTION...
time_llama() { "$LLAMA/llama-bench" -m "$LLAMA"/*.gguf -fa 1 -r 3 "$@"; }
# Benchmarks the bundle, with further options: DEPTH OPTION...
time_model() {
  local depth=$1
  shift
  "$powerinfer" bench "$work/bundle" --device "$device" --depth "$depth" -n "$decoded" --repeats 3 "$@"
}
# Collects the figures of five kernels with Nsight Compute.
profile_kernels() {
  local kernel
  for kernel in project attention gate_up down gemm; do
    timeout 20 ncu -k "regex:^$kernel" -c 1 --section SpeedOfLight --section Occupancy --section LaunchStats "$work/bench-kernels" \
      dense attention prompts | grep -E '^ +[a-z_0-9]+ \(|Duration|Throughput|Registers|Occupancy'
  done
}
# Times profiling: DEVICE TOKENS.
time_profile() {
  set -e
  local started
  started=$(date +%s.%N)
  # A run that was stopped before may still hold its folder.
  "$powerinfer" profile "$work/model" --data "$work/text.txt" --tokens "$2" --device "$1" --out "$work/timed-$2" --quiet > /dev/null
  awk -v device="$1" -v tokens="$2" -v a="$started" -v b="$(date +%s.%N)" \
    'BEGIN { printf "%s: %d tokens in %.1f s, %.0f tokens/s\n", device, tokens, b - a, tokens / (b - a) }'
  rm -rf "$work/timed-$2"
}
# Sweeps the demo over several placements: only speed may change.
sweep_demo() {
  set -e
  cd "$work"
  "$powerinfer" -q prepare demo --vram 24G --hardware "$hardware" --device cpu > /dev/null
  local where=(--device "$device")
  [ "$device" = gpu ] || where+=(--run-placements)
  "$powerinfer" sweep demo "${where[@]}" --policy exact,predicted --hot-threshold 1,0.5,0.1,0.01,0 --activations f32 \
    --tokens 4096 --layer-tokens 0 --tasks 20 --out sweep.jsonl
}
export -f make_model place_model time_model time_threads time_llama time_profile profile_kernels sweep_demo
# Runs a packed test executable: FILE FOLDER [COMMAND...].
run_tests() { env POWERINFER_TEST_DEVICE=gpu CARGO_MANIFEST_DIR="$PWD/$2" "${@:3}" "$work/$1" --test-threads=1; }

card=$(timeout 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | head -1) || card="no GPU"
printf '# GPU results\n\nWritten by `scripts/gpu-check.sh`. Machine: %s; %s CPU cores.\n' "$card" "$(nproc)" > "$report"

printf '\n## Machine\n' >> "$report"
quoted doctor 120 "$powerinfer" doctor --write "$work/machine.toml"
# Without a GPU in `machine.toml`, plans are for a named one.
grep -qs '^\[gpu' "$work/machine.toml" || hardware=${HARDWARE:-rtx4090}
emulate=()
[ "$device" = gpu ] || emulate=(--emulate)
export POWERINFER_REQUIRE_GPU=1
# Numbers of tokens decoded, of tokens before them, and of tokens profiled.
export decoded=64 depth=4000 profiled=8192
[ "$device" = gpu ] || { unset POWERINFER_REQUIRE_GPU; decoded=16 depth=256 profiled=512; }
# The first model is made on the CPU while the GPU's kernels are measured.
shapes=(${SHAPES:-llama-7b:32})
bash -c 'make_model "$@"' _ "${shapes[0]%%:*}" "${shapes[0]#*:}" > "$work/make.log" 2>&1 < /dev/null &
making=$!
wait_for_model() {
  local code=0
  wait "$making" || code=$?
  cat "$work/make.log" >> "$logs/make.log"
  return "$code"
}
printf '\n## Kernels\n' >> "$report"
for section in launches syncs sparse dense prompts attention; do
  shown "kernels: $section" 40 "$work/bench-kernels" "$section" "${emulate[@]}"
done

printf '\n## Models\n\nDecoding %s tokens and prefill of 512; 90%% of the FFN activations are zero, predictors have 4 bits.\n' "$decoded" >> "$report"
for shape in "${shapes[@]}"; do
  if [ "$shape" = "${shapes[0]}" ]; then
    wait_for_model || { printf '\n%s: not made\n' "$shape" | tee -a "$report"; failed=1; continue; }
  else
    step "$shape: make" 200 bash -c 'make_model "$@"' _ "${shape%%:*}" "${shape#*:}" || continue
  fi
  for percent in 100 50 25; do
    share="$shape, $quant, $percent% of the weights"
    quoted "$share: plan" 30 bash -c 'place_model "$@"' _ "$percent" || continue
    quoted "$share" 45 bash -c 'time_model "$@"' _ 0 -p 512
    quoted "$share: all neurons" 30 bash -c 'time_model "$@"' _ 0 -p 0 --policy dense
    [ "$percent" != 100 ] || quoted "$share: after $depth tokens" 30 bash -c 'time_model "$@"' _ "$depth" -p 0
    [ "$percent" = 25 ] || quoted "$share: batches" 45 bash -c 'time_model "$@"' _ 0 -p 0 --batch 1,2,4,8
  done
  for threads in 1 2 4 8 16; do
    ((threads > $(nproc))) || quoted "$shape: CPU alone, $threads threads" 45 bash -c 'time_threads "$@"' _ "$threads"
  done
  if [ -n "${LLAMA:-}" ] && [ "$shape" = "${shapes[0]}" ]; then
    export LLAMA
    quoted "llama.cpp: all on the GPU" 45 bash -c 'time_llama "$@"' _ -ngl 99 -p 512 -n 64
    quoted "llama.cpp: all on the GPU after 4000 tokens" 45 bash -c 'time_llama "$@"' _ -ngl 99 -p 0 -n 64 -d 4000
    quoted "llama.cpp: half of the layers" 60 bash -c 'time_llama "$@"' _ -ngl "$((${shape#*:} / 2))" -p 512 -n 32
    quoted "llama.cpp: CPU alone" 60 bash -c 'time_llama "$@"' _ -ngl 0 -nopo 1 -p 0 -n 16
  fi
  for run in "$device $profiled" "cpu 256"; do
    # shellcheck disable=SC2086
    quoted "$shape: profile on $run tokens" 45 bash -c 'time_profile "$@"' _ $run
  done
done
rm -rf "$work/model" "$work/profile" "$work/bundle"
quoted "demo" 90 bash -c sweep_demo

printf '\n## Tests\n' >> "$report"
kernels=(test-kernels test-prompts test-staging test-observe)
if [ "$device" = gpu ]; then
  export -f run_tests
  for test in "${kernels[@]}"; do
    step "$test" 60 bash -c 'run_tests "$@"' _ "$test" kernels
  done
  step test-hybrid 90 bash -c 'run_tests "$@"' _ test-hybrid crates/runtime
  step test-profile 45 bash -c 'run_tests "$@"' _ test-profile crates/profile
  ! command -v ncu > /dev/null || quoted "kernels in Nsight Compute" 100 bash -c profile_kernels
  if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck synccheck; do
      for test in "${kernels[@]}"; do
        step "$test, $tool" 60 bash -c 'run_tests "$@"' _ "$test" kernels compute-sanitizer --tool "$tool" --error-exitcode 9
      done
    done
  fi
fi

{
  printf '\n## Summary\n\n| step | seconds | outcome |\n| :-- | --: | :-- |\n'
  printf '%s\n' "${summary[@]}"
} | tee -a "$report"
exit "$failed"
