#!/usr/bin/env bash
# Runs the tests of the crates that have `unsafe` of their own under AddressSanitizer, which finds reads and
# writes past the end of what they were given. A stable compiler brings the sanitizer along, but not the
# switch for it, hence RUSTC_BOOTSTRAP. x86-64 Linux, about five minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTC_BOOTSTRAP=1
# Beside the usual target: everything is compiled differently.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/address-sanitizer
# Of what is fetched from registries nothing is under test; the test programs themselves are.
export RUSTFLAGS="-Zsanitizer=address"
# Fewer cases than usual, for a sanitizer slows everything down.
export PROPTEST_CASES=${PROPTEST_CASES:-16}
# Those of the kernels go through every instruction set that the processor has. The GPU's are left out: they
# are C++ on fibers, which the sanitizer does not know, and their memory ends before pages that cannot be read.
tests=(--lib)
for file in kernels/tests/*.rs; do
  name=$(basename "$file" .rs)
  case $name in cuda*) ;; *) tests+=(--test "$name") ;; esac
done
cargo test --locked --target x86_64-unknown-linux-gnu -p powerinfer-kernels "${tests[@]}"
cargo test --locked --target x86_64-unknown-linux-gnu -p powerinfer-pool --tests
