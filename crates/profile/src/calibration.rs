//! Calibration text as token sequences, a fifth of which is held out.

use powerinfer_artifact::Digest;

use crate::ProfileError;

/// One sequence in so many is held out from training predictors.
const HELD_OUT_EVERY: usize = 5;

/// What a sequence is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Predictors learn from it.
    Training,
    /// Predictors are judged on it.
    HeldOut,
}

impl Part {
    /// Both, in the order of their files.
    pub const ALL: [Self; 2] = [Self::Training, Self::HeldOut];

    /// The name tensors of this part carry.
    pub fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::HeldOut => "held_out",
        }
    }
}

/// Token sequences, each run from its first position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calibration {
    sequences: Vec<Vec<u32>>,
}

impl Calibration {
    /// Cuts documents into sequences of at most `length` tokens, until `tokens` are there.
    ///
    /// Every document begins a sequence, so that what the model sees is what it would see.
    pub fn new(
        documents: impl IntoIterator<Item = Vec<u32>>,
        length: usize,
        tokens: usize,
    ) -> Result<Self, ProfileError> {
        let mut sequences = Vec::new();
        let mut left = tokens;
        for document in documents {
            for piece in document.chunks(length) {
                let piece = &piece[..piece.len().min(left)];
                if !piece.is_empty() {
                    sequences.push(piece.to_vec());
                    left -= piece.len();
                }
            }
            if left == 0 {
                break;
            }
        }
        match sequences.len() {
            0 => Err(ProfileError::NoTokens),
            few if few < HELD_OUT_EVERY => {
                // A single long text still has parts: its sequences are cut shorter.
                let total: usize = sequences.iter().map(Vec::len).sum();
                if total < 2 * HELD_OUT_EVERY {
                    return Err(ProfileError::TooShort {
                        sequences: few,
                        needed: HELD_OUT_EVERY,
                    });
                }
                let pieces = sequences.concat();
                let shorter = total / HELD_OUT_EVERY;
                Ok(Self {
                    sequences: pieces.chunks(shorter).map(<[u32]>::to_vec).collect(),
                })
            }
            _ => Ok(Self { sequences }),
        }
    }

    /// The sequences and what each is for.
    pub fn sequences(&self) -> impl Iterator<Item = (&[u32], Part)> {
        let part = |index: usize| {
            if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 {
                Part::HeldOut
            } else {
                Part::Training
            }
        };
        self.sequences
            .iter()
            .enumerate()
            .map(move |(index, sequence)| (&sequence[..], part(index)))
    }

    /// Tokens of one part.
    pub fn tokens(&self, wanted: Part) -> usize {
        self.sequences()
            .filter(|(_, part)| *part == wanted)
            .map(|(sequence, _)| sequence.len())
            .sum()
    }

    /// A digest of the text as the model sees it.
    pub fn digest(&self) -> Digest {
        let bytes: Vec<Vec<u8>> = self
            .sequences
            .iter()
            .map(|sequence| {
                sequence
                    .iter()
                    .flat_map(|token| token.to_le_bytes())
                    .collect()
            })
            .collect();
        Digest::of_parts(bytes.iter().map(Vec::as_slice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifth_is_held_out_and_the_limit_holds() {
        let documents = (0..100).map(|document| vec![document; 7]);
        let calibration = Calibration::new(documents, 5, 200).unwrap();
        assert_eq!(
            calibration.tokens(Part::Training) + calibration.tokens(Part::HeldOut),
            200
        );
        let held_out = calibration.tokens(Part::HeldOut);
        assert!((30..=50).contains(&held_out), "{held_out}");
        assert!(
            calibration
                .sequences()
                .all(|(sequence, _)| sequence.len() <= 5)
        );
    }

    #[test]
    fn one_long_text_still_has_a_held_out_part() {
        let calibration = Calibration::new([(0..60).collect()], 512, 1000).unwrap();
        assert!(calibration.tokens(Part::HeldOut) > 0);
        for length in 10..40 {
            let calibration = Calibration::new([(0..length).collect()], 512, 1000).unwrap();
            assert!(calibration.tokens(Part::HeldOut) > 0, "{length} tokens");
        }
        assert!(matches!(
            Calibration::new([vec![1, 2]], 512, 1000),
            Err(ProfileError::TooShort { .. })
        ));
        assert!(matches!(
            Calibration::new([vec![]], 512, 1000),
            Err(ProfileError::NoTokens)
        ));
    }
}
