//! CPython that can do nothing but compute: in namespaces of its own, without network, with nothing of the machine's files but
//! what Python itself is made of, an empty environment, limits on time, memory, files and processes, and a clock beside.
//!
//! The system's own tools set it up (`unshare`, `mount`, `pivot_root`, `prlimit`, `setpriv`). Where they cannot, nothing
//! is run at all.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    io::{Read, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{EvalError, human_eval::Verdict};

/// Bytes of address space that a process may have, of which there are six at most.
const MEMORY_BYTES: u64 = 512 << 20;

/// Bytes at the end of what a program says that are kept.
const OUTPUT_BYTES: usize = 64 << 10;

/// What a program says first.
const BEGUN: &str = "begun\n";

/// What the namespaces and the limits take to be set up, beside the program's own time.
const SET_UP: Duration = Duration::from_secs(2);

/// Builds a root of what Python is made of, goes there, gives up all rights, and starts it. Its arguments are the
/// seconds of processor time, the bytes of memory, the program, and folders that it needs.
const SCRIPT: &str = r#"
set -eu
seconds=$1 memory=$2 python=$3
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
prlimit --cpu="$seconds" --as="$memory" --fsize=0 --nofile=32 --nproc=6 --core=0 \
  setpriv --bounding-set=-all --inh-caps=-all --no-new-privs \
  "$python" -I -S -B -X utf8 - || exit $?
"#;

/// Asks a Python where it lies and what it is made of.
const ASK: &str = "import os, sys; print(os.path.realpath(sys.executable)); print(os.path.realpath(sys.base_prefix))";

/// A Python, and the folders it needs.
#[derive(Debug)]
pub struct PythonSandbox {
    python: PathBuf,
    folders: Vec<PathBuf>,
    /// Whether this process runs as the system's administrator, whom limits on processes do not bind.
    is_root: bool,
}

