//! Super-blocks of 256 numbers, eight blocks of 32 with a scale and a minimum each: packing, and reading of
//! ggml's layout.
//!
//! The scale and the minimum of a block are first searched for in `f32`. The super-block's steps are then 1/63 of
//! its largest scale and of its largest minimum; both are rounded to multiples of these steps, and
//! neighbouring multiples are tried.

use half::f16;

use crate::format::{BLOCK, SUPER_BLOCK};

/// Largest number of four bits.
const LARGEST: f32 = 15.0;
/// Largest scale or minimum of six bits.
const LARGEST_FACTOR: f32 = 63.0;
/// Tenths of a step by which the number of steps in a block's range is varied around [`LARGEST`].
const STEPS: std::ops::RangeInclusive<i32> = -10..=10;
/// Partial sums computed in parallel.
const LANES: usize = 8;

/// A weight of block b is `scales[0] * factors[b][0] * number - scales[1] * factors[b][1]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SuperBlock {
    pub(crate) scales: [f16; 2],
    pub(crate) factors: [[u8; 2]; SUPER_BLOCK],
    pub(crate) numbers: [[u8; BLOCK]; SUPER_BLOCK],
}

/// Block to pack.
struct Source {
    /// Finite; past the last column unspecified.
    values: [f32; BLOCK],
    /// Weight of the error of each value: larger for large values, zero past the last column.
    weights: [f32; BLOCK],
    /// Sums of the weights, and of the values times the weights.
    sums: [f32; 2],
}

/// Packs at most 256 numbers, minimising the weighted squared error.
pub(crate) fn pack_super_block(values: &[f32]) -> SuperBlock {
    let mut sources = Vec::with_capacity(SUPER_BLOCK);
    sources.extend(values.chunks(BLOCK).map(Source::new));
    let mut found = [[0.0; 2]; SUPER_BLOCK];
    for (found, source) in found.iter_mut().zip(&sources) {
        *found = source.search();
    }
    let largest = |part: usize| found.iter().fold(0.0f32, |all, found| all.max(found[part]));
    let scales = [scale_for(largest(0)), scale_for(largest(1))];
    let mut packed = SuperBlock {
        scales,
        factors: [[0; 2]; SUPER_BLOCK],
        numbers: [[0; BLOCK]; SUPER_BLOCK],
    };
    for (block, source) in sources.iter().enumerate() {
        let factors = source.factors(scales.map(f16::to_f32), found[block]);
        let [scale, minimum] = scaled(scales.map(f16::to_f32), factors);
        packed.factors[block] = factors.map(|factor| factor as u8);
        packed.numbers[block] = source
            .numbers(inverse(scale), minimum)
            .map(|number| number as u8);
    }
    packed
}

/// Unpacks ggml's 144 bytes: both scales, the packed factors, and the numbers, two blocks in the low and the
/// high nibbles of 32 bytes.
pub(crate) fn unpack_ggml(bytes: &[u8; 144]) -> SuperBlock {
    let half = |place: usize| f16::from_le_bytes([bytes[place], bytes[place + 1]]);
    let packed = &bytes[4..16];
    let mut factors = [[0; 2]; SUPER_BLOCK];
    for (block, factors) in factors.iter_mut().enumerate() {
        *factors = match block.checked_sub(4) {
            None => [packed[block] & 63, packed[block + 4] & 63],
            // The lower four bits share a byte; the upper two are above the first blocks' six.
            Some(first) => [
                packed[block + 4] & 15 | packed[first] >> 6 << 4,
                packed[block + 4] >> 4 | packed[block] >> 6 << 4,
            ],
        };
    }
    let mut numbers = [[0; BLOCK]; SUPER_BLOCK];
    for (block, numbers) in numbers.iter_mut().enumerate() {
        let packed = &bytes[16 + BLOCK * (block / 2)..];
        for (number, packed) in numbers.iter_mut().zip(packed) {
            *number = packed >> (4 * (block % 2)) & 15;
        }
    }
    SuperBlock {
        scales: [half(0), half(2)],
        factors,
        numbers,
    }
}

impl Source {
    fn new(values: &[f32]) -> Self {
        // Numbers are clamped to the largest that a scale and a minimum can represent.
        let bound = f16::MAX.to_f32() * LARGEST_FACTOR;
        let finite = |x: f32| {
            if x.is_nan() {
                0.0
            } else {
                x.clamp(-bound, bound)
            }
        };
        // A partial block is filled up with its first value, which leaves its range unchanged.
        let mut block = [finite(values[0]); BLOCK];
        for (block, value) in block.iter_mut().zip(values) {
            *block = finite(*value);
        }
        let squares: f32 = block[..values.len()].iter().map(|x| x * x).sum();
        let usual = (squares / values.len() as f32).sqrt();
        let mut weights = [0.0; BLOCK];
        for (weight, value) in weights[..values.len()].iter_mut().zip(block) {
            *weight = usual + value.abs();
        }
        let mut sums = [[0.0f32; LANES]; 2];
        for (x, w) in lanes(&block).iter().zip(lanes(&weights)) {
            for lane in 0..LANES {
                sums[0][lane] += w[lane];
                sums[1][lane] += w[lane] * x[lane];
            }
        }
        Self {
            values: block,
            weights,
            sums: sums.map(|lanes| lanes.iter().sum()),
        }
    }

