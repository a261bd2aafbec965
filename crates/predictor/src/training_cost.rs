//! Measures the cost of training a predictor for one layer of a 7B model: time, memory, quality per rank. An ignored test, on
//! synthetic samples.
//!
//! ```text
//! cargo test --release -p powerinfer-predictor -- --ignored --nocapture training_a_7b_layer
//! ```

use std::time::Instant;

use powerinfer_artifact::{Digest, Header, ModelIdentity, Progress, progress::Interrupted};
use powerinfer_kernels::Isa;
use powerinfer_profile::Traces;
use powerinfer_tensor::Format;

use crate::{
    Settings, Sizing, Targets,
    planted::{Planted, planted},
    train::{Layer, best_of_samples},
};

const SHAPE: Planted = Planted {
    hidden: 4096,
    neurons: 11_008,
    tokens: [200_000, 50_000],
    rank: 256,
    threshold: 1.65,
};

/// Prints the details of training.
struct Printed(Instant);

impl Progress for Printed {
    fn begin(&self, _title: &str, _total: u64, _unit: &'static str) {}
    fn advance(&self, _count: u64) -> Result<(), Interrupted> {
        Ok(())
    }
    fn note(&self, line: &str) {
        eprintln!("{:6.0} s  {line}", self.0.elapsed().as_secs_f64());
    }
    fn detail(&self, line: &str) {
        self.note(line);
    }
    fn end(&self) {}
}

/// A field of `/proc/self/status`, in MiB.
fn memory(name: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kibibytes = line.and_then(|line| line.trim_start_matches(':').split_whitespace().next());
    kibibytes.map_or(f64::NAN, |number| number.parse::<f64>().unwrap() / 1024.0)
}

#[test]
#[ignore = "takes many minutes and gigabytes; a measurement"]
fn training_a_7b_layer_stays_below_2_gib_of_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("traces.safetensors");
    let model = ModelIdentity {
        name: "planted".to_owned(),
        fingerprint: Digest::of(b"planted"),
    };
    let header = Header::new(Traces::FORMAT, Traces::VERSION, model, 7);
    planted(SHAPE, 7).write(&path, &header).unwrap();
    // Resets the peak, where the system supports it.
    drop(std::fs::write("/proc/self/clear_refs", "5"));
    let settings = Settings {
        targets: Targets {
            recall: 0.95,
            contribution_recall: 0.99,
        },
        // 3 % of 6.7 GiB in q8_0, shared by 32 layers.
        layer_bytes: 6_700_000,
        sizing: Sizing::Evidence,
        steps: 2000,
        patience: 60,
        quant: Format::Q8_0,
        matrices_per_neuron: 3,
        weights: Format::Q4_0,
        seed: 0,
    };
    let began = Instant::now();
    let (traces, _) = Traces::read(&path, SHAPE.hidden, SHAPE.neurons).unwrap();
    let counts = traces.held_out.counts();
    let fired: u64 = counts.iter().sum();
    let known = Layer {
        layer: 0,
        density: fired as f64 / (SHAPE.tokens[1] * SHAPE.neurons) as f64,
        most: 0.4,
    };
    eprintln!("{:.1} % of the neurons are active", 100.0 * known.density);
    let progress = Printed(began);
    let isa = Isa::detect().unwrap();
    let best = best_of_samples(known, &traces, settings, isa, &progress).unwrap();
    match &best {
        Ok((network, quality)) => eprintln!(
            "rank {}: {} bytes, {quality:?}",
            network.rank,
            network.bytes()
        ),
        Err(refusal) => eprintln!("none: {refusal}"),
    }
    let (peak, own) = (memory("VmHWM"), memory("RssAnon"));
    eprintln!(
        "{:.0} s; peak memory {peak:.0} MiB, anonymous at the end {own:.0} MiB",
        began.elapsed().as_secs_f64()
    );
    assert!(peak.is_nan() || peak < 2048.0, "{peak} MiB");
}
