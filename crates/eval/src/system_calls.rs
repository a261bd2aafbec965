//! A filter of system calls for judged programs: what Python needs to import its modules and to compute.

use libc::{
    SYS_brk, SYS_clock_getres, SYS_clock_gettime, SYS_clock_nanosleep, SYS_close, SYS_dup,
    SYS_exit, SYS_exit_group, SYS_faccessat, SYS_fcntl, SYS_fstat, SYS_futex, SYS_getcwd,
    SYS_getdents64, SYS_getegid, SYS_geteuid, SYS_getgid, SYS_getpid, SYS_getppid, SYS_getrandom,
    SYS_getrusage, SYS_gettid, SYS_gettimeofday, SYS_getuid, SYS_ioctl, SYS_lseek, SYS_madvise,
    SYS_mmap, SYS_mprotect, SYS_mremap, SYS_munmap, SYS_nanosleep, SYS_newfstatat, SYS_openat,
    SYS_pread64, SYS_read, SYS_readlinkat, SYS_readv, SYS_rt_sigaction, SYS_rt_sigprocmask,
    SYS_rt_sigreturn, SYS_sched_getaffinity, SYS_sched_yield, SYS_sigaltstack, SYS_statfs,
    SYS_statx, SYS_sysinfo, SYS_times, SYS_uname, SYS_write, SYS_writev,
};

/// Permitted calls. Files are read-only, and none is there but Python's own; memory and time have limits.
const PERMITTED: [libc::c_long; 53] = [
    SYS_brk,
    SYS_clock_getres,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_close,
    SYS_dup,
    SYS_exit,
    SYS_exit_group,
    SYS_faccessat,
    SYS_fcntl,
    SYS_fstat,
    SYS_futex,
    SYS_getcwd,
    SYS_getdents64,
    SYS_getegid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getpid,
    SYS_getppid,
    SYS_getrandom,
    SYS_getrusage,
    SYS_gettid,
    SYS_gettimeofday,
    SYS_getuid,
    SYS_ioctl,
    SYS_lseek,
    SYS_madvise,
    SYS_mmap,
    SYS_mprotect,
    SYS_mremap,
    SYS_munmap,
    SYS_nanosleep,
    SYS_newfstatat,
    SYS_openat,
    SYS_pread64,
    SYS_read,
    SYS_readlinkat,
    SYS_readv,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sched_getaffinity,
    SYS_sched_yield,
    SYS_sigaltstack,
    SYS_statfs,
    SYS_statx,
    SYS_sysinfo,
    SYS_times,
    SYS_uname,
    SYS_write,
    SYS_writev,
    libc::SYS_faccessat2,
    libc::SYS_rseq,
];

/// Older forms of permitted calls, which only this architecture has.
#[cfg(target_arch = "x86_64")]
const OLDER: [libc::c_long; 7] = [
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_lstat,
    libc::SYS_open,
    libc::SYS_readlink,
    libc::SYS_stat,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: [libc::c_long; 0] = [];

/// Architecture of system calls, as `linux/audit.h` numbers it.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: Option<u32> = Some(0xc000_003e);
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: Option<u32> = Some(0xc000_00b7);
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ARCHITECTURE: Option<u32> = None;

/// Instruction of a filter, see `bpf(2)`: code, jumps if true and if false, and operand.
pub(crate) type Instruction = (u16, u8, u8, u32);

/// Instructions of the filter. Calls that are not permitted fail with `EPERM`; a call of another architecture ends the
/// program.
pub(crate) fn filter() -> Result<Vec<Instruction>, String> {
    let architecture =
        ARCHITECTURE.ok_or("system calls of this architecture cannot be filtered")?;
    // Offsets in `struct seccomp_data`.
    let load = |offset| (0x20, 0, 0, offset);
    let skip_unless = |value| (0x15, 0, 1, value);
    let end = |action| (0x06, 0, 0, action);
    let mut filter = vec![
        load(4),
        (0x15, 1, 0, architecture),
        end(libc::SECCOMP_RET_KILL_PROCESS),
        load(0),
    ];
    for call in PERMITTED.iter().chain(&OLDER) {
        filter.extend([skip_unless(*call as u32), end(libc::SECCOMP_RET_ALLOW)]);
    }
    filter.push(end(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    Ok(filter)
}
