//! Profiling and packing need less memory than the model.

use std::fs;

use serde_json::json;

use crate::sandbox::{Sandbox, run_command};

/// Bytes in a MiB.
const MIB: f64 = (1 << 20) as f64;

/// The peak memory that a run reports, in MiB.
fn peak(stderr: &str) -> f64 {
    let line = stderr
        .lines()
        .find_map(|line| line.strip_prefix("peak memory: "))
        .unwrap_or_else(|| panic!("{stderr}"));
    let (number, unit) = line.split_once(' ').unwrap();
    let scale = match unit {
        "GiB" => 1024.0,
        "MiB" => 1.0,
        other => panic!("{other}"),
    };
    number.parse::<f64>().unwrap() * scale
}

#[test]
fn a_model_is_never_in_memory_as_a_whole() {
    let sandbox = Sandbox::new();
    let (hidden, neurons, layers, vocabulary) = (512, 6144, 16, 48_000);
    let shape = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": 8, "intermediate_size": neurons,
        "vocab_size": vocabulary, "hidden_act": "relu", "max_position_embeddings": 512,
    });
    fs::create_dir(sandbox.path("shape")).unwrap();
    fs::write(sandbox.path("shape/config.json"), shape.to_string()).unwrap();
    sandbox
        .run(&[
            "synth", "--like", "shape", "--out", "model", "--dtype", "f32",
        ])
        .good();
    let model = fs::metadata(sandbox.path("model/model.safetensors"))
        .unwrap()
        .len() as f64
        / MIB;
    let layer = (4.0 * (3 * hidden * neurons + 4 * hidden * hidden) as f64) / MIB;
    // Memory of the program with its libraries and the buffers of its threads; the documented bound
    // includes 1 GiB for it.
    let program = 120.0;

    let text = "the quick brown fox jumps over the lazy dog ".repeat(30);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    let profile = [
        "profile", "model", "--data", "text.txt", "--tokens", "300", "-v",
    ];
    // Uses more threads than the machine has: memory must not grow with the number of threads.
    let mut command = sandbox.command(&profile);
    command.env("RAYON_NUM_THREADS", "8");
    let profile = peak(&run_command(command, b"").good().stderr);
    assert!(
        profile < layer + program,
        "profile: {profile} MiB, a layer has {layer} MiB"
    );
    for quant in ["q8_0", "f32"] {
        // Certification runs the model, and so does replacing a bundle; mapped pages stay in memory while there is room.
        let place = [
            "place",
            "model",
            "--vram",
            "0G",
            "--quant",
            quant,
            "--certify",
            "0",
            "--out",
            quant,
            "-v",
        ];
        let place = peak(&sandbox.run(&place).good().stderr);
        assert!(
            place < 2.0 * layer + program,
            "place: {place} MiB, two layers have {} MiB",
            2.0 * layer
        );
    }
    assert!(
        model > 3.0 * (layer + program),
        "the model is far larger: {model} MiB"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn workers_keep_to_a_lower_limit_of_memory() {
    let sandbox = Sandbox::new();
    sandbox
        .run(&["profile", "--tokens", "1000", "--out", "profile"])
        .good();
    let inner = sandbox.command(&["inspect", "profile", "--verify"]);
    let mut command = std::process::Command::new("sh");
    // Below what a worker takes otherwise.
    command
        .args(["-c", "ulimit -v 900000 && exec \"$@\"", "sh"])
        .arg(inner.get_program())
        .args(inner.get_args())
        .current_dir(sandbox.path(""));
    run_command(command, b"").good();
}
