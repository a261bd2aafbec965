#!/usr/bin/env bash
# Renders the corpus of chat templates with jinja2, set up as in transformers, and compares the results with the stored ones. A test
# of `powerinfer-text` expects the stored results. `--write` replaces them.
#
# usage: scripts/check-templates.sh [--write]
# Needs Python 3.9 or newer with pip, and access to PyPI the first time. Exits with 75 if jinja2 cannot be installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -m "${CARGO_TARGET_DIR:-target}")/templates-venv
missing() { echo "skipped the check of chat templates: $1" >&2; exit 75; }
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || missing "no Python with venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check jinja2==3.1.6 || missing "jinja2 cannot be installed"
"$venv/bin/python" -B scripts/check_templates.py "$@"
cargo test --workspace --locked --test templates
