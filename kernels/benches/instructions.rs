//! Instructions per row of 4096 weights of each kernel, a value that does not depend on the load of the machine. Fails if a
//! kernel exceeds its limit, so that optimisations are not lost.
//!
//! `cargo bench -p powerinfer-kernels --bench instructions` counts the kernels with a limit, `… -- all`
//! every kernel, which takes minutes, and `… -- avx512/q8_0/Sum` that one. A child process is single-stepped with
//! ptrace, since instruction-level simulators lack AVX-512. Linux only; skipped if ptrace is not permitted.
#![expect(
    unsafe_code,
    clippy::print_stdout,
    reason = "a program of its own, which follows another one by system calls"
)]

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("skipped 1 benchmark: instructions are counted on Linux only");
}

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::hint::black_box;

    use powerinfer_kernels::{AXPY_GROUP_ROWS, Isa, Norm, QuantisedActivations};
    use powerinfer_tensor::{Format, NormKind, OwnedMatrix, pack};

    const COLUMNS: usize = 4096;
    /// Rows per panel of a batched kernel.
    const BATCH_ROWS: usize = 16;
    /// Vectors of a batch.
    const BATCH_TOKENS: usize = 32;
    /// Rows and vectors of a batched axpy.
    const AXPY_ROWS: usize = 32;
    const AXPY_TOKENS: usize = 4;
    /// Rows of the other kernels.
    const ROWS: usize = 4;

    /// The counted kernels.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Kernel {
        /// GEMV, float.
        Arithmetic,
        /// The previous kernel with integer arithmetic.
        IntegerProduct,
        /// Axpy, float.
        Sum,
        /// The previous kernel with integer arithmetic.
        IntegerAxpy,
        /// GEMM with 32 tokens, integer, per token.
        IntegerBatch,
        /// Axpy with 4 tokens, integer, per token.
        AxpyBatch,
        /// Rounding of a float32 vector to int8, which one thread does for all threads.
        Rounding,
        /// RMSNorm of a float32 vector, which one thread computes for all threads.
        RmsNorm,
    }

    use Kernel::{
        Arithmetic, AxpyBatch, IntegerAxpy, IntegerBatch, IntegerProduct, RmsNorm, Rounding, Sum,
    };

    /// Limits in instructions per row of 4096 weights, about 10% above the measured counts. A quarter of the integer axpy's
    /// instructions prefetch lines, which makes it 17% faster from memory and 20% slower from caches.
    const MOST: [(&str, Format, Kernel, u64); 22] = [
        ("avx2", Format::F32, Rounding, 11800),
        ("avx2", Format::F32, RmsNorm, 6600),
        ("avx2", Format::F16, Arithmetic, 1830),
        ("avx2", Format::Q8_0, IntegerProduct, 1270),
        ("avx2", Format::Q8_0, IntegerBatch, 1040),
        ("avx2", Format::Q8_0, Sum, 3440),
        ("avx2", Format::Q4_0, IntegerProduct, 995),
        ("avx2", Format::Q4_0, IntegerAxpy, 2650),
        ("avx2", Format::Q4_0, AxpyBatch, 1400),
        ("avx512", Format::Q8_0, IntegerProduct, 925),
        ("avx512", Format::Q4_0, IntegerProduct, 705),
        ("avx512-vnni", Format::F32, Arithmetic, 1255),
        ("avx512-vnni", Format::F32, Rounding, 7500),
        ("avx512-vnni", Format::F16, Arithmetic, 1540),
        ("avx512-vnni", Format::F16, Sum, 2480),
        ("avx512-vnni", Format::Bf16, Arithmetic, 1540),
        ("avx512-vnni", Format::Q8_0, IntegerProduct, 670),
        ("avx512-vnni", Format::Q8_0, Sum, 2160),
        ("avx512-vnni", Format::Q8_0, IntegerBatch, 260),
        ("avx512-vnni", Format::Q4_0, IntegerProduct, 635),
        ("avx512-vnni", Format::Q4_0, IntegerAxpy, 1850),
        ("avx512-vnni", Format::Q4_0, IntegerBatch, 240),
    ];

    pub(super) fn main() {
        let asked: Vec<String> = std::env::args().skip(1).collect();
        let all = asked.iter().any(|argument| argument == "all");
        let is_asked = |isa: Isa, format: Format, kernel: Kernel| {
            asked.contains(&format!("{}/{format}/{kernel:?}", isa.name()))
        };
        let has_names = asked.iter().any(|argument| argument.contains('/'));
        let mut failed = 0;
        println!("instructions for a row of {COLUMNS} weights");
        println!("instructions of  format  kernel          found  allowed");
        for isa in Isa::available() {
            // Scalar code is a specification without a speed goal.
            if isa == Isa::SCALAR {
                continue;
            }
            for format in Format::ALL {
                for kernel in [
                    Arithmetic,
                    IntegerProduct,
                    Sum,
                    IntegerAxpy,
                    IntegerBatch,
                    AxpyBatch,
                    Rounding,
                    RmsNorm,
                ] {
                    let is_integer = matches!(kernel, IntegerProduct | IntegerBatch);
                    let is_axpy = matches!(kernel, IntegerAxpy | AxpyBatch);
                    if is_integer && !format.is_quantised()
                        || is_axpy && !format.has_nibbles()
                        || matches!(kernel, Rounding | RmsNorm) && format != Format::F32
                    {
                        continue;
                    }
                    let allowed = MOST
                        .iter()
                        .find(|line| (line.0, line.1, line.2) == (isa.name(), format, kernel));
                    let is_one = is_asked(isa, format, kernel);
                    if !is_one && (has_names || allowed.is_none() && !all) {
                        continue;
                    }
                    let Some(found) = per_row(isa, format, kernel) else {
                        println!("skipped all benchmarks: ptrace is not permitted");
                        return;
                    };
                    let most = allowed.map_or("-".to_owned(), |line| line.3.to_string());
                    let is_over = allowed.is_some_and(|line| found > line.3);
                    failed += usize::from(is_over);
                    let verdict = if is_over { "  TOO MANY" } else { "" };
                    println!(
                        "{:15}  {format:6}  {:14}  {found:5}  {most:>7}{verdict}",
                        isa.name(),
                        format!("{kernel:?}")
                    );
                }
            }
        }
        assert_eq!(
            failed, 0,
            "kernels that take more instructions than they are allowed to"
        );
    }

    /// Instructions per row; `None` if ptrace is not permitted.
    fn per_row(isa: Isa, format: Format, kernel: Kernel) -> Option<u64> {
        let (rows, vectors) = match kernel {
            IntegerBatch => (BATCH_ROWS, BATCH_TOKENS),
            AxpyBatch => (AXPY_ROWS, AXPY_TOKENS),
            _ => (ROWS, 1),
        };
        // The difference of two calls removes the fixed cost.
        let few = count(|run| run_rows(isa, format, kernel, rows, run))?;
        let many = count(|run| run_rows(isa, format, kernel, 2 * rows, run))?;
        Some((many - few) / rows as u64 / vectors as u64)
    }

    /// Calls `run` with the kernel on this many rows.
    fn run_rows(
        isa: Isa,
        format: Format,
        kernel: Kernel,
        rows: usize,
        run: &mut dyn FnMut(&mut dyn FnMut()),
    ) {
        let mut values: Vec<f32> = (0..rows * COLUMNS)
            .map(|i| ((i * 7919) % 211) as f32 / 100.0 - 1.0)
            .collect();
        let matrix: OwnedMatrix = pack(format, rows, COLUMNS, &values);
        let matrix = matrix.as_view();
        let vector = values[..COLUMNS].to_vec();
        let x = &vector[..];
        let mut rounded = QuantisedActivations::default();
        let batch: Vec<f32> = x
            .iter()
            .copied()
            .cycle()
            .take(BATCH_TOKENS * COLUMNS)
            .collect();
        let listed: Vec<u32> = (0..rows as u32).collect();
        let mut out = vec![0.0; (rows * BATCH_TOKENS).max(AXPY_TOKENS * COLUMNS)];
        match kernel {
            Arithmetic => run(&mut || isa.gemv(&matrix, x, &mut out[..rows])),
            IntegerProduct => {
                isa.quantise(x, COLUMNS, &mut rounded);
                run(&mut || isa.gemv_integer(&matrix, rounded.vector(0), &mut out[..rows]));
            }
            Sum => run(&mut || {
                isa.axpy_rows(
                    &matrix,
                    &listed,
                    &x[..rows],
                    0..COLUMNS,
                    &mut out[..COLUMNS],
                )
            }),
            IntegerAxpy => run(&mut || {
                isa.axpy_rows_integer(
                    &matrix,
                    &listed,
                    &x[..rows],
                    &[],
                    0..COLUMNS,
                    &mut out[..COLUMNS],
                )
            }),
            AxpyBatch => {
                let length = AXPY_TOKENS * COLUMNS;
                let (coefficients, mut sums) = (&values[..AXPY_TOKENS * rows], out.clone());
                let ends = vec![false; rows.div_ceil(AXPY_GROUP_ROWS) * AXPY_TOKENS];
                run(&mut || {
                    isa.axpy_rows_batch_integer(
                        &matrix,
                        &listed,
                        coefficients,
                        0..COLUMNS,
                        &ends,
                        &mut sums[..length],
                        &mut out[..length],
                    );
                });
            }
            Rounding => run(&mut || isa.quantise(&values, COLUMNS, &mut rounded)),
            RmsNorm => {
                let norm = Norm {
                    kind: NormKind::RootMeanSquare,
                    epsilon: 1e-5,
                    weight: x,
                    bias: None,
                };
                run(&mut || isa.normalise(norm, &mut values));
            }
            IntegerBatch => {
                isa.quantise(&batch, COLUMNS, &mut rounded);
                run(&mut || isa.gemm_integer(&matrix, &rounded, &mut out[..rows * BATCH_TOKENS]));
            }
        }
        black_box(&out);
    }

    /// Instructions of the closure that `prepare` passes on, in a child process.
    fn count(prepare: impl Fn(&mut dyn FnMut(&mut dyn FnMut()))) -> Option<u64> {
        // SAFETY: this process has one thread, so that the child is not restricted.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: these calls touch no memory; the child exits without running the parent's exit handlers.
            unsafe {
                if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0 {
                    libc::_exit(1);
                }
                prepare(&mut |kernel| {
                    // Warm-up, not counted.
                    kernel();
                    libc::raise(libc::SIGSTOP);
                    kernel();
                    libc::raise(libc::SIGSTOP);
                });
                libc::_exit(0);
            }
        }
        let mut status = 0;
        let mut wait = || {
            // SAFETY: `status` outlives the call.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            libc::WIFSTOPPED(status).then(|| libc::WSTOPSIG(status))
        };
        if child < 0 || wait() != Some(libc::SIGSTOP) {
            return None;
        }
        let mut steps = 0;
        loop {
            // SAFETY: the child is stopped, and these calls touch no memory of this process.
            unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0) };
            match wait() {
                Some(libc::SIGTRAP) => steps += 1,
                Some(libc::SIGSTOP) => break,
                _ => return None,
            }
        }
        // SAFETY: as above; the child has finished.
        unsafe {
            libc::ptrace(libc::PTRACE_KILL, child, 0, 0);
            libc::waitpid(child, &raw mut status, 0);
        }
        Some(steps)
    }
}
