//! Results of a benchmark, as tables and as one JSON document.

use std::{fmt::Write, path::Path};

use anyhow::Result;
use powerinfer_artifact::{ByteSize, counted, hardware::Cpu, plan::Policy};
use powerinfer_kernels::Isa;
use powerinfer_model::LanguageModel;
use powerinfer_pool::system;
use powerinfer_runtime::SingleSession;
use serde_json::json;

use crate::output::{Table, percent};
use powerinfer_eval::{
    Contention,
    bench::{
        BatchMeasured, Check, FfnTime, HybridTimes, Measured, PartTimes, ReadRate,
        SpeculationTimes, Spread, StageCost, Work,
    },
    format::figure,
};

/// Results of a benchmark.
pub(super) struct Report<'a> {
    pub(super) model: &'a SingleSession,
    pub(super) isa: Isa,
    pub(super) threads: usize,
    /// The policy, if it is not the plan's.
    pub(super) policy: Option<Policy>,
    /// Text of the tokens; none if they are random.
    pub(super) text: Option<&'a Path>,
    pub(super) seed: u64,
    pub(super) probe_bytes: usize,
    pub(super) check: &'a Check,
    pub(super) measured: &'a [Measured],
    pub(super) batches: &'a [BatchMeasured],
    pub(super) densities: &'a [FfnTime],
    pub(super) speculation: Option<&'a SpeculationTimes>,
    /// Times of the parts of a token's jobs, one entry per number of threads.
    pub(super) parts: &'a [PartTimes],
    /// Times of device and host.
    pub(super) hybrid: Option<&'a HybridTimes>,
    pub(super) sync_microseconds: f64,
}

