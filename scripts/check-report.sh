#!/usr/bin/env bash
# Sweeps the demo over a small grid and checks the report in a headless Chromium, which is installed with apt if possible.
# Exits with 75 without a browser or Python. POWERINFER=path uses an existing binary.
#
# usage: scripts/check-report.sh
set -euo pipefail
cd "$(dirname "$0")/.."
checked="the sweep report"
. scripts/browser.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
checker=$PWD/scripts/check_report.py
cd "$scratch"
"$POWERINFER" -q prepare demo --vram 24G --tokens 5000 --steps 30 --trace-tokens 2000
"$POWERINFER" -q sweep demo --html page.html --vram 0G,69M,71M --batch 1,4 --context 32,64 -n 8 --repeats 2 --probe 16MiB \
  --policy dense,exact,predicted:-2,predicted,predicted:+2,predicted:+4,predicted:+6 --tokens 1500 --audit-tokens 500 --layer-tokens 200 --tasks 10 > /dev/null
python3 "$checker" "$browser" page.html
