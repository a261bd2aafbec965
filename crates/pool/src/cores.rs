//! Number of threads worth starting: one per physical core that this process may use.

/// Returns the number of physical cores that this process may use, by its affinity mask and CPU quota.
pub fn usable_cores() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    physical_cores().map_or(processors, |cores| cores.clamp(1, processors))
}

/// Counts the physical cores among the processors that this process may use.
#[cfg(target_os = "linux")]
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mut lines = status.lines();
    let allowed = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let siblings = |processor: usize| {
        let folder = format!("/sys/devices/system/cpu/cpu{processor}/topology");
        std::fs::read_to_string(format!("{folder}/thread_siblings_list")).ok()
    };
    count_cores(&parse_list(allowed.trim())?, siblings)
}

/// Counts the physical cores of the machine.
#[cfg(not(target_os = "linux"))]
fn physical_cores() -> Option<usize> {
    Some(num_cpus::get_physical())
}

/// Parses a list such as `0-3,8`.
#[cfg(target_os = "linux")]
fn parse_list(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(numbers)
}

/// Counts the distinct sibling groups of `processors`; `siblings` returns the list of processors that share a
/// core with one. `None` if it returns no list at all.
#[cfg(target_os = "linux")]
fn count_cores(processors: &[usize], siblings: impl Fn(usize) -> Option<String>) -> Option<usize> {
    let groups = processors
        .iter()
        .filter_map(|&processor| siblings(processor));
    let cores = groups.collect::<std::collections::BTreeSet<_>>().len();
    (cores > 0).then_some(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usable_cores_are_between_one_and_the_processors() {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        assert!((1..=processors).contains(&usable_cores()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn hardware_threads_of_a_core_count_once() {
        // Processors 0 and 4 are one core, 1 and 5 the next; 9 is offline.
        let siblings = |processor: usize| match processor {
            0..8 => Some(format!("{},{}\n", processor % 4, processor % 4 + 4)),
            _ => None,
        };
        let count = |list: &str| count_cores(&parse_list(list).unwrap(), siblings);
        assert_eq!(count("0-7"), Some(4));
        assert_eq!(count("0-3"), Some(4));
        assert_eq!(count("0,4,5,9"), Some(2));
        assert_eq!(count("9"), None);
        assert_eq!(parse_list("0-1,x"), None);
        assert_eq!(parse_list(""), None);
    }
}