impl Report<'_> {
    /// Results as JSON.
    pub(super) fn json(&self) -> serde_json::Value {
        let bundle = self.model.bundle();
        let plan = bundle.plan();
        let of = |is_prompt: bool| -> Vec<&Measured> {
            let measured = self.measured.iter();
            measured
                .filter(|measured| matches!(measured.work, Work::Prompt { .. }) == is_prompt)
                .collect()
        };
        json!({
            "tool": concat!("powerinfer ", env!("CARGO_PKG_VERSION")),
            "bundle": {
                "model": bundle.header().model,
                "quant": bundle.quant().to_string(),
                "layers": self.model.config().layer_count,
                "context_tokens": self.model.context_limit(),
                "files": bundle.manifest_document().body.files,
            },
            "machine": {
                "processor": system::processor(),
                "system": std::env::consts::OS,
                "instruction_set": self.isa.name(),
                "cores": std::thread::available_parallelism().map_or(1, usize::from),
                "threads": self.threads,
                "ram_bytes": system::memory().map(|(total, _)| total),
            },
            "policy": self.policy.map_or_else(|| "planned".to_owned(), |policy| policy.to_string()),
            "layer_policies": self.model.policies(),
            "tokens": { "text": self.text, "seed": self.seed },
            "check": self.check,
            "probe_bytes": self.probe_bytes,
            "sync_microseconds": self.sync_microseconds,
            "prompt": of(true),
            "decode": of(false),
            "batches": self.batches,
            "ffn": self.densities,
            "speculation": self.speculation,
            "parts": self.parts,
            "hybrid": self.hybrid,
            "plan": {
                "machine": plan.hardware.name,
                "microseconds_per_token": plan.totals.microseconds_per_token,
            },
        })
    }

    /// Results as tables.
    pub(super) fn text(&self) -> Result<String> {
        let bundle = self.model.bundle();
        let plan = bundle.plan();
        let mut text = String::new();
        writeln!(
            text,
            "bundle          {}, {}, {}, {}",
            bundle.header().model,
            bundle.quant(),
            counted(self.model.config().layer_count, "layer"),
            self.policies(),
        )?;
        writeln!(
            text,
            "machine         {}, {}, {}",
            system::processor(),
            self.isa,
            counted(self.threads, "thread")
        )?;
        let on = match self.text {
            Some(_) => "",
            None => "; on random tokens, policies agree less often than on text",
        };
        writeln!(text, "checked         {}{on}\n", self.check)?;
        if !self.measured.is_empty() {
            text += &self.speeds();
        }
        if !self.batches.is_empty() {
            let blank = if self.measured.is_empty() { "" } else { "\n" };
            let table = batch_table(self.batches, self.reads_memory());
            writeln!(text, "{blank}{table}")?;
        }
        for measured in self.measured {
            if let Work::Decode { .. } = measured.work {
                writeln!(text, "\n{}", stages(measured, self.reads_memory()))?;
                let repeats = measured.microseconds_per_token.repeats.len();
                if repeats.is_multiple_of(2) {
                    writeln!(
                        text,
                        "stages          from the slower of the two middle repeats, so that they add up"
                    )?;
                }
                self.describe_decode(&mut text, measured)?;
            }
        }
        if let Some(times) = self.hybrid {
            writeln!(text, "\n{}", hybrid_table(times))?;
            writeln!(
                text,
                "on the GPU      {} of the computed neurons, {}; kernels of layers without a synchronisation between them count to the last",
                percent(times.gpu_share_of_computed_neurons),
                format_rate(times.gpu)
            )?;
            writeln!(text, "on the CPU      {}", format_rate(times.cpu))?;
        }
        if let Some(reason) = self.model.graph_failure() {
            writeln!(
                text,
                "without graphs  kernels are launched one by one: {reason}"
            )?;
        }
        if self.model.observers().graph_retries() > 0 {
            writeln!(
                text,
                "run again       {} without graphs, as the host was late or a graph failed",
                counted(self.model.observers().graph_retries() as usize, "token")
            )?;
        }
        if !self.densities.is_empty() {
            let mut table = Table::new(&[
                "neurons",
                "µs per FFN",
                "least–most",
                "of the time of all",
                "memory allows",
                "times that",
            ]);
            for found in self.densities {
                table.row(vec![
                    percent(found.neuron_share),
                    figure(found.microseconds.median),
                    range(&found.microseconds),
                    percent(found.time_share),
                    figure(found.ceiling_microseconds),
                    format!(
                        "{:.2}",
                        found.microseconds.median / found.ceiling_microseconds
                    ),
                ]);
            }
            writeln!(text, "\n{table}")?;
        }
        if let Some(times) = self.speculation {
            describe_speculation(&mut text, times)?;
        }
        for times in self.parts {
            writeln!(text, "\n{}", part_table(times, &plan.hardware.cpu))?;
        }
        if !self.parts.is_empty() {
            let cpu = &plan.hardware.cpu;
            let streams = self.parts.iter().map(|times| {
                let bandwidth = cpu.stream_bytes_per_second(times.threads) / 1e9;
                format!(
                    "{bandwidth:.1} GB/s from memory on {}",
                    counted(times.threads, "thread")
                )
            });
            writeln!(
                text,
                "parts           timed one after the other on one thread, then assigned to threads in order; assumes {:.1} µs to start and await a job, and {}, as on {}",
                cpu.kernel_seconds * 1e6,
                streams.collect::<Vec<_>>().join(", "),
                plan.hardware.name
            )?;
        }
        writeln!(
            text,
            "kernel launch   {:.1} µs of overhead each, with the wait for all threads, on {}",
            self.sync_microseconds,
            counted(self.threads, "thread")
        )?;
        let batches = self.batches.iter().map(|batch| &batch.policy);
        let measured = self.measured.iter().chain(batches);
        let spans: Vec<Contention> = measured.map(|measured| measured.contention).collect();
        if let Some(line) = disturbance(Contention::mean(&spans)) {
            writeln!(text, "disturbed       {line}")?;
        }
        Ok(text)
    }

    /// The policy, or those of the plan with their numbers of layers.
    fn policies(&self) -> String {
        let of = self.model.policies();
        let counted = Policy::ALL.into_iter().filter_map(|policy| {
            let count = of.iter().filter(|other| **other == policy).count();
            match count {
                0 => None,
                count if count == of.len() => Some(format!("`{policy}`")),
                count => Some(format!("`{policy}` in {count}")),
            }
        });
        let counted: Vec<String> = counted.collect();
        match self.policy {
            Some(_) => counted.join(", "),
            None => format!("as planned: {}", counted.join(", ")),
        }
    }

    /// Whether the probe of the read bandwidth is too large for the processor's caches.
    fn reads_memory(&self) -> bool {
        self.probe_bytes as u64 >= 2 * system::cache_bytes()
    }

    fn speeds(&self) -> String {
        let mut table = Table::new(&["", "tokens/s", "least–most", "µs per token"]);
        for measured in self.measured {
            let speed = &measured.tokens_per_second;
            table.row(vec![
                match measured.work {
                    Work::Prompt { tokens } => format!("prompt of {tokens}"),
                    Work::Decode { tokens, depth: 0 } => format!("decoding {tokens}"),
                    Work::Decode { tokens, depth } => format!("decoding {tokens} after {depth}"),
                    Work::Batch {
                        sequences, tokens, ..
                    } => format!("decoding {tokens} of {sequences}"),
                },
                figure(speed.median),
                range(speed),
                figure(measured.microseconds_per_token.median),
            ]);
        }
        table.to_string()
    }

    fn describe_decode(&self, text: &mut String, measured: &Measured) -> Result<()> {
        let bytes = &measured.bytes_per_token;
        let size = |bytes: f64| ByteSize(bytes as u64);
        writeln!(
            text,
            "read per token  {}: weights {}, predictors {}, KV cache {}{}; {} of FFN neurons computed",
            size(bytes.total),
            size(bytes.weights),
            size(bytes.predictors),
            size(bytes.kv_cache),
            if bytes.gpu > 0.0 {
                format!(", by the GPU {}", size(bytes.gpu))
            } else {
                String::new()
            },
            percent(measured.ffn_neurons_computed),
        )?;
        let bandwidth = &measured.read_bandwidth;
        if self.reads_memory() {
            writeln!(
                text,
                "read bandwidth  {:.1} GB/s ({:.1}–{:.1}) of {} in a stream, {}, between repeats; in decoding, the CPU reads {:.1} GB/s, {} of that bandwidth ({}–{}) in the median repeat",
                bandwidth.median / 1e9,
                bandwidth.least / 1e9,
                bandwidth.most / 1e9,
                ByteSize(self.probe_bytes as u64),
                counted(self.threads, "thread"),
                measured.bytes_per_second.median / 1e9,
                percent(measured.bandwidth_share.median),
                percent(measured.bandwidth_share.least),
                percent(measured.bandwidth_share.most),
            )?;
        } else {
            writeln!(
                text,
                "read bandwidth  not measured: the probe of {} is less than twice the processor's cache of {}; in decoding, the CPU reads {:.1} GB/s",
                ByteSize(self.probe_bytes as u64),
                ByteSize(system::cache_bytes()),
                measured.bytes_per_second.median / 1e9,
            )?;
        }
        if let Some(rows) = measured
            .row_bandwidth
            .as_ref()
            .filter(|_| self.reads_memory())
        {
            writeln!(
                text,
                "rows            {:.1} GB/s ({:.1}–{:.1}) for the rows that active neurons select, of their length and at their distances",
                rows.median / 1e9,
                rows.least / 1e9,
                rows.most / 1e9,
            )?;
        }
        let plan = self.model.bundle().plan();
        let (planned, found) = (
            plan.totals.microseconds_per_token,
            measured.microseconds_per_token.median,
        );
        if self.policy.is_none() && planned > 0.0 {
            writeln!(
                text,
                "plan            {} µs per token at full context on {}; measured {:.2} times that",
                figure(planned),
                plan.hardware.name,
                found / planned
            )?;
        }
        writeln!(
            text,
            "clock           {:.2} µs per token, {} of it, for timing the stages",
            measured.clock_microseconds,
            percent(measured.clock_microseconds / found)
        )?;
        Ok(())
    }
}

