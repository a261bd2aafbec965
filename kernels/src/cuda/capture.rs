//! [`CaptureLock`]: keeps the operations of other threads out of a capture.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
};

/// Knows which thread captures the stream of a device. An operation that any thread issues to a stream during its capture becomes
/// part of the graph, so operations of other threads wait until the capture has ended.
#[derive(Debug, Default)]
pub struct CaptureLock {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The thread that captures.
    owner: Option<ThreadId>,
    /// Operations that are being issued.
    operations: usize,
}

/// An operation that is being issued; no capture of another thread begins before it is dropped.
#[derive(Debug)]
pub struct Operation<'a>(&'a CaptureLock);

impl CaptureLock {
    /// Begins an operation, after the captures of other threads.
    pub fn operation(&self) -> Operation<'_> {
        let mut state = self.wait_while(State::is_captured_elsewhere);
        state.operations += 1;
        Operation(self)
    }

    /// Begins a capture of the calling thread, after the captures and operations of others; the calling thread must not have an
    /// [`Operation`].
    pub fn begin(&self) {
        let is_in_use = |state: &State| state.is_captured_elsewhere() || state.operations > 0;
        self.wait_while(is_in_use).owner = Some(thread::current().id());
    }

    /// Ends the capture of the calling thread, if there is one.
    pub fn end(&self) {
        let mut state = self.wait_while(|_| false);
        if !state.is_captured_elsewhere() {
            state.owner = None;
            self.changed.notify_all();
        }
    }

    fn wait_while(&self, condition: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(state, |state| condition(state));
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_captured_elsewhere(&self) -> bool {
        self.owner
            .is_some_and(|owner| owner != thread::current().id())
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let mut state = self.0.wait_while(|_| false);
        state.operations -= 1;
        if state.operations == 0 {
            self.0.changed.notify_all();
        }
    }
}
