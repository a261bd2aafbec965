//! Vectors prepared for kernels: quantised to int8 for integer arithmetic, or packed for float GEMMs.

use powerinfer_tensor::BLOCK;

/// Blocks per span, the unit of work within a row: their scales fill the widest register.
pub(crate) const SPAN: usize = 16;
/// Columns of a span.
pub(crate) const SPAN_COLUMNS: usize = SPAN * BLOCK;
/// Blocks of nibbles that fill the widest register.
pub(crate) const NIBBLE_GROUP: usize = 4;

/// A cache line; aligned, so that no register load crosses one.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [f32; 16]);

/// Vectors quantised to int8 in blocks of 32: a value is approximately `quant * scale`, with quants from -127 to 127.
///
/// Filled by [`Isa::quantise`](crate::Isa::quantise), which reuses the memory. The error of a value is at most half the
/// scale, 1/254 of the largest magnitude of its block. A block with a NaN or an infinity has a NaN scale, so that dot
/// products with it are NaN; a block with all magnitudes below 1e-30 is zero.
#[derive(Debug, Clone, Default)]
pub struct QuantisedActivations {
    pub(crate) tokens: usize,
    pub(crate) columns: usize,
    /// `[tokens, spans]`.
    pub(crate) spans: Vec<ActivationSpan>,
}

impl QuantisedActivations {
    /// Number of vectors.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Elements per vector.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of a quantised vector of `columns` elements.
    pub fn vector_bytes(columns: usize) -> usize {
        columns.div_ceil(SPAN_COLUMNS) * size_of::<ActivationSpan>()
    }

    /// Vector `token`.
    pub fn vector(&self, token: usize) -> QuantisedVector<'_> {
        QuantisedVector {
            columns: self.columns,
            spans: self.token(token),
        }
    }

    /// The vectors `tokens`, or all of them without a list.
    pub(crate) fn vectors<'a>(&'a self, tokens: Option<&'a [u32]>) -> Vectors<'a> {
        Vectors {
            spans: &self.spans,
            length: self.columns.div_ceil(SPAN_COLUMNS),
            count: tokens.map_or(self.tokens, <[u32]>::len),
            tokens,
        }
    }

    /// The spans of vector `token`.
    pub(crate) fn token(&self, token: usize) -> &[ActivationSpan] {
        let spans = self.columns.div_ceil(SPAN_COLUMNS);
        &self.spans[token * spans..][..spans]
    }
}

/// Some vectors of [`QuantisedActivations`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vectors<'a> {
    /// `[all vectors, length]`.
    pub(crate) spans: &'a [ActivationSpan],
    /// Spans of a vector.
    pub(crate) length: usize,
    /// Number of vectors.
    pub(crate) count: usize,
    /// Indices of the vectors; all without a list.
    pub(crate) tokens: Option<&'a [u32]>,
}

impl<'a> From<QuantisedVector<'a>> for Vectors<'a> {
    fn from(vector: QuantisedVector<'a>) -> Self {
        Self {
            spans: vector.spans,
            length: vector.spans.len(),
            count: 1,
            tokens: None,
        }
    }
}

impl<'a> Vectors<'a> {
    /// Vector `index`.
    #[inline(always)]
    pub(crate) fn get(&self, index: usize) -> &'a [ActivationSpan] {
        let token = self.tokens.map_or(index, |tokens| tokens[index] as usize);
        &self.spans[token * self.length..][..self.length]
    }
}

/// One vector of [`QuantisedActivations`].
#[derive(Debug, Clone, Copy)]
pub struct QuantisedVector<'a> {
    pub(crate) columns: usize,
    pub(crate) spans: &'a [ActivationSpan],
}

impl<'a> QuantisedVector<'a> {
    /// The quants of block `index`, padded with zeros, and their scale.
    ///
    /// # Panics
    ///
    /// The block does not exist.
    pub fn block(&self, index: usize) -> (&'a [i8; BLOCK], f32) {
        let span = &self.spans[index / SPAN];
        let quants = &span.quants.as_chunks().0[index % SPAN];
        (quants, span.scales[index % SPAN])
    }
}

