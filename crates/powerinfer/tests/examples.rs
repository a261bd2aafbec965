//! The examples run without arguments.
#![expect(clippy::unwrap_used, reason = "a failed test panics")]

use std::{env, process::Command};

/// Output of the example `name`, which was built next to this test.
fn output(name: &str) -> String {
    let test = env::current_exe().unwrap();
    let target = test.ancestors().nth(2).unwrap();
    let program = target
        .join("examples")
        .join(name)
        .with_extension(env::consts::EXE_EXTENSION);
    let output = Command::new(program).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn generate_writes_python() {
    let text = output("generate");
    assert!(text.starts_with("def odd(numbers):"), "{text}");
    assert!(text.contains("return"), "{text}");
}

#[test]
fn sparsity_lists_every_layer() {
    let text = output("sparsity");
    assert!(text.contains("tokens of demo"), "{text}");
    let layers = powerinfer::demo().unwrap().config().layer_count;
    assert_eq!(text.lines().count(), layers + 2, "{text}");
}

#[test]
fn place_uses_the_budget() {
    let text = output("place");
    let last = text.lines().last().unwrap();
    let (hot, rest) = last.split_once(" of ").unwrap();
    let all = rest.split_once(' ').unwrap().0;
    let [hot, all] = [hot, all].map(|number| number.parse::<u64>().unwrap());
    assert!(0 < hot && hot <= all && text.contains("Gpu"), "{text}");
}
