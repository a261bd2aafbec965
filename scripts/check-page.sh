#!/usr/bin/env bash
# Serves the demo and uses the server's page in a headless Chromium, which is installed with apt if possible.
# Exits with 75 without a browser or Python. POWERINFER=path uses an existing binary; BUNDLE=folder a prepared bundle.
#
# usage: scripts/check-page.sh [PICTURE.png]
set -euo pipefail
picture=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."
checked="the server's page"
. scripts/browser.sh
POWERINFER=$(realpath "$POWERINFER")
bundle=${BUNDLE:+$(realpath "$BUNDLE")}
checker=$PWD/scripts/check_page.py
scratch=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || true; rm -rf "$scratch"' EXIT
cd "$scratch"
if [ -z "$bundle" ]; then
  "$POWERINFER" -q prepare demo --tokens 5000 --steps 30 --trace-tokens 2000
  bundle=demo
fi
"$POWERINFER" serve "$bundle" --port 0 --policy predicted > address 2> log &
server=$!
for _ in $(seq 300); do
  grep -q '^listening on ' address && break
  kill -0 "$server" 2> /dev/null || break
  sleep 0.1
done
address=$(sed -n 's/^listening on //p' address)
if [ -z "$address" ]; then
  cat log >&2
  echo "error: the server has not started" >&2
  exit 1
fi
python3 "$checker" "$browser" "$address" ${picture:+"$picture"}
