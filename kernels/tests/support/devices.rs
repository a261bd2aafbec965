//! Devices of the tests of CUDA kernels.

use std::sync::Arc;

use powerinfer_emulator::{Checks, Order, PtxDevice, test_device, test_emulator};
use powerinfer_kernels::{cuda::Device, environment};

/// Multiprocessors of an H100.
const MANY: usize = 132;
/// Multiprocessors of the emulator as [`test_device`].
const FEW: usize = 2;

/// Whether the results of PTX have the bits of those of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PtxBits {
    /// They have.
    Equal,
    /// They depend on `exp`, `erf` or `tanh`, which the C library and PTX approximate each in their own way.
    Approximate,
}

/// Runs a test on the emulator in every sample order, and on the PTX interpreter, or several times on a GPU; its result must
/// have the same bits each time. The emulator and the interpreter also run it on as many multiprocessors as a large GPU has,
/// the emulator with checks of every access. Without a C++ compiler only the interpreter runs it.
#[track_caller]
pub(crate) fn on_every_device(test: impl Fn(&Arc<dyn Device>) -> Vec<f32>) {
    on_every_device_with(PtxBits::Equal, test);
}

/// As [`on_every_device`]; the results of the PTX interpreter need not have the same bits if they are approximate.
#[track_caller]
pub(crate) fn on_every_device_with(ptx_bits: PtxBits, test: impl Fn(&Arc<dyn Device>) -> Vec<f32>) {
    let bits = |device: &Arc<dyn Device>| -> Vec<u32> {
        test(device).into_iter().map(f32::to_bits).collect()
    };
    let bits_of_ptx =
        |multiprocessors| bits(&(Arc::new(PtxDevice::new(multiprocessors)) as Arc<dyn Device>));
    let check_ptx = |multiprocessors, of_source: &[u32]| {
        let of_ptx = bits_of_ptx(multiprocessors);
        assert!(
            ptx_bits == PtxBits::Approximate || of_ptx == of_source,
            "the PTX has other results than its source on {multiprocessors} multiprocessors"
        );
    };
    if !environment::tests_on_gpu() {
        let Some(emulator) = test_emulator(MANY, Order::Shuffled(2)) else {
            // Without the source, the test compares the PTX with its formula alone.
            bits_of_ptx(MANY);
            return;
        };
        let emulator: Arc<dyn Device> = Arc::new(emulator.with_checks(Checks::On));
        check_ptx(MANY, &bits(&emulator));
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
    if let Some(first) = first.filter(|_| !environment::tests_on_gpu()) {
        check_ptx(FEW, &first);
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
