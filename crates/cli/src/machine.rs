//! What this machine is: processor, cores, memory, graphics card.

pub(crate) mod cores;
pub(crate) mod gpu;
pub(crate) mod measure;

use std::fs;

/// The processor's name.
pub(crate) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |(_, name)| name.trim().to_owned(),
    )
}

/// Bytes of memory: all of it, and what is free for use; `None` where the system does not tell.
pub(crate) fn memory() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes = |key: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim_start_matches(':')
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    };
    Some((
        kibibytes("MemTotal")? << 10,
        kibibytes("MemAvailable")? << 10,
    ))
}

/// The most memory that this process has held; `None` where the system does not tell.
pub(crate) fn peak_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

/// The graphics card's driver, or why there is none, in words that fit behind a colon.
pub(crate) fn gpu_status() -> String {
    match gpu::driver() {
        Err(reason) => reason,
        Ok(driver) => format!("NVIDIA driver {driver}"),
    }
}
