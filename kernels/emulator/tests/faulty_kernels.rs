//! Faulty kernels, and the errors that the emulator reports for them.
#![expect(unsafe_code, reason = "launches kernels")]
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::sync::Arc;

use powerinfer_emulator::{Emulator, Order, test_emulator};
use powerinfer_kernels::cuda::{Device, DeviceError, Launch};

/// Launches a kernel with blocks of 64 threads on 100 elements; returns its output, or the error.
fn run(kernel: &str, blocks: u32, order: Order) -> Option<Result<Vec<f32>, String>> {
    let device: Arc<dyn Device> = Arc::new(test_emulator(1, order)?);
    let x: Vec<f32> = (0..100).map(|i| i as f32).collect();
    // The structure `Arguments`: x, out, count.
    let (x_address, out_address) = (device.allocate(400).unwrap(), device.allocate(400).unwrap());
    let arguments = [x_address, out_address, 100];
    let launch = Launch {
        kernel,
        grid: [blocks, 1, 1],
        threads: 64,
        shared_bytes: 256,
        arguments: bytemuck::bytes_of(&arguments),
    };
    let mut out = vec![0.0f32; 100];
    // SAFETY: both buffers hold 100 elements; accesses beyond them are what the emulator has to catch.
    let outcome = unsafe {
        device.write(x_address, bytemuck::cast_slice(&x)).unwrap();
        device.clear(out_address, 400).unwrap();
        let outcome = device.launch(&launch);
        device
            .read(out_address, bytemuck::cast_slice_mut(&mut out))
            .unwrap();
        device.free(x_address, 400);
        device.free(out_address, 400);
        outcome
    };
    Some(match outcome {
        Ok(()) => Ok(out),
        Err(DeviceError::Kernel { reason, .. }) => Err(reason),
        Err(other) => Err(other.to_string()),
    })
}

#[test]
fn a_race_makes_results_depend_on_the_thread_order() {
    let Some(forward) = run("missing_barrier", 1, Order::Forward) else {
        return;
    };
    let reverse = run("missing_barrier", 1, Order::Reverse).unwrap();
    assert_ne!(format!("{forward:?}"), format!("{reverse:?}"));
}

#[test]
fn a_correct_kernel_runs_in_every_order_and_after_failed_launches() {
    for order in Order::SAMPLES {
        for kernel in ["two_barriers", "wrong_mask", "out_of_bounds"] {
            let Some(found) = run(kernel, 2, order) else {
                return;
            };
            assert!(found.is_err(), "{kernel}");
        }
        let found = run("correct", 2, order).unwrap().unwrap();
        assert_eq!(
            found[..64],
            (0..64).rev().map(|i| i as f32).collect::<Vec<_>>()
        );
    }
}

#[test]
fn errors_name_the_fault_and_its_place() {
    let reason = |kernel, blocks| match run(kernel, blocks, Order::Forward) {
        Some(found) => found.unwrap_err(),
        None => String::new(),
    };
    if test_emulator(1, Order::Forward).is_none() {
        return;
    }
    let two = reason("two_barriers", 1);
    assert!(
        two.contains("waits at another __syncthreads") || two.contains("never completes"),
        "{two}"
    );
    let lanes = reason("wrong_mask", 1);
    assert!(
        lanes.contains("mask ffffffff, lanes arrived 000fffff"),
        "{lanes}"
    );
    let bounds = reason("out_of_bounds", 2);
    assert!(
        bounds.contains("out of bounds: block (1, 0, 0) thread 36"),
        "{bounds}"
    );
    let shared = reason("out_of_shared", 1);
    assert!(
        shared.contains("out of bounds: block (0, 0, 0) thread 63"),
        "{shared}"
    );
    assert_eq!(reason("no_such_kernel", 1), "there is no such kernel");
}

#[test]
fn a_captured_graph_runs_when_it_is_launched_and_not_before() {
    let Some(device) = test_emulator(1, Order::Forward) else {
        return;
    };
    let [x, out] = [400, 400].map(|bytes| device.allocate(bytes).unwrap());
    let arguments = [x, out, 100];
    let launch = Launch {
        kernel: "correct",
        grid: [1, 1, 1],
        threads: 64,
        shared_bytes: 256,
        arguments: bytemuck::bytes_of(&arguments),
    };
    let values = |start: i32| -> Vec<f32> { (0..100).map(|i| (start + i) as f32).collect() };
    let read = |device: &Emulator| {
        let mut found = vec![0.0f32; 100];
        // SAFETY: the buffer holds 100 elements.
        unsafe { device.read(out, bytemuck::cast_slice_mut(&mut found)) }.map(|()| found[0])
    };
    // SAFETY: all buffers hold 100 elements.
    unsafe {
        device.write(x, bytemuck::cast_slice(&values(0))).unwrap();
        device.write(out, bytemuck::cast_slice(&values(7))).unwrap();
        assert!(device.begin_capture().unwrap());
        device.clear(out, 400).unwrap();
        device.launch(&launch).unwrap();
        let error = read(&device).unwrap_err();
        assert_eq!(
            error.to_string(),
            "emulator failed while copying from it: a graph is being captured"
        );
        let graph = device.end_capture().unwrap();
        assert_eq!(read(&device).unwrap(), 7.0);
        graph.launch().unwrap();
        assert_eq!(read(&device).unwrap(), 63.0);
        // A graph reads its inputs when it runs.
        device.write(x, bytemuck::cast_slice(&values(100))).unwrap();
        graph.launch().unwrap();
        assert_eq!(read(&device).unwrap(), 163.0);
        device.free(x, 400);
        device.free(out, 400);
    }
}
