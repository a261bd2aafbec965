//! Sign matrices, one bit per weight: the operand of sign-bit prediction.

use crate::TensorError;

/// Bits in a word.
const WORD: usize = u64::BITS as usize;

/// Words of the signs of `values`, one bit per value, lowest bit first.
///
/// A set bit means negative. The last word is filled up with zeros.
pub fn pack_signs(values: &[f32]) -> impl Iterator<Item = u64> {
    values.chunks(WORD).map(|group| {
        let bits = group.iter().enumerate();
        bits.fold(0, |word, (bit, value)| {
            word | u64::from(value.is_sign_negative()) << bit
        })
    })
}

/// Borrowed sign matrix `[rows, columns]`: one bit per number, each row filled up to whole 64-bit words of
/// little-endian bytes.
#[derive(Debug, Clone, Copy)]
pub struct SignMatrix<'a> {
    words: &'a [[u8; 8]],
    columns: usize,
}

impl<'a> SignMatrix<'a> {
    /// Size in bytes of a row of `columns` signs.
    pub fn row_bytes(columns: usize) -> usize {
        columns.div_ceil(WORD) * size_of::<u64>()
    }

    /// Borrows a matrix whose rows lie in `bytes` one after the other.
    ///
    /// # Errors
    ///
    /// Returns [`TensorError::Signs`] if `bytes` does not hold exactly `rows` rows.
    pub fn new(bytes: &'a [u8], rows: usize, columns: usize) -> Result<Self, TensorError> {
        let expected = rows.checked_mul(Self::row_bytes(columns));
        match bytes.as_chunks::<8>() {
            (words, []) if expected == Some(bytes.len()) => Ok(Self { words, columns }),
            _ => Err(TensorError::Signs {
                rows,
                columns,
                bytes: bytes.len(),
            }),
        }
    }

    /// Little-endian bytes of all words, row after row.
    #[inline]
    pub fn word_bytes(&self) -> &'a [[u8; 8]] {
        self.words
    }

    /// All words, row after row.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        self.words.iter().map(|word| u64::from_le_bytes(*word))
    }

    /// Number of columns.
    #[inline]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Size of all rows in bytes.
    pub fn bytes(&self) -> usize {
        self.words.as_flattened().len()
    }

    /// Number of 64-bit words in a row.
    #[inline]
    pub fn row_words(&self) -> usize {
        self.columns.div_ceil(WORD)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.words.len().checked_div(self.row_words()).unwrap_or(0)
    }

    /// Rows `range` as a matrix over the same memory.
    ///
    /// # Panics
    ///
    /// Panics if `range` does not lie within the rows.
    pub fn rows_range(&self, range: std::ops::Range<usize>) -> Self {
        let width = self.row_words();
        Self {
            words: &self.words[range.start * width..range.end * width],
            columns: self.columns,
        }
    }
}
