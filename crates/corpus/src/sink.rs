//! [`Sink`]: collects documents until there are enough.

use crate::{CorpusError, Document, Encoder, Unusable};

/// Bytes of text to read per token wanted; longer tokens are rare.
const BYTES_PER_TOKEN: usize = 16;

/// Reason to stop reading before the end of a file.
pub(crate) enum Stop {
    /// Enough text was read.
    Enough,
    /// The rest of the file is unusable.
    Unusable(Unusable),
    /// Reading fails altogether.
    Failed(CorpusError),
}

impl<E: Into<Unusable>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Unusable(error.into())
    }
}

/// Encoded documents, and what the current file contributed.
pub(crate) struct Sink<'a> {
    encoder: &'a Encoder<'a>,
    /// Maximum length of a sequence in tokens.
    length: usize,
    /// Number of tokens wanted.
    limit: usize,
    /// Tokens in the first sequences of all documents.
    first_sequences: usize,
    pub(crate) documents: Vec<Vec<u32>>,
    /// Records of the current file, used or not.
    records: usize,
    /// Unusable records of the current file.
    unusable: usize,
    /// Number and defect of the first unusable record.
    first_unusable: Option<(usize, Unusable)>,
}

impl<'a> Sink<'a> {
    /// Creates a sink for `limit` tokens in sequences of at most `length`.
    pub(crate) fn new(encoder: &'a Encoder<'a>, length: usize, limit: usize) -> Self {
        Self {
            encoder,
            length,
            limit,
            first_sequences: 0,
            documents: Vec::new(),
            records: 0,
            unusable: 0,
            first_unusable: None,
        }
    }

    /// Returns whether there is enough text. Sequences are interleaved across documents, so no more documents are needed once
    /// the first sequence of each suffices.
    pub(crate) fn is_full(&self) -> bool {
        self.first_sequences >= self.limit
    }

    /// Returns how many bytes of a text are needed at most.
    pub(crate) fn most_bytes(&self) -> usize {
        self.limit.saturating_mul(BYTES_PER_TOKEN)
    }

    /// Adds the next record of the current file.
    pub(crate) fn take(&mut self, record: Result<Document, Unusable>) -> Result<(), Stop> {
        self.records += 1;
        let ids = match record {
            Ok(Document::Text(text)) => {
                let end = text.floor_char_boundary(self.most_bytes());
                self.encoder.text(&text[..end]).map(Ok)
            }
            Ok(Document::Chat(messages)) => self.encoder.chat(&messages),
            Err(reason) => Ok(Err(reason)),
        };
        match ids.map_err(Stop::Failed)? {
            Ok(mut ids) => {
                ids.truncate(self.limit);
                self.first_sequences += ids.len().min(self.length);
                self.documents.push(ids);
            }
            Err(reason) => {
                self.unusable += 1;
                self.first_unusable.get_or_insert((self.records, reason));
            }
        }
        if self.is_full() {
            Err(Stop::Enough)
        } else {
            Ok(())
        }
    }

    /// Ends the current file. Returns how many records it had, how many were unusable, and number and defect of the first
    /// unusable one.
    pub(crate) fn end_file(&mut self) -> (usize, usize, Option<(usize, Unusable)>) {
        let counts = (self.records, self.unusable);
        (self.records, self.unusable) = (0, 0);
        (counts.0, counts.1, self.first_unusable.take())
    }
}