/// Time per token of each stage in the median repeat, so that the stages add up; compared with the read bandwidth if that is
/// the bandwidth of `memory`, not of a cache.
fn stages(measured: &Measured, memory: bool) -> Table {
    let columns = [
        "stage",
        "µs per token",
        "least–most",
        "of the time",
        "read",
        "GB/s",
        "memory allows",
        "of that",
    ];
    let shown = if memory {
        columns.len()
    } else {
        columns.len() - 2
    };
    let mut table = Table::new(&columns[..shown]);
    let total = measured.microseconds_per_token.repeats[measured.middle_repeat];
    let mut row = |name: &str, spread: &Spread, bytes: f64, ceiling: f64| {
        let time = spread.repeats[measured.middle_repeat];
        let speed = bytes / (time / 1e6).max(1e-12);
        let reading = if bytes > 0.0 {
            [
                ByteSize(bytes as u64).to_string(),
                format!("{:.1}", speed / 1e9),
                format!("{:.1}", ceiling / 1e9),
                percent(speed / ceiling),
            ]
        } else {
            Default::default()
        };
        let cells = [
            name.to_owned(),
            figure(time),
            range(spread),
            percent(time / total),
        ];
        table.row([cells.as_slice(), &reading].concat()[..shown].to_vec());
    };
    for cost in &measured.stages {
        if cost.microseconds.most > 0.0 {
            let ceiling = cost.ceiling_bytes_per_second;
            row(&cost.stage, &cost.microseconds, cost.bytes, ceiling);
        }
    }
    row("unaccounted", &measured.unaccounted_microseconds, 0.0, 1.0);
    let bytes = measured.bytes_per_token.total - measured.bytes_per_token.gpu;
    let seconds = |cost: &StageCost| cost.bytes / cost.ceiling_bytes_per_second;
    let ceiling = bytes / measured.stages.iter().map(seconds).sum::<f64>();
    row("total", &measured.microseconds_per_token, bytes, ceiling);
    table
}

