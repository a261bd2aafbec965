//! Calibration text as token sequences with source and part.

use std::{collections::BTreeMap, ops::Range};

use powerinfer_artifact::{Digest, Shard};

use crate::{ProfileError, SourceSummary};

/// Every `HELD_OUT_EVERY`-th sequence belongs to the held-out part.
const HELD_OUT_EVERY: usize = 5;

/// Minimum number of tokens in the held-out part.
const FEWEST: usize = 2;

/// Most tokens of the reserved texts, which are not profiled.
pub const RESERVED: usize = 16_384;

/// If no text remains to be reserved, the last `1 / RESERVED_EVERY` of the sequences are.
const RESERVED_EVERY: usize = 8;

/// Number of documents from which on the halves of a source share none.
const DOCUMENTS_FOR_HALVES: usize = 8;

/// Training or held-out part of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Predictors are trained on it.
    Training,
    /// Predictors are calibrated and evaluated on it.
    HeldOut,
}

impl Part {
    /// Both parts.
    pub const ALL: [Self; 2] = [Self::Training, Self::HeldOut];

    /// Name, as in tensor names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::HeldOut => "held_out",
        }
    }
}

/// A named set of tokenised documents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Name for reports.
    pub name: String,
    /// Number of documents per file format.
    pub formats: BTreeMap<String, u64>,
    /// Token ids of each document.
    pub documents: Vec<Vec<u32>>,
}

/// A token sequence that starts at position 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Index of the source.
    pub source: usize,
    /// Whether it belongs to the first of two independent halves.
    pub first_half: bool,
    /// Training or held-out part.
    pub part: Part,
}

/// Calibration sequences from one or several sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calibration {
    sources: Vec<SourceSummary>,
    sequences: Vec<Sequence>,
    reserved: Vec<Vec<u32>>,
}

impl Calibration {
    /// Splits documents into sequences of at most `length` tokens, `tokens` in total, and reserves the text after them: at
    /// most [`RESERVED`] tokens, or the last sequences if no text remains.
    ///
    /// Every document starts a sequence. Sources alternate, and documents within a source, so that any prefix of the
    /// sequences is representative.
    ///
    /// # Errors
    ///
    /// There are no tokens, or too few for a held-out part.
    pub fn new(sources: Vec<Source>, length: usize, tokens: usize) -> Result<Self, ProfileError> {
        let calibration = Self::cut(&sources, length, tokens);
        match calibration.sequences.len() {
            0 => Err(ProfileError::NoTokens),
            few if few < HELD_OUT_EVERY => {
                // A single long text is split into shorter sequences.
                let total = calibration.tokens();
                if total < FEWEST * HELD_OUT_EVERY {
                    return Err(ProfileError::TooShort {
                        tokens: total,
                        held_out: total / HELD_OUT_EVERY,
                        needed: FEWEST,
                        total: FEWEST * HELD_OUT_EVERY,
                    });
                }
                Ok(Self::cut(&sources, total / HELD_OUT_EVERY, tokens))
            }
            _ => Ok(calibration),
        }
    }

    /// Checks that each part has at least `needed` tokens.
    ///
    /// # Errors
    ///
    /// A part is too short.
    pub fn check_parts(&self, needed: usize) -> Result<(), ProfileError> {
        let [training, held_out] =
            Part::ALL.map(|part| self.part_tokens(part, 0..self.sequences.len()));
        if training.min(held_out) >= needed {
            Ok(())
        } else {
            Err(ProfileError::TooShort {
                tokens: training + held_out,
                held_out,
                needed,
                total: needed * HELD_OUT_EVERY,
            })
        }
    }

