//! Faulty kernels, and the errors that the emulator reports for them.
#![expect(unsafe_code, reason = "launches kernels")]
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use powerinfer_emulator::{Checks, Emulator, Order, test_emulator};
use powerinfer_kernels::cuda::{Device, DeviceError, Launch};

/// Elements of both buffers.
const COUNT: usize = 100;

/// Runs a kernel without checks; see [`run_on`].
fn run(kernel: &str, blocks: u32, order: Order) -> Option<Result<Vec<f32>, String>> {
    let device = test_emulator(1, order)?;
    Some(run_on(&device, kernel, [blocks, 64, COUNT as u32]))
}

/// Runs a kernel with checks in every order; returns its output, or the error.
fn run_checked(kernel: &str, blocks: u32) -> Option<Vec<Result<Vec<f32>, String>>> {
    let runs = Order::SAMPLES.map(|order| {
        let device = test_emulator(1, order)?.with_checks(Checks::On);
        Some(run_on(&device, kernel, [blocks, 64, COUNT as u32]))
    });
    runs.into_iter().collect()
}

/// Launches a kernel with `[blocks, threads, count]` on an input in device memory and an output of zeros in host memory;
/// returns the output, or the error.
fn run_on(
    device: &Emulator,
    kernel: &str,
    [blocks, threads, count]: [u32; 3],
) -> Result<Vec<f32>, String> {
    const BYTES: usize = COUNT * size_of::<f32>();
    let x: Vec<f32> = (0..COUNT).map(|i| i as f32).collect();
    let x_address = device.allocate(BYTES).unwrap();
    let (host, out_address) = device.allocate_host(BYTES).unwrap();
    // The structure `Arguments`: x, out, count.
    let arguments = [x_address, out_address, count.into()];
    let launch = Launch {
        kernel,
        grid: [blocks, 1, 1],
        threads,
        shared_bytes: 256,
        arguments: bytemuck::bytes_of(&arguments),
    };
    let mut out = vec![0.0f32; COUNT];
    // SAFETY: both buffers hold COUNT elements; accesses beyond them are what the emulator has to catch.
    let outcome = unsafe {
        device.write(x_address, bytemuck::cast_slice(&x)).unwrap();
        device.clear(out_address, BYTES).unwrap();
        let outcome = device.launch(&launch);
        device
            .read(out_address, bytemuck::cast_slice_mut(&mut out))
            .unwrap();
        device.free(x_address, BYTES);
        device.free_host(host, BYTES);
        outcome
    };
    match outcome {
        Ok(()) => Ok(out),
        Err(DeviceError::Kernel { reason, .. }) => Err(reason),
        Err(other) => Err(other.to_string()),
    }
}

/// Asserts that the checks report `faulty` with all `parts` of a message, in every order, and never report `correct`.
#[track_caller]
fn assert_reported(faulty: &str, correct: &str, blocks: u32, parts: &[&str]) {
    let Some(found) = run_checked(faulty, blocks) else {
        return;
    };
    for outcome in found {
        let message = outcome.expect_err(faulty);
        assert!(message.starts_with(faulty), "{message}");
        for part in parts {
            assert!(message.contains(part), "{message}");
        }
    }
    for outcome in run_checked(correct, blocks).unwrap() {
        assert_eq!(outcome.err(), None);
    }
}

#[test]
fn races_within_a_block_are_reported_in_every_order() {
    let no_barrier = "without a barrier between";
    assert_reported(
        "missing_barrier",
        "correct",
        1,
        &["of shared memory, which block (0, 0, 0) thread", no_barrier],
    );
    assert_reported(
        "missing_warp_barrier",
        "with_warp_barrier",
        1,
        &["of shared memory", no_barrier],
    );
    assert_reported(
        "missing_second_barrier",
        "with_second_barrier",
        1,
        &["of shared memory", no_barrier],
    );
    assert_reported(
        "same_byte",
        "own_byte",
        1,
        &["overwrites byte", "wrote", no_barrier],
    );
    assert_reported(
        "missing_global_barrier",
        "with_global_barrier",
        1,
        &["of 400 of a buffer", no_barrier],
    );
}

