#!/usr/bin/env bash
# Builds powerinfer, prepares the demo model that it ships, runs it, and prints what sparsity
# brings. Needs rustup and a C compiler; POWERINFER=path uses a binary that is there already.
#
# usage: scripts/demo.sh [TASKS]     number of held-out tasks to judge, 200 unless given
set -euo pipefail
cd "$(dirname "$0")/.."
tasks=${1:-200}
if [ -z "${POWERINFER:-}" ]; then
  cargo build --release --locked -p powerinfer-cli
  POWERINFER=${CARGO_TARGET_DIR:-target}/release/powerinfer
fi
out=${DEMO_FOLDER:-${CARGO_TARGET_DIR:-target}/demo.powerinfer}

echo "== prepare: profile, train predictors, place"
"$POWERINFER" prepare demo --vram 24G --out "$out"
echo
echo "== run: a task that the model was not trained on"
"$POWERINFER" run "$out" </dev/null
echo
echo "== eval: what the policies cost and bring on $tasks held-out tasks"
"$POWERINFER" eval tasks "$out" --count "$tasks" --threads 1
