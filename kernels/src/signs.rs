//! Matrices of which only the signs are kept, a bit a number: what sign-bit prediction reads.

use crate::KernelError;

/// Bits of a word.
const WORD: usize = u64::BITS as usize;

/// Signs of numbers, a bit each, lowest bit first: set where the number is negative. The last word
/// is filled up with zeros.
pub fn pack_signs(values: &[f32]) -> Vec<u64> {
    let word = |group: &[f32]| {
        let bits = group.iter().enumerate();
        bits.fold(0, |word, (bit, value)| {
            word | u64::from(value.is_sign_negative()) << bit
        })
    };
    values.chunks(WORD).map(word).collect()
}

/// The signs of a matrix, borrowed: `rows` rows of `columns` bits, each row filled up to whole
/// 64-bit words of little-endian bytes.
#[derive(Debug, Clone, Copy)]
pub struct SignMatrix<'a> {
    pub(crate) words: &'a [[u8; 8]],
    columns: usize,
}

impl<'a> SignMatrix<'a> {
    /// Bytes of a row of `columns` signs.
    pub fn row_bytes(columns: usize) -> usize {
        columns.div_ceil(WORD) * size_of::<u64>()
    }

    /// The matrix whose rows lie in `bytes` one after the other.
    ///
    /// Fails where `bytes` do not hold just `rows` rows.
    pub fn new(bytes: &'a [u8], rows: usize, columns: usize) -> Result<Self, KernelError> {
        let expected = rows.checked_mul(Self::row_bytes(columns));
        match bytes.as_chunks::<8>() {
            (words, []) if expected == Some(bytes.len()) => Ok(Self { words, columns }),
            _ => Err(KernelError::Signs {
                rows,
                columns,
                bytes: bytes.len(),
            }),
        }
    }

    /// All words, row after row.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        self.words.iter().map(|word| u64::from_le_bytes(*word))
    }

    /// Signs of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.words.as_flattened().len()
    }

    /// Words of a row.
    pub(crate) fn row_words(&self) -> usize {
        self.columns.div_ceil(WORD)
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.words.len().checked_div(self.row_words()).unwrap_or(0)
    }

    /// The rows `range`.
    pub fn rows_range(&self, range: std::ops::Range<usize>) -> Self {
        let width = self.row_words();
        Self {
            words: &self.words[range.start * width..range.end * width],
            columns: self.columns,
        }
    }
}
