#!/usr/bin/env bash
# Compiles kernels/cuda/*.cu to the PTX that lies in kernels/ptx, with a pinned NVRTC, so that everybody gets
# the same bytes. Run it after each change of a kernel; a test compares hashes of the sources.
#
# usage: scripts/generate-ptx.sh [--check]
#   --check  writes nothing, and fails where what lies there differs from what would be written
# Needs Python 3.9 or newer with pip on x86-64 Linux, and the Python registry; no CUDA and no GPU. Exits with
# 75 where the tools cannot be had.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${CARGO_TARGET_DIR:-$root/target}/ptx-venv
missing() { echo "skipped: $1" >&2; exit 75; }
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || missing "no Python with venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check nvidia-cuda-nvrtc-cu12==12.4.127 ||
  missing "the compiler cannot be installed"
"$venv/bin/python" -B "$root/scripts/generate_ptx.py" "$@"
