//! Number of threads worth starting: one for each physical core that this process may use.

/// Physical cores that this process may run on, within its affinity mask and its share of time.
pub fn usable_cores() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    physical_cores().map_or(processors, |cores| cores.clamp(1, processors))
}

/// Cores among the processors that this process may run on.
#[cfg(target_os = "linux")]
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mut lines = status.lines();
    let allowed = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let siblings = |processor: usize| {
        let folder = format!("/sys/devices/system/cpu/cpu{processor}/topology");
        std::fs::read_to_string(format!("{folder}/thread_siblings_list")).ok()
    };
    count_cores(&listed(allowed.trim())?, siblings)
}

/// Cores of the whole machine.
#[cfg(not(target_os = "linux"))]
fn physical_cores() -> Option<usize> {
    Some(num_cpus::get_physical())
}

/// The numbers in a list such as `0-3,8`.
#[cfg(target_os = "linux")]
fn listed(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(numbers)
}

/// Groups of `processors` that are threads of one core; `siblings` names all that share a processor's.
/// `None` where it names none.
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
    fn there_is_a_core_and_no_more_than_processors() {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        assert!((1..=processors).contains(&usable_cores()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_of_a_core_count_once() {
        // Processors 0 and 4 are one core, 1 and 5 the next; 9 is switched off.
        let siblings = |processor: usize| match processor {
            0..8 => Some(format!("{},{}\n", processor % 4, processor % 4 + 4)),
            _ => None,
        };
        let count = |list: &str| count_cores(&listed(list).unwrap(), siblings);
        assert_eq!(count("0-7"), Some(4));
        assert_eq!(count("0-3"), Some(4));
        assert_eq!(count("0,4,5,9"), Some(2));
        assert_eq!(count("9"), None);
        assert_eq!(listed("0-1,x"), None);
        assert_eq!(listed(""), None);
    }
}
