//! Whether a connection's client waits for the server, or the server for the client.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// Who waits for whom on a connection.
#[derive(Debug)]
pub(crate) struct Connection {
    id: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Whether the client takes what is written.
    reads: bool,
    /// When one of the two last changed.
    since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// A head is expected.
    Idle,
    /// A body is expected.
    Receiving,
    /// The server is to answer.
    Answering,
}

impl Connection {
    /// A connection on which nothing has arrived.
    pub(crate) fn new(id: u64) -> Self {
        let state = State {
            phase: Phase::Idle,
            reads: true,
            since: Instant::now(),
        };
        Self {
            id,
            state: Mutex::new(state),
        }
    }

    /// Number of the connection.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// A head has arrived, perhaps of a request whose body has not.
    pub(crate) fn begins(&self, has_body: bool) {
        self.change(|state| {
            state.phase = if has_body {
                Phase::Receiving
            } else {
                Phase::Answering
            };
        });
    }

    /// The body of the request has arrived, or nobody waits for it any more.
    pub(crate) fn received(&self) {
        self.change(|state| {
            if state.phase == Phase::Receiving {
                state.phase = Phase::Answering;
            }
        });
    }

    /// The response is complete.
    pub(crate) fn answered(&self) {
        self.change(|state| state.phase = Phase::Idle);
    }

    /// Records whether the client takes what is written.
    pub(crate) fn reads(&self, reads: bool) {
        self.change(|state| state.reads = reads);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        state.since = Instant::now();
    }

    /// Time since which the server has waited for the client; `None` if the client waits for the server.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        let state = self.lock();
        let is_waiting = state.phase != Phase::Answering || !state.reads;
        is_waiting.then_some(state.since)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
