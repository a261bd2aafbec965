//! `powerinfer doctor`: what this machine can do.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Result;
use powerinfer_artifact::{
    ByteSize,
    hardware::{Cpu, Hardware},
    write::write_file,
};
use powerinfer_kernels::Isa;
use serde_json::json;

use crate::{
    machine,
    output::{Output, print, print_json},
};

/// How to report.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer doctor\n  powerinfer doctor --write hardware.json && powerinfer place demo --vram 0G --hardware hardware.json"
)]
pub(crate) struct DoctorArguments {
    /// Write what was measured into this file, for `place --hardware FILE`
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &DoctorArguments, output: Output) -> Result<()> {
    output.say("measuring memory bandwidth …");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (one, all) = (machine::read_bandwidth(1), machine::read_bandwidth(threads));
    let isa = Isa::detect()?;
    let available: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    let memory = machine::memory();
    let (row, kernel) = machine::row_and_kernel_seconds(isa);
    if let Some(path) = &arguments.write {
        let hardware = Hardware {
            name: "this machine".to_owned(),
            description: format!("{}, {threads} threads", machine::processor()),
            cpu: Cpu {
                threads,
                read_bandwidth_bytes_per_second: all.round(),
                ram_bytes: memory.map_or(0, |(total, _)| total),
                row_seconds: row / threads as f64,
                kernel_seconds: kernel,
            },
            gpu: None,
            sources: BTreeMap::from([(
                "cpu".to_owned(),
                "measured by `powerinfer doctor`".to_owned(),
            )]),
        };
        hardware.validate()?;
        let text = serde_json::to_string_pretty(&hardware)? + "\n";
        write_file(path, text.as_bytes())?;
        output.say(format!(
            "written; `powerinfer place --hardware {}` plans for this machine",
            path.display()
        ));
    }
    if arguments.json {
        return print_json(&json!({
            "processor": machine::processor(),
            "threads": threads,
            "instruction_set": isa.name(),
            "instruction_sets": available,
            "ram_bytes": memory.map(|(total, _)| total),
            "free_ram_bytes": memory.map(|(_, free)| free),
            "read_bandwidth_bytes_per_second": { "one_thread": one, "all_threads": all },
            "row_seconds": row,
            "kernel_seconds": kernel,
            "gpu": null,
            "gpu_status": machine::gpu_status(),
        }));
    }
    let memory = memory.map_or_else(
        || "unknown".to_owned(),
        |(total, free)| format!("{}, {} free", ByteSize(total), ByteSize(free)),
    );
    print(format!(
        "processor       {}\nthreads         {threads}\nkernels         {} (of {})\nmemory          {memory}\n\
         read bandwidth  {:.1} GB/s on 1 thread, {:.1} GB/s on {threads}\nkernel costs    {:.1} ns a row and {:.2} µs a kernel, beside bytes\nGPU             none: {}\n",
        machine::processor(),
        isa.name(),
        available.join(", "),
        one / 1e9,
        all / 1e9,
        1e9 * row,
        1e6 * kernel,
        machine::gpu_status(),
    ))
}
