//! Read bandwidth that each kernel achieves on one thread, relative to plain reads.
//!
//! `cargo bench -p powerinfer-kernels --bench bandwidth -- [FORMAT…] [mib=N] [columns=N] [share=PERCENT] [tokens=N]`.
//! `POWERINFER_ISA` selects the instruction set, `tokens=` the length of the prompt. `mib=8` fits the weights into the caches, so
//! that arithmetic is measured; `columns=192` ends rows within a span. Some rows, a random share, are listed as by a layer of 11008 neurons: one list of products, and eight of sums.
//! Weights are in huge pages, as in a bundle. Results are checked against the scalar code before anything is timed.
#![expect(clippy::print_stdout, reason = "a benchmark reports on stdout")]

use std::hint::black_box;
use std::time::Instant;

use powerinfer_kernels::{AXPY_GROUP_ROWS, Isa, QuantisedActivations};
use powerinfer_tensor::{
    BLOCK, Format, Matrix, MatrixData, OwnedMatrix, SUPER_BLOCK, bf16, f16, pack,
};

const PASSES: usize = 5;
/// Neurons of a layer, whose products are computed by one call.
const LAYER_ROWS: u32 = 11_008;
/// Neurons whose rows are summed by one call.
const SUM_ROWS: u32 = LAYER_ROWS / 8;

fn main() {
    let isa = Isa::detect().expect("POWERINFER_ISA names what this processor has");
    let asked: Vec<Format> = std::env::args()
        .filter_map(|name| name.parse().ok())
        .collect();
    let mut memory = memmap2::MmapMut::map_anon(total_bytes()).expect("memory for the weights");
    memory
        .advise(memmap2::Advice::HugePage)
        .expect("a system that has huge pages");
    memory.fill(0x2a);
    let bytes: &[u64] = bytemuck::cast_slice(&memory);
    let read = best(total_bytes(), || {
        black_box(
            bytes
                .iter()
                .fold([0u64; 1], |[sum], word| [sum.wrapping_add(*word)]),
        );
    });
    println!(
        "{isa}, rows of {} weights, one thread; GB/s of {PASSES} passes, the best",
        columns()
    );
    println!("plain reads {read:.1}");
    println!(
        "format  dense  rounded  some rows  rounded    sum  rounded  some sum  rounded  prompt GFLOP/s  rounded  sums GFLOP/s  rounded"
    );
    for format in Format::ALL {
        if asked.is_empty() || asked.contains(&format) {
            measure(isa, format, bytemuck::cast_slice(bytes));
        }
    }
}

fn measure(isa: Isa, format: Format, bytes: &[u8]) {
    check(isa, format);
    let rows = total_bytes() / format.row_bytes(columns());
    let matrix = view(format, rows, bytes);
    let total = rows * matrix.row_bytes();
    let x: Vec<f32> = (0..columns()).map(|i| (i % 7) as f32 - 3.0).collect();
    let mut rounded = QuantisedActivations::default();
    isa.quantise(&x, columns(), &mut rounded);
    let mut out = vec![0.0; rows];
    let dense = best(total, || isa.gemv(&matrix, &x, &mut out));
    let integer = |act: &mut dyn FnMut(&QuantisedActivations), bytes: usize| {
        if format.is_quantised() {
            best(bytes, || act(&rounded))
        } else {
            f64::NAN
        }
    };
    let dense_rounded = integer(
        &mut |x| isa.gemv_integer(&matrix, x.vector(0), &mut out),
        total,
    );
    let listed: Vec<u32> = (0..rows as u32)
        .filter(|row| row.wrapping_mul(2_654_435_761) >> 16 < share() * 65536 / 100)
        .collect();
    let some = listed.len() * matrix.row_bytes();
    let lists = |rows: u32| listed.chunk_by(move |a, b| a / rows == b / rows);
    let sparse = best(some, || {
        for rows in lists(LAYER_ROWS) {
            isa.gemv_rows(&matrix, rows, &x, &mut out[..rows.len()]);
        }
    });
    let sparse_rounded = integer(
        &mut |x| {
            for rows in lists(LAYER_ROWS) {
                isa.gemv_rows_integer(&matrix, rows, x.vector(0), &mut out[..rows.len()]);
            }
        },
        some,
    );
    let mut sums = vec![0.0; columns()];
    let all: Vec<u32> = (0..rows as u32).collect();
    let ones = vec![1.0; rows];
    let sum = best(total, || {
        isa.axpy_rows(&matrix, &all, &ones, 0..columns(), &mut sums)
    });
    let sum_sparse = best(some, || {
        for rows in lists(SUM_ROWS) {
            isa.axpy_rows(&matrix, rows, &ones[..rows.len()], 0..columns(), &mut sums);
        }
    });
    let (sum_rounded, sum_sparse_rounded) = if format.has_nibbles() {
        (
            best(total, || {
                isa.axpy_rows_integer(&matrix, &all, &ones, &[], 0..columns(), &mut sums);
            }),
            best(some, || {
                let mut next = &listed[..];
                for rows in lists(SUM_ROWS) {
                    let ones = &ones[..rows.len()];
                    next = &next[rows.len()..];
                    isa.axpy_rows_integer(&matrix, rows, ones, next, 0..columns(), &mut sums);
                }
            }),
        )
    } else {
        (f64::NAN, f64::NAN)
    };
    let tokens = argument("tokens=").unwrap_or(64);
    let part = matrix.rows_range(0..rows.min(2048));
    let many: Vec<f32> = x.iter().copied().cycle().take(tokens * columns()).collect();
    let mut products = vec![0.0; tokens * part.rows()];
    let operations = 2 * tokens * columns() * part.rows();
    let prompt = best(operations, || isa.gemm(&part, &many, tokens, &mut products));
    isa.quantise(&many, columns(), &mut rounded);
    let prompt_rounded = if format.is_quantised() {
        best(operations, || {
            isa.gemm_integer(&part, &rounded, &mut products)
        })
    } else {
        f64::NAN
    };
    let rows = &all[..part.rows()];
    let ones = vec![1.0; tokens * rows.len()];
    let mut sums = vec![0.0; tokens * columns()];
    let mut out = sums.clone();
    let ends = vec![false; rows.len().div_ceil(AXPY_GROUP_ROWS) * tokens];
    let many = best(operations, || {
        isa.axpy_rows_batch(&part, rows, &ones, 0..columns(), &mut sums);
    });
    let many_rounded = if format.has_nibbles() {
        best(operations, || {
            let (sums, out) = (&mut sums, &mut out);
            isa.axpy_rows_batch_integer(&part, rows, &ones, 0..columns(), &ends, sums, out);
        })
    } else {
        f64::NAN
    };
    println!(
        "{format:6}  {dense:5.1}  {dense_rounded:7.1}  {sparse:9.1}  {sparse_rounded:7.1}  {sum:5.1}  {sum_rounded:7.1}  {sum_sparse:8.1}  {sum_sparse_rounded:7.1}  {prompt:14.1}  {prompt_rounded:7.1}  {many:12.1}  {many_rounded:7.1}"
    );
}