/// Report of contention for the processor, if there was any.
fn disturbance(found: Contention) -> Option<String> {
    let share = |share: Option<f64>| share.map_or_else(|| "an unknown share".to_owned(), percent);
    found.is_disturbed().then(|| {
        format!(
            "threads waited for a processor {} of the time, {} of the machine's time was stolen: speeds are too low and vary",
            share(found.waited),
            share(found.stolen)
        )
    })
}

fn range(spread: &Spread) -> String {
    format!("{}–{}", figure(spread.least), figure(spread.most))
}

/// A table of the estimated times of a token on several threads, with a row per stage.
fn part_table(times: &PartTimes, cpu: &Cpu) -> Table {
    let threads = counted(times.threads, "thread");
    let mut table = Table::new(&[
        &threads,
        "jobs",
        "serial µs",
        "parts µs",
        "imbalance",
        "threads take",
        "memory allows",
        "µs per token",
    ]);
    let start = cpu.kernel_seconds * 1e6;
    let limit = |bytes: f64| bytes / cpu.stream_bytes_per_second(times.threads) * 1e6;
    let mut sums = [0.0; 6];
    for stage in &times.stages {
        let (threads, memory) = (stage.microseconds(start), limit(stage.bytes));
        let figures = [
            stage.serial_microseconds,
            stage.part_microseconds,
            stage.makespan_microseconds,
            threads,
            memory,
            threads.max(memory),
        ];
        sums.iter_mut()
            .zip(figures)
            .for_each(|(sum, figure)| *sum += figure);
        let imbalance = stage.imbalance(times.threads);
        table.row(part_row(&stage.stage, stage.jobs, figures, imbalance));
    }
    let jobs = times.stages.iter().map(|stage| stage.jobs).sum();
    let imbalance = sums[2] * times.threads as f64 / sums[1].max(1e-9);
    table.row(part_row("all", jobs, sums, imbalance));
    table
}

/// A row of [`part_table`] from `figures` in microseconds: time between jobs, of all parts, of the slowest thread, of the stage on all
/// threads, that memory needs, and the larger of the last two.
fn part_row(stage: &str, jobs: usize, figures: [f64; 6], imbalance: f64) -> Vec<String> {
    let [serial, parts, _, threads, memory, token] = figures.map(figure);
    let imbalance = format!("{imbalance:.2}");
    vec![
        stage.to_owned(),
        jobs.to_string(),
        serial,
        parts,
        imbalance,
        threads,
        memory,
        token,
    ]
}

