//! Devices of the tests of CUDA kernels.

use std::sync::Arc;

use powerinfer_emulator::{Checks, Order, test_device, test_emulator};
use powerinfer_kernels::cuda::Device;
use powerinfer_pool::environment;

/// Multiprocessors of an H100.
const MANY: usize = 132;

/// Runs a test on the emulator in every sample order, or several times on a GPU; its result must have the same bits each
/// time. The emulator also runs it on as many multiprocessors as a large GPU has, with checks of every access.
#[track_caller]
pub(crate) fn on_every_device(test: impl Fn(&Arc<dyn Device>) -> Vec<f32>) {
    let bits = |device: &Arc<dyn Device>| -> Vec<u32> {
        test(device).into_iter().map(f32::to_bits).collect()
    };
    if !environment::tests_on_gpu() {
        let Some(emulator) = test_emulator(MANY, Order::Shuffled(2)) else {
            return;
        };
        bits(&(Arc::new(emulator.with_checks(Checks::On)) as Arc<dyn Device>));
    }
    let mut first: Option<Vec<u32>> = None;
    for order in Order::SAMPLES {
        let Some(device) = test_device(order) else {
            return;
        };
        let found = bits(&device);
        match &first {
            None => first = Some(found),
            Some(first) => assert!(
                *first == found,
                "results depend on the order of threads: {order:?}"
            ),
        }
    }
}

/// Asserts that every value is within `tolerance` of the expected one, relative to the largest magnitude, or 1.
#[track_caller]
pub(crate) fn assert_near(found: &[f32], want: &[f32], tolerance: f32, context: &str) {
    assert_eq!(found.len(), want.len(), "{context}");
    let largest = want
        .iter()
        .fold(1.0f32, |largest, want| largest.max(want.abs()));
    for (index, (found, want)) in found.iter().zip(want).enumerate() {
        assert!(
            (found - want).abs() <= tolerance * largest,
            "{context}: element {index} is {found}, expected {want}"
        );
    }
}
