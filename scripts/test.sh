#!/usr/bin/env bash
# Everything CI runs: format, lints, tests, documentation. Needs rustup and a C compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

step "format"
cargo fmt --all --check
step "lints"
cargo clippy --workspace --all-targets --locked -- -D warnings
step "tests"
cargo test --workspace --locked
step "instructions of the inner kernels"
cargo bench -p powerinfer-kernels --bench instructions --locked
step "documentation"
RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked
step "done"
