//! CPython in a sandbox: own namespaces, no network, no files but Python's own, an empty environment, and limits on time,
//! memory, files, processes and system calls.
//!
//! Linux's tools set it up (`unshare`, `mount`, `pivot_root`, `prlimit`, `setpriv`). If they cannot, no program is run.
//! A sandbox is set up once and runs one program after the other, each in separate processes: `python_supervisor.py`. The
//! program's process has neither the tests nor the file of the verdict.

use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use powerinfer_guard::worker::{NoAnswer, Worker};
use serde::Serialize;
use serde_json::json;

use crate::{
    EvalError, Verdict,
    system_calls::{self, Instruction},
};

/// Limit on the address space of a process; there are six processes at most.
const MEMORY_BYTES: u64 = 512 << 20;

/// Python program that runs the judged ones in child processes.
const SUPERVISOR: &str = include_str!("python_supervisor.py");

/// Time to set up namespaces and limits, and to start Python.
const SET_UP: Duration = Duration::from_secs(20);

/// Time that a program may wait, or be kept waiting by others, added to its processor time.
const WAIT: Duration = Duration::from_secs(5);

/// Shell script that builds a root folder with Python's files, changes to it, drops all privileges and starts Python.
/// Its arguments: bytes of memory, Python, its program, and the folders that it needs.
const SCRIPT: &str = r#"
set -eu
memory=$1 python=$2 supervisor=$3
shift 3
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
prlimit --as="$memory" --fsize=0 --nofile=32 --nproc=6 --core=0 \
  setpriv --bounding-set=-all --inh-caps=-all --no-new-privs \
  "$python" -s -S -B -X utf8 -c "$supervisor" || exit $?
"#;

/// Names of the interpreters to try: on `PATH`, and, if that one cannot be run as another user, the one of the system.
const PYTHONS: [&str; 2] = ["python3", "/usr/bin/python3"];

/// Python program that prints its own folders, and its name with its version.
const ASK: &str = "import os, sys; print(os.path.realpath(sys.executable)); print(os.path.realpath(sys.base_prefix)); print(sys.implementation.cache_tag)";

/// A Python interpreter with the folders that it needs.
#[derive(Debug)]
pub struct PythonSandbox {
    python: PathBuf,
    folders: Vec<PathBuf>,
    name: String,
    /// Whether this process runs as root, to which limits on processes do not apply.
    is_root: bool,
    /// Filter of system calls.
    filter: Vec<Instruction>,
    /// Sandbox that is set up: the first program sets it up, and one that has to be ended takes it along.
    worker: Mutex<Option<Worker>>,
}

/// Tests of a function.
#[derive(Debug, Clone, Serialize)]
pub struct Tests {
    /// Source that defines the function, and others that the tests use.
    pub reference: String,
    /// Source that defines `check`, which raises unless the function that it is called with is right.
    pub test: String,
    /// Name of the function.
    pub entry_point: String,
}

impl PythonSandbox {
    /// Sandbox of `python3`, after checking that programs run in it and reach no files, network or processes.
    ///
    /// # Errors
    ///
    /// Fails with [`EvalError::NoSandbox`] if there is no Python, or if the sandbox does not hold.
    pub fn find() -> Result<Self, EvalError> {
        let [first, system] = PYTHONS.map(Path::new);
        Self::new(first).or_else(|error| {
            let found = system.exists().then(|| Self::new(system));
            found.and_then(Result::ok).ok_or(error)
        })
    }

    /// Sandbox of the Python interpreter at `python`, checked.
    fn new(python: &Path) -> Result<Self, EvalError> {
        let refused = |reason: String| EvalError::NoSandbox { reason };
        let program = python.display();
        let asked = Command::new(python).args(["-I", "-c", ASK]).output();
        let asked = asked.map_err(|error| {
            refused(match error.kind() {
                io::ErrorKind::NotFound => format!("`{program}` is not installed"),
                _ => format!("`{program}` does not start: {error}"),
            })
        })?;
        let text = String::from_utf8_lossy(&asked.stdout);
        let lines: Vec<&str> = text.lines().collect();
        let [real, base, name] = lines[..] else {
            return Err(refused(format!("`{program}` does not report its folders")));
        };
        // Folders that are bound anyway, and the root.
        let folders = if ["/usr", "/"].contains(&base) {
            vec![]
        } else {
            vec![base.into()]
        };
        let sandbox = Self {
            python: real.into(),
            folders,
            name: name.to_owned(),
            is_root: is_root(),
            filter: system_calls::filter().map_err(refused)?,
            worker: Mutex::new(None),
        };
        let worker = sandbox.start().map_err(refused)?;
        *sandbox.worker() = Some(worker);
        for (what, program) in ESCAPES {
            if sandbox.judge(program, None, WAIT) == Verdict::Passed {
                return Err(refused(format!("{what} is within the sandbox's reach")));
            }
        }
        Ok(sandbox)
    }