#[test]
fn other_faults_are_reported_with_checks_too() {
    for (kernel, blocks, parts) in [
        (
            "out_of_bounds",
            2,
            ["block (1, 0, 0)", "out of bounds", "of a buffer of 400"],
        ),
        (
            "out_of_shared",
            1,
            [
                "thread 63",
                "out of bounds",
                "at byte 256 of a buffer of 256",
            ],
        ),
        (
            "in_front",
            1,
            [
                "thread 0",
                "out of bounds",
                "4 bytes before a buffer of 400",
            ],
        ),
        (
            "far_behind",
            1,
            ["thread", "out of bounds", "of a buffer of 400"],
        ),
    ] {
        assert_reported(kernel, "correct", blocks, &parts);
    }
    assert_reported("wrong_mask", "correct", 1, &["never completes"]);
}

#[test]
fn a_report_names_the_place_and_both_threads() {
    if test_emulator(1, Order::Forward).is_none() {
        return;
    }
    let found = run_checked("missing_barrier", 1).unwrap();
    assert_eq!(
        found[0].clone().unwrap_err(),
        "missing_barrier: block (0, 0, 0) thread 32 overwrites byte 128 of shared memory, which block (0, 0, 0) thread 31 \
         read, without a barrier between"
    );
}

#[test]
fn reads_of_asynchronous_copies_that_have_not_landed_are_reported() {
    let not_waited = "copies to asynchronously, before it has waited for the copy";
    assert_reported(
        "missing_copy_wait",
        "with_copy_wait",
        1,
        &["reads byte", not_waited],
    );
    assert_reported(
        "wrong_copy_group",
        "right_copy_group",
        1,
        &["reads byte", not_waited],
    );
    // Without checks, the target of such a copy is NaN.
    for (kernel, is_nan) in [
        ("missing_copy_wait", true),
        ("with_copy_wait", false),
        ("wrong_copy_group", true),
        ("right_copy_group", false),
    ] {
        let Some(found) = run(kernel, 1, Order::Forward) else {
            return;
        };
        assert_eq!(found.unwrap()[0].is_nan(), is_nan, "{kernel}");
    }
}

#[test]
fn races_between_blocks_are_reported_in_every_order() {
    assert_reported(
        "lost_update",
        "atomic_update",
        5,
        &["of a buffer", "unordered by fences and an atomic"],
    );
    assert_reported(
        "missing_fence_plain_load",
        "with_fence_plain_load",
        5,
        &["reads byte", "unordered by fences and an atomic"],
    );
}

#[test]
fn both_sides_of_a_sum_over_blocks_have_to_fence() {
    for faulty in ["missing_fence", "missing_second_fence"] {
        let unordered = "wrote, unordered by fences and an atomic";
        assert_reported(faulty, "with_fence", 5, &["reads byte", unordered]);
    }
}

#[test]
fn stores_for_the_host_have_to_precede_its_flag() {
    // The flag comes first or last among the stores, as the order has it.
    assert_reported("early_flag", "flag_in_time", 1, &["the host's flag"]);
    assert_reported(
        "store_after_flag",
        "flag_in_time",
        1,
        &["stores to host memory after the host's flag is released"],
    );
}

#[test]
fn resident_blocks_take_turns_at_barriers_in_shuffled_orders() {
    let updates = |kernel, order| Some(run(kernel, 20, order)?.unwrap()[0]);
    let Some(in_turn) = updates("lost_update", Order::Forward) else {
        return;
    };
    assert_eq!(in_turn, 20.0);
    let lost = updates("lost_update", Order::Shuffled(1)).unwrap();
    assert!(lost < 20.0, "{lost}");
    let atomic = updates("atomic_update", Order::Shuffled(1)).unwrap();
    assert_eq!(atomic.to_bits(), 20);
}

