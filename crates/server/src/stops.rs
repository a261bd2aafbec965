//! Stop strings: a text ends before the first stop string that becomes complete.

use std::sync::Arc;

/// Stop strings of a request, prepared once for all of its texts.
#[derive(Debug, Default)]
pub(crate) struct StopStrings(Vec<StopString>);

/// A stop string, prepared for the Knuth–Morris–Pratt search.
#[derive(Debug)]
struct StopString {
    bytes: Vec<u8>,
    /// For each number of first bytes: length of their longest proper prefix that is also their suffix.
    shorter: Vec<u32>,
}

/// Progress of a text towards its stop strings. Time and memory per byte depend only on the number of stop strings.
#[derive(Debug)]
pub(crate) struct StopSearch {
    stops: Arc<StopStrings>,
    /// For each stop string, how many of its first bytes the text ends with.
    matched: Vec<u32>,
}

impl StopStrings {
    /// Prepares `stops`, none of which is empty.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self(stops.into_iter().map(StopString::new).collect())
    }

    /// Whether there are no stop strings.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl StopString {
    fn new(stop: String) -> Self {
        let mut new = Self {
            bytes: stop.into_bytes(),
            shorter: vec![0, 0],
        };
        for end in 1..new.bytes.len() {
            let next = new.next(new.shorter[end], new.bytes[end]);
            new.shorter.push(next);
        }
        new
    }

    /// Number of first bytes that a text ends with after `byte`, if it ended with `matched` of them before.
    fn next(&self, mut matched: u32, byte: u8) -> u32 {
        while matched > 0 && self.bytes.get(matched as usize) != Some(&byte) {
            matched = self.shorter[matched as usize];
        }
        matched + u32::from(self.bytes[matched as usize] == byte)
    }
}

impl StopSearch {
    /// A search from the start of a text.
    pub(crate) fn new(stops: Arc<StopStrings>) -> Self {
        let matched = vec![0; stops.0.len()];
        Self { stops, matched }
    }

    /// Appends `text`. If a stop string becomes complete, returns its length and the index in `text` after its end; of
    /// several with the same end the longest counts.
    pub(crate) fn push(&mut self, text: &str) -> Option<(usize, usize)> {
        for (index, byte) in text.bytes().enumerate() {
            let mut found = None;
            for (stop, matched) in self.stops.0.iter().zip(&mut self.matched) {
                *matched = stop.next(*matched, byte);
                if *matched as usize == stop.bytes.len() {
                    found = found.max(Some(stop.bytes.len()));
                }
            }
            if let Some(length) = found {
                return Some((length, index + 1));
            }
        }
        None
    }

    /// Bytes at the end of the text that may be the start of a stop string.
    pub(crate) fn pending(&self) -> usize {
        self.matched.iter().copied().max().unwrap_or(0) as usize
    }
}
