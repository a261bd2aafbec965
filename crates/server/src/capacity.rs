//! How many sequences memory has room for.

use powerinfer_artifact::ByteSize;
use powerinfer_pool::system;
use powerinfer_runtime::{Engine, memory::PREFILL_BATCH};

use crate::ServerError;

/// Requests that can run at the same time, at most.
pub const MAX_PARALLEL: usize = PREFILL_BATCH;

/// Requests that run at the same time if memory permits and nothing else is given.
pub const DEFAULT_PARALLEL: usize = 4;

/// Sequences that a server may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Requests that run at the same time.
    pub(crate) parallel: usize,
    /// Sequences in all: those of requests that run, and idle ones whose prefixes are kept.
    pub(crate) sequences: usize,
}

impl Capacity {
    /// The capacity for `model` with sequences of up to `context` tokens.
    ///
    /// # Errors
    ///
    /// The KV caches of `parallel` requests do not fit the memory that the weights leave free.
    pub(crate) fn new(
        model: &Engine,
        context: usize,
        parallel: Option<usize>,
    ) -> Result<Self, ServerError> {
        // Pages of the weights count as free until they have been read.
        let weights = model.bundle().bytes();
        let free = system::memory().map(|(_, free)| free.saturating_sub(weights));
        let [on_host, on_device] = model.session_bytes(context);
        let memories = [(on_host, free), (on_device, model.device_cache_budget())];
        Self::in_memory(memories, parallel)
    }

    /// The capacity of memories: bytes of a sequence, and bytes that are free.
    fn in_memory(
        memories: [(u64, Option<u64>); 2],
        parallel: Option<usize>,
    ) -> Result<Self, ServerError> {
        let room = |(sequence, free): (u64, Option<u64>)| match free {
            // The model's own sequence exists in any case.
            Some(free) if sequence > 0 => ((free / sequence) as usize).max(1),
            _ => usize::MAX,
        };
        let [host, device] = memories;
        let (sequence, free) = if room(device) < room(host) {
            device
        } else {
            host
        };
        let room = room((sequence, free));
        let parallel = parallel.map(|parallel| parallel.clamp(1, MAX_PARALLEL));
        match parallel {
            Some(parallel) if parallel > room => Err(ServerError::Memory {
                parallel,
                needed: ByteSize(parallel as u64 * sequence),
                free: ByteSize(free.unwrap_or_default()),
                room,
            }),
            _ => {
                let parallel = parallel.unwrap_or(DEFAULT_PARALLEL.min(room));
                let sequences = room.min(2 * parallel);
                Ok(Self {
                    parallel,
                    sequences,
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_limits_the_sequences() {
        let capacity = |free, parallel| {
            let memories = [(100, free), (0, None)];
            let capacity = Capacity::in_memory(memories, parallel).unwrap();
            (capacity.parallel, capacity.sequences)
        };
        assert_eq!(capacity(None, None), (4, 8));
        assert_eq!(capacity(Some(10_000), Some(16)), (16, 32));
        assert_eq!(capacity(Some(2000), Some(16)), (16, 20));
        assert_eq!(capacity(Some(350), None), (3, 3));
        assert_eq!(capacity(Some(0), None), (1, 1));
        assert_eq!(capacity(Some(0), Some(1)), (1, 1));
        // A device has less room than the host.
        let memories = [(100, Some(1000)), (10, Some(35))];
        let capacity = Capacity::in_memory(memories, None).unwrap();
        assert_eq!((capacity.parallel, capacity.sequences), (3, 3));
    }

    #[test]
    fn more_requests_than_memory_has_room_for_are_refused() {
        let memories = [(1 << 30, Some(5 << 30)), (0, None)];
        let error = Capacity::in_memory(memories, Some(16)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the KV caches of 16 requests need up to 16.0 GiB, and 5.0 GiB of memory are free beside the weights, \
             enough for 5"
        );
    }
}
