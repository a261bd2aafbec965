//! CPython that can do nothing but compute: in namespaces of its own, without network, with nothing of the machine's files but
//! what Python itself is made of, an empty environment, limits on time, memory, files and processes, and a clock beside.
//!
//! The system's own tools set it up (`unshare`, `mount`, `pivot_root`, `prlimit`, `setpriv`). Where they cannot, nothing
//! is run at all.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{EvalError, human_eval::Verdict};

/// Bytes of address space that a program may have.
const MEMORY_BYTES: u64 = 1 << 30;

/// Bytes of what a program says that are read.
const OUTPUT_BYTES: u64 = 64 << 10;

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
mkdir before work proc
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
umount /proc
mount -o remount,ro /
cd /work
exec prlimit --cpu="$seconds" --as="$memory" --fsize=0 --nofile=32 --nproc=16 --core=0 \
  setpriv --bounding-set=-all --inh-caps=-all --no-new-privs \
  "$python" -I -S -B -X utf8 -
"#;

/// Asks a Python where it lies and what it is made of.
const ASK: &str = "import os, sys; print(os.path.realpath(sys.executable)); print(os.path.realpath(sys.prefix)); print(os.path.realpath(sys.base_prefix))";

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
        let (Some(real), Some(prefix), Some(base)) = (lines.next(), lines.next(), lines.next())
        else {
            return Err(refused("it does not tell where it lies".to_owned()));
        };
        let mut folders = Vec::new();
        for folder in [prefix, base] {
            // What is bound anyway, and what would be everything.
            let is_system = folder == Path::new("/usr") || folder == Path::new("/");
            if !is_system && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
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
        // What comes behind the last line alone tells that it was reached, for a program may end early without an error.
        let sign = secret();
        let program = format!(
            "import sys\ntry:\n    exec(compile({}, 'program', 'exec'), {{'__name__': '__main__'}})\nexcept AssertionError as error:\n    sys.stdout.write('assertion ' + str(error)[:200])\nexcept BaseException as error:\n    sys.stdout.write('error ' + type(error).__name__ + ': ' + str(error)[:200])\nelse:\n    sys.stdout.write('{sign}')\n",
            quoted(program)
        );
        let mut child = match self.command(patience).spawn() {
            Ok(child) => child,
            Err(error) => return Verdict::Unjudged(format!("`unshare` does not start: {error}")),
        };
        let said = watch(&mut child, program, patience);
        let Some((stdout, stderr)) = said else {
            return Verdict::Timeout;
        };
        if stdout.ends_with(&sign) {
            return Verdict::Passed;
        }
        // What the program itself has printed may come before.
        let last = |mark: &str| {
            stdout
                .rfind(mark)
                .map(|at| stdout[at + mark.len()..].to_owned())
        };
        match (last("assertion "), last("error ")) {
            (Some(detail), None) => Verdict::Failed(detail),
            (_, Some(detail)) => Verdict::Error(detail),
            (None, None) => {
                let reason = stderr.lines().last().unwrap_or("it ended early").to_owned();
                Verdict::Error(reason)
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
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// Gives `child` its program; returns what it says, or nothing where it has to be stopped.
fn watch(child: &mut Child, program: String, patience: Duration) -> Option<(String, String)> {
    let mut input = child.stdin.take()?;
    let writer = thread::spawn(move || {
        // A program that ends early does not read all of it.
        let _ = input.write_all(program.as_bytes());
    });
    fn read(from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = from.take(OUTPUT_BYTES).read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }
    let stdout = read(child.stdout.take()?);
    let stderr = read(child.stderr.take()?);
    let started = Instant::now();
    let ended = loop {
        match child.try_wait() {
            Ok(Some(_)) => break true,
            Ok(None) if started.elapsed() < patience + SET_UP => {
                thread::sleep(Duration::from_millis(3));
            }
            Ok(None) | Err(_) => break false,
        }
    };
    if !ended {
        let _ = child.kill();
        let _ = child.wait();
    }
    let _ = writer.join();
    let (stdout, stderr) = (stdout.join(), stderr.join());
    // Killed for its processor time, it has said nothing.
    let killed = started.elapsed() >= patience && stdout.as_ref().is_ok_and(String::is_empty);
    match (ended && !killed, stdout, stderr) {
        (true, Ok(stdout), Ok(stderr)) => Some((stdout, stderr)),
        _ => None,
    }
}

/// What must not be possible, and programs that pass where it is.
const ESCAPES: [(&str, &str); 4] = [
    ("the file system", "open('/etc/passwd').read()\n"),
    ("writing files", "open('/work/x', 'w').write('x')\n"),
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

/// Something that no program can know.
fn secret() -> String {
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
                #[allow(clippy::print_stdout)] // whoever reads the tests is to see it
                {
                    println!("skipped: {reason}");
                }
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
        assert_eq!(judge("while True: pass\n"), Verdict::Timeout);
        assert_eq!(judge("import time\ntime.sleep(100)\n"), Verdict::Timeout);
    }

    #[test]
    fn nothing_gets_out() {
        let Some(sandbox) = sandbox() else { return };
        for program in [
            "open('/etc/passwd').read()\n",
            "open('/proc/self/environ').read()\n",
            "open('/work/x', 'w').write('x')\n",
            "open('/usr/bin/x', 'w').write('x')\n",
            "import os\nos.remove('/usr/bin/env')\n",
            "import os\nassert 'HOME' in os.environ\n",
            "import os\nassert os.listdir('/home')\n",
            "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)\n",
            "import socket\nsocket.create_connection(('8.8.8.8', 53), 1)\n",
            "import os\nwhile True: os.fork()\n",
            "import os\nos.chroot('/work')\n",
            "import os\nos.setuid(1000)\n",
            "import subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', 'none', '/work'], check=True)\n",
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
