//! A filter of system calls for judged programs: what Python needs to import its modules and to compute.

use std::collections::BTreeMap;

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
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

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

/// Instructions of the filter, see `bpf(2)`: code, jumps if true and if false, and operand. Calls that are not permitted
/// fail with `EPERM`.
pub(crate) fn filter() -> Result<Vec<(u16, u8, u8, u32)>, String> {
    let permitted = PERMITTED.iter().chain(&OLDER);
    let rules: BTreeMap<i64, _> = permitted.map(|call| (*call, Vec::new())).collect();
    let architecture = std::env::consts::ARCH.try_into();
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    let program: BpfProgram = architecture
        .and_then(|architecture| {
            SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture)
        })
        .and_then(TryInto::try_into)
        .map_err(|error| format!("system calls cannot be filtered: {error}"))?;
    let instructions = program.iter();
    Ok(instructions
        .map(|each| (each.code, each.jt, each.jf, each.k))
        .collect())
}
