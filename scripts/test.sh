#!/usr/bin/env bash
# Runs all checks of CI: format, tests, GPU kernels, lints, documentation. Needs rustup and a C++ compiler (without one set
# POWERINFER_SKIP_EMULATOR=1: tests of the GPU kernels are then skipped and counted).
# The PTX tools, jinja2 and the server's clients are installed with pip; a browser, an ARM emulator and Slurm with apt; checks without their tool are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

echo "All checks of CI: over an hour on two cores the first time, 9 GB in the target folder."
echo "Installed if missing: crates, the PTX tools, jinja2 and clients of the server (pip, in folders of their own), Chromium, QEMU, a linker for ARM and Slurm (apt)."
step "format"
cargo fmt --all --check
step "tests"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cargo test --workspace --locked 2>&1 | tee "$log"
echo "$(grep -c '^skipped: ' "$log" || true) tests skipped"
step "instructions of the inner kernels"
cargo bench -p powerinfer-kernels --bench instructions --locked
step "the GPU's benchmark, emulated"
cargo bench -p powerinfer-kernels --bench gpu --locked -- --emulate
step "attacks, one minute"
bash scripts/attack.sh 1
step "PTX of the GPU kernels, ARM, pages in a browser, chat templates, clients of the server, Slurm"
skipped=0
for check in "scripts/generate-ptx.sh --check" scripts/check-ptx.sh scripts/check-arm.sh scripts/check-report.sh \
  scripts/check-page.sh scripts/check-templates.sh scripts/check-clients.sh scripts/check-slurm.sh; do
  code=0
  bash $check || code=$?
  case $code in
    0) ;;
    75) skipped=$((skipped + 1)) ;;
    *) exit "$code" ;;
  esac
done
[ "$skipped" = 0 ] || echo "$skipped of 8 checks skipped"
step "lints"
cargo clippy --workspace --all-targets --locked -- -D warnings
cargo clippy -p powerinfer-cli --features emulator --locked -- -D warnings
step "documentation"
RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked
step "done"
