//! How many sequences memory has room for.

use powerinfer_artifact::ByteSize;
use powerinfer_model::LanguageModel;
use powerinfer_pool::system;
use powerinfer_runtime::{
    Runtime,
    memory::{PREFILL_BATCH, kv_bytes},
};

use crate::ServerError;

/// Requests that can run at the same time, at most.
pub const MAX_PARALLEL: usize = PREFILL_BATCH;

/// Requests that run at the same time where memory permits and nothing else is given.
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
    /// Fails where the KV caches of `parallel` requests do not fit the memory that the weights leave free.
    pub(crate) fn of(
        model: &Runtime,
        context: usize,
        parallel: Option<usize>,
    ) -> Result<Self, ServerError> {
        if !model.supports_batches() {
            // A plan with a part on a GPU counts one cache there.
            return Ok(Self {
                parallel: 1,
                sequences: if model.uses_device() { 1 } else { 2 },
            });
        }
        // Pages of the weights count as free until they have been read.
        let weights = model.bundle().bytes();
        let free = system::memory().map(|(_, free)| free.saturating_sub(weights));
        Self::in_memory(sequence_bytes(model, context), free, parallel)
    }

    fn in_memory(
        sequence: u64,
        free: Option<u64>,
        parallel: Option<usize>,
    ) -> Result<Self, ServerError> {
        let room = free.map_or(usize::MAX, |free| (free / sequence.max(1)) as usize);
        // The model's own sequence exists in any case.
        let room = room.max(1);
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

/// Bytes of the KV cache of a sequence of `context` tokens.
pub(crate) fn sequence_bytes(model: &Runtime, context: usize) -> u64 {
    let config = model.config();
    let format = model.bundle().plan().budget.kv_cache;
    let of_layer = kv_bytes(config, context as u64, format);
    of_layer.saturating_mul(config.layer_count as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_limits_the_sequences() {
        let capacity = |free, parallel| {
            let capacity = Capacity::in_memory(100, free, parallel).unwrap();
            (capacity.parallel, capacity.sequences)
        };
        assert_eq!(capacity(None, None), (4, 8));
        assert_eq!(capacity(Some(10_000), Some(16)), (16, 32));
        assert_eq!(capacity(Some(2000), Some(16)), (16, 20));
        assert_eq!(capacity(Some(350), None), (3, 3));
        assert_eq!(capacity(Some(0), None), (1, 1));
        assert_eq!(capacity(Some(0), Some(1)), (1, 1));
    }

    #[test]
    fn more_requests_than_memory_has_room_for_are_refused() {
        let error = Capacity::in_memory(1 << 30, Some(5 << 30), Some(16)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the KV caches of 16 requests need up to 16.0 GiB, and 5.0 GiB of memory are free beside the weights; \
             use `--parallel 5`, or a shorter `--context`"
        );
    }
}