    /// Name of the interpreter with its version, such as `cpython-311`. Verdicts may depend on it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `program` and then `tests`, for at most `time_limit` of processor time, in whole seconds; without tests the
    /// program passes if it ends.
    pub fn judge(&self, program: &str, tests: Option<&Tests>, time_limit: Duration) -> Verdict {
        let mut kept = self.worker();
        let worker = match kept.take() {
            Some(worker) => Ok(worker),
            None => self.start(),
        };
        let mut worker = match worker {
            Ok(worker) => worker,
            Err(reason) => return Verdict::Unjudged(reason),
        };
        match worker.ask(&self.request(program, tests, time_limit), time_limit + WAIT) {
            Ok(answer) => match serde_json::from_slice(&answer).ok().and_then(
                |(name, detail): (String, String)| Verdict::from_name(&name, Some(&detail)),
            ) {
                Some(verdict) => {
                    *kept = Some(worker);
                    verdict
                }
                None => Verdict::Unjudged("the verdict cannot be read".to_owned()),
            },
            Err(NoAnswer::Timeout) => Verdict::Timeout,
            Err(NoAnswer::Ended(_)) => {
                let reason = worker.end();
                let reason = reason.as_deref().unwrap_or("it gave no verdict");
                Verdict::Unjudged(format!("the sandbox failed: {reason}"))
            }
        }
    }

    fn worker(&self) -> MutexGuard<'_, Option<Worker>> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets up a sandbox, and checks that it runs programs.
    fn start(&self) -> Result<Worker, String> {
        let failed = |reason: &str| format!("the sandbox cannot be set up here: {reason}");
        let command = self.command();
        let name = command.get_program().to_owned();
        let mut worker = Worker::spawn(command)
            .map_err(|error| failed(&format!("`{}` does not start: {error}", name.display())))?;
        let program = "x = sum(range(10))\nassert x == 45\n";
        match worker.ask(&self.request(program, None, WAIT), SET_UP) {
            Ok(answer) if answer == br#"["passed", ""]"# => Ok(worker),
            Ok(answer) => Err(failed(&String::from_utf8_lossy(&answer))),
            Err(reason) => Err(failed(&worker.end().unwrap_or(reason.to_string()))),
        }
    }

    /// The message with `program` and the one with its tests, which the supervisor reads later.
    fn request(&self, program: &str, tests: Option<&Tests>, time_limit: Duration) -> Vec<u8> {
        let seconds = time_limit.as_secs().max(1);
        let messages = [
            json!({ "source": program, "filter": self.filter, "seconds": seconds }),
            json!(tests),
        ];
        let framed = messages.map(|message| {
            let text = message.to_string();
            [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
        });
        framed.concat()
    }

    fn command(&self) -> Command {
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
        line.push(MEMORY_BYTES.to_string());
        line.push(self.python.display().to_string());
        line.push(SUPERVISOR.to_owned());
        line.extend(self.folders.iter().map(|path| path.display().to_string()));
        let mut command = Command::new(&line[0]);
        command
            .args(&line[1..])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            // The order of sets of texts depends on it.
            .env("PYTHONHASHSEED", "0")
            .current_dir("/")
            .stderr(Stdio::piped());
        command
    }
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
pub(crate) mod tests {
    use std::{io::Write, thread};

    use super::*;

    /// A sandbox, if the system allows one; else prints that the test is skipped.
    pub(crate) fn for_tests() -> Option<PythonSandbox> {
        match PythonSandbox::find() {
            Ok(sandbox) => Some(sandbox),
            Err(reason) => {
                // Tests capture the output of macros only.
                let test = thread::current();
                let name = test.name().unwrap_or("a test");
                let _ = writeln!(io::stderr(), "skipped: {name}: {reason}");
                None
            }
        }
    }

    #[test]
    fn programs_get_the_verdict_of_how_they_end() {
        let Some(sandbox) = for_tests() else { return };
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
        let Some(sandbox) = for_tests() else { return };
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
        let Some(sandbox) = for_tests() else { return };
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
        let Some(sandbox) = for_tests() else { return };
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

    #[test]
    fn programs_run_after_any_other_as_if_they_were_the_first() {
        let Some(sandbox) = for_tests() else { return };
        // The order of a set of texts is the same in every sandbox.
        let order = "raise ValueError([*{'a', 'b', 'c', 'd', 'e', 'f'}])\n";
        let judge = |program: &str| sandbox.judge(program, None, Duration::from_secs(1));
        let first = judge(order);
        for other in [
            "import builtins\nbuiltins.ValueError = KeyError\n",
            "while True: pass\n",
            "import os\nos._exit(0)\n",
            // It is ended with its sandbox.
            "import time\ntime.sleep(100)\n",
        ] {
            judge(other);
            assert_eq!(judge(order), first, "{other}");
        }
        // Answers on which the tests spend all their time.
        let tests = Tests {
            reference: String::new(),
            test: "def check(candidate):\n    for i in range(100): candidate(i)\n".to_owned(),
            entry_point: "f".to_owned(),
        };
        let program = "def f(x):\n    return [0] * 3000000\n";
        let verdict = sandbox.judge(program, Some(&tests), Duration::from_secs(1));
        assert_eq!(verdict, Verdict::Timeout);
        assert_eq!(judge(order), first);
        let again = for_tests().unwrap();
        assert_eq!(again.judge(order, None, Duration::from_secs(1)), first);
    }

    #[test]
    fn a_python_that_is_missing_or_none_is_named() {
        for (python, part) in [
            ("/no/python3", "`/no/python3` is not installed"),
            ("/bin/true", "`/bin/true` does not report its folders"),
            ("/dev/null", "`/dev/null` does not start"),
        ] {
            let error = PythonSandbox::new(Path::new(python)).unwrap_err();
            assert_eq!(error.hint(), Some(powerinfer_artifact::Hint::InstallPython));
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
