#!/usr/bin/env bash
# Runs the tests of the CPU kernels, with NEON, of the thread pool, and the runtime's goldens as ARM programs in QEMU. Installs
# the target with rustup, QEMU and a linker with apt if possible; exits with 75 without them.
#
# usage: scripts/check-arm.sh
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
skip() {
  echo "skipped the check on ARM: $1" >&2
  exit 75
}
command -v rustup > /dev/null || skip "rustup not found"
rustup -q target add $target || skip "the standard library for $target cannot be installed"
if ! command -v qemu-aarch64 > /dev/null || ! command -v aarch64-linux-gnu-gcc > /dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    (apt-get update -q && apt-get install -y -q --no-install-recommends qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross) \
      > /dev/null 2>&1 || true
  fi
  command -v qemu-aarch64 > /dev/null && command -v aarch64-linux-gnu-gcc > /dev/null \
    || skip "QEMU or a linker for ARM not found, and they cannot be installed"
fi
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
# The GPU's kernels run in their emulator on the machine's own architecture alone.
export POWERINFER_SKIP_EMULATOR=1
# Must exist on the target: without it every test would compare scalar code with itself.
export POWERINFER_ISA=neon
cargo test --locked --target $target -p powerinfer-kernels --lib --test equality --test attention --test integer_axpy
cargo test --locked --target $target -p powerinfer-pool
cargo test --locked --target $target -p powerinfer-runtime --test golden
# In QEMU, the longer texts of the other batch tests take 15 minutes.
cargo test --locked --target $target -p powerinfer-runtime --test batches -- each_has_the_bits_that_it_has_alone speculation_changes_no_token
