#!/usr/bin/env bash
# Builds the executables that `gpu-check.sh` runs on a machine with only a GPU driver: the program, the GPU
# tests and the kernel benchmark, stripped and compressed, and the demo, in target/gpu-check.
#
# usage: scripts/gpu-pack.sh
# Needs rustup, a C++ compiler, strip and xz.
set -euo pipefail
cd "$(dirname "$0")/.."
out=target/gpu-check
rm -rf "$out"
mkdir -p "$out"
# Path of the executable in cargo's JSON messages.
executable() { sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1; }
pack() { strip -o "$out/$2" "$1"; xz -6 -T0 "$out/$2"; }
pack "$(cargo build --release --locked -p powerinfer-cli --message-format=json | executable)" powerinfer
# Builds a test and prints the path of its executable: PACKAGE TEST.
test() { cargo test --release --locked -p "$1" --test "$2" --no-run --message-format=json | executable; }
pack "$(test powerinfer-kernels cuda)" test-kernels
pack "$(test powerinfer-kernels cuda_prompt)" test-prompts
pack "$(test powerinfer-kernels cuda_staging)" test-staging
pack "$(test powerinfer-kernels cuda_observe)" test-observe
pack "$(test powerinfer-runtime hybrid)" test-hybrid
pack "$(test powerinfer-profile on_device)" test-profile
pack "$(cargo bench --locked -p powerinfer-kernels --bench gpu --no-run --message-format=json | executable)" bench-kernels
# The hybrid test runs the demo.
tar -cJf "$out/demo.tar.xz" datasets/demo
du -h "$out"/*
