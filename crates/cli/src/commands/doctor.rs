//! `powerinfer doctor`: what this machine can do.

use anyhow::Result;
use powerinfer_artifact::ByteSize;
use powerinfer_kernels::Isa;
use serde_json::json;

use crate::{
    machine,
    output::{Output, print, print_json},
};

/// How to report.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  powerinfer doctor --json")]
pub(crate) struct DoctorArguments {
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
    if arguments.json {
        return print_json(&json!({
            "processor": machine::processor(),
            "threads": threads,
            "instruction_set": isa.name(),
            "instruction_sets": available,
            "ram_bytes": memory.map(|(total, _)| total),
            "free_ram_bytes": memory.map(|(_, free)| free),
            "read_bandwidth_bytes_per_second": { "one_thread": one, "all_threads": all },
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
         read bandwidth  {:.1} GB/s on 1 thread, {:.1} GB/s on {threads}\nGPU             none: {}\n",
        machine::processor(),
        isa.name(),
        available.join(", "),
        one / 1e9,
        all / 1e9,
        machine::gpu_status(),
    ))
}
