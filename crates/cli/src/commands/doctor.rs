//! `powerinfer doctor`: what this machine can do.

use std::{fmt::Write, path::PathBuf};

use anyhow::Result;
use powerinfer_artifact::{
    ByteSize, counted,
    hardware::{Cpu, Gpu, Hardware},
    shell_quoted,
};
use powerinfer_kernels::Isa;
use powerinfer_planner::machine::{MeasuredMachine, Thoroughness, keep, measure};
use powerinfer_pool::system;
use powerinfer_runtime::warn_about_threads;
use powerinfer_tensor::Format;
use serde_json::json;

use crate::{
    output::{Output, Table, print, print_json},
    progress::Bar,
};

/// How to report.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer doctor\n  powerinfer doctor --write hardware.toml\n  powerinfer place demo --vram 0G --hardware hardware.toml"
)]
pub(crate) struct DoctorArguments {
    /// Write the measurements to this file, `.toml` or `.json`, for `place --hardware FILE`
    #[arg(long, value_name = "FILE", value_parser = crate::values::new_file)]
    write: Option<PathBuf>,
    /// Measure for this many threads [default: the number that decodes fastest]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Measure less, in seconds; plans keep the measurements that they use
    #[arg(long)]
    quick: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &DoctorArguments, output: Output) -> Result<()> {
    if let Some(path) = &arguments.write {
        Hardware::check_file_name(path)?;
    }
    let threads = arguments.threads.map(|count| count as usize);
    warn_about_threads(threads.unwrap_or(1), &Bar::new(output));
    let thoroughness = if arguments.quick {
        Thoroughness::Quick
    } else {
        Thoroughness::Full
    };
    output.say("measuring how fast memory is read and kernels run; best while nothing else does …");
    let measured = measure(threads, thoroughness, &Bar::new(output))?;
    if !arguments.quick
        && !measured.is_disturbed
        && let Some(file) = keep(&measured)?
    {
        output.say(format!(
            "kept in `{}`: plans for this machine use these figures from now on",
            file.display()
        ));
    }
    let MeasuredMachine {
        hardware,
        gpu_status,
        is_disturbed,
        ..
    } = measured;
    let threads = hardware.cpu.threads;
    if is_disturbed && !arguments.quick {
        output.say("these figures are not kept; plans for this machine use earlier measurements or measure again");
    }
    if let Some(path) = &arguments.write {
        hardware.write(path)?;
        output.say(format!(
            "written; `powerinfer place --hardware {}` plans for this machine",
            shell_quoted(&path.to_string_lossy())
        ));
    }
    let isa = Isa::detect()?;
    let available: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    let memory = system::memory();
    if arguments.json {
        let cpu = &hardware.cpu;
        return print_json(&json!({
            "processor": system::processor(),
            "threads": threads,
            "instruction_set": isa.name(),
            "instruction_sets": available,
            "ram_bytes": memory.map(|(total, _)| total),
            "free_ram_bytes": memory.map(|(_, free)| free),
            "read_bandwidth_bytes_per_second": {
                "one_thread": stream(cpu, 1),
                "all_threads": stream(cpu, threads),
            },
            "row_seconds": cpu.row_seconds,
            "kernel_seconds": cpu.kernel_seconds,
            "gpu": hardware.gpu,
            "gpu_status": gpu_status,
            "hardware": hardware,
        }));
    }
    let memory = memory.map_or_else(
        || "unknown".to_owned(),
        |(total, free)| format!("{}, {} free", ByteSize(total), ByteSize(free)),
    );
    let mut text = format!(
        "processor       {}\nthreads         {threads}\nkernels         {} (of {})\nmemory          {memory}\n",
        system::processor(),
        isa.name(),
        available.join(", "),
    );
    describe_cpu(&mut text, &hardware.cpu)?;
    match &hardware.gpu {
        None => writeln!(text, "GPU             none: {gpu_status}")?,
        Some(gpu) => describe_gpu(&mut text, gpu, &gpu_status)?,
    }
    if output.verbose {
        text += &tables(&hardware.cpu)
    } else {
        text += "\n`-v` prints reads by row size and kernels by format\n"
    }
    print(text)
}

/// Bytes per second that `threads` threads read in a stream.
fn stream(cpu: &Cpu, threads: usize) -> Option<f64> {
    let reads = cpu.reads.iter().filter(|read| read.threads == threads);
    reads.map(|read| read.bytes_per_second).next_back()
}

