//! The arithmetic of tensor cores, as the emulator's `mma_m16n8k16` has it.

use half::f16;

/// Products added at once by a tensor core of compute capability 8.0.
const PRODUCTS_AT_ONCE: usize = 8;
/// Bits kept below the last bit of the largest addend.
const EXTRA_BITS: i32 = 1;

/// Operands of a lane: four registers of a, two of b, four sums, as `mma.m16n8k16` distributes them.
pub(crate) type Fragments = [u32; 10];

/// The sums of every lane plus a · b.
pub(crate) fn multiply_accumulate(lanes: &[Fragments; 32]) -> [[u32; 4]; 32] {
    let numbers = lanes.map(|lane| {
        let mut numbers = [0.0f32; 12];
        for (index, number) in numbers.iter_mut().enumerate() {
            *number = f16::from_bits((lane[index / 2] >> (16 * (index % 2))) as u16).to_f32();
        }
        numbers
    });
    let sum = |lane: usize, index: usize| {
        let (row, column, lower) = (lane / 4, lane % 4 * 2 + index % 2, index / 2);
        let mut sum = f32::from_bits(lanes[lane][6 + index]);
        for half in 0..2 {
            let product = |k: usize| {
                let a = numbers[row * 4 + k / 2][2 * (lower + 2 * half) + k % 2];
                let b = numbers[column * 4 + k / 2][2 * (4 + half) + k % 2];
                f64::from(a) * f64::from(b)
            };
            sum = add_products(sum, std::array::from_fn(product));
        }
        sum.to_bits()
    };
    std::array::from_fn(|lane| std::array::from_fn(|index| sum(lane, index)))
}

/// Adds exact products: all addends are aligned to the largest and truncated; so is the result.
fn add_products(sum: f32, products: [f64; PRODUCTS_AT_ONCE]) -> f32 {
    let sum = f64::from(sum);
    let plain = sum + products.iter().sum::<f64>();
    let largest = products
        .iter()
        .fold(sum.abs(), |largest, product| largest.max(product.abs()));
    if largest == 0.0 || !plain.is_finite() {
        return plain as f32;
    }
    let power = |exponent: i32| f64::from_bits(((exponent + 1023) as u64) << 52);
    let exponent = (largest.to_bits() >> 52) as i32 - 1023;
    let last = (exponent - 23 - EXTRA_BITS).max(-149);
    let aligned = |addend: f64| (addend * power(-last)) as i64;
    let total = aligned(sum) + products.into_iter().map(aligned).sum::<i64>();
    let mut magnitude = total.unsigned_abs();
    if magnitude >> 24 != 0 {
        let excess = 64 - magnitude.leading_zeros() - 24;
        magnitude = magnitude >> excess << excess;
    }
    let rounded = magnitude as f64 * power(last);
    (if total < 0 { -rounded } else { rounded }) as f32
}
