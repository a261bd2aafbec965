//! CPython in a sandbox: own namespaces, no network, no files but Python's own, an empty environment, and limits on time,
//! memory, files, processes and system calls.
//!
//! Linux's tools set it up (`unshare`, `mount`, `pivot_root`, `prlimit`, `setpriv`). If they cannot, no program is run.
//! The program's process has neither the tests nor the place where the verdict is written: `python_supervisor.py` calls it
//! and compares values in another.

use std::{
    io::{Read, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use powerinfer_guard::inherit_no_descriptors;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{EvalError, human_eval::Verdict, system_calls};

/// Limit on the address space of a process; there are six processes at most.
const MEMORY_BYTES: u64 = 512 << 20;

/// Bytes kept of the end of a program's output.
const OUTPUT_BYTES: usize = 64 << 10;

/// First line of the supervisor's output.
const BEGUN: &str = "begun\n";

/// Python program that runs the judged one in a child process.
const SUPERVISOR: &str = include_str!("python_supervisor.py");

/// Time to set up namespaces and limits, added to the program's own.
const SET_UP: Duration = Duration::from_secs(2);

/// Shell script that builds a root folder with Python's files, changes to it, drops all privileges and starts Python.
/// Its arguments: seconds of processor time, bytes of memory, Python, its program, and the folders that it needs.
const SCRIPT: &str = r#"
set -eu
seconds=$1 memory=$2 python=$3 supervisor=$4
shift 4
mount --make-rprivate /
mount -t tmpfs -o size=16m,mode=755,nosuid,nodev none /tmp
mkdir /tmp/root
mount -t tmpfs -o size=16m,mode=755,nosuid,nodev none /tmp/root
cd /tmp/root
mkdir before scratch proc
mount -t proc none proc # which `umount` reads
for folder in /bin /sbin /lib /lib32 /lib64 /usr/bin /usr/sbin /usr/lib /usr/lib32 /usr/lib64 "$@"; do
  if [ -L "$folder" ]; then
    mkdir -p ".${folder%/*}"
    [ -e ".$folder" ] || cp -P "$folder" ".$folder"
  elif [ -d "$folder" ]; then
    mkdir -p ".$folder"
    mount --bind "$folder" ".$folder"
    mount -o remount,bind,ro,nosuid,nodev ".$folder"
  fi
done
pivot_root . before
cd /
umount -l /before
rmdir /before
echo 0 > /proc/sys/user/max_user_namespaces
echo 0 > /proc/sys/kernel/shmall # which no limit on memory counts
umount /proc
mount -o remount,ro /
cd /scratch
# Not in the place of this shell, with which all that runs here ends.
prlimit --cpu="$seconds" --as="$memory" --fsize=0 --nofile=32 --nproc=6 --core=0 \
  setpriv --bounding-set=-all --inh-caps=-all --no-new-privs \
  "$python" -I -S -B -X utf8 -c "$supervisor" || exit $?
"#;

/// Python program that prints its own folders.
const ASK: &str = "import os, sys; print(os.path.realpath(sys.executable)); print(os.path.realpath(sys.base_prefix))";

/// A Python interpreter with the folders that it needs.
#[derive(Debug)]
pub struct PythonSandbox {
    python: PathBuf,
    folders: Vec<PathBuf>,
    /// Whether this process runs as root, to which limits on processes do not apply.
    is_root: bool,
    /// Instructions of the filter of system calls: code, jumps if true and if false, and operand.
    filter: Vec<(u16, u8, u8, u32)>,
}

/// Tests of a function.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tests {
    /// Source that defines the function, and others that the tests use.
    pub reference: String,
    /// Source that defines `check`, which raises unless the function that it is called with is right.
    pub test: String,
    /// Name of the function.
    pub entry_point: String,
}

impl PythonSandbox {
    /// Sandbox of the Python interpreter at `python`, after checking that programs run in it and reach no files, network
    /// or processes.
    ///
    /// # Errors
    ///
    /// Fails with [`EvalError::NoSandbox`] if the interpreter does not run, or if the sandbox does not hold.
    pub fn new(python: &Path) -> Result<Self, EvalError> {
        let refused = |reason: String| EvalError::NoSandbox {
            python: python.to_owned(),
            reason,
        };
        let asked = Command::new(python)
            .args(["-I", "-c", ASK])
            .output()
            .map_err(|error| refused(format!("it does not start: {error}")))?;
        let text = String::from_utf8_lossy(&asked.stdout);
        let mut lines = text.lines().map(PathBuf::from);
        let (Some(real), Some(base)) = (lines.next(), lines.next()) else {
            return Err(refused("it does not report its folders".to_owned()));
        };
        // Folders that are bound anyway, and the root.
        let is_system = base == Path::new("/usr") || base == Path::new("/");
        let folders = if is_system { vec![] } else { vec![base] };
        let sandbox = Self {
            python: real,
            folders,
            is_root: is_root(),
            filter: system_calls::filter().map_err(refused)?,
        };
        match sandbox.judge("x = sum(range(10))\nassert x == 45\n", None, SET_UP) {
            Verdict::Passed => {}
            other => {
                return Err(refused(format!(
                    "the sandbox cannot be set up here: {}",
                    other.detail().unwrap_or(other.name())
                )));
            }
        }
        for (what, program) in ESCAPES {
            if sandbox.judge(program, None, SET_UP) == Verdict::Passed {
                return Err(refused(format!("{what} is within its reach")));
            }
        }
        Ok(sandbox)
    }

    /// Runs `program` and then `tests`, for at most `time_limit`; without tests the program passes if it ends.
    pub fn judge(&self, program: &str, tests: Option<&Tests>, time_limit: Duration) -> Verdict {
        let messages = [
            json!({ "source": program, "filter": self.filter }),
            json!(tests),
        ];
        let framed = messages.map(|message| {
            let text = message.to_string();
            format!("{:10}{text}", text.len())
        });
        let mut child = match self.command(time_limit).spawn() {
            Ok(child) => child,
            Err(error) => return Verdict::Unjudged(format!("`setpriv` does not start: {error}")),
        };
        let Some(output) = watch(&mut child, framed.concat(), time_limit) else {
            return Verdict::Unjudged("the sandbox cannot be watched".to_owned());
        };
        let last_error = || output.stderr.lines().last();
        let Some(found) = output.stdout.strip_prefix(BEGUN) else {
            let reason = last_error().unwrap_or("it did not start");
            return Verdict::Unjudged(format!("the sandbox was not set up: {reason}"));
        };
        if output.is_over {
            return Verdict::Timeout;
        }
        let verdict = serde_json::from_str(found).ok();
        let verdict = verdict
            .and_then(|(name, detail): (String, String)| Verdict::from_name(&name, Some(&detail)));
        verdict.unwrap_or_else(|| {
            let reason = last_error().unwrap_or("it gave no verdict");
            Verdict::Unjudged(format!("the sandbox failed: {reason}"))
        })
    }

    fn command(&self, time_limit: Duration) -> Command {
        let mut line: Vec<String> = Vec::new();
        if self.is_root {
            // As user nobody, to which limits on processes apply.
            line.extend(
                [
                    "setpriv",
                    "--reuid=65534",
                    "--regid=65534",
                    "--clear-groups",
                ]
                .map(str::to_owned),
            );
        }
        line.extend(
            [
                "unshare",
                "--user",
                "--map-root-user",
                "--net",
                "--pid",
                "--ipc",
                "--uts",
                "--mount",
                "--fork",
                "--kill-child=SIGKILL",
                "--",
                "sh",
                "-c",
                SCRIPT,
                "sandbox",
            ]
            .map(str::to_owned),
        );
        line.push((time_limit.as_secs() + 1).to_string());
        line.push(MEMORY_BYTES.to_string());
        line.push(self.python.display().to_string());
        line.push(SUPERVISOR.to_owned());
        line.extend(self.folders.iter().map(|path| path.display().to_string()));
        let mut command = Command::new(&line[0]);
        command
            .args(&line[1..])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .current_dir("/")
            // A group of its own, so that signals to it do not reach this process.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        inherit_no_descriptors(&mut command);
        command
    }
}

/// Output of the supervisor, and how it ended.
struct ProgramOutput {
    /// Whether it exceeded the time limit.
    is_over: bool,
    stdout: String,
    stderr: String,
}

/// Reads all of `from`; returns its end.
fn drain(mut from: impl Read) -> String {
    let (mut tail, mut piece) = (Vec::new(), [0; 8192]);
    while let Ok(count @ 1..) = from.read(&mut piece) {
        tail.extend_from_slice(&piece[..count]);
        if tail.len() > 2 * OUTPUT_BYTES {
            tail.drain(..tail.len() - OUTPUT_BYTES);
        }
    }
    String::from_utf8_lossy(&tail).into_owned()
}

/// Writes `program` to `child`, and kills it after the time limit.
fn watch(child: &mut Child, program: String, time_limit: Duration) -> Option<ProgramOutput> {
    let (mut input, stdout, stderr) = (
        child.stdin.take()?,
        child.stdout.take()?,
        child.stderr.take()?,
    );
    let writer = thread::spawn(move || {
        // A program that exits early does not read all of it.
        let _ = input.write_all(program.as_bytes());
    });
    let stdout = thread::spawn(move || drain(stdout));
    let stderr = thread::spawn(move || drain(stderr));
    let started = Instant::now();
    let code = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status.code()),
            Ok(None) if started.elapsed() < time_limit + SET_UP => {
                thread::sleep(Duration::from_millis(3));
            }
            Ok(None) | Err(_) => break None,
        }
    };
    if code.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let _ = writer.join();
    let (stdout, stderr) = (stdout.join().ok()?, stderr.join().ok()?);
    Some(ProgramOutput {
        is_over: code.is_none(),
        stdout,
        stderr,
    })
}

