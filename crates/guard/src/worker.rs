//! Child processes of this program for work that must be stopped from outside: a chat template or a judged program can
//! compute without end, or fill the memory, within one operation of its interpreter.
//!
//! A worker answers requests in turn; both are a length, 8 bytes little-endian, and as many bytes.

use std::{
    env,
    ffi::OsString,
    fmt,
    io::{self, Read, Write},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Mutex, OnceLock, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use crate::executable::Executable;

/// Most address space of a worker in bytes; limited on Linux alone.
const WORKER_MEMORY: u64 = 1 << 30;

/// First argument of a worker; the second is the name of its work.
const ARGUMENT: &str = "__worker";

/// The executable of this process, if it has called [`work_as_worker`].
static EXECUTABLE: OnceLock<Executable> = OnceLock::new();

/// Bytes read of a worker's stderr, at most.
const ERROR_BYTES: u64 = 64 << 10;

/// Time for a worker that has closed its output to end.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Name of a kind of work, and the function from request to answer.
pub type Work = (&'static str, fn(&[u8]) -> Vec<u8>);

/// To be called first in `main`. In a worker it works until its parent closes the connection, and returns true. In any other
/// process it returns false. [`Worker::start`] starts workers from now on.
///
/// A worker process for work that is not among `kinds` exits at once. Otherwise it would run the whole program, which would
/// start more workers.
pub fn work_as_worker(kinds: &[Work]) -> bool {
    if let Ok(executable) = Executable::current() {
        let _ = EXECUTABLE.set(executable);
    }
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let work = match &arguments[..] {
        [argument, name] if argument == ARGUMENT => kinds.iter().find(|kind| name == kind.0),
        _ => return false,
    };
    let Some((_, work)) = work else {
        return true;
    };
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let limit = Some(worker_memory());
        let limit = Rlimit {
            current: limit,
            maximum: limit,
        };
        if setrlimit(Resource::As, limit).is_err() {
            return true;
        }
    }
    let (mut input, mut output) = (io::stdin(), io::stdout());
    while let Ok(request) = read_message(&mut input) {
        if write_message(&mut output, &work(&request)).is_err() {
            break;
        }
    }
    true
}

/// Address space of a worker in bytes: no more than this process may have.
fn worker_memory() -> u64 {
    #[cfg(target_os = "linux")]
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
    #[cfg(not(target_os = "linux"))]
    let limit: Option<u64> = None;
    limit.map_or(WORKER_MEMORY, |limit| limit.min(WORKER_MEMORY))
}

fn read_message(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > WORKER_MEMORY {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut bytes = Vec::new();
    from.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == length {
        Ok(bytes)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

fn write_message(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&(bytes.len() as u64).to_le_bytes())?;
    to.write_all(bytes)?;
    to.flush()
}

/// Child process that answers requests; killed when dropped.
pub struct Worker {
    child: Child,
    input: ChildStdin,
    answers: Receiver<Vec<u8>>,
}

/// Why a worker gave no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoAnswer {
    /// It took too long.
    Timeout,
    /// It ended with this status, if the system reports one: it needed too much memory, or was killed.
    Ended(Option<ExitStatus>),
}

/// Why a [`KeptWorker`] gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The system refused a process or a thread.
    #[error("its process cannot be started: {0}")]
    Start(#[from] io::Error),
    /// The worker gave no answer; if it ended, neither did its replacement.
    #[error("{0}")]
    NoAnswer(NoAnswer),
}

impl Worker {
    /// Starts a worker that does the work called `name`; none in a program that does not call [`work_as_worker`].
    ///
    /// # Errors
    ///
    /// The system refuses a process or a thread.
    pub fn start(name: &str) -> io::Result<Option<Self>> {
        let Some(executable) = EXECUTABLE.get() else {
            return Ok(None);
        };
        let mut command = Command::new(executable.path());
        command.args([ARGUMENT, name]);
        command.stderr(Stdio::null());
        // Stacks and arenas of a thread for each of many processors would fill the address space.
        for variable in [
            "POLARS_MAX_THREADS",
            "RAYON_NUM_THREADS",
            "MALLOC_ARENA_MAX",
        ] {
            command.env(variable, "1");
        }
        Self::spawn(command).map(Some)
    }

    /// Starts `command`, which answers requests as a worker does.
    ///
    /// # Errors
    ///
    /// The system refuses a process or a thread.
    pub fn spawn(mut command: Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        #[cfg(unix)]
        {
            use std::os::unix::process::CommandExt;
            // Ctrl-C is for the parent.
            command.process_group(0);
            crate::inherit_no_descriptors(&mut command);
        }
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(mut output)) = (input, output) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let (sender, answers) = mpsc::channel();
        let reader = move || {
            while let Ok(answer) = read_message(&mut output) {
                if sender.send(answer).is_err() {
                    break;
                }
            }
        };
        let worker = Self {
            child,
            input,
            answers,
        };
        thread::Builder::new()
            .name("worker".to_owned())
            .spawn(reader)?;
        Ok(worker)
    }

    /// Returns the answer to `request`. A worker that gave none must not be asked again.
    ///
    /// # Errors
    ///
    /// There is no answer within `limit`.
    pub fn ask(&mut self, request: &[u8], limit: Duration) -> Result<Vec<u8>, NoAnswer> {
        if write_message(&mut self.input, request).is_err() {
            return Err(NoAnswer::Ended(self.status()));
        }
        let answer = self.answers.recv_timeout(limit);
        answer.map_err(|error| match error {
            RecvTimeoutError::Timeout => NoAnswer::Timeout,
            RecvTimeoutError::Disconnected => NoAnswer::Ended(self.status()),
        })
    }

    /// Ends the process; returns the last line of its stderr, if that is piped and has one.
    pub fn end(mut self) -> Option<String> {
        let mut errors = Vec::new();
        let _ = self.child.kill();
        let piped = self.child.stderr.take()?;
        let _ = piped.take(ERROR_BYTES).read_to_end(&mut errors);
        let errors = String::from_utf8_lossy(&errors);
        errors.lines().last().map(str::to_owned)
    }

    /// Exit status of the process; `None` if it has not ended in time.
    fn status(&mut self) -> Option<ExitStatus> {
        let started = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(None) if started.elapsed() < END_LIMIT => {
                    thread::sleep(Duration::from_millis(1));
                }
                status => return status.ok().flatten(),
            }
        }
    }
}

