#!/usr/bin/env bash
# Assembles the PTX in kernels/ptx for every GPU generation since compute capability 8.0, with a pinned ptxas, and reads the
# machine code (SASS) for sm_90 and sm_89. Fails on an assembler error, if a kernel spills registers, and if a figure exceeds its
# limit in scripts/sass_limits.json:
#   registers   of a thread
#   in flight   loads that a thread has issued when it first uses one of them, in the loop that streams data
#   per weight  instructions of that loop per weight it reads; inner loops, as of a GEMM, count once
#
# usage: scripts/check-ptx.sh [--estimate] [--write]
#   --estimate  also prints the estimated time of a token, and of a prompt's products, on an H100, kernel by kernel
#   --write     takes what is measured as the new limits
# Needs Python 3.9 or newer with pip on x86-64 Linux, and access to PyPI; no CUDA and no GPU. Exits with
# 75 if the tools cannot be installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${CARGO_TARGET_DIR:-$root/target}/ptx-venv
missing() { echo "skipped: $1" >&2; exit 75; }
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || missing "no Python with venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check nvidia-cuda-nvcc-cu12==12.8.93 nvidia-cuda-nvdisasm==13.2.51 zstandard==0.25.0 ||
  missing "the assembler and the disassembler cannot be installed"
exec "$venv/bin/python" "$root/scripts/check_sass.py" "$@"
