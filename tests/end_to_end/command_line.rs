//! The program's tables and streams.

use crate::sandbox::{Sandbox, words};

#[test]
fn the_plan_is_as_it_was() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let place = sandbox
        .run(&words("place demo --vram 24G --ram 8G --dry-run -v"))
        .good();
    let text = place.text();
    // Everything but the figures that depend on the profile.
    for part in [
        "layer",
        "policy",
        "hot neurons",
        "KV cache",
        "total, of 24.0 GiB",
        "total, of 8.0 GiB",
        "waits for",
        "this plan is",
        "whole layers on the GPU, the last first",
        "decoding 8 at once",
        "reading a prompt of 512",
        "optimality: proven for latency, by decomposition in",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn json_is_one_document_and_quiet_is_quiet() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    for arguments in [
        &["inspect", "demo.powerinfer", "--json"][..],
        &["place", "demo", "--vram", "1G", "--json", "--dry-run"],
        &["run", "demo", "--prompt", "def f(x):", "-n", "3", "--json"],
        &[
            "bench", "demo", "-r", "1", "-n", "3", "-p", "0", "--probe", "4M", "--json",
        ],
        &["doctor", "--json"],
    ] {
        let run = sandbox.run(&[arguments, &["--quiet"]].concat()).good();
        run.json();
        assert_eq!(run.stderr, "", "{arguments:?}");
    }
}

#[test]
fn a_prompt_comes_from_stdin_too_and_chat_answers_each_line() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let run = |arguments: &[&str], stdin: &[u8]| sandbox.run_with(arguments, stdin).good().text();
    let flag = run(&["run", "--prompt", "def f(xs):", "-n", "8"], b"");
    assert_eq!(run(&["run", "-n", "8"], b"def f(xs):\n"), flag);
    assert_eq!(
        run(&["run", "-n", "8", "--echo"], b"def f(xs):\n"),
        format!("def f(xs):{flag}")
    );
    assert_eq!(
        run(&["run", "-n", "8", "-i"], b"def f(xs):\ndef f(xs):\n"),
        flag.repeat(2)
    );
}

#[test]
fn sampling_repeats_with_its_seed() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let run = |seed: &str| {
        let arguments = [
            "run",
            "--prompt",
            "def",
            "-n",
            "30",
            "--temperature",
            "2",
            "--top-k",
            "50",
            "--seed",
            seed,
        ];
        sandbox.run(&arguments).good().text()
    };
    assert_eq!(run("1"), run("1"));
    assert_ne!(run("1"), run("2"));
}

#[test]
fn completions_know_the_commands() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(
            sandbox
                .run(&["completions", shell])
                .good()
                .text()
                .contains("train-predictors"),
            "{shell}"
        );
    }
}
