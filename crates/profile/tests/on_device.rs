//! Profiles made on a device against those of the CPU: on the emulator or a GPU.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use golden::{Golden, MODELS};
use powerinfer_artifact::{
    Hint, Progress, Shard,
    progress::{Interrupted, Silent},
    random::Random,
};
use powerinfer_emulator::{Order, test_device, test_emulator};
use powerinfer_kernels::cuda::Device;
use powerinfer_model::Checkpoint;
use powerinfer_profile::{
    Amount, Calibration, Part, Profile, ProfileError, Settings, Source, measure,
};

/// Text of two sources, one with sequences of odd lengths.
fn calibration(checkpoint: &Checkpoint, length: usize) -> Calibration {
    let config = checkpoint.config();
    let mut random = Random::new(1);
    let mut document = |tokens: usize| -> Vec<u32> {
        let word = |_| random.below(config.vocabulary_size) as u32;
        (0..tokens).map(word).collect()
    };
    let source = |name: &str, documents| Source {
        name: name.to_owned(),
        formats: Default::default(),
        documents,
    };
    let sources = vec![
        source("long", vec![document(5 * length)]),
        source(
            "short",
            vec![document(1), document(2), document(length - 1)],
        ),
    ];
    Calibration::new(sources, length, 6 * length).unwrap()
}

const SETTINGS: Settings = Settings {
    trace_tokens: 50,
    amount: Amount::Everything,
    shard: Shard::WHOLE,
    seed: 0,
};

fn profile(
    checkpoint: &Checkpoint,
    calibration: &Calibration,
    device: Option<&Arc<dyn Device>>,
    out: &Path,
) -> Result<Profile, ProfileError> {
    measure(checkpoint, calibration, SETTINGS, device, out, &Silent)
}

/// Records the notes.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Progress for Notes {
    fn begin(&self, _title: &str, _total: u64, _unit: &'static str) {}
    fn advance(&self, _count: u64) -> Result<(), Interrupted> {
        Ok(())
    }
    fn note(&self, line: &str) {
        self.0.lock().unwrap().push(line.to_owned());
    }
    fn end(&self) {}
}

/// Asserts that two values agree up to rounding.
#[track_caller]
fn assert_near(found: f32, want: f32, largest: f32, what: &str) {
    let tolerance = 1e-4 * (want.abs() + largest);
    assert!(
        (found - want).abs() <= tolerance,
        "{what}: {found}, expected {want}"
    );
}

/// Asserts that two profiles agree up to rounding, which may activate a neuron.
fn assert_same_profile(found: &Profile, want: &Profile, context: &str) {
    for (layer, (found, want)) in found.activities().iter().zip(want.activities()).enumerate() {
        let context = format!("{context}, layer {layer}");
        assert_eq!(found.tokens, want.tokens, "{context}");
        let differing = |found: &[u64], want: &[u64]| -> u64 {
            found.iter().zip(want).map(|(a, b)| a.abs_diff(*b)).sum()
        };
        let active: u64 = want.active.iter().sum();
        let allowed = active / 10_000;
        assert!(
            differing(&found.active, &want.active) <= allowed,
            "{context}: {} of {active} activations",
            differing(&found.active, &want.active)
        );
        let halves = (&found.first_half, &want.first_half);
        let sources = found.sources.iter().zip(&want.sources);
        for (found, want) in sources.chain([halves]) {
            assert_eq!(found.tokens, want.tokens, "{context}");
            assert!(
                differing(&found.active, &want.active) <= allowed,
                "{context}"
            );
        }
        for (found, want) in found.locality.iter().zip(&want.locality) {
            assert!(found.active.abs_diff(want.active) <= allowed, "{context}");
            assert!(
                found.reused.abs_diff(want.reused) <= 32 * allowed,
                "{context}"
            );
        }
        let largest = |values: &[f32]| values.iter().fold(0.0f32, |a, b| a.max(*b));
        for (found, want) in [
            (found.magnitude(), want.magnitude()),
            (found.contribution(), want.contribution()),
        ] {
            let largest = largest(&want);
            for (found, want) in found.iter().zip(&want) {
                assert_near(*found, *want, largest, &context);
            }
        }
    }
    for layer in 0..want.activities().len() {
        let (found, want) = (found.traces(layer).unwrap(), want.traces(layer).unwrap());
        for part in Part::ALL {
            let (found, want) = (found.part(part), want.part(part));
            assert_eq!(found.tokens(), want.tokens());
            let (mut active, mut differing) = (0, 0);
            for token in 0..want.tokens() {
                // Samples are bf16.
                let near = |(found, want): (f32, f32)| {
                    assert!(
                        (found - want).abs() <= 0.01 * (want.abs() + 0.01),
                        "{context}: {found}, expected {want}"
                    );
                };
                found.input(token).zip(want.input(token)).for_each(near);
                if let Some(residual) = want.residual(token) {
                    let found = found.residual(token).unwrap();
                    found.zip(residual).for_each(near);
                }
                for neuron in 0..want.active.neurons() {
                    let is_active = want.active.is_active(token, neuron);
                    active += usize::from(is_active);
                    differing += usize::from(is_active != found.active.is_active(token, neuron));
                }
            }
            assert!(
                differing <= active / 1000,
                "{context}: {differing} of {active} bits"
            );
        }
    }
}

