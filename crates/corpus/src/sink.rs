//! [`Sink`]: takes the documents of files until there are enough.

use crate::{CorpusError, Document, Encoder, Unusable};

/// A token is longer than this many bytes so rarely that no more text is read for one.
const BYTES_PER_TOKEN: usize = 16;

/// Why reading a file ends before its end.
pub(crate) enum Stop {
    /// There is enough text.
    Enough,
    /// The rest of the file cannot be used.
    Unusable(Unusable),
    /// Nothing can be read.
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
    /// Longest sequence in tokens.
    length: usize,
    /// Tokens wanted.
    limit: usize,
    /// Tokens of the documents' first sequences.
    first_sequences: usize,
    pub(crate) documents: Vec<Vec<u32>>,
    /// Records of the current file, used or not.
    records: usize,
    /// Unusable records of the current file, and the first of them with its number.
    unusable: usize,
    first_unusable: Option<(usize, Unusable)>,
}

impl<'a> Sink<'a> {
    /// A sink for `limit` tokens in sequences of at most `length`.
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

    /// Whether there is enough text. Documents are interleaved, so once each gives one full sequence, more are not read.
    pub(crate) fn is_full(&self) -> bool {
        self.first_sequences >= self.limit
    }

    /// Most bytes of a text that are needed.
    pub(crate) fn most_bytes(&self) -> usize {
        self.limit.saturating_mul(BYTES_PER_TOKEN)
    }

    /// Takes the next record of the current file.
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
        match self.is_full() {
            true => Err(Stop::Enough),
            false => Ok(()),
        }
    }

    /// Ends a file: the number of its records, that of unusable ones, and the first of these with its number.
    pub(crate) fn end_file(&mut self) -> (usize, usize, Option<(usize, Unusable)>) {
        let counts = (self.records, self.unusable);
        (self.records, self.unusable) = (0, 0);
        (counts.0, counts.1, self.first_unusable.take())
    }
}
