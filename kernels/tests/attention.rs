//! CPU attention kernels: the same bits on every instruction set, close to arithmetic in `f64`; and the KV cache planes.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "support/noise.rs"]
mod noise;

use noise::noise;
use powerinfer_kernels::{Isa, exp2};
use powerinfer_tensor::{CacheFormat, CacheLayout, CachePlane};
use proptest::prelude::*;

const HEAD_SIZES: [usize; 9] = [1, 8, 31, 33, 64, 80, 96, 128, 256];

/// A plane of the keys or values of one head.
fn plane(layout: CacheLayout, format: CacheFormat, head_size: usize, heads: &[f32]) -> CachePlane {
    plane_of(layout, format, [1, head_size], heads)
}

/// A plane of `[heads, head size]` with the positions of `rows`.
fn plane_of(
    layout: CacheLayout,
    format: CacheFormat,
    [heads, head_size]: [usize; 2],
    rows: &[f32],
) -> CachePlane {
    let rows = rows.chunks(heads * head_size);
    let mut plane = CachePlane::new(layout, format, heads, head_size, rows.len()).unwrap();
    rows.for_each(|row| plane.push(row));
    plane
}

/// Heads of `size` elements, each padded with zeros to `width`.
fn padded(heads: &[f32], size: usize, width: usize) -> Vec<f32> {
    let fill = |head: &[f32]| [head, &vec![0.0; width - size][..]].concat();
    heads.chunks(size).flat_map(fill).collect()
}

/// Largest rounding error of a format, for values between -1 and 1.
fn rounding(format: CacheFormat) -> f64 {
    match format {
        CacheFormat::F32 => 0.0,
        CacheFormat::F16 => 0.5 / 1024.0,
        CacheFormat::Q8_0 => 0.6 / 127.0,
    }
}

fn same_bits(a: &[f32], b: &[f32], what: &str) {
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {index}: {a} {b}");
    }
}

#[test]
fn scores_and_weighted_values_match_f64_on_every_instruction_set() {
    for format in CacheFormat::ALL {
        for head_size in HEAD_SIZES {
            for (queries, positions) in [(1, 1), (2, 33), (3, 70), (4, 64), (15, 40), (8, 97)] {
                let seed = (head_size * 100 + positions) as u64;
                let cached = noise(seed, positions * head_size);
                let query = noise(seed + 1, queries * head_size);
                let keys = plane(CacheLayout::Keys, format, head_size, &cached);
                let values = plane(CacheLayout::Values, format, head_size, &cached);
                let width = keys.width();
                let tiles = 0..positions.div_ceil(32);
                let length = 32 * tiles.len();
                let weights = padded(&noise(seed + 2, queries * positions), positions, length);
                let what = format!("{format} {head_size} {queries} x {positions}");
                let run = |isa: Isa| {
                    let mut scores = vec![f32::NAN; queries * length];
                    let heads = padded(&query, head_size, width);
                    isa.scores(&keys, 0, tiles.clone(), &heads, &mut scores);
                    let mut sums = vec![0.25; queries * width];
                    isa.weighted_values(&values, 0, tiles.clone(), &weights, &mut sums);
                    (scores, sums)
                };
                let (scores, sums) = run(Isa::SCALAR);
                for isa in Isa::available() {
                    let found = run(isa);
                    same_bits(&found.0, &scores, &format!("{what} scores {isa}"));
                    same_bits(&found.1, &sums, &format!("{what} sums {isa}"));
                }
                for q in 0..queries {
                    for p in 0..length {
                        let product = |i: usize| {
                            f64::from(query[q * head_size + i])
                                * f64::from(cached[p * head_size + i])
                        };
                        let exact: f64 = if p < positions {
                            (0..head_size).map(product).sum()
                        } else {
                            0.0
                        };
                        let allowed = head_size as f64 * (rounding(format) + 1e-6);
                        let found = f64::from(scores[q * length + p]);
                        assert!((found - exact).abs() <= allowed, "{what}: {found} {exact}");
                    }
                    for i in 0..head_size {
                        let product = |p: usize| {
                            f64::from(weights[q * length + p])
                                * f64::from(cached[p * head_size + i])
                        };
                        let exact = 0.25 + (0..positions).map(product).sum::<f64>();
                        let allowed = positions as f64 * (rounding(format) + 1e-6);
                        let found = f64::from(sums[q * width + i]);
                        assert!((found - exact).abs() <= allowed, "{what}: {found} {exact}");
                    }
                }
            }
        }
    }
}

#[test]
fn exponentials_match_f64_and_are_zero_where_masked() {
    for isa in Isa::available() {
        for (length, valid) in [(32, 0..1), (64, 5..64), (96, 40..41), (512, 31..500)] {
            let scores: Vec<f32> = noise(7, length).iter().map(|x| x * 90.0).collect();
            let mut powers = scores.clone();
            let (largest, sum) = isa.exp2_minus_max(&mut powers, valid.clone());
            let mut expected = scores.clone();
            let of_scalar = Isa::SCALAR.exp2_minus_max(&mut expected, valid.clone());
            same_bits(&powers, &expected, isa.name());
            assert_eq!((largest, sum), of_scalar, "{isa}");
            let kept = scores[valid.clone()].iter().copied();
            assert_eq!(largest, kept.fold(f32::NEG_INFINITY, f32::max));
            let mut total = 0.0;
            for (index, power) in powers.iter().enumerate() {
                let exact = f64::from(scores[index] - largest).exp2();
                if valid.contains(&index) && exact >= 2f64.powi(-126) {
                    assert!((f64::from(*power) / exact - 1.0).abs() < 4e-7)
                } else {
                    assert_eq!(*power, 0.0)
                }
                total += f64::from(*power);
            }
            assert!((f64::from(sum) / total - 1.0).abs() < 1e-5);
        }
    }
    assert_eq!(exp2(0.0), 1.0);
    assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
    assert!(exp2(f32::NAN).is_nan());
}

