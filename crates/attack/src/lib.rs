//! Mutated inputs for every reader: files of a checkpoint, artifacts, and requests to the server.
//!
//! ```text
//! target::TARGETS ── valid input ──▶ mutation ──▶ arena: writes, reads, restores ──▶ Outcome
//! ```
//!
//! `scripts/attack.sh` runs the binary of this crate, and the targets of `fuzz/` use the same readers with libFuzzer.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

use std::{cell::OnceCell, env, path::Path};

use crate::{
    arena::Arena,
    target::{Sources, find},
};

pub mod arena;
mod contexts;
pub mod mutation;
mod requests;
pub mod target;

/// Reads `data` as an input of the target called `name`, for libFuzzer. Artifacts that it needs are in the folder that
/// `POWERINFER_ATTACK_MADE` names, `made` if it is not set; `scripts/attack.py prepare` makes it.
///
/// # Panics
///
/// A target panics, or the folder lacks an artifact.
pub fn fuzz(name: &str, data: &[u8]) {
    thread_local! {
        static ARENA: OnceCell<Arena> = const { OnceCell::new() };
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    ARENA.with(|arena| {
        let arena = arena.get_or_init(|| {
            let made = env::var_os("POWERINFER_ATTACK_MADE").map(Into::into);
            let sources = Sources {
                golden: root.join("tests/golden"),
                made: made.unwrap_or_else(|| "made".into()),
            };
            let scratch = tempfile::tempdir().expect("a temporary folder");
            let target = find(name).expect("the target exists");
            Arena::new(target, &sources, &scratch.keep()).expect("inputs are readable")
        });
        arena.read_bytes(data).expect("files are writable");
    });
}