impl PythonSandbox {
    /// Makes sure that the Python at `python` runs in a sandbox here: that it computes there, and that files, network
    /// and processes are out of its reach.
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
            return Err(refused("it does not tell where it lies".to_owned()));
        };
        // What is bound anyway, and what would be everything.
        let is_system = base == Path::new("/usr") || base == Path::new("/");
        let folders = if is_system { vec![] } else { vec![base] };
        let sandbox = Self {
            python: real,
            folders,
            is_root: is_root(),
        };
        match sandbox.judge("x = sum(range(10))\nassert x == 45\n", SET_UP) {
            Verdict::Passed => {}
            other => {
                return Err(refused(format!(
                    "the sandbox cannot be set up here: {}",
                    other.detail().unwrap_or(other.name())
                )));
            }
        }
        for (what, program) in ESCAPES {
            if sandbox.judge(program, SET_UP) == Verdict::Passed {
                return Err(refused(format!("{what} is within its reach")));
            }
        }
        Ok(sandbox)
    }

    /// Runs `program` to its end, or until `patience` is over.
    pub fn judge(&self, program: &str, patience: Duration) -> Verdict {
        // What comes behind the last line tells that it was reached, for a program may end early without an error. Who looks
        // for it finds it: a judge of models, not of adversaries.
        let sign = sign();
        let program = format!(
            "import sys\nsys.stdout.write('begun\\n')\nsys.stdout.flush()\ntry:\n    exec(compile({}, 'program', 'exec'), {{'__name__': '__main__'}})\nexcept AssertionError as error:\n    sys.stdout.write('assertion ' + str(error)[:200])\nexcept BaseException as error:\n    sys.stdout.write('error ' + type(error).__name__ + ': ' + str(error)[:200])\nelse:\n    sys.stdout.write('{sign}')\n",
            quoted(program)
        );
        let mut child = match self.command(patience).spawn() {
            Ok(child) => child,
            Err(error) => return Verdict::Unjudged(format!("`setpriv` does not start: {error}")),
        };
        let Some(said) = watch(&mut child, program, patience) else {
            return Verdict::Unjudged("the sandbox cannot be watched".to_owned());
        };
        if !said.begun {
            let reason = said.stderr.lines().last().unwrap_or("it did not start");
            return Verdict::Unjudged(format!("the sandbox was not set up: {reason}"));
        }
        if said.is_over {
            return Verdict::Timeout;
        }
        let stdout = &said.stdout;
        if stdout.contains(&sign) {
            return Verdict::Passed;
        }
        // What the program itself has printed may come before.
        let last = |mark: &str| {
            let at = stdout.rfind(mark)?;
            Some(stdout[at + mark.len()..].to_owned())
        };
        match (last("assertion "), last("error ")) {
            (Some(detail), None) => Verdict::Failed(detail),
            (_, Some(detail)) => Verdict::Error(detail),
            (None, None) => {
                let reason = said.stderr.lines().last().unwrap_or("it ended early");
                Verdict::Error(reason.to_owned())
            }
        }
    }

    fn command(&self, patience: Duration) -> Command {
        let mut line: Vec<String> = Vec::new();
        if self.is_root {
            // As nobody, whom limits on processes bind.
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
        line.push((patience.as_secs() + 1).to_string());
        line.push(MEMORY_BYTES.to_string());
        let paths = std::iter::once(&self.python).chain(&self.folders);
        line.extend(paths.map(|path| path.display().to_string()));
        let mut command = Command::new(&line[0]);
        command
            .args(&line[1..])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .current_dir("/")
            // Signals to a group of processes do not reach this one.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// What a program has said, and how it ended.
struct Said {
    /// Whether it was started at all.
    begun: bool,
    /// Whether its time was over.
    is_over: bool,
    stdout: String,
    stderr: String,
}

/// The beginning and the end of what comes from `from`, all of which is read.
fn drain(mut from: impl Read) -> (bool, String) {
    let (mut head, mut tail, mut piece) = (Vec::new(), Vec::new(), [0; 8192]);
    while let Ok(count @ 1..) = from.read(&mut piece) {
        let missing = BEGUN.len().saturating_sub(head.len()).min(count);
        head.extend_from_slice(&piece[..missing]);
        tail.extend_from_slice(&piece[..count]);
        if tail.len() > 2 * OUTPUT_BYTES {
            tail.drain(..tail.len() - OUTPUT_BYTES);
        }
    }
    let text = String::from_utf8_lossy(&tail).into_owned();
    (head == BEGUN.as_bytes(), text)
}

/// Gives `child` its program, and stops it where its time is over.
fn watch(child: &mut Child, program: String, patience: Duration) -> Option<Said> {
    let (mut input, stdout, stderr) = (
        child.stdin.take()?,
        child.stdout.take()?,
        child.stderr.take()?,
    );
    let writer = thread::spawn(move || {
        // A program that ends early does not read all of it.
        let _ = input.write_all(program.as_bytes());
    });
    let stdout = thread::spawn(move || drain(stdout));
    let stderr = thread::spawn(move || drain(stderr));
    let started = Instant::now();
    let code = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status.code()),
            Ok(None) if started.elapsed() < patience + SET_UP => {
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
    let ((begun, stdout), (_, stderr)) = (stdout.join().ok()?, stderr.join().ok()?);
    // What is killed for its processor time ends with one of these.
    let is_killed = matches!(code, Some(Some(137 | 152))) && started.elapsed() >= patience;
    Some(Said {
        begun,
        is_over: code.is_none() || is_killed,
        stdout,
        stderr,
    })
}

/// What must not be possible, and programs that pass where it is.
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

/// `text` as a literal of Python.
fn quoted(text: &str) -> String {
    let escaped: String = text
        .chars()
        .map(|letter| match letter {
            ' '..='~' if letter != '\'' && letter != '\\' => letter.to_string(),
            _ => {
                let code = u32::from(letter);
                format!("\\U{code:08x}")
            }
        })
        .collect();
    format!("'{escaped}'")
}

/// What no program prints by chance.
fn sign() -> String {
    let word = || RandomState::new().build_hasher().finish();
    format!("passed-{:016x}{:016x}", word(), word())
}

/// Whether this process runs as the system's administrator.
fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    ids.is_some_and(|ids| ids.split_whitespace().nth(1) == Some("0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sandbox, where one can be had.
    fn sandbox() -> Option<PythonSandbox> {
        let found = PythonSandbox::new(Path::new("/usr/bin/python3"))
            .or_else(|_| PythonSandbox::new(Path::new("python3")));
        match found {
            Ok(sandbox) => Some(sandbox),
            Err(reason) => {
                println!("skipped: {reason}");
                None
            }
        }
    }

    #[test]
    fn texts_become_literals() {
        assert_eq!(quoted("a'b\\\n"), "'a\\U00000027b\\U0000005c\\U0000000a'");
    }

    #[test]
    fn programs_have_the_end_they_deserve() {
        let Some(sandbox) = sandbox() else { return };
        let judge = |program: &str| sandbox.judge(program, Duration::from_secs(1));
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
            // Ends early, and says that all went well.
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
        // Much of it, and something behind the end.
        let loud = "print('x' * 10 ** 6)\nimport atexit\natexit.register(print, 'bye')\n";
        assert_eq!(judge(loud), Verdict::Passed);
        // It does not outlive its time, whatever it does about who looks after it.
        let clinging =
            "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\ntime.sleep(100)\n";
        assert_eq!(judge(clinging), Verdict::Timeout);
        assert_eq!(judge("while True: pass\n"), Verdict::Timeout);
        assert_eq!(judge("import time\ntime.sleep(100)\n"), Verdict::Timeout);
    }

    #[test]
    fn nothing_gets_out() {
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
            let verdict = sandbox.judge(program, Duration::from_secs(1));
            assert_ne!(verdict, Verdict::Passed, "{program}");
        }
        // It goes on as before.
        let verdict = sandbox.judge("assert True\n", Duration::from_secs(1));
        assert_eq!(verdict, Verdict::Passed);
    }
}
