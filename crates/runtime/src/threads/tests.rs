//! Kernels on any number of threads.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use powerinfer_artifact::random::Random;
use powerinfer_kernels::AXPY_GROUP_ROWS;
use powerinfer_tensor::{Format, pack};
use proptest::prelude::*;

use super::{axpy::Parts, *};
use crate::{ffn::Active, input::InputBuffers};

#[test]
fn results_have_the_same_bits_on_any_number_of_threads() {
    let mut random = Random::new(1);
    let mut normal = |count: usize| {
        (0..count)
            .map(|_| random.normal() as f32)
            .collect::<Vec<_>>()
    };
    let (rows, columns, tokens) = (1031, 800, 3);
    let matrix = pack(Format::Q8_0, rows, columns, &normal(rows * columns));
    let (matrix, x, coefficients) = (matrix.as_view(), normal(tokens * columns), normal(rows));
    let listed: Vec<u32> = (0..rows as u32).collect();
    let run = |count| {
        let threads = Threads::new(Isa::SCALAR, count).unwrap();
        let mut out = [
            vec![0.0; rows],
            vec![0.0; rows],
            vec![0.0; columns],
            vec![0.0; tokens * rows],
        ];
        let mut buffers = [InputBuffers::default(), InputBuffers::default()];
        let [first, second] = &mut buffers;
        let one = Input::new(&threads, &x[..columns], columns, &matrix, first);
        let many = Input::new(&threads, &x[..], columns, &matrix, second);
        threads.gemv(&matrix, &one, &mut out[0]);
        threads.gemv_rows(&matrix, &listed, &one, &mut out[1]);
        threads.add_rows_of(&matrix, &listed, &coefficients, &mut out[2]);
        threads.gemm(&matrix, &many, &mut out[3]);
        out.concat()
            .into_iter()
            .map(f32::to_bits)
            .collect::<Vec<_>>()
    };
    assert!(
        matrix.rows() * matrix.row_bytes() >= WORTH_SPLITTING,
        "large enough to be shared"
    );
    for count in [2, 5, 7, 16] {
        assert_eq!(run(1), run(count), "{count} threads");
    }
    // Several matrices in one job.
    let short = matrix.rows_range(3..50);
    let matrices = [&short, &matrix, &short];
    for count in [1, 3, 16] {
        let threads = Threads::new(Isa::SCALAR, count).unwrap();
        let mut buffers = InputBuffers::default();
        let input = Input::new(&threads, &x[..columns], columns, &matrix, &mut buffers);
        let mut each = vec![9.0; 47 + rows + 47];
        let mut sums = vec![0.0; 3000];
        let total = |products: &mut [f32]| products.iter().sum::<f32>();
        threads.gemv_each_then(
            &matrices,
            &input,
            &mut each,
            total,
            (&mut sums, 1 << 20),
            |range, sums, total| {
                assert_eq!(range.len(), sums.len());
                sums.fill(*total);
            },
        );
        let total: f32 = each.iter().sum();
        assert!(sums.iter().all(|sum| *sum == total));
        let mut alone = vec![0.0; rows];
        threads.gemv(&matrix, &input, &mut alone);
        assert_eq!(each, [&alone[3..50], &alone, &alone[3..50]].concat());
    }
}

#[test]
fn sums_of_several_tokens_have_the_bits_of_single_ones_whatever_each_part_lists() {
    let (rows, columns, tokens) = (1100, 1200, 14);
    let mut random = Random::new(2);
    let weights: Vec<f32> = (0..rows * columns)
        .map(|_| random.normal() as f32)
        .collect();
    // Ranges of 256 rows, of which all, most, few or none are listed, and a short one of which only one token lists some. Seven other
    // tokens share one range, and the last token lists nothing.
    let shares = |token: usize| match token {
        3 => [1.0, 0.7, 0.02, 0.0, 0.5],
        0..=2 | 4..=5 => [1.0, 0.7, 0.02, 0.0, 0.0],
        6..13 => [0.0, 0.0, 0.0, 1.0, 0.0],
        _ => [0.0; 5],
    };
    let active: Vec<Active> = (0..tokens)
        .map(|token| {
            let is_listed = |row: &u32| random.unit() < shares(token)[*row as usize / 256];
            let rows: Vec<u32> = (0..rows as u32).filter(is_listed).collect();
            let coefficients = rows.iter().map(|row| (*row as f32).sin()).collect();
            Active { rows, coefficients }
        })
        .collect();
    let union: BTreeSet<u32> = active.iter().flat_map(|a| a.rows.iter().copied()).collect();
    for format in Format::ALL {
        let matrix = pack(format, rows, columns, &weights);
        for (isa, count) in [
            (Isa::SCALAR, 2),
            (Isa::detect().unwrap(), 1),
            (Isa::detect().unwrap(), 3),
        ] {
            let threads = Threads::new(isa, count).unwrap();
            let mut single = vec![0.0; tokens * columns];
            for (active, out) in active.iter().zip(single.chunks_exact_mut(columns)) {
                threads.add_rows_of(&matrix.as_view(), &active.rows, &active.coefficients, out);
            }
            let mut all = vec![0.0; tokens * columns];
            let read = threads.add_rows_of_batch(&matrix.as_view(), &active, &mut all);
            assert_eq!(read, union.len(), "{format}, {isa}, {count} threads");
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(
                bits(&single),
                bits(&all),
                "{format}, {isa}, {count} threads"
            );
        }
    }
}

