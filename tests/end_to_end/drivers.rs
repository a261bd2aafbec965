//! Unusable GPUs and drivers, simulated by a fake driver whose answers are set by environment variables.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use crate::sandbox::{QUICK, Run, Sandbox, run_command};

/// Compiles the fake driver into a separate folder; `None` without a C compiler.
fn driver(sandbox: &Sandbox, name: &str, flags: &[&str]) -> Option<PathBuf> {
    let folder = sandbox.path(name);
    std::fs::create_dir_all(&folder).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/support/fake_driver.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(folder.join("libcuda.so"))
        .args(flags)
        .arg(source)
        .status();
    match compiled {
        Ok(status) => {
            assert!(status.success());
            Some(folder)
        }
        Err(_) => {
            #[expect(clippy::print_stdout, reason = "a skipped test is reported")]
            {
                println!("skipped: there is no C compiler here");
            }
            None
        }
    }
}

fn run_with(sandbox: &Sandbox, driver: &Path, variables: &[(&str, &str)], line: &[&str]) -> Run {
    let mut command = sandbox.command(line);
    command.env("LD_LIBRARY_PATH", driver);
    command.envs(variables.iter().copied());
    run_command(command, b"")
}

/// Command that runs the demo's bundle.
const RUN: [&str; 6] = [
    "run",
    "demo.powerinfer/bundle",
    "--prompt",
    "def f(",
    "-n",
    "3",
];

fn place_for_a_gpu(sandbox: &Sandbox) {
    sandbox.copy_demo();
    let place = ["place", RUN[1], "--vram", "1G", "--hardware", "rtx4090"];
    sandbox.run(&place).good();
}

#[test]
fn an_unusable_driver_or_gpu_is_reported_and_the_cpu_is_used() {
    let sandbox = Sandbox::new();
    let (Some(whole), Some(part)) = (
        driver(&sandbox, "whole", &[]),
        driver(&sandbox, "part", &["-DINCOMPLETE"]),
    ) else {
        return;
    };
    place_for_a_gpu(&sandbox);
    let on_cpu = sandbox
        .run(&[&RUN[..], &["--device", "cpu"]].concat())
        .good();
    type Case<'a> = (&'a Path, &'a [(&'a str, &'a str)], &'a str);
    let cases: [Case<'_>; 7] = [
        (
            &part,
            &[],
            "lacks `cuDriverGetVersion`; install version 550 or newer",
        ),
        (&whole, &[("FAKE_START", "999")], "fails to initialise"),
        (
            &whole,
            &[("FAKE_VERSION", "11080")],
            "supports CUDA 11.8, the kernels need 12.4; install version 550 or newer",
        ),
        (&whole, &[("FAKE_CARDS", "0")], "sees 0 devices"),
        (
            &whole,
            &[("FAKE_CAPABILITY", "75")],
            "Fake Card has compute capability 7.5, the kernels need 8.0",
        ),
        (
            &whole,
            &[("FAKE_MODULES", "218")],
            "Fake Card cannot load the kernels of `attention`",
        ),
        (
            &whole,
            &[("FAKE_MODULES", "209")],
            "CUDA_ERROR_NO_BINARY_FOR_GPU",
        ),
    ];
    for (driver, variables, reason) in cases {
        let run = |device: &str, more: &[(&str, &str)]| {
            let line = [&RUN[..], &["--device", device]].concat();
            run_with(&sandbox, driver, &[variables, more].concat(), &line)
        };
        let parts = ["no GPU can be used", reason, "`--device cpu`"];
        run("gpu", &[]).bad(1, &parts);
        run("auto", &[("POWERINFER_REQUIRE_GPU", "1")]).bad(1, &parts);
        let instead = run("auto", &[]).good();
        assert_eq!(instead.stdout, on_cpu.stdout);
        instead.stderr_contains(&[reason]);
        let profile = ["profile", "demo", "--device", "gpu", "--out", "never"];
        run_with(&sandbox, driver, variables, &profile).bad(1, &parts);
        assert!(!sandbox.path("never").exists());
    }
}

#[test]
fn a_gpu_that_is_too_small_or_fails_is_an_error_with_a_hint() {
    let sandbox = Sandbox::new();
    let Some(driver) = driver(&sandbox, "driver", &[]) else {
        return;
    };
    place_for_a_gpu(&sandbox);
    let run = |variables: &[(&str, &str)]| {
        let started = Instant::now();
        let line = [&RUN[..], &["--device", "gpu"]].concat();
        let run = run_with(&sandbox, &driver, variables, &line);
        assert!(started.elapsed().as_secs() < 15, "{:?}", started.elapsed());
        run
    };
    for bytes in ["0", "100000", "3000000"] {
        run(&[("FAKE_MEMORY", bytes)])
            .bad(1, &["out of memory on Fake Card", "hint: lower `--vram`"]);
    }
    // Without pages that can be mapped, allocations are the driver's.
    run(&[("FAKE_MEMORY", "100000"), ("FAKE_MAPPING", "0")])
        .bad(1, &["out of memory on Fake Card", "hint: lower `--vram`"]);
    run(&[("FAKE_MAPS", "999")]).bad(1, &["failed while allocating memory"]);
    // The driver reports less free memory than the program computes.
    run(&[("FAKE_WASTE", "1000")]).bad(1, &["of the GPU's memory are taken", "a budget of 1"]);
    run(&[("FAKE_LOCKED", "10")]).bad(1, &["out of memory on the host (pinned)"]);
    // CUDA_ERROR_LAUNCH_FAILED, and a GPU that is no longer reachable.
    for code in ["719", "46"] {
        run(&[("FAKE_LAUNCHES", code)]).bad(1, &["failed on Fake Card"]);
    }
    let profile = [
        &["profile", "demo", "--device", "gpu", "--out", "profile"][..],
        &QUICK[..2],
    ]
    .concat();
    for (variable, value) in [("FAKE_LAUNCHES", "719"), ("FAKE_MEMORY", "1000")] {
        run_with(&sandbox, &driver, &[(variable, value)], &profile)
            .bad(1, &["Fake Card", "add `--device cpu` to resume"]);
    }
}
