//! Mutated inputs for every reader: files of a checkpoint, artifacts, and requests to the server.
//!
//! ```text
//! target::TARGETS ── valid input ──▶ mutation ──▶ arena: writes, reads, restores ──▶ Outcome
//! ```
//!
//! `scripts/attack.sh` runs the binary of this crate, and the targets of `fuzz/` use the same readers with libFuzzer.

pub mod arena;
pub mod mutation;
mod requests;
pub mod target;