    fn cut(sources: &[Source], length: usize, tokens: usize) -> Self {
        let mut queues: Vec<_> = sources
            .iter()
            .map(|source| pieces(source, length))
            .collect();
        let mut sequences: Vec<Sequence> = Vec::new();
        let mut left = tokens;
        let mut reserved: Vec<Vec<u32>> = Vec::new();
        let mut room = RESERVED;
        let mut found = true;
        while room > 0 && found {
            found = false;
            for (source, queue) in queues.iter_mut().enumerate() {
                let Some((piece, first_half)) = queue.next() else {
                    continue;
                };
                found = true;
                if left == 0 {
                    let piece = &piece[..piece.len().min(room)];
                    room -= piece.len();
                    reserved.extend((!piece.is_empty()).then(|| piece.to_vec()));
                    continue;
                }
                let piece = &piece[..piece.len().min(left)];
                left -= piece.len();
                let held_out = sequences.len() % HELD_OUT_EVERY == HELD_OUT_EVERY - 1;
                sequences.push(Sequence {
                    tokens: piece.to_vec(),
                    source,
                    first_half,
                    part: if held_out {
                        Part::HeldOut
                    } else {
                        Part::Training
                    },
                });
            }
        }
        if reserved.is_empty() && sequences.len() > HELD_OUT_EVERY + 1 {
            let count = sequences.len().div_ceil(RESERVED_EVERY);
            let last = sequences.split_off(sequences.len() - count);
            for sequence in last {
                let text = &sequence.tokens[..sequence.tokens.len().min(room)];
                room -= text.len();
                reserved.extend((!text.is_empty()).then(|| text.to_vec()));
            }
        }
        let summary = |source: &Source| SourceSummary {
            name: source.name.clone(),
            documents: source.documents.len() as u64,
            formats: source.formats.clone(),
            tokens: 0,
        };
        Self {
            sources: sources.iter().map(summary).collect(),
            sequences,
            reserved,
        }
    }

    /// Token ids of the reserved texts, which are not profiled.
    pub fn reserved(&self) -> &[Vec<u32>] {
        &self.reserved
    }

    /// Returns the sources. Their token counts are known only after profiling.
    pub fn sources(&self) -> &[SourceSummary] {
        &self.sources
    }

    /// The sequences.
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens_in(0..self.sequences.len())
    }

    /// Number of tokens of a range of sequences.
    pub fn tokens_in(&self, range: Range<usize>) -> usize {
        let lengths = self.sequences[range].iter().map(|s| s.tokens.len());
        lengths.sum()
    }

    /// Number of tokens of one part in a range of sequences.
    pub fn part_tokens(&self, wanted: Part, range: Range<usize>) -> usize {
        let sequences = self.sequences[range].iter();
        let of_part = sequences.filter(|sequence| sequence.part == wanted);
        of_part.map(|sequence| sequence.tokens.len()).sum()
    }

    /// The range of sequences of `shard`.
    ///
    /// # Errors
    ///
    /// The shard is empty.
    pub fn shard(&self, shard: Shard) -> Result<Range<usize>, ProfileError> {
        let range = shard.range(self.sequences.len());
        if range.is_empty() {
            return Err(ProfileError::EmptyShard {
                shard,
                sequences: self.sequences.len(),
            });
        }
        Ok(range)
    }

    /// The shortest range of sequences from `start` with at least `tokens` tokens, or all remaining ones.
    pub fn first(&self, start: usize, tokens: usize) -> Range<usize> {
        let mut end = start;
        let mut sum = 0;
        while end < self.sequences.len() && sum < tokens {
            sum += self.sequences[end].tokens.len();
            end += 1;
        }
        start..end
    }

    /// Digest of the sequences with their sources and halves, and of the reserved texts.
    pub fn digest(&self) -> Digest {
        let parts = self.sequences.iter().map(|sequence| {
            let Sequence {
                tokens,
                source,
                first_half,
                part: _, // follows from the index
            } = sequence;
            let numbers = [*source as u32, u32::from(*first_half)];
            let numbers = numbers.into_iter().chain(tokens.iter().copied());
            numbers.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
        });
        let reserved = self.reserved.iter().map(|text| {
            let numbers = std::iter::once(u32::MAX).chain(text.iter().copied());
            numbers.flat_map(u32::to_le_bytes).collect()
        });
        let parts: Vec<_> = parts.chain(reserved).collect();
        let names = self.sources.iter().map(|source| source.name.as_bytes());
        Digest::of_parts(names.chain(parts.iter().map(Vec::as_slice)))
    }
}