/// Listed rows, most of them among the first, as in a matrix that is sorted by activation frequency.
fn skewed(rows: u32, density: f64, skew: f64, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    let is_listed = |row: &u32| {
        let place = f64::from(*row) / f64::from(rows);
        random.unit() < density * (1.0 + skew) * (1.0 - place).powf(skew)
    };
    (0..rows).filter(is_listed).collect()
}

proptest! {
    #[test]
    fn parts_of_a_list_are_of_like_size_and_keep_groups_whole(
        rows in 0u32..12_000, density in 0.0f64..1.2, skew in 0.0f64..8.0, seed: u64,
    ) {
        let listed = skewed(rows, density, skew, seed);
        let parts = Parts::new(&listed, &vec![0.5; listed.len()]);
        let least = listed.len().div_ceil(32).max(64);
        let mut end = 0;
        for part in 0..parts.count {
            let range = parts.range(part);
            prop_assert_eq!(range.start, end);
            end = range.end;
            prop_assert!(range.len() >= least || part + 1 == parts.count);
            let group = |row: &u32| *row as usize / AXPY_GROUP_ROWS;
            let own = &listed[range.clone()];
            if part + 1 < parts.count {
                let before = own.partition_point(|row| group(row) < group(&own[own.len() - 1]));
                prop_assert!(before < least, "the part is at least one group too long");
            }
            if let (Some(last), Some(next)) = (listed[range].last(), listed.get(end)) {
                prop_assert!(group(last) < group(next));
            }
        }
        prop_assert_eq!(end, listed.len());
        // If all rows are listed but only those above have non-zero coefficients, the parts are the same.
        let mut coefficients = vec![0.0; rows as usize];
        listed.iter().for_each(|row| coefficients[*row as usize] = -2.0);
        let all: Vec<u32> = (0..rows).collect();
        let of_all = Parts::new(&all, &coefficients);
        if !listed.is_empty() {
            prop_assert_eq!(of_all.count, parts.count);
            for part in 0..parts.count {
                let own = of_all.range(part);
                let kept = own.filter(|row| coefficients[*row] != 0.0).count();
                prop_assert_eq!(kept, parts.range(part).len());
            }
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn rows_with_a_coefficient_of_0_can_be_left_out(
        density in 0.0f64..0.6, skew in 0.0f64..6.0, seed: u64,
        format in prop::sample::select(Format::ALL.to_vec()), threads in 1usize..17,
    ) {
        let (rows, columns) = (700, 1024);
        let mut random = Random::new(seed);
        let weights: Vec<f32> = (0..rows * columns).map(|_| random.normal() as f32).collect();
        let matrix = pack(format, rows, columns, &weights);
        let listed = skewed(rows as u32, density, skew, seed);
        let coefficients: Vec<f32> = listed.iter().map(|_| random.normal() as f32).collect();
        let mut of_all = vec![0.0; rows];
        listed.iter().zip(&coefficients).for_each(|(row, c)| of_all[*row as usize] = *c);
        let all: Vec<u32> = (0..rows as u32).collect();
        let threads = Threads::recording(Isa::detect().unwrap(), threads);
        let mut sums = [vec![1.0; columns], vec![1.0; columns]];
        threads.add_rows_of(&matrix.as_view(), &listed, &coefficients, &mut sums[0]);
        threads.add_rows_of(&matrix.as_view(), &all, &of_all, &mut sums[1]);
        prop_assert_eq!(&sums[0], &sums[1]);
    }
}

#[test]
fn many_threads_share_the_listed_rows_evenly() {
    // The shapes of a 7B model.
    let (rows, columns) = (11_008, 4096);
    let all: Vec<u32> = (0..rows as u32).collect();
    for (density, skew, is_dense) in [
        (0.1, 0.0, false),
        (0.1, 3.0, false),
        (0.1, 8.0, false),
        (0.3, 1.0, false),
        (1.0, 0.0, true),
        (0.1, 8.0, true),
    ] {
        let active = skewed(rows as u32, density, skew, 5);
        let mut of_all = vec![0.0; rows];
        active.iter().for_each(|row| of_all[*row as usize] = 1.0);
        let (listed, coefficients) = if is_dense {
            (&all, of_all)
        } else {
            (&active, vec![1.0; active.len()])
        };
        // The last part of a skewed list of all rows is long, because most of its rows have a coefficient of 0.
        let most = if is_dense && skew > 0.0 {
            [1.2, 1.4]
        } else {
            [1.25, 1.25]
        };
        for (count, most) in [8, 16].into_iter().zip(most) {
            // A unit takes as long as it has rows and columns.
            let threads = Threads::recording(Isa::SCALAR, count);
            let parts = Parts::new(listed, &coefficients);
            let (bounds, units) = threads.units(&parts, columns);
            assert_eq!(bounds[units], parts.count * columns);
            let work = bounds[..=units].windows(2).rev().map(|unit| {
                let rows = parts.range(unit[0] / columns).len();
                Duration::from_nanos((rows * (unit[1] - unit[0])) as u64)
            });
            let job = RecordedJob {
                started: Instant::now(),
                stages: vec![work.collect()],
            };
            let [slowest, all] = [job.makespan(count), job.total()];
            let imbalance = slowest.as_secs_f64() * count as f64 / all.as_secs_f64();
            assert!(
                imbalance < most,
                "{imbalance:.2} with {count} threads, density {density}, skew {skew}"
            );
        }
    }
}