#[test]
fn threads_yield_at_random_accesses_in_shuffled_orders_with_checks() {
    let sums: Vec<u32> = match run_checked("two_atomics", 20) {
        Some(found) => found
            .into_iter()
            .map(|out| out.unwrap()[0].to_bits())
            .collect(),
        None => return,
    };
    assert_eq!(sums[..2], [20, 20]);
    assert!(sums[2] < 20, "{sums:?}");
    // The same in every run.
    let again = run_checked("two_atomics", 20).unwrap();
    assert_eq!(again[2].as_ref().unwrap()[0].to_bits(), sums[2]);
}

#[test]
fn long_sums_in_tensor_cores_are_biased() {
    let Some(device) = test_emulator(1, Order::Forward) else {
        return;
    };
    let error = |kernel, products: u32| {
        let third = 0.333_251_953_125f64;
        let want = f64::from(products) * third * third;
        let found = run_on(&device, kernel, [1, 32, products / 16]).unwrap()[0];
        (f64::from(found) - want) / want
    };
    for products in [4096, 8192, 11008] {
        let (in_tensor_cores, in_f32) = (
            error("sum_in_tensor_cores", products),
            error("sum_in_f32", products),
        );
        assert!(in_tensor_cores < -2e-5, "{products}: {in_tensor_cores}");
        assert!(in_f32.abs() < 5e-6, "{products}: {in_f32}");
    }
}

#[test]
fn operations_of_other_threads_wait_for_the_end_of_a_capture() {
    use std::{sync::mpsc, thread, time::Duration};

    let Some(device) = test_emulator(1, Order::Forward) else {
        return;
    };
    let from = device.allocate(16).unwrap();
    let to = device.allocate(16).unwrap();
    assert!(device.begin_capture().unwrap());
    let (sender, finished) = mpsc::channel();
    thread::scope(|scope| {
        let device = &device;
        scope.spawn(move || {
            // SAFETY: both hold 16 bytes.
            unsafe { device.copy(to, from, 16) }.unwrap();
            sender.send(()).unwrap();
        });
        assert!(finished.recv_timeout(Duration::from_millis(50)).is_err());
        // SAFETY: as above.
        unsafe { device.clear(from, 8) }.unwrap();
        let graph = device.end_capture().unwrap();
        assert_eq!(graph.operations().len(), 1, "its own alone");
        finished.recv().unwrap();
    });
    // SAFETY: allocated with this size, and not used again.
    unsafe {
        device.free(from, 16);
        device.free(to, 16);
    }
}

#[test]
fn two_devices_capture_graphs_at_once() {
    let Some(first) = test_emulator(1, Order::Forward) else {
        return;
    };
    let second = test_emulator(1, Order::Forward).unwrap();
    // Both threads are within a capture before either launches, and both launch before either ends.
    let barrier = std::sync::Barrier::new(2);
    let capture = |device: &Emulator, value: u32| {
        let address = device.allocate(400).unwrap();
        let x = device.allocate(400).unwrap();
        let arguments = [x, address, 100];
        let launch = Launch {
            kernel: "correct",
            grid: [1, 1, 1],
            threads: 64,
            shared_bytes: 256,
            arguments: bytemuck::bytes_of(&arguments),
        };
        let mut found = vec![0.0f32; COUNT];
        // SAFETY: both buffers hold COUNT elements.
        unsafe {
            device
                .write(x, bytemuck::cast_slice(&[value as f32; COUNT]))
                .unwrap();
            device.clear(address, 400).unwrap();
            assert!(device.begin_capture().unwrap());
            barrier.wait();
            for _ in 0..value {
                device.launch(&launch).unwrap();
            }
            barrier.wait();
            let graph = device.end_capture().unwrap();
            graph.launch().unwrap();
            device
                .read(address, bytemuck::cast_slice_mut(&mut found))
                .unwrap();
            device.free(x, 400);
            device.free(address, 400);
            (found[0], format!("{graph:?}").matches("Launch").count())
        }
    };
    let (one, three) = std::thread::scope(|scope| {
        let one = scope.spawn(|| capture(&first, 1));
        let three = scope.spawn(|| capture(&second, 3));
        (one.join().unwrap(), three.join().unwrap())
    });
    assert_eq!((one, three), ((1.0, 1), (3.0, 3)));
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