/// Pieces of a source's documents, round-robin over the documents, and whether each belongs to the first half.
fn pieces(source: &Source, length: usize) -> impl Iterator<Item = (&[u32], bool)> {
    let many = source.documents.len() >= DOCUMENTS_FOR_HALVES;
    let mut queues: Vec<_> = source
        .documents
        .iter()
        .map(|document| document.chunks(length.max(1)))
        .collect();
    let mut number = 0;
    let mut round = Vec::new();
    std::iter::from_fn(move || {
        if round.is_empty() {
            for (document, queue) in queues.iter_mut().enumerate().rev() {
                round.extend(queue.next().map(|piece| (document, piece)));
            }
        }
        let (document, piece) = round.pop()?;
        number += 1;
        let half = if many { document } else { number - 1 };
        Some((piece, half % 2 == 0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(name: &str, documents: Vec<Vec<u32>>) -> Source {
        Source {
            name: name.to_owned(),
            formats: BTreeMap::new(),
            documents,
        }
    }

    fn one(
        documents: Vec<Vec<u32>>,
        length: usize,
        tokens: usize,
    ) -> Result<Calibration, ProfileError> {
        Calibration::new(vec![source("text", documents)], length, tokens)
    }

    #[test]
    fn the_digest_depends_on_the_halves() {
        let piece = |number: u32| vec![number; 5];
        let single = one(vec![(0..12).flat_map(piece).collect()], 5, 50).unwrap();
        // The tenth piece is the second one of the first document.
        let mut documents: Vec<Vec<u32>> = (0..9).map(piece).collect();
        (9..12).for_each(|number| documents[number as usize - 9].extend(piece(number)));
        let several = one(documents, 5, 50).unwrap();
        let tokens = |calibration: &Calibration| {
            let sequences = calibration.sequences().iter();
            sequences.map(|one| one.tokens.clone()).collect::<Vec<_>>()
        };
        assert_eq!(tokens(&single), tokens(&several));
        assert_ne!(single, several);
        assert_ne!(single.digest(), several.digest());
    }

    #[test]
    fn a_fifth_is_held_out_and_the_limit_holds() {
        let calibration =
            one((0..100).map(|document| vec![document; 7]).collect(), 5, 200).unwrap();
        let all = 0..calibration.sequences().len();
        assert_eq!(calibration.tokens(), 200);
        let held_out = calibration.part_tokens(Part::HeldOut, all.clone());
        assert_eq!(calibration.part_tokens(Part::Training, all) + held_out, 200);
        assert!((30..=50).contains(&held_out), "{held_out}");
        assert!(
            calibration
                .sequences()
                .iter()
                .all(|sequence| sequence.tokens.len() <= 5)
        );
    }

    #[test]
    fn a_single_long_text_has_a_held_out_part() {
        for length in 10..60 {
            let calibration = one(vec![(0..length).collect()], 512, 1000).unwrap();
            let all = 0..calibration.sequences().len();
            assert!(
                calibration.part_tokens(Part::HeldOut, all) > 0,
                "{length} tokens"
            );
        }
        assert!(matches!(
            one(vec![vec![1, 2]], 512, 1000),
            Err(ProfileError::TooShort { .. })
        ));
        assert!(matches!(
            one(vec![vec![]], 512, 1000),
            Err(ProfileError::NoTokens)
        ));
    }

    #[test]
    fn sources_and_documents_alternate() {
        let calibration = Calibration::new(
            vec![
                source("a", vec![vec![1; 20], vec![2; 10]]),
                source("b", vec![vec![3; 10]]),
            ],
            5,
            30,
        )
        .unwrap();
        let order: Vec<u32> = calibration
            .sequences()
            .iter()
            .map(|s| s.tokens[0])
            .collect();
        assert_eq!(order, [1, 3, 2, 3, 1, 2]);
        let sources: Vec<usize> = calibration.sequences().iter().map(|s| s.source).collect();
        assert_eq!(sources, [0, 1, 0, 1, 0, 0]);
    }

    #[test]
    fn halves_of_many_documents_share_none() {
        let documents = (0..20).map(|document| vec![document; 12]).collect();
        let calibration = one(documents, 5, 1000).unwrap();
        let halves = |first: bool| -> std::collections::BTreeSet<u32> {
            let sequences = calibration.sequences().iter();
            let half = sequences.filter(|sequence| sequence.first_half == first);
            half.map(|sequence| sequence.tokens[0]).collect()
        };
        assert!(halves(true).is_disjoint(&halves(false)));
        assert_eq!(halves(true).len(), 10);
    }

    #[test]
    fn shards_partition_the_sequences() {
        let calibration = one(vec![(0..103).collect()], 5, 1000).unwrap();
        for count in 1..calibration.sequences().len() {
            let mut next = 0;
            for index in 1..=count {
                let range = calibration.shard(Shard { index, count }).unwrap();
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next, calibration.sequences().len());
        }
        assert!(
            calibration
                .shard(Shard {
                    index: 7,
                    count: 1000
                })
                .is_err()
        );
    }
}
