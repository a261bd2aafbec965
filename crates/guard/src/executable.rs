//! The file that this process was started from, even after another file has taken its place.

#[cfg(target_os = "linux")]
use std::{fs::File, os::fd::AsRawFd};
use std::{io, path::PathBuf};

/// Executable of this process. On Linux it is held open, so that it can be started again after an upgrade has replaced
/// or deleted it.
pub(crate) struct Executable {
    #[cfg(target_os = "linux")]
    file: File,
    #[cfg(not(target_os = "linux"))]
    path: PathBuf,
}

impl Executable {
    /// Opens the executable of this process.
    ///
    /// # Errors
    ///
    /// The system does not know it.
    pub(crate) fn current() -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        return File::open("/proc/self/exe").map(|file| Self { file });
        #[cfg(not(target_os = "linux"))]
        std::env::current_exe().map(|path| Self { path })
    }

    /// Path under which a child of this process can execute it.
    pub(crate) fn path(&self) -> PathBuf {
        // The descriptor is closed on execution, after the path has been followed.
        #[cfg(target_os = "linux")]
        return format!("/proc/self/fd/{}", self.file.as_raw_fd()).into();
        #[cfg(not(target_os = "linux"))]
        self.path.clone()
    }
}
