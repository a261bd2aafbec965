#!/usr/bin/env bash
# Compiles kernels/cuda/*.cu to PTX in kernels/ptx with a pinned NVRTC, so that the output is reproducible.
# Run it after each change of a kernel; a test compares digests of the sources.
#
# usage: scripts/generate-ptx.sh [--check]
#   --check  writes nothing, and fails if kernels/ptx is out of date
# Needs Python 3.9 or newer with pip on x86-64 Linux, and access to PyPI; no CUDA and no GPU. Exits with
# 75 if the tools cannot be installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${CARGO_TARGET_DIR:-$root/target}/ptx-venv
missing() { echo "skipped: $1" >&2; exit 75; }
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || missing "no Python with venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check nvidia-cuda-nvrtc-cu12==12.4.127 zstandard==0.25.0 ||
  missing "the compiler cannot be installed"
"$venv/bin/python" -B "$root/scripts/generate_ptx.py" "$@"
