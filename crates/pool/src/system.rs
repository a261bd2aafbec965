//! Facts that the operating system reports about this machine and this process: processor, memory.

use std::fs;

/// Name of the processor; its architecture if the system does not report one.
pub fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |(_, name)| name.trim().to_owned(),
    )
}

/// Processors and memory nodes that this process may use, as the system lists them; empty if it does not.
pub fn allowed_resources() -> Vec<String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let lists = ["Cpus_allowed_list:", "Mems_allowed_list:"];
    let lines = status
        .lines()
        .filter(|line| lists.iter().any(|list| line.starts_with(list)));
    lines.map(|line| line.replace('\t', " ")).collect()
}

/// Bytes of main memory in all, and bytes available to new work; `None` if the system does not report them.
pub fn memory() -> Option<(u64, u64)> {
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

/// Size in bytes of the processor's largest cache; 0 if the system does not report it. In a virtual machine, part of it may
/// belong to others.
pub fn cache_bytes() -> u64 {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache");
    let sizes = caches.into_iter().flatten().flatten().filter_map(|cache| {
        let text = fs::read_to_string(cache.path().join("size")).ok()?;
        let text = text.trim();
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
        let shift = match unit {
            "K" => 10,
            "M" => 20,
            _ => return None,
        };
        Some(number.parse::<u64>().ok()? << shift)
    });
    sizes.max().unwrap_or(0)
}

/// Peak resident memory of this process in bytes; `None` if the system does not report it.
pub fn peak_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}
