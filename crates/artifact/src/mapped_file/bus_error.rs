//! Prints a message on SIGBUS. The system raises this signal when the program reads a mapped page that the file no longer has,
//! because another program truncated or overwrote the file.
//!
//! The handler finds the file by the address of the fault, in a list of all mapped ranges. Entries of that list are never
//! freed and change by atomic stores only, so the handler takes no lock and can run at any moment in any thread.

use std::{
    ffi::{c_int, c_void},
    fs::File,
    os::fd::AsRawFd,
    path::Path,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering},
    },
};

/// The first of all ranges.
static RANGES: OnceLock<Box<Range>> = OnceLock::new();
/// The hint after the message, with a line break.
static HINT: OnceLock<String> = OnceLock::new();
/// The previous handler: Rust's, which reports stack overflows.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Addresses of a mapped file. After the file is unmapped, the entry serves the next mapping of the same path.
#[derive(Debug)]
struct Range {
    is_used: AtomicBool,
    start: AtomicUsize,
    /// Exclusive; 0 while nothing is mapped.
    end: AtomicUsize,
    /// Descriptor of the file.
    file: AtomicI32,
    /// The quoted path, as messages show it.
    name: String,
    next: OnceLock<Box<Range>>,
}

/// The list entry of a mapped file, released on drop.
#[derive(Debug)]
pub(super) struct Watched(&'static Range);

impl Watched {
    /// Enters `bytes`, the mapping of `file` at `path`.
    pub(super) fn new(path: &Path, file: &File, bytes: &[u8]) -> Self {
        let name = quoted(path);
        let range = unused(&RANGES, name);
        let start = bytes.as_ptr().addr();
        range.file.store(file.as_raw_fd(), Ordering::Relaxed);
        range.start.store(start, Ordering::Relaxed);
        // The end is stored last: a thread that reads it also sees the other fields.
        range.end.store(start + bytes.len(), Ordering::Release);
        Self(range)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.end.store(0, Ordering::Relaxed);
        self.0.is_used.store(false, Ordering::Release);
    }
}

/// An unused entry for the file `name` in the list that begins with `place`, appended if there is none.
fn unused(mut place: &'static OnceLock<Box<Range>>, name: String) -> &'static Range {
    let mut new = Some(Range {
        is_used: AtomicBool::new(true),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        file: AtomicI32::new(-1),
        name,
        next: OnceLock::new(),
    });
    loop {
        let range = place.get_or_init(|| Box::new(new.take().expect("an entry is appended once")));
        match &new {
            None => return range,
            Some(new) if range.name == new.name && !range.is_used.swap(true, Ordering::Acquire) => {
                return range;
            }
            Some(_) => place = &range.next,
        }
    }
}

/// `path` between backticks, control characters escaped.
fn quoted(path: &Path) -> String {
    let shown = path.display().to_string();
    let escaped = shown.chars().map(|character| {
        if character.is_control() {
            character.escape_default().to_string()
        } else {
            character.to_string()
        }
    });
    format!("`{}`", escaped.collect::<String>())
}

/// The range that contains `address`.
fn find(address: usize) -> Option<&'static Range> {
    let mut place = &RANGES;
    while let Some(range) = place.get() {
        // The end is read first, see `Watched::new`.
        let end = range.end.load(Ordering::Acquire);
        if address < end && range.start.load(Ordering::Relaxed) <= address {
            return Some(range);
        }
        place = &range.next;
    }
    None
}

/// Makes the program print a message with `hint` and exit with status 1 if a mapped file shrinks while it is read. Other
/// causes of SIGBUS have the same effect as before. Later calls do nothing.
pub fn exit_if_files_shrink(hint: &str) {
    if HINT.set(format!("hint: {hint}\n")).is_err() {
        return;
    }
    // SAFETY: all fields of the two structures may be zero; `sigaction` then fills `before`, and reads `ours`, whose handler
    // has the signature that SA_SIGINFO asks for. The handler calls nothing but functions that are safe in a handler.
    #[expect(unsafe_code, reason = "handler of a signal that mapped files raise")]
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) != 0
            || BEFORE.set(before).is_err()
        {
            return;
        }
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_bus_error as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut());
    }
}

/// Handles SIGBUS.
extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the system passes a valid structure.
    #[expect(unsafe_code, reason = "fields of a signal")]
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // A memory error of the hardware has another code.
    if code == libc::BUS_ADRERR
        && let Some(range) = find(address)
    {
        report(range);
    }
    // SAFETY: the action is the one that was installed before, and both functions may be called in a handler. A fault is
    // repeated when this returns; a signal that a program sent is not, so it is sent again.
    #[expect(unsafe_code, reason = "the handler before this one goes on")]
    unsafe {
        if let Some(before) = BEFORE.get() {
            libc::sigaction(signal, before, ptr::null_mut());
        }
        if code <= 0 {
            libc::raise(signal);
        }
    }
}

/// Prints what happened to the file of `range`, and exits with status 1.
fn report(range: &Range) -> ! {
    let start = range.start.load(Ordering::Relaxed);
    let length = range.end.load(Ordering::Relaxed) - start;
    let what = match length_of(range.file.load(Ordering::Relaxed)) {
        Some(found) if found >= length => {
            " can no longer be read, or changed while it was in use\n"
        }
        _ => " changed or shrank while it was in use\n",
    };
    let hint = HINT.get().map_or("", String::as_str);
    for text in ["error: ", &range.name, what, hint] {
        write_to_stderr(text.as_bytes());
    }
    // SAFETY: ends the process at once, without destructors, which might wait for the thread that was interrupted.
    #[expect(unsafe_code, reason = "ends the process in a handler")]
    unsafe {
        libc::_exit(1)
    }
}

/// Length of the open file `descriptor`.
fn length_of(descriptor: c_int) -> Option<usize> {
    // SAFETY: zeros are a valid structure, which `fstat` fills; it may be called in a handler and fails for a closed file.
    #[expect(unsafe_code, reason = "the length of a file in a handler")]
    let (result, length) = unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        (libc::fstat(descriptor, &raw mut found), found.st_size)
    };
    (result == 0).then(|| usize::try_from(length).unwrap_or(0))
}

/// Writes all of `bytes` to stderr, unless that fails.
fn write_to_stderr(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: `bytes` are readable, and `write` may be called in a handler.
        #[expect(unsafe_code, reason = "output in a handler")]
        let written =
            unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(written) {
            Ok(written @ 1..) => bytes = &bytes[written.min(bytes.len())..],
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_by_address_while_they_are_mapped() {
        let file = tempfile::tempfile().unwrap();
        let bytes = [0; 64];
        let (path, start) = (Path::new("a\n/b"), bytes.as_ptr().addr());
        let watched = Watched::new(path, &file, &bytes);
        let name = |address| find(address).map(|range| range.name.as_str());
        assert_eq!(name(start), Some("`a\\n/b`"));
        assert_eq!(name(start + 63), Some("`a\\n/b`"));
        assert_eq!(name(start + 64), None);
        let entry = ptr::from_ref(watched.0);
        drop(watched);
        assert_eq!(name(start), None);
        // The entry is reused only for the same path, and not while it is in use.
        let other = Watched::new(Path::new("c"), &file, &bytes[..1]);
        assert_eq!(name(start), Some("`c`"));
        drop(other);
        let again = Watched::new(path, &file, &bytes[..8]);
        assert!(ptr::eq(again.0, entry));
        let second = Watched::new(path, &file, &bytes[8..]);
        assert!(!ptr::eq(second.0, entry));
        assert_eq!(name(start + 8), Some("`a\\n/b`"));
    }
}
