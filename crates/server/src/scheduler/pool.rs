//! Sessions that no request uses: each keeps its tokens, so that a prompt with the same prefix starts from there.

use powerinfer_runtime::{Engine, RuntimeError, Session};

/// Idle sessions, least recently used first.
pub(crate) struct SessionPool {
    idle: Vec<Session>,
    /// Sessions made, idle or not.
    made: usize,
    /// Most sessions to make.
    capacity: usize,
    /// Most tokens of a session.
    context: usize,
}

impl SessionPool {
    /// A pool of up to `capacity` sessions, `first` included, all with the context of `first`.
    pub(crate) fn new(first: Session, capacity: usize) -> Self {
        Self {
            context: first.context(),
            idle: vec![first],
            made: 1,
            capacity,
        }
    }

    /// Takes a session that starts with the longest prefix of `prompt` that an idle session or one of `busy` has, at most
    /// `most` tokens. Also returns the length of the prefix.
    ///
    /// # Errors
    ///
    /// There is not enough memory for a KV cache, or a device fails.
    pub(crate) fn take(
        &mut self,
        engine: &mut Engine,
        prompt: &[u32],
        most: usize,
        busy: &[&Session],
    ) -> Result<(Session, usize), RuntimeError> {
        let prefix = |session: &Session| session.common_prefix(prompt).min(most);
        let longest_idle = (0..self.idle.len()).max_by_key(|index| prefix(&self.idle[*index]));
        let longest_busy = busy.iter().max_by_key(|session| prefix(session));
        let from_idle = longest_idle.map_or(0, |index| prefix(&self.idle[index]));
        let from_busy = longest_busy.map_or(0, |session| prefix(session));
        // An idle session is continued if that loses no more tokens than it reuses.
        if let Some(index) = longest_idle
            && from_idle >= from_busy
            && self.idle[index].position() <= 2 * from_idle
        {
            let mut session = self.idle.remove(index);
            session.truncate(from_idle);
            return Ok((session, from_idle));
        }
        let is_room = self.made < self.capacity && self.idle.iter().all(|idle| idle.position() > 0);
        if is_room {
            self.idle.insert(0, engine.new_session(self.context)?);
            self.made += 1;
        }
        // The least recently used session is overwritten; if it has the longest prefix, it keeps that.
        let mut session = self.idle.remove(0);
        let source = match longest_idle.map(|index| index + usize::from(is_room)) {
            Some(0) if from_idle >= from_busy => None,
            Some(index) if from_idle >= from_busy => Some(&self.idle[index - 1]),
            _ => longest_busy.copied(),
        };
        let kept = from_idle.max(from_busy);
        match source {
            None => session.truncate(kept),
            Some(source) => {
                session.truncate(0);
                if let Err(error) = session.copy_from(source, kept) {
                    session.truncate(0);
                    self.put(session);
                    return Err(error);
                }
            }
        }
        Ok((session, kept))
    }

    /// Returns a session.
    pub(crate) fn put(&mut self, session: Session) {
        self.idle.push(session);
    }

    /// Empties all idle sessions: their keys and values are those of other policies.
    pub(crate) fn forget(&mut self) {
        self.idle.iter_mut().for_each(|session| session.truncate(0));
    }
}
