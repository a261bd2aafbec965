//! Runs the same steps over sessions of different contexts on the emulated device and on the CPU; their results must agree.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use powerinfer_artifact::progress::Silent;
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_emulator::{Emulator, Order};
use powerinfer_runtime::{
    ActivationFormat, DeviceChoice, Engine, Execution, Passes, RuntimeError, Session, Wanted,
};

/// Maximum number of sessions at a time.
const SESSIONS: usize = 5;
/// Maximum number of steps of a try: the emulator is slow.
const STEPS: usize = 10;
/// Largest allowed difference of logits, relative to the CPU's largest logit.
const TOLERANCE: f32 = 1e-3;

/// A session on the device and its copy on the CPU.
struct Pair([Session; 2]);

/// Runs the steps that `bytes` encode with the bundle in `folder`.
///
/// # Panics
///
/// The bundle cannot be run, device and CPU disagree, or a pass had to be run again.
pub(crate) fn run(folder: &Path, bytes: &[u8]) {
    let seed = bytes.first().copied().unwrap_or_default();
    let mut models = open(folder, seed).unwrap_or_else(|error| panic!("{error:#}"));
    let mut pairs: Vec<Pair> = Vec::new();
    for step in bytes.chunks_exact(4).take(STEPS) {
        let [operation, slot, number, other] =
            [step[0], step[1], step[2], step[3]].map(usize::from);
        if pairs.is_empty() || operation % 8 == 0 && pairs.len() < SESSIONS {
            let context = 1 + number % 64;
            let new =
                |model: &mut Engine| model.new_session(context).expect("memory for a session");
            pairs.push(Pair(models.each_mut().map(new)));
            continue;
        }
        let (slot, count) = (slot % pairs.len(), 1 + number % 11);
        let vocabulary = models[0].bundle().config().vocabulary_size;
        let tokens: Vec<u32> = (0..SESSIONS + count)
            .map(|index| ((other * 31 + index * 7) % vocabulary) as u32)
            .collect();
        match operation % 8 {
            0 | 1 => each(&mut models, &mut pairs[slot..=slot], |model, sessions| {
                model.pass(sessions, &tokens[..1], Wanted::Last)
            }),
            2 => each(&mut models, &mut pairs[slot..=slot], |model, sessions| {
                model.pass(sessions, &tokens[..count], Wanted::All)
            }),
            3 | 4 => each(&mut models, &mut pairs, |model, sessions| {
                model.pass(sessions, &tokens[..sessions.len()], Wanted::Last)
            }),
            5 => each(&mut models, &mut pairs, |model, sessions| {
                let tokens = &tokens[..sessions.len() - 1 + count];
                model.pass(sessions, tokens, Wanted::Last)
            }),
            6 => {
                let from = other % pairs.len();
                let kept = pairs[from].0[0].position().min(number);
                let taken = pairs.remove(from);
                if let Some(to) = pairs.get_mut(slot) {
                    let results = [0, 1].map(|side| to.0[side].copy_from(&taken.0[side], kept));
                    assert_eq!(results[0].is_ok(), results[1].is_ok(), "{results:?}");
                }
                pairs.push(taken);
            }
            _ => {
                let kept = number % (pairs[slot].0[0].position() + 1);
                pairs[slot]
                    .0
                    .iter_mut()
                    .for_each(|session| session.truncate(kept));
            }
        }
    }
    assert_eq!(
        models[0].observers().graph_retries(),
        0,
        "tokens were run again"
    );
}

/// Opens the bundle on the emulated device, with this order of threads, and on the CPU.
fn open(folder: &Path, seed: u8) -> Result<[Engine; 2]> {
    let open = |device| {
        let bundle = Bundle::open(folder, IntegrityCheck::Quick)?;
        let execution = Execution {
            activations: ActivationFormat::F32,
            device,
            ..Execution::on_cpu(1)
        };
        anyhow::Ok(Engine::open(bundle, None, &execution, &Silent)?)
    };
    let device = Emulator::new(2, Order::Shuffled(seed.into())).context("there is no emulator")?;
    let device = open(DeviceChoice::Given(Arc::new(device)))?;
    ensure!(device.uses_device(), "the plan does not use a GPU");
    Ok([device, open(DeviceChoice::Cpu)?])
}

/// Runs `run` on device and CPU. Checks that the logits agree, or that both fail and leave the sessions unchanged.
fn each(
    models: &mut [Engine; 2],
    pairs: &mut [Pair],
    run: impl Fn(&mut Engine, &mut [&mut Session]) -> Result<(), RuntimeError>,
) {
    let positions = |pairs: &[Pair]| -> Vec<[usize; 2]> {
        let of = |pair: &Pair| pair.0.each_ref().map(Session::position);
        pairs.iter().map(of).collect()
    };
    let before = positions(pairs);
    let [on_device, on_host] = [0, 1].map(|side| {
        let mut sessions: Vec<&mut Session> =
            pairs.iter_mut().map(|pair| &mut pair.0[side]).collect();
        let model = &mut models[side];
        run(model, &mut sessions).map(|()| model.logits().to_vec())
    });
    match (on_device, on_host) {
        (Ok(found), Ok(want)) => {
            let largest = want
                .iter()
                .fold(0.0f32, |most, logit| most.max(logit.abs()));
            let differences = found.iter().zip(&want).map(|(a, b)| (a - b).abs());
            let worst = differences.fold(0.0, f32::max);
            assert!(
                found.len() == want.len() && worst <= TOLERANCE * largest,
                "logits differ by {worst} of {largest}"
            );
        }
        (Err(_), Err(_)) => assert_eq!(positions(pairs), before, "as before"),
        (found, want) => panic!(
            "{:?} on the device, {:?} on the CPU",
            found.err(),
            want.err()
        ),
    }
    assert!(positions(pairs).iter().all(|[device, host]| device == host));
}