/// Vectors in the order in which [`Isa::gemm_packed`](crate::Isa::gemm_packed) reads them; empty if it reads the vectors
/// themselves.
///
/// Filled by [`Isa::pack`](crate::Isa::pack), which reuses the memory.
#[derive(Debug, Clone, Default)]
pub struct PackedActivations {
    pub(crate) tokens: usize,
    pub(crate) columns: usize,
    /// Lanes of the instruction set for which the vectors are packed.
    pub(crate) lanes: usize,
    pub(crate) lines: Vec<Line>,
}

impl PackedActivations {
    /// Bytes of a packed vector of `columns` elements.
    pub fn vector_bytes(columns: usize) -> usize {
        columns.next_multiple_of(BLOCK) * size_of::<f32>()
    }

    /// The values of `count` vectors from `first`.
    pub(crate) fn part(&self, first: usize, count: usize) -> &[f32] {
        let vector = self.columns.next_multiple_of(BLOCK);
        &bytemuck::cast_slice(&self.lines)[first * vector..][..count * vector]
    }
}

/// Sixteen blocks of a vector, padded with zeros.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct ActivationSpan {
    /// `[block, 32]`.
    pub(crate) quants: [i8; SPAN_COLUMNS],
    /// The quants in the order of the nibbles of four-bit weights: of every four blocks, the first halves, then the second
    /// halves.
    pub(crate) half_blocks: [i8; SPAN_COLUMNS],
    /// Scale of each block.
    pub(crate) scales: [f32; SPAN],
    /// Sum of the quants of each block.
    pub(crate) sums: [i32; SPAN],
}

impl ActivationSpan {
    pub(crate) const ZERO: Self = Self {
        quants: [0; SPAN_COLUMNS],
        half_blocks: [0; SPAN_COLUMNS],
        scales: [0.0; SPAN],
        sums: [0; SPAN],
    };

    /// Quantises block `block`; `values` are padded with zeros.
    #[inline(always)]
    pub(crate) fn set(&mut self, block: usize, values: &[f32; BLOCK]) {
        // The bits of magnitudes sort like the magnitudes, NaN last.
        let mut largest = 0;
        for value in values {
            largest = largest.max(value.to_bits() & 0x7fff_ffff);
        }
        let (scale, inverse) = int8_scale(largest);
        self.scales[block] = scale;
        let mut quants = [0; BLOCK];
        for (quant, value) in quants.iter_mut().zip(values) {
            *quant = to_int8(*value, inverse);
        }
        let mut sum = 0;
        for quant in quants {
            sum += i32::from(quant);
        }
        self.sums[block] = sum;
        self.quants[block * BLOCK..][..BLOCK].copy_from_slice(&quants);
        let (first, second) = quants.split_at(BLOCK / 2);
        let start =
            block / NIBBLE_GROUP * NIBBLE_GROUP * BLOCK + block % NIBBLE_GROUP * (BLOCK / 2);
        self.half_blocks[start..][..BLOCK / 2].copy_from_slice(first);
        self.half_blocks[start + NIBBLE_GROUP * BLOCK / 2..][..BLOCK / 2].copy_from_slice(second);
    }
}

/// Bits of the smallest magnitude that is not rounded to 0, and of infinity.
const TINY: u32 = 1e-30f32.to_bits();
const INFINITE: u32 = f32::INFINITY.to_bits();

/// Scale and inverse scale of values whose largest magnitude has the bits `largest`.
#[inline(always)]
pub(crate) fn int8_scale(largest: u32) -> (f32, f32) {
    // Masks instead of branches, so that loops are vectorised.
    let mask = |is: bool| u32::from(is).wrapping_neg();
    let is_normal = mask((TINY..INFINITE).contains(&largest));
    let nan = mask(largest >= INFINITE) & f32::NAN.to_bits();
    let largest = f32::from_bits(largest);
    let (scale, inverse) = (largest / 127.0, 127.0 / largest);
    (
        f32::from_bits(scale.to_bits() & is_normal | nan),
        f32::from_bits(inverse.to_bits() & is_normal),
    )
}

/// `value * inverse`, rounded to an integer from -127 to 127.
#[inline(always)]
pub(crate) fn to_int8(value: f32, inverse: f32) -> i8 {
    // Not finite with a zero inverse: the scale is NaN already.
    let value = if inverse == 0.0 { 0.0 } else { value * inverse };
    // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low byte.
    (value + 12_582_912.0).to_bits() as u8 as i8
}
