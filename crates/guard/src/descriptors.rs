//! Descriptors that child processes inherit.

use std::{io, os::unix::process::CommandExt, process::Command};

/// First descriptor after stdin, stdout and stderr.
const FIRST: u32 = 3;

/// Maximum number of descriptors to mark one by one if the system cannot mark a range of them.
const MOST: u32 = 1 << 16;

/// Prevents the child of `command` from inheriting descriptors above 2, including those that this process inherited.
pub fn inherit_no_descriptors(command: &mut Command) {
    // SAFETY: between fork and exec, `close_at_exec` makes system calls only: it allocates nothing and takes no lock.
    #[expect(unsafe_code, reason = "see above")]
    unsafe {
        command.pre_exec(close_at_exec);
    }
}

/// Marks all descriptors above 2 to be closed by `exec`.
#[expect(clippy::unnecessary_wraps, reason = "the type that `pre_exec` takes")]
fn close_at_exec() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: the call takes only numbers and closes nothing before `exec`. The glibc function is not used, as old versions
        // lack it.
        #[expect(unsafe_code, reason = "see above")]
        let failed = unsafe {
            libc::syscall(
                libc::SYS_close_range,
                FIRST,
                u32::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            )
        };
        if failed == 0 {
            return Ok(());
        }
    }
    for number in FIRST..MOST {
        // SAFETY: the call takes only numbers and fails for a number that is not a descriptor.
        #[expect(unsafe_code, reason = "see above")]
        unsafe {
            libc::fcntl(number.cast_signed(), libc::F_SETFD, libc::FD_CLOEXEC);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_child_has_no_descriptor_of_its_parent() {
        let open = |inherits: bool| {
            let mut command = Command::new("ls");
            command.arg("/proc/self/fd").stdin(Stdio::null());
            if !inherits {
                inherit_no_descriptors(&mut command);
            }
            let output = command.output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let file = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: the call duplicates an open descriptor, without the flag that closes it at exec.
        #[expect(unsafe_code, reason = "see above")]
        let copy =
            unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::F_DUPFD, 40) };
        assert!(copy >= 40);
        let line = format!("{copy}\n");
        assert!(open(true).contains(&line));
        // 3 is the folder that `ls` reads.
        assert_eq!(open(false), "0\n1\n2\n3\n");
        // SAFETY: nothing else uses the descriptor.
        #[expect(unsafe_code, reason = "see above")]
        unsafe {
            libc::close(copy);
        }
    }
}
