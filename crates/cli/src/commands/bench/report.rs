//! What was measured, as tables for people and as one document for programs.

use std::{fmt::Write, path::Path};

use anyhow::Result;
use powerinfer_artifact::{ByteSize, plan::Policy};
use powerinfer_kernels::Isa;
use powerinfer_model::LanguageModel;
use powerinfer_pool::system;
use powerinfer_runtime::Runtime;
use serde_json::json;

use super::{
    batches::{self, BatchMeasured},
    check::Check,
    densities::FfnTime,
    measure::{Measured, Spread, Work},
    sides::Sides,
};
use crate::{
    contention::Contention,
    output::{Table, percent},
};

/// Everything there is to tell.
pub(super) struct Report<'a> {
    pub(super) model: &'a Runtime,
    pub(super) isa: Isa,
    pub(super) threads: usize,
    /// The policy that was forced.
    pub(super) policy: Option<Policy>,
    /// Where tokens came from, unless they are random.
    pub(super) text: Option<&'a Path>,
    pub(super) seed: u64,
    pub(super) probe_bytes: usize,
    pub(super) check: &'a Check,
    pub(super) measured: &'a [Measured],
    pub(super) batches: &'a [BatchMeasured],
    pub(super) densities: &'a [FfnTime],
    /// Of a GPU and the CPU beside it.
    pub(super) sides: Option<&'a Sides>,
    pub(super) sync_microseconds: f64,
}

impl Report<'_> {
    /// For programs.
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
            "sides": self.sides,
            "plan": {
                "machine": plan.hardware.name,
                "microseconds_per_token": plan.totals.microseconds_per_token,
            },
        })
    }

    /// For people.
    pub(super) fn text(&self) -> Result<String> {
        let bundle = self.model.bundle();
        let mut text = String::new();
        writeln!(
            text,
            "bundle          {}, {}, {} layers, {}",
            bundle.header().model,
            bundle.quant(),
            self.model.config().layer_count,
            self.policies(),
        )?;
        writeln!(
            text,
            "machine         {}, {}, {}",
            system::processor(),
            self.isa,
            threads(self.threads)
        )?;
        writeln!(text, "checked         {}\n", self.check.describe())?;
        if !self.measured.is_empty() {
            text += &self.speeds();
        }
        if !self.batches.is_empty() {
            let blank = if self.measured.is_empty() { "" } else { "\n" };
            writeln!(text, "{blank}{}", batches::table(self.batches, figure))?;
        }
        for measured in self.measured {
            if let Work::Decode { .. } = measured.work {
                writeln!(text, "\n{}", stages(measured))?;
                self.describe_decode(&mut text, measured)?;
            }
        }
        if let Some(sides) = self.sides {
            writeln!(text, "\n{}", sides.table())?;
            writeln!(text, "on the GPU      {}", sides.describe_gpu())?;
            writeln!(text, "on the CPU      {}", sides.describe_cpu())?;
        }
        if !self.densities.is_empty() {
            let mut table =
                Table::new(&["neurons", "µs an FFN", "least–most", "of the time of all"]);
            for found in self.densities {
                table.row(vec![
                    percent(found.neuron_share),
                    figure(found.microseconds.median),
                    range(&found.microseconds),
                    percent(found.time_share),
                ]);
            }
            writeln!(text, "\n{table}")?;
        }
        writeln!(
            text,
            "synchronisation       {:.1} µs beside the work of a small kernel on {}",
            self.sync_microseconds,
            threads(self.threads)
        )?;
        let batches = self.batches.iter().map(|batch| &batch.policy);
        let measured = self.measured.iter().chain(batches);
        let spans: Vec<Contention> = measured.map(|measured| measured.contention).collect();
        if let Some(line) = disturbance(Contention::mean(&spans)) {
            writeln!(text, "disturbed       {line}")?;
        }
        Ok(text)
    }

    /// The policy, or those of a plan with their numbers of layers.
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

    fn speeds(&self) -> String {
        let mut table = Table::new(&["", "tokens/s", "least–most", "µs a token"]);
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
            "read per token  {}: weights {}, predictors {}, KV cache {}; {} of FFN neurons computed",
            size(bytes.total),
            size(bytes.weights),
            size(bytes.predictors),
            size(bytes.kv_cache),
            percent(measured.ffn_neurons_computed),
        )?;
        let bandwidth = &measured.read_bandwidth;
        writeln!(
            text,
            "read bandwidth  {:.1} GB/s ({:.1}–{:.1}) of {} in a stream, {}, beside each repeat; decoding reads {:.1} GB/s, {} of it ({}–{})",
            bandwidth.median / 1e9,
            bandwidth.least / 1e9,
            bandwidth.most / 1e9,
            ByteSize(self.probe_bytes as u64),
            threads(self.threads),
            measured.bytes_per_second.median / 1e9,
            percent(measured.bandwidth_share.median),
            percent(measured.bandwidth_share.least),
            percent(measured.bandwidth_share.most),
        )?;
        let plan = self.model.bundle().plan();
        let (planned, found) = (
            plan.totals.microseconds_per_token,
            measured.microseconds_per_token.median,
        );
        if self.policy.is_none() && planned > 0.0 {
            writeln!(
                text,
                "plan            {} µs a token at full context on {}; measured {:.2} times that",
                figure(planned),
                plan.hardware.name,
                found / planned
            )?;
        }
        writeln!(
            text,
            "clock           {:.2} µs a token, {} of it, for timing the stages",
            measured.clock_microseconds,
            percent(measured.clock_microseconds / found)
        )?;
        Ok(())
    }
}

/// Stage by stage, what a token takes in the repeat in the middle, so that the stages add up.
fn stages(measured: &Measured) -> Table {
    let mut table = Table::new(&[
        "stage",
        "µs a token",
        "least–most",
        "of the time",
        "read",
        "GB/s",
        "of read bandwidth",
    ]);
    let total = measured.microseconds_per_token.repeats[measured.middle_repeat];
    let mut row = |name: &str, spread: &Spread, bytes: f64| {
        let time = spread.repeats[measured.middle_repeat];
        let speed = bytes / (time / 1e6).max(1e-12);
        let reading = match bytes > 0.0 {
            true => [
                ByteSize(bytes as u64).to_string(),
                format!("{:.1}", speed / 1e9),
                percent(speed / measured.read_bandwidth.median),
            ],
            false => Default::default(),
        };
        let cells = [
            name.to_owned(),
            figure(time),
            range(spread),
            percent(time / total),
        ];
        table.row([cells.as_slice(), &reading].concat());
    };
    for cost in &measured.stages {
        if cost.microseconds.most > 0.0 {
            row(&cost.stage, &cost.microseconds, cost.bytes);
        }
    }
    row("unaccounted", &measured.unaccounted_microseconds, 0.0);
    let bytes = measured.bytes_per_token.total;
    row("total", &measured.microseconds_per_token, bytes);
    table
}

/// Says that others used the machine, where they did.
fn disturbance(found: Contention) -> Option<String> {
    let share = |share: Option<f64>| share.map_or_else(|| "an unknown share".to_owned(), percent);
    found.is_disturbed().then(|| {
        format!(
            "the threads waited for a processor {} of the time, and {} of the machine's was given to others: figures are too low and vary",
            share(found.waited),
            share(found.stolen)
        )
    })
}

fn threads(count: usize) -> String {
    format!("{count} thread{}", if count == 1 { "" } else { "s" })
}

/// Three digits or so.
fn figure(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

fn range(spread: &Spread) -> String {
    format!("{}–{}", figure(spread.least), figure(spread.most))
}
