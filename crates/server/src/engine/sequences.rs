//! Sequences that no request uses: each keeps its tokens, so that a prompt with the same prefix starts from there.

use powerinfer_runtime::{Runtime, RuntimeError, Sequence};

/// Idle sequences, least recently used first.
pub(crate) struct SequencePool {
    idle: Vec<Sequence>,
    /// Sequences made, idle or not.
    made: usize,
    /// Sequences to make at most.
    capacity: usize,
    /// Tokens of a sequence at most.
    context: usize,
}

impl SequencePool {
    /// A pool of up to `capacity` sequences of up to `context` tokens, of which `first` is made.
    pub(crate) fn new(first: Sequence, capacity: usize, context: usize) -> Self {
        Self {
            idle: vec![first],
            made: 1,
            capacity,
            context,
        }
    }

    /// Takes a sequence that starts with as many tokens of `prompt` as an idle sequence or one of `busy` does, but
    /// with `most` at most; returns their number.
    ///
    /// # Errors
    ///
    /// Fails if memory for a KV cache is missing, or if a device fails.
    pub(crate) fn take(
        &mut self,
        model: &Runtime,
        prompt: &[u32],
        most: usize,
        busy: &[&Sequence],
    ) -> Result<(Sequence, usize), RuntimeError> {
        let prefix = |sequence: &Sequence| sequence.common_prefix(prompt).min(most);
        let longest_idle = (0..self.idle.len()).max_by_key(|index| prefix(&self.idle[*index]));
        let longest_busy = busy.iter().max_by_key(|sequence| prefix(sequence));
        let from_idle = longest_idle.map_or(0, |index| prefix(&self.idle[index]));
        let from_busy = longest_busy.map_or(0, |sequence| prefix(sequence));
        // An idle sequence continues where that loses no more than it gains.
        if let Some(index) = longest_idle
            && from_idle >= from_busy
            && self.idle[index].position() <= 2 * from_idle
        {
            let mut sequence = self.idle.remove(index);
            sequence.truncate(from_idle);
            return Ok((sequence, from_idle));
        }
        let is_room = self.made < self.capacity && self.idle.iter().all(|idle| idle.position() > 0);
        if is_room {
            self.idle.insert(0, model.new_sequence(self.context)?);
            self.made += 1;
        }
        // The least recently used sequence is overwritten; its own prefix is the best where it is the source.
        let mut sequence = self.idle.remove(0);
        let source = match longest_idle.map(|index| index + usize::from(is_room)) {
            Some(0) if from_idle >= from_busy => None,
            Some(index) if from_idle >= from_busy => Some(&self.idle[index - 1]),
            _ => longest_busy.copied(),
        };
        let kept = from_idle.max(from_busy);
        match source {
            None => sequence.truncate(kept),
            Some(source) => {
                sequence.truncate(0);
                if let Err(error) = sequence.copy_from(source, kept) {
                    sequence.truncate(0);
                    self.put(sequence);
                    return Err(error);
                }
            }
        }
        Ok((sequence, kept))
    }

    /// Returns a sequence.
    pub(crate) fn put(&mut self, sequence: Sequence) {
        self.idle.push(sequence);
    }

    /// Empties all idle sequences: their keys and values are those of other policies.
    pub(crate) fn forget(&mut self) {
        self.idle
            .iter_mut()
            .for_each(|sequence| sequence.truncate(0));
    }
}