#[test]
fn a_range_of_tiles_gives_the_scores_of_its_positions() {
    let isa = Isa::available().pop().unwrap();
    let heads = noise(3, 130 * 64);
    let keys = plane(CacheLayout::Keys, CacheFormat::F16, 64, &heads);
    let query = noise(4, 2 * 64);
    let mut all = vec![0.0; 2 * 160];
    isa.scores(&keys, 0, 0..5, &query, &mut all);
    let mut some = vec![0.0; 2 * 64];
    isa.scores(&keys, 0, 2..4, &query, &mut some);
    assert_eq!(some[..64], all[64..128]);
    assert_eq!(some[64..], all[160 + 64..160 + 128]);
}

#[test]
fn heads_of_a_plane_do_not_mix() {
    for format in CacheFormat::ALL {
        let (heads, head_size, positions) = (3, 40, 70);
        let rows = noise(8, positions * heads * head_size);
        let query = padded(&noise(9, 2 * head_size), head_size, 64);
        let weights = padded(&noise(10, 2 * positions), positions, 96);
        let of = |layout, head: usize| {
            let rows = rows.chunks(head_size).skip(head).step_by(heads);
            plane(
                layout,
                format,
                head_size,
                &rows.collect::<Vec<_>>().concat(),
            )
        };
        let all = |layout| plane_of(layout, format, [heads, head_size], &rows);
        let (keys, values) = (all(CacheLayout::Keys), all(CacheLayout::Values));
        for isa in Isa::available() {
            for head in 0..heads {
                let run = |keys: &CachePlane, values: &CachePlane, head| {
                    let (mut scores, mut sums) = (vec![0.0; 2 * 96], vec![0.0; 2 * 64]);
                    isa.scores(keys, head, 0..3, &query, &mut scores);
                    isa.weighted_values(values, head, 0..3, &weights, &mut sums);
                    [scores, sums].concat()
                };
                let (own_keys, own_values) =
                    (of(CacheLayout::Keys, head), of(CacheLayout::Values, head));
                let alone = run(&own_keys, &own_values, 0);
                same_bits(
                    &run(&keys, &values, head),
                    &alone,
                    &format!("{format} {isa}"),
                );
            }
        }
    }
}

#[test]
fn nan_propagates_and_large_values_stay_finite() {
    for format in CacheFormat::ALL {
        let keys = plane(CacheLayout::Keys, format, 2, &[f32::NAN, 1.0, 1e6, 1.0]);
        let mut scores = vec![0.0; 32];
        let query = padded(&[1.0, 1.0], 2, 32);
        Isa::SCALAR.scores(&keys, 0, 0..1, &query, &mut scores);
        assert!(scores[0].is_nan(), "{format}");
        assert!(scores[1] > 6e4 && scores[1].is_finite(), "{format}");
    }
}

proptest! {
    #[test]
    fn truncated_and_copied_planes_equal_pushed_ones(
        format in 0usize..3,
        keys: bool,
        heads in 1usize..4,
        head_size in 1usize..70,
        positions in 1usize..100,
        kept in 0usize..100,
    ) {
        let format = CacheFormat::ALL[format];
        let layout = if keys { CacheLayout::Keys } else { CacheLayout::Values };
        let kept = kept.min(positions);
        let rows = noise(5, positions * heads * head_size);
        let whole = plane_of(layout, format, [heads, head_size], &rows);
        prop_assert_eq!(whole.bytes(), format.plane_bytes(heads, head_size, positions));
        let mut expected = CachePlane::new(layout, format, heads, head_size, positions).unwrap();
        rows.chunks(heads * head_size).take(kept).for_each(|row| expected.push(row));

        let mut truncated = plane_of(layout, format, [heads, head_size], &rows);
        truncated.truncate(kept);
        prop_assert_eq!(truncated.as_bytes(), expected.as_bytes());
        let mut copied = CachePlane::new(layout, format, heads, head_size, positions).unwrap();
        copied.copy_from(&whole, kept);
        prop_assert_eq!(copied.as_bytes(), expected.as_bytes());
        prop_assert_eq!(copied.positions(), kept);
        let mut read = CachePlane::new(layout, format, heads, head_size, positions).unwrap();
        let (values, scales) = whole.as_bytes();
        read.read_bytes(values, scales, kept);
        prop_assert_eq!(read.as_bytes(), expected.as_bytes());
        prop_assert_eq!(read.positions(), kept);

        // A truncated plane can grow again.
        for row in rows.chunks(heads * head_size).skip(kept) {
            truncated.push(row);
        }
        prop_assert_eq!(truncated.as_bytes(), whole.as_bytes());
    }
}
