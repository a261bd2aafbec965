#!/usr/bin/env bash
# Assembles the PTX in kernels/ptx for every GPU generation since compute capability 8.0, with a pinned ptxas.
# Fails on an assembler error or if a kernel spills registers.
#
# usage: scripts/check-ptx.sh
# Needs Python 3.9 or newer with pip on x86-64 Linux, and access to PyPI; no CUDA and no GPU. Exits with
# 75 if the tools cannot be installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${CARGO_TARGET_DIR:-$root/target}/ptx-venv
missing() { echo "skipped: $1" >&2; exit 75; }
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || missing "no Python with venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check nvidia-cuda-nvcc-cu12==12.8.93 ||
  missing "the assembler cannot be installed"
ptxas=$("$venv/bin/python" -c 'import pathlib, sysconfig; print(pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia/cuda_nvcc/bin/ptxas")')
failed=0
for file in "$root"/kernels/ptx/*.ptx; do
  for chip in 80 86 89 90 120; do
    if ! said=$("$ptxas" -v -arch="sm_$chip" "$file" -o /dev/null 2>&1); then
      echo "$(basename "$file") for sm_$chip: $said" >&2
      failed=1
    fi
    # Order of the lines per function: name, stack and spills, registers.
    spilled=$(echo "$said" | awk '/Compiling entry function/ { name = $0 }
      /bytes spill/ && !/ 0 bytes spill stores, 0 bytes spill loads/ { print name; print $0 }')
    if [ -n "$spilled" ]; then
      echo "$(basename "$file") for sm_$chip spills:" >&2
      echo "$spilled" >&2
      failed=1
    fi
    registers=$(echo "$said" | grep -o 'Used [0-9]* registers' | awk '{ if ($2 > most) most = $2 } END { print most + 0 }')
    echo "$(basename "$file") for sm_$chip: at most $registers registers"
  done
done
exit "$failed"
