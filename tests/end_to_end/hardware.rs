//! Machines: measured by `doctor`, named, or described in a file.

use std::fs;

use super::sandbox::{Run, Sandbox, assert_contains};

/// Places the demo on the machine that `hardware` names or describes.
fn place(sandbox: &Sandbox, hardware: &str) -> Run {
    let arguments = ["place", "demo", "--vram", "0G", "--dry-run", "--json"];
    sandbox.run(&[&arguments[..], &["--hardware", hardware]].concat())
}

#[test]
fn place_plans_for_the_figures_that_doctor_writes() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    for file in ["here.toml", "here.json"] {
        let doctor = sandbox
            .run(&["doctor", "--quick", "--write", file, "--threads", "1", "-v"])
            .good();
        doctor.stdout_contains(&["GEMV, 10% of rows"]);
        doctor.stderr_contains(&[file]);
        let plan = place(&sandbox, file).good().json()["plan"].clone();
        assert_eq!(plan["hardware"]["name"], "this machine");
        let cpu = &plan["hardware"]["cpu"];
        assert!(cpu["row_seconds"].as_f64().unwrap() >= 0.0, "{cpu}");
        assert!(cpu["kernels"].is_null(), "the model's own figures: {cpu}");
        let source = &plan["hardware"]["sources"]["cpu.read_bandwidth_bytes_per_second"];
        assert!(source.as_str().unwrap().contains("in q8_0"), "{source}");
    }
}

/// Prediction pays off if memory is slow, but not if non-adjacent rows are expensive. The
/// machine is made up: what a busy one measures of itself may favour either.
#[test]
fn the_figures_of_a_machine_decide_what_is_predicted() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let policy = |row_seconds: &str| {
        let machine = format!(
            "name = 'slow'\ndescription = 'slow memory'\n[cpu]\nthreads = 1\n\
             read_bandwidth_bytes_per_second = 1e9\nram_bytes = 8000000000\n\
             row_seconds = {row_seconds}\n"
        );
        fs::write(sandbox.path("slow.toml"), machine).unwrap();
        place(&sandbox, "slow.toml").good().json()["plan"]["layers"][0]["policy"].clone()
    };
    assert_eq!(policy("0.0"), "predicted");
    assert_eq!(policy("1e-3"), "dense");
}

#[test]
fn doctor_prints_its_figures_as_json() {
    let sandbox = Sandbox::new();
    let report = sandbox.run(&["doctor", "--quick", "--json"]).good().json();
    let cpu = &report["hardware"]["cpu"];
    assert_eq!(cpu["threads"], report["threads"]);
    let kernels = cpu["kernels"].as_array().unwrap();
    for format in ["f32", "bf16", "q8_0", "q4_k", "q4_0"] {
        assert!(kernels.iter().any(|kernel| kernel["format"] == format));
    }
    assert!(report["read_bandwidth_bytes_per_second"]["one_thread"].as_f64() > Some(1e8));
    assert!(!report["gpu_status"].as_str().unwrap().is_empty());
}

#[test]
fn every_named_machine_can_be_planned_for() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    for name in ["h200-16c", "rtx5090", "rtx4060-8g", "laptop"] {
        let plan = place(&sandbox, name).good().json()["plan"].clone();
        assert_eq!(plan["hardware"]["name"], name);
        assert!(plan["totals"]["microseconds_per_token"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn an_invalid_hardware_file_is_refused_with_figure_and_line() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let good = "name = 'mine'\ndescription = 'by hand'\n[cpu]\nthreads = 4\n\
        read_bandwidth_bytes_per_second = 2e10\nram_bytes = 8000000000\nrow_seconds = 1e-8\n\
        [[cpu.reads]]\nthreads = 4\nrow_bytes = 4096\nbytes_per_second = 1e10\n";
    let try_text = |text: &str| {
        fs::write(sandbox.path("mine.toml"), text).unwrap();
        place(&sandbox, "mine.toml")
    };
    try_text(good).good();
    for (from, to, words) in [
        ("2e10", "0", "`cpu.read_bandwidth_bytes_per_second` is 0"),
        (
            "2e10",
            "nan",
            "`cpu.read_bandwidth_bytes_per_second` is NaN",
        ),
        (
            "2e10",
            "-1e9",
            "`cpu.read_bandwidth_bytes_per_second` is -1000000000",
        ),
        ("= 1e10", "= inf", "`cpu.reads[0].bytes_per_second` is inf"),
        ("1e-8", "-1e-8", "`cpu.row_seconds` is -0.00000001"),
        (
            "threads = 4\nread",
            "threads = 0\nread",
            "`cpu.threads` is 0",
        ),
    ] {
        try_text(&good.replacen(from, to, 1)).bad(1, &["hardware `mine`", words, "hint: measure"]);
    }
    try_text(&good.replace("ram_bytes", "ram")).bad(
        1,
        &[
            "`mine.toml` does not describe a machine: line 6",
            "unknown field `ram`",
            "hint: `powerinfer doctor --write FILE`",
        ],
    );
    try_text("[cpu").bad(1, &["`mine.toml` does not describe a machine: line 1"]);
    sandbox
        .run(&["doctor", "--quick", "--write", "here.yaml"])
        .bad(
            1,
            &[
                "`here.yaml` ends in neither `.toml` nor `.json`",
                "; name the file",
            ],
        );
}

#[test]
fn a_plan_for_a_gpu_runs_without_one_and_reports_it() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let bundle = "demo.powerinfer/bundle";
    let place = ["place", bundle, "--vram", "1G", "--hardware", "rtx4090"];
    sandbox.run(&place).good();
    let run = ["run", bundle, "--prompt", "def f(", "-n", "3"];
    let on = |device: &str| sandbox.run(&[&run[..], &["--device", device]].concat());
    let on_cpu = on("cpu").good();
    assert!(!on_cpu.stderr.contains("GPU"), "{}", on_cpu.stderr);
    let report = sandbox.run(&["doctor", "--json"]).good().json();
    if !report["gpu"].is_null() {
        return; // this machine has a GPU, which the tests of the runtime cover
    }
    let automatic = sandbox.run(&run).good();
    assert_eq!(automatic.stdout, on_cpu.stdout);
    let said = &automatic.stderr;
    assert_contains(
        said,
        &[
            "the plan is for `rtx4090`, which is not here",
            "for the CPU",
            "same neurons",
        ],
    );
    on("gpu").bad(1, &["no GPU can be used", "`--device cpu`"]);
    // A plan for the CPU needs no GPU; with `--device gpu`, the error names the missing GPU.
    sandbox.run(&["place", bundle, "--vram", "0G"]).good();
    let again = sandbox.run(&run).good();
    assert!(!again.stderr.contains("GPU"), "{}", again.stderr);
    on("gpu").bad(1, &["no GPU can be used"]);
}