fn gigabytes(bytes_per_second: f64) -> String {
    format!("{:.1}", bytes_per_second / 1e9)
}

fn describe_cpu(text: &mut String, cpu: &Cpu) -> Result<()> {
    let threads = cpu.threads;
    let of_one = gigabytes(stream(cpu, 1).unwrap_or_default());
    write!(text, "read bandwidth  {of_one} GB/s on 1 thread")?;
    if threads > 1 {
        let of_all = gigabytes(cpu.read_bandwidth_bytes_per_second);
        write!(text, ", {of_all} GB/s on {threads}")?;
    }
    text.push('\n');
    writeln!(
        text,
        "overheads       {:.1} ns per scattered row, {:.1} ns per axpy row, {:.1} µs per kernel launch",
        1e9 * cpu.row_seconds,
        1e9 * cpu.sum_row_seconds,
        1e6 * cpu.kernel_seconds,
    )?;
    writeln!(
        text,
        "outside GEMVs   {:.1} µs per layer for a hidden size of 4096, {:.1} µs for 11008 neurons; sampling {:.0} µs for a vocabulary of 32000",
        4096e6 * cpu.hidden_seconds,
        11008e6 * cpu.neuron_seconds,
        32000e6 * cpu.vocabulary_seconds,
    )?;
    if let Some(operations) = cpu.operations_per_second {
        let float = cpu
            .float_operations_per_second
            .map(|float| format!(", {:.0} with weights in float formats", float / 1e9));
        writeln!(
            text,
            "prompts         {:.0} GFLOP/s in GEMMs{}",
            operations / 1e9,
            float.unwrap_or_default()
        )?;
    }
    Ok(())
}

fn describe_gpu(text: &mut String, gpu: &Gpu, status: &str) -> Result<()> {
    let free = gpu.free_bytes.unwrap_or_default();
    writeln!(
        text,
        "GPU             {}, {} of memory, {} free; {status}",
        gpu.name,
        ByteSize(gpu.vram_bytes),
        ByteSize(free)
    )?;
    writeln!(
        text,
        "GPU memory      {} GB/s (twice the speed of copies), {:.1} µs per kernel launch",
        gigabytes(gpu.read_bandwidth_bytes_per_second),
        1e6 * gpu.kernel_launch_seconds
    )?;
    writeln!(
        text,
        "PCIe            {} GB/s, {:.1} µs latency, {:.1} µs per synchronisation",
        gigabytes(gpu.pcie_bandwidth_bytes_per_second),
        1e6 * gpu.pcie_latency_seconds,
        1e6 * gpu.sync_seconds
    )?;
    Ok(())
}

/// Reading by row size, and kernels by format, for one thread and for all.
fn tables(cpu: &Cpu) -> String {
    let mut counts: Vec<usize> = cpu.reads.iter().map(|read| read.threads).collect();
    counts.dedup();
    let headings: Vec<String> = counts
        .iter()
        .map(|count| counted(count, "thread"))
        .collect();
    let mut table = vec!["GB/s read, rows of"];
    table.extend(headings.iter().map(String::as_str));
    let mut reads = Table::new(&table);
    let of_one = cpu.reads.iter().filter(|read| read.threads == counts[0]);
    for row_bytes in of_one.map(|read| read.row_bytes) {
        let same = cpu.reads.iter().filter(|read| read.row_bytes == row_bytes);
        let mut cells = vec![ByteSize(row_bytes).to_string()];
        cells.extend(same.map(|read| gigabytes(read.bytes_per_second)));
        reads.row(cells);
    }
    let mut kernels = Table::new(&[
        "GB/s of weights",
        "threads",
        "row",
        "GEMV, all rows",
        "GEMV, 10% of rows",
        "axpy, all rows",
        "axpy, 10% of rows",
    ]);
    for format in Format::ALL {
        for kernel in cpu
            .kernels
            .iter()
            .filter(|kernel| kernel.format == format && [1, cpu.threads].contains(&kernel.threads))
        {
            kernels.row(vec![
                kernel.format.to_string(),
                kernel.threads.to_string(),
                ByteSize(kernel.row_bytes).to_string(),
                gigabytes(kernel.dense_bytes_per_second),
                gigabytes(kernel.rows_bytes_per_second),
                gigabytes(kernel.dense_axpy_bytes_per_second),
                gigabytes(kernel.axpy_bytes_per_second),
            ]);
        }
    }
    format!("\n{reads}\n{kernels}")
}
