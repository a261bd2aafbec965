#!/usr/bin/env bash
# Builds a wheel of the program into target/wheels, installs it into a fresh environment and runs it. `pip install` of the wheel
# gives the command `powerinfer`.
#
# usage: scripts/build-wheel.sh [MATURIN OPTION]...    such as `--profile dev` for a quick build
# Needs Python 3.9 or newer with pip, and access to PyPI the first time. Exits with 75 if maturin cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
missing() { echo "skipped the wheel: $1" >&2; exit 75; }
[ -x "$target/wheel-venv/bin/python" ] || python3 -m venv "$target/wheel-venv" || missing "no Python with venv"
"$target/wheel-venv/bin/python" -m pip install --quiet --disable-pip-version-check "maturin>=1.9,<2" || missing "maturin cannot be installed"
"$target/wheel-venv/bin/maturin" build --out "$target/wheels" "${@:---release}"
wheel=$(ls -t "$target"/wheels/powerinfer-*.whl | head -1)
check=$(mktemp -d)
trap 'rm -rf "$check"' EXIT
python3 -m venv "$check"
"$check/bin/python" -m pip install --quiet --disable-pip-version-check --no-index "$wheel"
"$check/bin/powerinfer" --version
echo "$wheel"
