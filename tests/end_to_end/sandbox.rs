//! Runs the program in a temporary folder, one per test.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use powerinfer_artifact::hardware;

/// Whether this machine can judge generated functions; else prints that the test is skipped.
pub(crate) fn can_judge() -> bool {
    let found = powerinfer_eval::PythonSandbox::find();
    if let Err(reason) = &found {
        // Tests capture the output of macros only.
        let test = std::thread::current();
        let name = test.name().unwrap_or("a test");
        let _ = writeln!(std::io::stderr(), "skipped: {name}: {reason}");
    }
    found.is_ok()
}

/// Exit code and output of a finished run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Asserts that the run succeeded.
    #[track_caller]
    pub(crate) fn good(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.stderr);
        self
    }

    /// Asserts that the run failed with this exit code and without a panic, and that the error message contains
    /// all `parts`.
    #[track_caller]
    pub(crate) fn bad(self, code: i32, parts: &[&str]) -> Self {
        assert_eq!(self.code, code, "{}{}", self.text(), self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        assert!(self.stderr.contains("error: "), "{}", self.stderr);
        self.stderr_contains(parts);
        self
    }

    /// Asserts that stderr contains all `parts`.
    #[track_caller]
    pub(crate) fn stderr_contains(&self, parts: &[&str]) {
        assert_contains(&self.stderr, parts);
    }

    /// Asserts that stdout contains all `parts`.
    #[track_caller]
    pub(crate) fn stdout_contains(&self, parts: &[&str]) {
        assert_contains(&self.text(), parts);
    }
}

/// Asserts that `text` contains all `parts`.
#[track_caller]
pub(crate) fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

/// The cache of the tests of this process.
fn cache_folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir().unwrap()).path()
}

/// A temporary folder.
pub(crate) struct Sandbox {
    folder: tempfile::TempDir,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `powerinfer` in this folder. An argument `@x` is replaced by the path of `x` in it.
    pub(crate) fn run(&self, arguments: &[&str]) -> Run {
        self.run_with(arguments, b"")
    }

    pub(crate) fn run_with(&self, arguments: &[&str], stdin: &[u8]) -> Run {
        run_command(self.command(arguments), stdin)
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_powerinfer"));
        command
            .current_dir(self.folder.path())
            .env("NO_COLOR", "1")
            .env_remove("POWERINFER_ISA")
            // Tests use neither the models of the user nor the network.
            .env("HF_HUB_CACHE", self.path("hub"))
            .env("HF_HUB_OFFLINE", "1")
            // This machine is measured once per process.
            .env("POWERINFER_CACHE", cache_folder());
        for argument in arguments {
            match argument.strip_prefix('@') {
                Some(name) => command.arg(self.path(name)),
                None => command.arg(argument),
            };
        }
        command
    }

    /// A copy of the golden checkpoint `name` that a test may change.
    pub(crate) fn copy_model(&self, name: &str) -> PathBuf {
        let folder = self.path(name);
        copy_folder(&golden_model(name), &folder);
        folder
    }

    /// Writes the hardware file of a machine whose CPU takes so long to start a kernel that its GPU computes even the smallest models
    /// faster. Returns the file's name.
    pub(crate) fn slow_host(&self) -> &'static str {
        let mut machine = hardware::named("rtx4090").unwrap();
        machine.cpu.kernel_seconds = 2e-5;
        let text = serde_json::to_string(&machine).unwrap();
        fs::write(self.path("slow-host.json"), text).unwrap();
        "slow-host.json"
    }

    /// A copy of the prepared demo in this folder.
    pub(crate) fn copy_demo(&self) -> PathBuf {
        let folder = self.path("demo.powerinfer");
        copy_folder(prepared_demo(), &folder);
        folder
    }
}

/// Runs `command` with this standard input and waits for it.
pub(crate) fn run_command(mut command: Command, stdin: &[u8]) -> Run {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let stdin = stdin.to_vec();
    // A program that fails early does not read its input, so a broken pipe is expected.
    let writer = std::thread::spawn(move || {
        let _ = input.write_all(&stdin);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    Run {
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The words of a command line without quotes.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Path of the golden checkpoint `name`.
pub(crate) fn golden_model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/models")
        .join(name)
}

/// Copies a folder with its contents.
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Options that make `prepare` fast at the expense of quality.
pub(crate) const QUICK: [&str; 6] = [
    "--tokens",
    "5000",
    "--steps",
    "30",
    "--trace-tokens",
    "2000",
];

/// The prepared demo, shared by all tests of this process.
pub(crate) fn prepared_demo() -> &'static Path {
    static FOLDER: OnceLock<(Sandbox, PathBuf)> = OnceLock::new();
    let (_, folder) = FOLDER.get_or_init(|| {
        let sandbox = Sandbox::new();
        let arguments = [&["prepare", "demo", "--vram", "24G"][..], &QUICK].concat();
        sandbox.run(&arguments).good();
        let folder = sandbox.path("demo.powerinfer");
        // Tests give what they need.
        std::fs::remove_file(folder.join("settings.json")).unwrap();
        (sandbox, folder)
    });
    folder
}
