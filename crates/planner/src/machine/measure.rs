//! Measures this machine: reading, kernels, what a decode step takes besides, the graphics card.

use std::{collections::BTreeMap, io::Write};

use powerinfer_artifact::{
    Progress,
    hardware::{Cpu, Hardware, ReadSpeed},
};
use powerinfer_kernels::Isa;
use powerinfer_pool::system;
use powerinfer_runtime::{SpeedTest, Threads, WEIGHT_BYTE};
use powerinfer_tensor::Format;

use super::gpu;
use crate::PlannerError;

/// How long to take over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thoroughness {
    /// Everything, several times over.
    Full,
    /// A few seconds: fewer row lengths, each once, over less memory.
    Quick,
}

impl Thoroughness {
    /// Weights to go through; many times a desktop's caches.
    fn bytes(self) -> usize {
        match self {
            Self::Full => 256 << 20,
            Self::Quick => 96 << 20,
        }
    }

    fn passes(self) -> usize {
        match self {
            Self::Full => 5,
            Self::Quick => 1,
        }
    }

    /// Lengths of rows, in weights: hidden states that models have.
    fn columns(self) -> &'static [usize] {
        match self {
            Self::Full => &[512, 1024, 2048, 4096, 8192, 14336],
            Self::Quick => &[1024, 4096],
        }
    }

    /// Bytes of rows that are just read. The last is a stream.
    fn row_bytes(self) -> &'static [usize] {
        match self {
            Self::Full => &[256, 1024, 4096, 16 << 10, 64 << 10, 4 << 20],
            Self::Quick => &[4096, 4 << 20],
        }
    }
}

/// This machine with at most `threads` threads; and why it has no graphics card, where it has none.
pub fn measure(
    threads: usize,
    thoroughness: Thoroughness,
    progress: &dyn Progress,
) -> Result<(Hardware, Option<String>), PlannerError> {
    let isa = Isa::detect()?;
    let test = speed_test(thoroughness.bytes())?;
    let mut counts: Vec<usize> = (0..)
        .map(|power| 1 << power)
        .take_while(|count| *count < threads)
        .collect();
    counts.push(threads);
    let (sizes, lengths) = (thoroughness.row_bytes(), thoroughness.columns());
    let figures = counts.len() * (sizes.len() + lengths.len() * Format::ALL.len()) + 2;
    progress.begin("measuring", figures as u64, "figures");
    let passes = thoroughness.passes();
    let (mut reads, mut kernels) = (Vec::new(), Vec::new());
    for count in &counts {
        for row_bytes in sizes {
            reads.push(ReadSpeed {
                threads: *count,
                row_bytes: *row_bytes as u64,
                bytes_per_second: test.read(*count, *row_bytes, passes),
            });
            progress.advance(1)?;
        }
    }
    for format in Format::ALL {
        for count in &counts {
            let pool = Threads::new(isa, *count)?;
            let starting = test.kernel_seconds(&pool)?;
            for columns in lengths {
                kernels.push(test.kernels(&pool, format, *columns, passes, starting));
                progress.advance(1)?;
            }
        }
    }
    let pool = Threads::new(isa, threads)?;
    let beside = test.beside_matrices(&pool)?;
    let operations = test.operations(&pool);
    progress.advance(1)?;
    let card = gpu::measure();
    progress.advance(1)?;
    progress.end();
    let stream = reads.last().expect("there is a stream").bytes_per_second;
    let mut hardware = Hardware {
        name: "this machine".to_owned(),
        description: format!("{}, {threads} threads", system::processor()),
        cpu: Cpu {
            threads,
            read_bandwidth_bytes_per_second: stream,
            ram_bytes: system::memory().map_or(0, |(total, _)| total),
            row_seconds: 0.0,
            sum_row_seconds: 0.0,
            kernel_seconds: beside.kernel_seconds,
            hidden_seconds: beside.hidden_seconds,
            neuron_seconds: beside.neuron_seconds,
            vocabulary_seconds: beside.vocabulary_seconds,
            layer_seconds: 0.0,
            token_seconds: 0.0,
            operations_per_second: Some(operations),
            reads,
            kernels,
        },
        gpu: None,
        sources: BTreeMap::new(),
    };
    // What matrices in no format at all would take: that of the format most models are run in.
    let typical = Format::Q8_0.row_bytes(4096) as f64;
    let rates = hardware.cpu.rates(Format::Q8_0, threads, typical);
    hardware.cpu.row_seconds = rates.row_seconds;
    hardware.cpu.sum_row_seconds = rates.sum_row_seconds;
    let mut source =
        |figure: &str, text: &str| hardware.sources.insert(figure.to_owned(), text.to_owned());
    let measured = "measured by `powerinfer doctor`";
    source("cpu.threads", "reported by the system, or asked for");
    source("cpu.ram_bytes", "reported by the system");
    source(
        "cpu.read_bandwidth_bytes_per_second",
        &format!("{measured}: a stream, plain loads"),
    );
    source(
        "cpu.reads",
        &format!("{measured}: plain loads of every tenth row, and a stream"),
    );
    source(
        "cpu.kernels",
        &format!("{measured}: the kernels of decoding, instruction set {isa}"),
    );
    for figure in ["row_seconds", "sum_row_seconds"] {
        source(
            &format!("cpu.{figure}"),
            &format!("from `cpu.kernels`: rows of {typical} bytes in q8_0"),
        );
    }
    for figure in [
        "kernel_seconds",
        "hidden_seconds",
        "neuron_seconds",
        "vocabulary_seconds",
        "operations_per_second",
    ] {
        source(&format!("cpu.{figure}"), measured);
    }
    let reason = match card {
        Err(reason) => Some(reason),
        Ok(found) => {
            for (figure, text) in found.sources {
                source(figure, &text);
            }
            hardware.gpu = Some(found.gpu);
            None
        }
    };
    hardware.validate()?;
    Ok((hardware, reason))
}

/// A temporary file of weights, mapped; it is gone with the value that is returned.
pub fn speed_test(bytes: usize) -> Result<SpeedTest, PlannerError> {
    let mut file = tempfile::NamedTempFile::new().map_err(PlannerError::Temporary)?;
    let piece = vec![WEIGHT_BYTE; 1 << 20];
    for _ in 0..bytes / piece.len() {
        file.write_all(&piece).map_err(PlannerError::Temporary)?;
    }
    file.flush().map_err(PlannerError::Temporary)?;
    Ok(SpeedTest::open(file.path())?)
}