    /// Scale and minimum, neither negative, with the smallest error found: the values are quantised with several
    /// scales, and for each result the best scale and minimum are fitted.
    fn search(&self) -> [f32; 2] {
        // A minimum is subtracted and never negative, so that zero is always within the range.
        let (mut low, mut high) = (0.0f32, f32::MIN);
        for x in self.values {
            (low, high) = (low.min(x), high.max(x));
        }
        let range = high - low;
        if range <= 0.0 {
            return [0.0, -low];
        }
        let mut best = [range / LARGEST, -low];
        let mut least = self.error(&self.numbers(LARGEST / range, -low), best);
        for step in STEPS {
            let numbers = self.numbers((LARGEST + 0.1 * step as f32) / range, -low);
            let Some(fitted) = self.fitted(&numbers) else {
                continue;
            };
            let error = self.error(&numbers, fitted);
            if error < least {
                (best, least) = (fitted, error);
            }
        }
        best
    }

    /// The whole numbers nearest to the values: `(value + minimum) * inverse`.
    #[inline(always)]
    fn numbers(&self, inverse: f32, minimum: f32) -> [f32; BLOCK] {
        self.values.map(|x| {
            let number = ((x + minimum) * inverse).clamp(0.0, LARGEST);
            // Adding 2^23 leaves the nearest whole number, ties to even.
            number + 8_388_608.0 - 8_388_608.0
        })
    }

    /// Scale and minimum with the least error; `None` if all numbers are equal.
    fn fitted(&self, numbers: &[f32; BLOCK]) -> Option<[f32; 2]> {
        let mut sums = [[0.0f32; LANES]; 3];
        let parts = lanes(&self.values).iter().zip(lanes(&self.weights));
        for ((x, w), n) in parts.zip(lanes(numbers)) {
            for lane in 0..LANES {
                let weighted = w[lane] * n[lane];
                sums[0][lane] += weighted;
                sums[1][lane] += weighted * n[lane];
                sums[2][lane] += weighted * x[lane];
            }
        }
        let [n, nn, nx] = sums.map(|lanes| lanes.iter().sum::<f32>());
        let [w, x] = self.sums;
        let determinant = w * nn - n * n;
        if determinant <= 0.0 {
            return None;
        }
        let minimum = (n * nx - nn * x) / determinant;
        Some(if minimum < 0.0 {
            [nx / nn, 0.0]
        } else {
            [((w * nx - x * n) / determinant).max(0.0), minimum]
        })
    }

    /// Weighted sum of the squared errors.
    #[inline(always)]
    fn error(&self, numbers: &[f32; BLOCK], [scale, minimum]: [f32; 2]) -> f32 {
        let mut sums = [0.0f32; LANES];
        let parts = lanes(&self.values).iter().zip(lanes(&self.weights));
        for ((x, w), n) in parts.zip(lanes(numbers)) {
            for lane in 0..LANES {
                let error = n[lane] * scale - minimum - x[lane];
                sums[lane] += w[lane] * error * error;
            }
        }
        sums.iter().sum()
    }

    /// Multiples of `scales` with the least error, among those around `wanted`.
    fn factors(&self, scales: [f32; 2], wanted: [f32; 2]) -> [f32; 2] {
        let nearest = |part: usize| {
            let factor = wanted[part] * inverse(scales[part]);
            factor.min(LARGEST_FACTOR).round()
        };
        let around = [nearest(0), nearest(1)];
        let (mut best, mut least) = (around, f32::INFINITY);
        for down in [0.0, -1.0, 1.0] {
            for across in [0.0, -1.0, 1.0] {
                let tried = [around[0] + down, around[1] + across];
                if tried
                    .iter()
                    .any(|factor| !(0.0..=LARGEST_FACTOR).contains(factor))
                {
                    continue;
                }
                let [scale, minimum] = scaled(scales, tried);
                let numbers = self.numbers(inverse(scale), minimum);
                let error = self.error(&numbers, [scale, minimum]);
                if error < least {
                    (best, least) = (tried, error);
                }
            }
        }
        best
    }
}

/// Scale and minimum of a block.
fn scaled(scales: [f32; 2], factors: [f32; 2]) -> [f32; 2] {
    [scales[0] * factors[0], scales[1] * factors[1]]
}

/// Step of which `largest` is at most about 63 multiples.
fn scale_for(largest: f32) -> f16 {
    let scale = f16::from_f32(largest / LARGEST_FACTOR).min(f16::MAX);
    if scale.to_f32() * (LARGEST_FACTOR + 0.5) < largest && scale < f16::MAX {
        f16::from_bits(scale.to_bits() + 1)
    } else {
        scale
    }
}

/// `1 / scale`, or zero.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

fn lanes(block: &[f32; BLOCK]) -> &[[f32; LANES]] {
    block.as_chunks().0
}