/// `count` per second of the fastest pass, in units of 1e9.
fn best(count: usize, mut act: impl FnMut()) -> f64 {
    let times = (512 / (total_bytes() >> 20)).max(1);
    let seconds = (0..PASSES).map(|_| {
        let started = Instant::now();
        for _ in 0..times {
            act();
        }
        started.elapsed().as_secs_f64() / times as f64
    });
    count as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}

fn view(format: Format, rows: usize, bytes: &[u8]) -> Matrix<'_> {
    let blocks = rows * columns() / BLOCK;
    let (head, tail) = (
        |length| &bytes[..length],
        |from: usize, length| &bytes[from..][..length],
    );
    let data = match format {
        Format::F32 => MatrixData::F32(bytemuck::cast_slice(head(rows * columns() * 4))),
        Format::F16 => MatrixData::F16(bytemuck::cast_slice::<_, f16>(head(rows * columns() * 2))),
        Format::Bf16 => {
            MatrixData::Bf16(bytemuck::cast_slice::<_, bf16>(head(rows * columns() * 2)))
        }
        Format::Q8_0 => MatrixData::Q8_0 {
            quants: bytemuck::cast_slice(head(blocks * BLOCK)),
            scales: bytemuck::cast_slice(tail(blocks * BLOCK, blocks * 2)),
        },
        Format::Q4K => {
            let scales = blocks * BLOCK / 2;
            let supers = rows * columns().div_ceil(BLOCK).div_ceil(SUPER_BLOCK);
            let factors = scales + supers * 4;
            MatrixData::Q4K {
                quants: head(scales),
                scales: bytemuck::cast_slice(tail(scales, factors - scales)),
                factors: bytemuck::cast_slice(tail(factors, blocks * 2)),
            }
        }
        Format::Q4_0 => MatrixData::Q4_0 {
            quants: head(blocks * BLOCK / 2),
            scales: bytemuck::cast_slice(tail(blocks * BLOCK / 2, blocks * 2)),
        },
    };
    Matrix::new(rows, columns(), data).expect("the planes were cut for this shape")
}

/// Checks the results of the kernels against the scalar code.
fn check(isa: Isa, format: Format) {
    let values: Vec<f32> = (0..8 * columns())
        .map(|i| ((i * 7919) % 211) as f32 / 100.0 - 1.0)
        .collect();
    let matrix: OwnedMatrix = pack(format, 8, columns(), &values);
    let products = |isa: Isa| {
        let mut out = vec![0.0; 8];
        isa.gemv(&matrix.as_view(), &values[..columns()], &mut out);
        if format.is_quantised() {
            let mut rounded = QuantisedActivations::default();
            isa.quantise(&values[..columns()], columns(), &mut rounded);
            out.resize(16, 0.0);
            isa.gemv_integer(&matrix.as_view(), rounded.vector(0), &mut out[8..]);
        }
        if format.has_nibbles() {
            let rows: Vec<u32> = (0..8).collect();
            let mut sums = vec![0.0; columns()];
            let (weights, x) = (matrix.as_view(), &values[..8]);
            isa.axpy_rows_integer(&weights, &rows, x, &[], 0..columns(), &mut sums);
            let ends = [false];
            let mut totals = vec![0.0; columns()];
            isa.axpy_rows_batch_integer(
                &weights,
                &rows,
                x,
                0..columns(),
                &ends,
                &mut sums,
                &mut totals,
            );
            out.extend(sums);
        }
        out
    };
    assert_eq!(products(isa), products(Isa::SCALAR), "{isa}, {format}");
}

/// Weights per row.
fn columns() -> usize {
    argument("columns=").unwrap_or(4096)
}

/// Share of the rows that sparse kernels read, in percent.
fn share() -> u32 {
    argument("share=").unwrap_or(10)
}

/// Bytes of the weights.
fn total_bytes() -> usize {
    argument("mib=").unwrap_or(512) << 20
}

/// Value of the argument `name=N`.
fn argument<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.parse().ok())
}
