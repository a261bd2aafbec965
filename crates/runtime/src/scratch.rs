//! Memory of the calling thread that is reused from call to call, so that decoding allocates nothing.

use std::cell::Cell;

/// Values up to which a thread keeps its memory; longer buffers are those of prompts, and are freed.
const KEPT_VALUES: usize = 1 << 20;

/// A vector that a thread lends out and takes back.
///
/// Borrowing it again before it is returned gives a new, empty vector, so calls may nest.
pub(crate) struct ThreadBuffer<T: 'static>(pub(crate) &'static std::thread::LocalKey<Cell<Vec<T>>>);

impl<T: Copy + Default> ThreadBuffer<T> {
    /// Calls `act` with `length` default values.
    pub(crate) fn zeroed<R>(&self, length: usize, act: impl FnOnce(&mut [T]) -> R) -> R {
        self.empty(|buffer| {
            buffer.reserve_exact(length);
            buffer.resize(length, T::default());
            act(buffer)
        })
    }

    /// Calls `act` with `length` values that are not cleared: they are left over from earlier calls.
    pub(crate) fn stale<R>(&self, length: usize, act: impl FnOnce(&mut [T]) -> R) -> R {
        let mut buffer = self.0.take();
        if buffer.len() < length {
            buffer.reserve_exact(length - buffer.len());
            buffer.resize(length, T::default());
        }
        let result = act(&mut buffer[..length]);
        self.give_back(buffer);
        result
    }

    /// Calls `act` with an empty vector that has the capacity of earlier calls.
    pub(crate) fn empty<R>(&self, act: impl FnOnce(&mut Vec<T>) -> R) -> R {
        let mut buffer = self.0.take();
        buffer.clear();
        let result = act(&mut buffer);
        self.give_back(buffer);
        result
    }

    fn give_back(&self, buffer: Vec<T>) {
        if buffer.capacity() <= KEPT_VALUES {
            self.0.set(buffer);
        }
    }
}
