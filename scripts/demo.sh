#!/usr/bin/env bash
# Builds powerinfer, prepares the included demo model, runs it and evaluates its policies.
# Needs rustup and a C compiler; POWERINFER=path uses an existing binary.
#
# usage: scripts/demo.sh [TASKS]     number of held-out tasks to judge [default: 200]
set -euo pipefail
cd "$(dirname "$0")/.."
tasks=${1:-200}
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked -p powerinfer-cli
  POWERINFER=${CARGO_TARGET_DIR:-target}/release/powerinfer
fi
out=${DEMO_FOLDER:-${CARGO_TARGET_DIR:-target}/demo.powerinfer}

echo "== prepare: profile, train predictors, place"
"$POWERINFER" prepare demo --out "$out"
echo
echo "== run: a held-out task"
"$POWERINFER" run "$out" </dev/null
echo
echo "== eval: quality and speed of the policies on $tasks held-out tasks"
"$POWERINFER" eval tasks "$out" --count "$tasks" --threads 1
