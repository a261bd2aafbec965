//! Asynchronous copies, each executed as late as the synchronisation allows, and the races that would be undefined on a
//! GPU.
#![cfg_attr(not(emulated), expect(dead_code, reason = "nothing is copied"))]

use std::{collections::VecDeque, ops::Range};

use crate::{Emulator, lock};

/// Asynchronous copies of all staging streams.
#[derive(Debug, Default)]
pub(crate) struct AsyncCopies {
    /// Copies that were issued and not executed.
    pub(crate) pending: VecDeque<AsyncCopy>,
    /// Staging streams and host ranges that may still be read: the host has not waited for them.
    pub(crate) unsynchronised: Vec<(usize, Range<u64>)>,
    /// Staging streams whose destination kernels may use, since they were made to wait for the copies.
    pub(crate) in_use: Vec<usize>,
}

/// A copy from host memory that overlaps with kernels.
#[derive(Debug)]
pub(crate) struct AsyncCopy {
    pub(crate) staging: usize,
    pub(crate) address: u64,
    pub(crate) host: u64,
    pub(crate) bytes: usize,
}

impl Emulator {
    /// Executes the pending copies up to the last one that satisfies `is_last`.
    #[expect(unsafe_code, reason = "copies between raw addresses")]
    pub(crate) fn run_copies(&self, is_last: impl Fn(&AsyncCopy) -> bool) {
        let pending = &mut lock(&self.copies).pending;
        let last = pending.iter().rposition(is_last);
        for copy in pending.drain(..last.map_or(0, |last| last + 1)) {
            // SAFETY: the caller of `copy_async` waits before it changes or frees the memory.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    copy.host as *const u8,
                    copy.address as *mut u8,
                    copy.bytes,
                );
            }
        }
    }
}
