#!/usr/bin/env bash
# Runs tests of the code that is `unsafe`, or runs on several threads, under sanitizers and in Miri. x86-64 Linux, rustup and a
# C++ compiler; `thread` and `miri` install the nightly toolchain's parts. Each keeps its own folder in `target`.
#
# usage: scripts/sanitize.sh [address|undefined|thread|miri]... [default: all]
#   address    kernels on every instruction set of the CPU, the thread pool, mapped files
#   undefined  the GPU kernels in their emulator, compiled as C++ with UndefinedBehaviorSanitizer
#   thread     the thread pool, and the kernels
#   miri       scalar kernels, the thread pool, readers of our files, GGUF and pickles; takes hours
set -euo pipefail
cd "$(dirname "$0")/.."
host=x86_64-unknown-linux-gnu
target=$(realpath "${CARGO_TARGET_DIR:-target}")
# Fewer cases than usual, because all of them are slow.
export PROPTEST_CASES=${PROPTEST_CASES:-16}

# Tests of the kernels without those of the GPU.
kernels=(--lib)
for test in kernels/tests/*.rs kernels/tests/*/main.rs; do
  name=${test#kernels/tests/}
  name=${name%/main.rs}
  name=${name%.rs}
  case $name in cuda* | ptx) ;; *) kernels+=(--test "$name") ;; esac
done

# The emulator runs fibers, which jump between stacks: AddressSanitizer and ThreadSanitizer do not follow them. It has guard
# pages after its buffers, and runs one thread at a time in several orders.
without_emulator() { POWERINFER_SKIP_EMULATOR=1 "$@"; }

address() {
  # The stable compiler includes the sanitizer but not its flag.
  export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR=$target/address-sanitizer
  without_emulator cargo test --locked --target $host -p powerinfer-kernels "${kernels[@]}"
  cargo test --locked --target $host -p powerinfer-pool --tests
  cargo test --locked --target $host -p powerinfer-artifact --lib
}

undefined() {
  # Only the C++ is instrumented.
  export CARGO_TARGET_DIR=$target/undefined-sanitizer
  export CXXFLAGS="-fsanitize=undefined -fno-sanitize-recover=undefined" RUSTFLAGS="-Clink-arg=-lubsan"
  cargo test --locked -p powerinfer-emulator -p powerinfer-kernels --lib --test cuda --test cuda_observe --test cuda_prompt --test cuda_staging
}

thread() {
  rustup -q component add rust-src --toolchain nightly
  # The standard library as well: otherwise its locks look like races.
  export RUSTFLAGS="-Zsanitizer=thread" CARGO_TARGET_DIR=$target/thread-sanitizer
  cargo +nightly test --locked -Zbuild-std --target $host -p powerinfer-pool --tests
  without_emulator cargo +nightly test --locked -Zbuild-std --target $host -p powerinfer-kernels "${kernels[@]}"
}

miri() {
  rustup -q component add miri rust-src --toolchain nightly
  # Tests write files, and measure time.
  export MIRIFLAGS="-Zmiri-disable-isolation" PROPTEST_CASES=2 CARGO_TARGET_DIR=$target/miri
  test() { without_emulator cargo +nightly miri test --locked "$@"; }
  test -p powerinfer-pool --test pool
  test -p powerinfer-tensor --lib
  # Without those of large files, of locks and sockets, and of texts that safe code of libraries parses.
  test -p powerinfer-artifact --lib -- --skip mapped_file --skip write:: --skip pieces_across_pages --skip hardware --skip byte_size
  test -p powerinfer-model --lib gguf -- --skip too_many_items --skip extreme_values
  test -p powerinfer-import --lib pickle -- --skip nesting_and_cycles
  test -p powerinfer-kernels --lib cpu
  test -p powerinfer-kernels --test equality --test attention --test integer_axpy
}

for check in "$@"; do
  case $check in
    address | undefined | thread | miri) ;;
    *) sed -n 's/^# usage: //p' "$0" >&2 && exit 2 ;;
  esac
done
[ $# -gt 0 ] || set -- address undefined thread miri
for check in "$@"; do
  printf '\n== %s\n' "$check"
  ("$check")
done
