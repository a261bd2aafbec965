//! Read bandwidth of some neurons' rows by their layout in memory: values apart from scales (planes), scales after their row, rows
//! of up and down side by side, and rows of all three matrices side by side.
//!
//! `cargo bench -p powerinfer-kernels --bench layouts` takes a minute and 3 GiB. Neurons are random, each value is the best of
//! several passes and prefetch distances, and sums are checked against the scalar code before anything is timed.
#![expect(clippy::print_stdout, reason = "a benchmark reports on stdout")]

use std::{hint::black_box, thread, time::Instant};

use powerinfer_kernels::Isa;

const BYTES: usize = 3 << 30;
const PASSES: usize = 4;
/// Cache lines in flight ahead of the row that is read.
const LINES_AHEAD: [usize; 3] = [32, 64, 128];
/// Shapes: hidden size and neurons.
const SHAPES: [(&str, usize, usize); 2] = [("7B", 4096, 11_008), ("70B", 8192, 28_672)];

fn main() {
    let isa = Isa::detect().expect("POWERINFER_ISA names what this processor has");
    let mut memory = memmap2::MmapMut::map_anon(BYTES).expect("memory for the rows");
    memory
        .advise(memmap2::Advice::HugePage)
        .expect("a system that has huge pages");
    let words: &mut [u64] = bytemuck::cast_slice_mut(&mut memory);
    (0..)
        .zip(&mut *words)
        .for_each(|(index, word)| *word = index);
    println!("{isa}; GB/s of {PASSES} passes, the best");
    println!("shape  format  neurons  threads  planes  inline  up+down   all");
    let mut seed = 1u64;
    for (shape, hidden, neurons) in SHAPES {
        let scales = hidden / 16;
        for (format, values, scales) in [
            ("q4_0", hidden / 2, scales),
            ("q8_0", hidden, scales),
            ("f16", 2 * hidden, 0),
        ] {
            let row = values + scales;
            let planes: &[usize] = match scales {
                0 => &[values; 3],
                _ => &[values, scales, values, scales, values, scales],
            };
            let layouts: [&[usize]; 4] = [planes, &[row; 3], &[row, 2 * row], &[3 * row]];
            let layers = size_of_val(&*words) / (3 * row * neurons);
            for percent in [5, 10] {
                let mut draw = |_: &u32| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 33) % 100 < percent
                };
                let mut list = |_: usize| (0..neurons as u32).filter(&mut draw).collect();
                let lists: Vec<Vec<u32>> = (0..layers).map(&mut list).collect();
                for threads in [1, 2] {
                    let best =
                        layouts.map(|arrays| best(isa, words, arrays, neurons, &lists, threads));
                    let [planes, inline, two, all] = best;
                    println!(
                        "{shape:5}  {format:6}  {percent:5} %  {threads:7}  {planes:6.1}  {inline:6.1}  {two:7.1}  {all:4.1}"
                    );
                }
            }
        }
    }
}

/// Bytes per second, in units of 1e9, at which `threads` threads read the rows `lists`, one list per layer, of `arrays` of rows
/// of these bytes.
fn best(
    isa: Isa,
    words: &[u64],
    arrays: &[usize],
    neurons: usize,
    lists: &[Vec<u32>],
    threads: usize,
) -> f64 {
    let read = |isa: Isa, thread: usize, lines_ahead: usize, lists: &[Vec<u32>]| {
        let (mut rest, mut sum) = (words, 0u64);
        for list in lists {
            let part = thread * list.len() / threads..(thread + 1) * list.len() / threads;
            for row_bytes in arrays {
                let row_words = row_bytes / size_of::<u64>();
                let rows = rest.split_off(..row_words * neurons).unwrap_or_default();
                let of_array = isa.sum_rows(rows, row_words, &list[part.clone()], lines_ahead);
                sum = sum.wrapping_add(of_array);
            }
        }
        sum
    };
    let [own, scalar] = [isa, Isa::SCALAR].map(|isa| read(isa, 0, LINES_AHEAD[0], &lists[..1]));
    assert_eq!(own, scalar, "{isa}");
    let rows: usize = lists.iter().map(Vec::len).sum();
    let bytes = rows * arrays.iter().sum::<usize>();
    let mut best = 0f64;
    for lines_ahead in LINES_AHEAD.repeat(PASSES) {
        let started = Instant::now();
        thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || black_box(read(isa, thread, lines_ahead, lists)));
            }
        });
        best = best.max(bytes as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    best
}