/// Forbidden actions, with programs that pass if they are possible.
const ESCAPES: [(&str, &str); 4] = [
    ("the file system", "open('/etc/passwd').read()\n"),
    ("writing files", "open('/scratch/x', 'w').write('x')\n"),
    (
        "the network",
        "import socket\ns = socket.socket()\ns.settimeout(1)\nassert s.connect_ex(('127.0.0.1', 9)) not in (101, 113)\n",
    ),
    (
        "starting processes without end",
        "import os\nfor _ in range(100):\n    if os.fork() == 0:\n        import time\n        time.sleep(3)\n        os._exit(0)\n",
    ),
];

/// Whether this process runs as root.
fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.is_some_and(|ids| ids.split_whitespace().nth(1) == Some("0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sandbox, if the system allows one.
    fn sandbox() -> Option<PythonSandbox> {
        let found = PythonSandbox::new(Path::new("/usr/bin/python3"))
            .or_else(|_| PythonSandbox::new(Path::new("python3")));
        match found {
            Ok(sandbox) => Some(sandbox),
            Err(reason) => {
                {
                    println!("skipped: {reason}");
                }
                None
            }
        }
    }

    #[test]
    fn programs_get_the_verdict_of_how_they_end() {
        let Some(sandbox) = sandbox() else { return };
        let judge = |program: &str| sandbox.judge(program, None, Duration::from_secs(1));
        assert_eq!(
            judge("print('hello')\nassert 1 + 1 == 2\n"),
            Verdict::Passed
        );
        assert_eq!(
            judge("assert 1 == 2, 'not equal'\n"),
            Verdict::Failed("not equal".to_owned())
        );
        for program in [
            "def f(:\n",
            "raise ValueError('x')\n",
            "x = [0] * 10 ** 11\n",
            "x = 'a'\nwhile True: x = x + x\n",
            // Exits early with success.
            "import sys\nsys.exit(0)\n",
            "import os\nos._exit(0)\n",
            "raise SystemExit\n",
        ] {
            let verdict = judge(program);
            assert!(
                matches!(verdict, Verdict::Error(_)),
                "{program}: {verdict:?}"
            );
        }
        // Long output, and output after the end.
        let loud = "print('x' * 10 ** 6)\nimport atexit\natexit.register(print, 'bye')\n";
        assert_eq!(judge(loud), Verdict::Passed);
        // It cannot outlive the time limit.
        let clinging =
            "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\ntime.sleep(100)\n";
        assert_eq!(judge(clinging), Verdict::Timeout);
        assert_eq!(judge("while True: pass\n"), Verdict::Timeout);
        assert_eq!(judge("import time\ntime.sleep(100)\n"), Verdict::Timeout);
    }

    #[test]
    fn verdicts_cannot_be_forged() {
        let Some(sandbox) = sandbox() else { return };
        let tests = Tests {
            reference: "def twice(x):\n    return 2 * x\n".to_owned(),
            test: "SECRET = 424242\ndef check(candidate):\n    assert candidate(3) == 6, 'three'\n    assert candidate([1, (2, {3})]) == [1, (2, {3})] * 2\n    assert candidate(SECRET) == 2 * SECRET\n    try:\n        candidate(None)\n    except TypeError:\n        return\n    assert False\n".to_owned(),
            entry_point: "twice".to_owned(),
        };
        let judge = |body: &str| {
            let program = format!("def twice(x):\n{body}\n");
            sandbox.judge(&program, Some(&tests), Duration::from_secs(1))
        };
        assert_eq!(judge("    return 2 * x"), Verdict::Passed);
        assert_eq!(
            judge("    print('error E: x')\n    return x"),
            Verdict::Failed("three".to_owned())
        );
        // An answer that is equal to everything, the verdict in every open file, and the parent's memory.
        for forged in [
            "    class Any:\n        def __eq__(self, other): return True\n    return Any()",
            "    class Any(int):\n        def __eq__(self, other): return True\n    return Any()",
            "    import os\n    for number in range(32):\n        try: os.write(number, b'begun\\n[\"passed\", \"\"]')\n        except OSError: pass\n    os._exit(0)",
            "    import ctypes, os\n    if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: return 2 * x",
            "    import os\n    os.kill(os.getppid(), 9)",
            "    import gc\n    found = [item for item in gc.get_objects() if isinstance(item, dict) and 'SECRET' in item]\n    return 2 * x if found else x",
            "    raise AssertionError",
            "    raise SystemExit(0)",
        ] {
            let verdict = judge(forged);
            assert!(
                matches!(verdict, Verdict::Failed(_) | Verdict::Error(_)),
                "{forged}: {verdict:?}"
            );
        }
        // Families of sockets that can be created; nothing is connected to.
        let sockets = "    import socket\n    opened = []\n    for family in range(64):\n        for kind in (1, 2, 3, 5):\n            try:\n                socket.socket(family, kind, 0).close()\n                opened.append(family)\n            except OSError:\n                pass\n    raise ValueError('opened %r' % opened)";
        assert_eq!(
            judge(sockets),
            Verdict::Error("ValueError: opened []".to_owned())
        );
    }

    #[test]
    fn exceptions_reach_the_tests_as_python_creates_them() {
        let Some(sandbox) = sandbox() else { return };
        let program = "class Mine(OSError):
    def __str__(self): return 'my own'

def f(text):
    if text == 'Mine': raise Mine(2, 'x')
    eval(text)
    raise eval(text)
";
        let test = "def check(candidate):
    for kind, text in [
        (OSError, 'OSError(\"x\")'),
        (FileNotFoundError, 'open(\"/nothing\")'),
        (FileNotFoundError, 'OSError(2, \"x\", \"file\")'),
        (MemoryError, 'MemoryError'),
        (MemoryError, '[0] * 10 ** 12'),
        (TimeoutError, 'TimeoutError()'),
        (KeyError, '{}[1]'),
        (UnicodeDecodeError, 'bytes([255]).decode()'),
        (StopIteration, 'next(iter([]))'),
        (SyntaxError, '1 +'),
        (ExceptionGroup, 'ExceptionGroup(\"x\", [OSError()])'),
    ]:
        try:
            candidate(text)
        except Exception as error:
            assert type(error) is kind or type(error).__name__ == 'ExceptionGroup', (text, error)
        else:
            assert False, text
    try:
        candidate('{}[1]')
    except KeyError as error:
        assert error.args == (1,)
    try:
        candidate('OSError(2, \"x\", \"file\")')
    except OSError as error:
        assert (error.errno, error.filename) == (2, 'file')
    try:
        candidate('Mine')
    except OSError as error:
        assert type(error).__name__ == 'Mine' and str(error) == 'my own' and error.errno == 2
";
        let tests = Tests {
            reference: "def f(text):\n    pass\n".to_owned(),
            test: test.to_owned(),
            entry_point: "f".to_owned(),
        };
        let verdict = sandbox.judge(program, Some(&tests), Duration::from_secs(2));
        assert_eq!(verdict, Verdict::Passed);
        // An exception that no test expects is an error of the program.
        let tests = Tests {
            test: "def check(candidate):\n    candidate('OSError(5)')\n".to_owned(),
            ..tests
        };
        let verdict = sandbox.judge(program, Some(&tests), Duration::from_secs(2));
        assert_eq!(verdict, Verdict::Error("OSError: 5".to_owned()));
    }

    #[test]
    fn programs_reach_nothing_outside() {
        let Some(sandbox) = sandbox() else { return };
        for program in [
            "open('/etc/passwd').read()\n",
            "open('/proc/self/environ').read()\n",
            "open('/scratch/x', 'w').write('x')\n",
            "open('/usr/bin/x', 'w').write('x')\n",
            "import os\nos.remove('/usr/bin/env')\n",
            "import os\nassert 'HOME' in os.environ\n",
            "import os\nassert os.listdir('/home')\n",
            "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)\n",
            "import socket\nsocket.create_connection(('8.8.8.8', 53), 1)\n",
            "import os\nwhile True: os.fork()\n",
            "import os\nos.kill(0, 9)\n",
            "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0\n",
            "import os\nos.chroot('/scratch')\n",
            "import os\nos.setuid(1000)\n",
            "import subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', 'none', '/scratch'], check=True)\n",
            "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\n",
        ] {
            let verdict = sandbox.judge(program, None, Duration::from_secs(1));
            assert_ne!(verdict, Verdict::Passed, "{program}");
        }
        // The sandbox still works.
        let verdict = sandbox.judge("assert True\n", None, Duration::from_secs(1));
        assert_eq!(verdict, Verdict::Passed);
    }
}
