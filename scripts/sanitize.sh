#!/usr/bin/env bash
# Runs the tests of the kernels and of the thread pool, whose `unsafe` code accesses raw memory, under
# AddressSanitizer. The stable compiler includes the sanitizer but not its flag, hence RUSTC_BOOTSTRAP.
# x86-64 Linux, about five minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTC_BOOTSTRAP=1
# A separate target directory, since all crates are compiled with other flags.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/address-sanitizer
# The dependencies are instrumented as well, although only the kernels and the pool are under test.
export RUSTFLAGS="-Zsanitizer=address"
# Fewer cases than usual, because the sanitizer is slow.
export PROPTEST_CASES=${PROPTEST_CASES:-16}
# Kernel tests cover every instruction set of the CPU. Tests of the GPU kernels are skipped: the emulator runs
# C++ on fibers, which the sanitizer does not support, and has guard pages after its buffers.
tests=(--lib)
for target in kernels/tests/*.rs kernels/tests/*/main.rs; do
  name=${target#kernels/tests/}
  name=${name%/main.rs}
  name=${name%.rs}
  case $name in cuda*) ;; *) tests+=(--test "$name") ;; esac
done
cargo test --locked --target x86_64-unknown-linux-gnu -p powerinfer-kernels "${tests[@]}"
cargo test --locked --target x86_64-unknown-linux-gnu -p powerinfer-pool --tests
