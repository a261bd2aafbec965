//! Files that other programs truncate, overwrite or replace while they are in use.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    thread,
    time::Duration,
};

use crate::sandbox::Sandbox;

const HINT: &str = "hint: replace files by renaming, not by overwriting them";

/// A chat that has given its first answer.
struct Chat {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Chat {
    fn start(sandbox: &Sandbox, more: &[&str]) -> Self {
        let mut child = sandbox
            .command(&["run", "demo", "-i", "-n", "4", "--device", "cpu"])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut chat = Self {
            stdin: child.stdin.take().unwrap(),
            stdout: BufReader::new(child.stdout.take().unwrap()),
            child,
        };
        chat.ask();
        let mut line = String::new();
        chat.stdout.read_line(&mut line).unwrap();
        chat
    }

    fn ask(&mut self) {
        // A program that has ended does not read its input.
        let _ = self.stdin.write_all(b"def f(xs):\n");
    }

    /// Asks once more; returns exit code, stderr, and whether there was an answer.
    fn finish(mut self) -> (Option<i32>, String, bool) {
        self.ask();
        drop(self.stdin);
        let [mut stdout, mut stderr] = [String::new(), String::new()];
        self.stdout.read_to_string(&mut stdout).unwrap();
        let mut messages = self.child.stderr.take().unwrap();
        messages.read_to_string(&mut stderr).unwrap();
        let code = self.child.wait().unwrap().code();
        (code, stderr, !stdout.trim().is_empty())
    }
}

fn demo() -> (Sandbox, PathBuf) {
    let sandbox = Sandbox::new();
    let weights = sandbox.copy_demo().join("bundle/weights.safetensors");
    (sandbox, weights)
}

fn truncate(path: &PathBuf) {
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(4096)
        .unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn a_weights_file_that_shrinks_ends_a_run_with_a_message() {
    let (sandbox, weights) = demo();
    let chat = Chat::start(&sandbox, &[]);
    truncate(&weights);
    let (code, stderr, _) = chat.finish();
    assert_eq!(code, Some(1), "{stderr}");
    let message =
        "demo.powerinfer/bundle/weights.safetensors` changed or shrank while it was in use\n";
    assert!(stderr.contains(message), "{stderr}");
    let hint = format!("{HINT}; `--no-mmap` reads them into memory first\n");
    assert!(stderr.ends_with(&hint), "{stderr}");
}

#[test]
fn weights_that_are_overwritten_end_a_run_with_an_error() {
    let (sandbox, weights) = demo();
    let chat = Chat::start(&sandbox, &[]);
    let bytes = fs::read(&weights).unwrap();
    let file = File::options().write(true).open(&weights).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH)
        .unwrap();
    let (code, stderr, is_answered) = chat.finish();
    assert!(is_answered);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.contains("weights.safetensors` changed while it was in use"),
        "{stderr}"
    );
    // Not with the weights in memory.
    fs::write(&weights, &bytes).unwrap();
    let chat = Chat::start(&sandbox, &["--no-mmap"]);
    truncate(&weights);
    let (code, stderr, is_answered) = chat.finish();
    assert_eq!((code, is_answered), (Some(0), true), "{stderr}");
}

#[test]
fn replacing_a_bundle_by_renaming_does_not_disturb_a_run() {
    let (sandbox, weights) = demo();
    let chat = Chat::start(&sandbox, &[]);
    let other = sandbox.path("other");
    fs::write(&other, b"not weights").unwrap();
    fs::rename(&other, &weights).unwrap();
    let (code, stderr, is_answered) = chat.finish();
    assert_eq!((code, is_answered), (Some(0), true), "{stderr}");
}

#[test]
fn a_server_ends_when_its_weights_change() {
    let (sandbox, weights) = demo();
    let mut child = sandbox
        .command(&["serve", "demo", "--port", "0", "--threads", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert!(line.starts_with("listening"), "{line}");
    // A file that is renamed over the weights changes nothing.
    let renamed = sandbox.path("renamed");
    fs::rename(&weights, &renamed).unwrap();
    fs::write(&weights, b"not weights").unwrap();
    thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none());
    truncate(&renamed);
    for _ in 0..200 {
        if child.try_wait().unwrap().is_some() {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    let _ = child.kill();
    let code = child.wait().unwrap().code();
    let mut stderr = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.contains("weights.safetensors` changed while it was in use"),
        "{stderr}"
    );
    assert!(stderr.contains("; run the command again"), "{stderr}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_bus_error_of_another_cause_still_kills() {
    use std::os::unix::process::ExitStatusExt;
    let (sandbox, _) = demo();
    let mut chat = Chat::start(&sandbox, &[]);
    // The first one ends in Rust's handler, which restores the default.
    let send = format!("kill -BUS {}; sleep 0.2; kill -BUS {0}", chat.child.id());
    let sent = std::process::Command::new("sh")
        .args(["-c", &send])
        .status();
    sent.unwrap();
    let status = chat.child.wait().unwrap();
    assert_eq!(status.signal(), Some(7), "{status}");
}