/// Table with one row per batch size. If the read bandwidth is that of `memory`, not of a cache, a column shows the share achieved.
fn batch_table(measured: &[BatchMeasured], memory: bool) -> Table {
    let mut headings = vec![
        "sequences",
        "tokens/s",
        "least–most",
        "each",
        "read per token",
        "neurons of a token",
        "of any",
    ];
    if memory {
        headings.push("of read bandwidth");
    }
    let has_dense = measured.iter().any(|batch| batch.dense.is_some());
    let has_plan = measured
        .iter()
        .any(|batch| batch.planned_tokens_per_second.is_some());
    if has_dense {
        headings.extend(["dense", "least–most", "times dense"]);
    }
    if has_plan {
        headings.push("plan, full context");
    }
    let mut table = Table::new(&headings);
    for batch in measured {
        let found = &batch.policy;
        let mut row = vec![
            batch.sequences.to_string(),
            figure(found.tokens_per_second.median),
            range(&found.tokens_per_second),
            figure(batch.sequence_tokens_per_second),
            ByteSize(found.bytes_per_token.total as u64).to_string(),
            percent(found.ffn_neurons_computed),
            percent(batch.union_share),
        ];
        if memory {
            row.push(percent(found.bandwidth_share.median));
        }
        if let (Some(dense), Some(times)) = (&batch.dense, batch.times_dense) {
            row.extend([
                figure(dense.tokens_per_second.median),
                range(&dense.tokens_per_second),
                format!("{times:.2}"),
            ]);
        }
        if has_plan {
            let planned = batch.planned_tokens_per_second;
            row.push(planned.map_or_else(String::new, figure));
        }
        table.row(row);
    }
    table
}

/// Tables of completions with and without proposals, and of passes by their number of tokens.
fn describe_speculation(text: &mut String, times: &SpeculationTimes) -> Result<()> {
    let mut table = Table::new(&["", "tokens/s", "least–most"]);
    for (name, speed) in [
        ("one token after the other", &times.plain),
        ("speculative", &times.speculative),
    ] {
        table.row(vec![name.to_owned(), figure(speed.median), range(speed)]);
    }
    writeln!(text, "\n{table}")?;
    writeln!(
        text,
        "speculation     {:.2} times as fast ({:.2}–{:.2}) for {} of {}; {} of {} accepted\n",
        times.speedup.median,
        times.speedup.least,
        times.speedup.most,
        counted(times.tokens, "token"),
        counted(times.completions, "completion"),
        times.accepted,
        counted(times.proposed as usize, "proposed token"),
    )?;
    let mut table = Table::new(&[
        "tokens of a pass",
        "passes",
        "µs",
        "neurons of a token",
        "of any",
    ]);
    for pass in &times.passes {
        table.row(vec![
            pass.tokens.to_string(),
            pass.passes.to_string(),
            figure(pass.microseconds),
            percent(pass.neurons_of_a_token),
            percent(pass.neurons_of_any),
        ]);
    }
    writeln!(text, "{table}")?;
    Ok(())
}

/// A table with a row per layer, and one for all.
fn hybrid_table(times: &HybridTimes) -> Table {
    let mut table = Table::new(&[
        "layer",
        "GPU µs",
        "planned",
        "CPU µs",
        "planned",
        "waiting µs",
        "planned",
    ]);
    let layers = times.layers.iter().enumerate();
    let layers = layers.map(|(index, layer)| (index.to_string(), layer));
    for (name, layer) in layers.chain([("all".to_owned(), &times.total)]) {
        let figures = [
            layer.gpu_microseconds,
            layer.planned_gpu_microseconds,
            layer.cpu_microseconds,
            layer.planned_cpu_microseconds,
            layer.waiting_microseconds,
            layer.planned_sync_microseconds,
        ];
        let figures = figures.map(|figure| format!("{figure:.1}"));
        table.row([&[name][..], &figures].concat());
    }
    table
}

/// Memory traffic in words.
fn format_rate(rate: ReadRate) -> String {
    let mut text = format!("{:.1} MB per token", rate.bytes_per_token / 1e6);
    if let Some(speed) = rate.bytes_per_second {
        text += &format!(" at {:.1} GB/s", speed / 1e9);
    }
    if let (Some(share), Some(most)) = (rate.bandwidth_share, rate.read_bandwidth) {
        text += &format!(
            ", {} of the {:.1} GB/s measured",
            percent(share),
            most / 1e9
        );
    }
    text
}
