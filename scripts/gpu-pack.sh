#!/usr/bin/env bash
# Builds what `gpu-check.sh` runs on a machine that has a GPU and nothing else: the program and the tests of
# the GPU's half, stripped and compressed, in target/gpu-check.
#
# usage: scripts/gpu-pack.sh
# Needs rustup, a C++ compiler, strip and xz.
set -euo pipefail
cd "$(dirname "$0")/.."
out=target/gpu-check
rm -rf "$out"
mkdir -p "$out"
# The path of the file that a line of cargo's messages says it has made.
executable() { sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1; }
pack() { strip -o "$out/$2" "$1"; xz -6 -T0 "$out/$2"; }
pack "$(cargo build --release --locked -p powerinfer-cli --message-format=json | executable)" powerinfer
pack "$(cargo test --release --locked -p powerinfer-kernels --test cuda --no-run --message-format=json | executable)" test-kernels
pack "$(cargo test --release --locked -p powerinfer-kernels --test cuda_prompt --no-run --message-format=json | executable)" test-prompts
pack "$(cargo test --release --locked -p powerinfer-runtime --test hybrid --no-run --message-format=json | executable)" test-hybrid
du -h "$out"/*