/// A worker that is started by the first request and kept for the next ones.
#[derive(Debug)]
pub struct KeptWorker {
    work: Work,
    worker: Mutex<Option<Worker>>,
}

impl KeptWorker {
    /// A worker for `work`, which is not started yet.
    pub const fn new(work: Work) -> Self {
        Self {
            work,
            worker: Mutex::new(None),
        }
    }

    /// Returns the answer to `request`; in a program without workers, this process computes it. A worker that ends is replaced
    /// once: something outside may have killed it.
    ///
    /// # Errors
    ///
    /// No worker can be started, there is no answer within `limit`, or two workers in a row have ended.
    pub fn ask(&self, request: &[u8], limit: Duration) -> Result<Vec<u8>, WorkerError> {
        let mut kept = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_last = false;
        loop {
            let mut worker = match kept.take() {
                Some(worker) => worker,
                None => match Worker::start(self.work.0)? {
                    Some(worker) => worker,
                    None => return Ok((self.work.1)(request)),
                },
            };
            match worker.ask(request, limit) {
                Ok(answer) => {
                    *kept = Some(worker);
                    return Ok(answer);
                }
                Err(NoAnswer::Ended(_)) if !is_last => is_last = true,
                Err(reason) => return Err(WorkerError::NoAnswer(reason)),
            }
        }
    }
}

/// Does `work` in a new worker, or in this process if workers are not supported.
///
/// # Errors
///
/// The worker gives no answer within `limit`.
pub fn in_worker(work: Work, request: &[u8], limit: Duration) -> Result<Vec<u8>, String> {
    match Worker::start(work.0) {
        Ok(Some(mut worker)) => worker
            .ask(request, limit)
            .map_err(|reason| reason.to_string()),
        Ok(None) => Ok(work.1(request)),
        Err(error) => Err(format!("no child process: {error}")),
    }
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Timeout => write!(formatter, "it took too long"),
            Self::Ended(status) => {
                write!(formatter, "its process ended")?;
                if let Some(status) = status {
                    write!(formatter, " ({status})")?;
                }
                let memory = worker_memory() >> 20;
                write!(formatter, ", and may use up to {memory} MiB of memory")
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Worker({})", self.child.id())
    }
}