#[test]
fn a_device_counts_as_the_cpu_does_in_every_family() {
    let Some(device) = test_device(Order::Shuffled(1)) else {
        return;
    };
    for name in MODELS {
        let checkpoint = Golden::open(name).checkpoint();
        let length = checkpoint.config().context_length.min(33);
        let calibration = calibration(&checkpoint, length);
        let folder = tempfile::tempdir().unwrap();
        let (here, there) = (folder.path().join("cpu"), folder.path().join("device"));
        let want = profile(&checkpoint, &calibration, None, &here).unwrap();
        let found = profile(&checkpoint, &calibration, Some(&device), &there).unwrap();
        assert_same_profile(&found, &want, name);
        assert_eq!(found.reserved().unwrap(), want.reserved().unwrap());
    }
}

#[test]
fn a_device_with_little_memory_uses_smaller_batches_and_with_too_little_fails_with_a_hint() {
    let checkpoint = Golden::open("llama-relu-gqa").checkpoint();
    let calibration = calibration(&checkpoint, 64);
    let folder = tempfile::tempdir().unwrap();
    let out = |name: &str| folder.path().join(name);
    let want = profile(&checkpoint, &calibration, None, &out("cpu")).unwrap();
    let mut done = 0;
    for bytes in [0, 100_000, 500_000, 600_000, 800_000, 4_000_000] {
        let Some(emulator) = test_emulator(2, Order::Forward) else {
            return;
        };
        let device: Arc<dyn Device> = Arc::new(emulator.with_memory(bytes));
        match profile(&checkpoint, &calibration, Some(&device), &out("device")) {
            Ok(found) => {
                assert_same_profile(&found, &want, &format!("{bytes} bytes"));
                done += 1;
            }
            Err(error) => {
                assert_eq!(done, 0, "{bytes} bytes: {error}");
                assert_eq!(error.hint(), Some(Hint::ResumeOnCpu), "{error}");
            }
        }
    }
    assert!((2..6).contains(&done), "{done} of the sizes are enough");
}

#[test]
fn a_run_resumes_after_the_layers_that_a_lost_device_finished() {
    let Some(device) = test_emulator(2, Order::Forward) else {
        return;
    };
    let checkpoint = Golden::open("opt-preln").checkpoint();
    let calibration = calibration(&checkpoint, 20);
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (folder.path().join("cpu"), folder.path().join("device"));
    let want = profile(&checkpoint, &calibration, None, &here).unwrap();
    // A layer has more than a hundred launches.
    let device: Arc<dyn Device> = Arc::new(device.lost_after(150));
    let error = profile(&checkpoint, &calibration, Some(&device), &there).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.hint(), Some(Hint::ResumeOnCpu));
    assert!(text.contains("it is lost"), "{text}");
    let notes = Notes::default();
    let found = measure(&checkpoint, &calibration, SETTINGS, None, &there, &notes).unwrap();
    let notes = notes.0.into_inner().unwrap();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("resuming after layer")),
        "{notes:?}"
    );
    assert_same_profile(&found, &want, "resumed on the CPU");
}
