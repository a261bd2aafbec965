#!/usr/bin/env bash
# Serves two small models and checks what clients of OpenAI's API get: the `openai` package, lm-evaluation-harness and curl.
# The log-likelihoods that the harness receives must equal those of `powerinfer` itself.
# POWERINFER=path uses an existing binary.
#
# usage: scripts/check-clients.sh
# Needs Python 3.11 or newer with pip on Linux, curl, and access to PyPI the first time: 0.2 GB of wheels, 1 GB installed in a
# folder of their own; no torch and no GPU. Exits with 75 if they cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -m "${CARGO_TARGET_DIR:-target}")/clients-venv
missing() { echo "skipped the check of clients: $1" >&2; exit 75; }
command -v curl > /dev/null || missing "curl not found"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || missing "no Python with venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  "lm_eval[api]==0.4.13" openai==3.54.0 transformers==5.23.0 jsonschema==4.26.0 ||
  missing "the clients cannot be installed"
if [ -z "${POWERINFER:-}" ]; then
  cargo build --locked -p powerinfer-cli
  POWERINFER=$(realpath "${CARGO_TARGET_DIR:-target}")/debug/powerinfer
fi
POWERINFER=$(realpath "$POWERINFER")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
root=$PWD
cd "$scratch"
short="--vram 0G --steps 20 --trace-tokens 1000"
"$POWERINFER" -q prepare demo --tokens 3000 $short
"$POWERINFER" -q prepare "$root/tests/golden/models/llama-relu-gqa" --out chat.powerinfer --data "$root/README.md" --tokens 2000 $short
"$venv/bin/python" -B "$root/scripts/check_clients.py" "$POWERINFER" "$root/datasets/demo"
