//! The device that kernels are tested on.

use std::sync::Arc;

use powerinfer_emulator::{Order, test_device};
use powerinfer_kernels::cuda::Device;

/// Runs a test on the emulator, or on the card; what it returns has to be the same bits for all orders of
/// the emulator's threads, and each time on a card.
#[track_caller]
pub(crate) fn on_every_device(test: impl Fn(&Arc<dyn Device>) -> Vec<f32>) {
    let mut first: Option<Vec<u32>> = None;
    for order in Order::SAMPLES {
        let Some(device) = test_device(order) else {
            return;
        };
        let found: Vec<u32> = test(&device).into_iter().map(f32::to_bits).collect();
        match &first {
            None => first = Some(found),
            Some(first) => assert!(
                *first == found,
                "results depend on the order of threads: {order:?}"
            ),
        }
    }
}

/// Numbers as large as expected, up to `tolerance` of the largest.
#[track_caller]
pub(crate) fn assert_near(found: &[f32], want: &[f32], tolerance: f32, context: &str) {
    assert_eq!(found.len(), want.len(), "{context}");
    let largest = want
        .iter()
        .fold(1.0f32, |largest, want| largest.max(want.abs()));
    for (index, (found, want)) in found.iter().zip(want).enumerate() {
        assert!(
            (found - want).abs() <= tolerance * largest,
            "{context}: number {index} is {found}, expected {want}"
        );
    }
}
