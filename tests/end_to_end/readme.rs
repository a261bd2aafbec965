//! The commands of the README run verbatim, and the files that it names exist.

use std::{fs, path::Path, process::Command};

use crate::sandbox::{Sandbox, can_judge};

fn readme() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap()
}

/// Commands after `$ ` in the console blocks of the README.
fn console_commands() -> Vec<String> {
    let text = readme();
    let blocks = text
        .split("```console\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next());
    blocks
        .flat_map(str::lines)
        .filter_map(|line| line.strip_prefix("$ "))
        .map(str::to_owned)
        .collect()
}

/// One test, since the script uses the results of the commands.
#[test]
fn commands_run_verbatim_and_the_demo_script_prints_its_table() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    let commands = console_commands();
    assert!(commands.len() >= 4, "{commands:?}");
    let program = Path::new(env!("CARGO_BIN_EXE_powerinfer"));
    let folder = program.parent().unwrap().display();
    let path = format!("{folder}:{}", std::env::var("PATH").unwrap());
    let run = |command: &str| {
        let output = Command::new("bash")
            .args(["-c", command])
            .current_dir(sandbox.path(""))
            .env("PATH", &path)
            .env("POWERINFER", program)
            .env("DEMO_FOLDER", sandbox.path("demo.powerinfer"))
            .env("POWERINFER_CACHE", sandbox.path("cache"))
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command}\n{errors}");
        String::from_utf8(output.stdout).unwrap() + &errors
    };
    for command in &commands {
        run(command);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = run(&format!("{} 4", root.join("scripts/demo.sh").display()));
    assert_eq!(text.matches("up to date").count(), 3, "{text}");
    for part in [
        "def ",
        "policy",
        "dense",
        "exact",
        "predicted",
        "pass@1",
        "perplexity",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn linked_files_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = readme();
    let links = text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    for link in links.filter(|link| !link.starts_with("http") && !link.starts_with('#')) {
        let file = link.split('#').next().unwrap_or(link);
        assert!(root.join(file).exists(), "{link}");
    }
}
