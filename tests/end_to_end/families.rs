//! The whole pipeline on golden checkpoints of every family and container.

use crate::{
    golden::{Golden, MODELS},
    sandbox::{QUICK, Sandbox, golden_model, words},
};

#[test]
fn prepare_and_run_work_on_every_family() {
    let sandbox = Sandbox::new();
    let text = "def area(radius):\n    return 3.14 * radius ** 2\n\n".repeat(40);
    std::fs::write(sandbox.path("text.txt"), text).unwrap();
    for name in MODELS {
        let model = golden_model(name);
        let arguments = [
            "prepare",
            model.to_str().unwrap(),
            "--data",
            "text.txt",
            "--vram",
            "1G",
            "--quant",
            "f32",
        ];
        sandbox.run(&[&arguments[..], &QUICK].concat()).good();
        // In float32 the bundle computes the text of the reference implementation.
        let golden = Golden::open(name);
        let json = std::fs::read(golden.folder.join("expected.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let prompt = json["prompts"][1]["text"].as_str().unwrap();
        let work = format!("{name}.powerinfer");
        let run = |policy: &str| {
            sandbox
                .run(&[
                    "run",
                    &work,
                    "--prompt",
                    prompt,
                    "--policy",
                    policy,
                    "-n",
                    "8",
                    "--temperature",
                    "0",
                ])
                .good()
        };
        let (dense, exact) = (run("dense"), run("exact"));
        assert_eq!(dense.stdout, exact.stdout, "{name}");
        dense.stderr_contains(&["100.0% of FFN neurons"]);
    }
}

#[test]
fn a_conversation_goes_through_the_models_chat_template() {
    let sandbox = Sandbox::new();
    let model = golden_model("llama-silu");
    std::fs::write(
        sandbox.path("text.txt"),
        "some words to calibrate on ".repeat(40),
    )
    .unwrap();
    let arguments = [
        "prepare",
        model.to_str().unwrap(),
        "--data",
        "text.txt",
        "--vram",
        "0G",
    ];
    sandbox.run(&arguments).good();
    let chat = |lines: &str| {
        let arguments = words("run llama-silu.powerinfer -i -v -n 3 --temperature 0");
        sandbox.run_with(&arguments, lines.as_bytes()).good()
    };
    let one = chat("return the sum\n");
    one.stderr_contains(&["a message a line"]);
    assert_eq!(one.stderr.matches("prompt: ").count(), 1, "{}", one.stderr);
    // The template adds its own tokens, and the second prompt contains the first message and its
    // answer.
    let two = chat("return the sum\nreturn the sum\n");
    let prompts: Vec<usize> = two
        .stderr
        .lines()
        .filter_map(|line| {
            line.strip_prefix("prompt: ")?
                .split(' ')
                .next()?
                .parse()
                .ok()
        })
        .collect();
    assert_eq!(prompts.len(), 2, "{}", two.stderr);
    let plain = sandbox
        .run_with(&["tokenize", model.to_str().unwrap()], b"return the sum")
        .good()
        .json();
    assert!(prompts[0] > plain.as_array().unwrap().len());
    assert!(prompts[1] > 2 * prompts[0], "{prompts:?}");
    assert!(two.stdout.starts_with(&one.stdout));
}
