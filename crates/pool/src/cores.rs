//! Number of threads worth starting: one per physical core that this process may use, within one memory node.

/// Returns the number of physical cores that this process may use, by its affinity mask and CPU quota. If there are several
/// memory nodes (NUMA), only the one with the most cores counts.
pub fn usable_cores() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    physical_cores().map_or(processors, |cores| cores.clamp(1, processors))
}

/// Returns the number of memory nodes whose processors this process may use; 1 if the system does not report them.
pub fn memory_nodes() -> usize {
    #[cfg(target_os = "linux")]
    if let Some(allowed) = allowed_processors() {
        return by_node(&allowed, &processors_of_nodes()).len();
    }
    1
}

/// The processors that this process may use.
#[cfg(target_os = "linux")]
fn allowed_processors() -> Option<Vec<usize>> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mut lines = status.lines();
    let allowed = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    parse_list(allowed.trim())
}

/// Processor list of each memory node, such as `0-3,8-11`.
#[cfg(target_os = "linux")]
fn processors_of_nodes() -> Vec<String> {
    let nodes = std::fs::read_dir("/sys/devices/system/node");
    let nodes = nodes.into_iter().flatten().flatten();
    // Entries that are not nodes have no `cpulist`.
    nodes
        .filter_map(|node| std::fs::read_to_string(node.path().join("cpulist")).ok())
        .collect()
}

/// Groups the `allowed` processors by node, given the processor list of each node. Nodes without allowed processors are left out; if no
/// list matches, there is one group.
#[cfg(target_os = "linux")]
fn by_node(allowed: &[usize], nodes: &[String]) -> Vec<Vec<usize>> {
    let nodes = nodes.iter().filter_map(|list| parse_list(list.trim()));
    let own = nodes.map(|node| {
        allowed
            .iter()
            .copied()
            .filter(|p| node.contains(p))
            .collect()
    });
    let found: Vec<Vec<usize>> = own.filter(|own: &Vec<usize>| !own.is_empty()).collect();
    if found.is_empty() {
        vec![allowed.to_owned()]
    } else {
        found
    }
}

/// Counts the physical cores that this process may use on the memory node with the most.
#[cfg(target_os = "linux")]
fn physical_cores() -> Option<usize> {
    let siblings = |processor: usize| {
        let folder = format!("/sys/devices/system/cpu/cpu{processor}/topology");
        std::fs::read_to_string(format!("{folder}/thread_siblings_list")).ok()
    };
    let nodes = by_node(&allowed_processors()?, &processors_of_nodes());
    let cores = nodes.iter().map(|node| count_cores(node, siblings));
    cores.max().flatten()
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
        let nodes = |allowed: &str, nodes: &[&str]| {
            let lists: Vec<String> = nodes.iter().map(|list| format!("{list}\n")).collect();
            let nodes = by_node(&parse_list(allowed).unwrap(), &lists);
            nodes.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(nodes("0-7", &["0-2,4-6", "3,7"]), [6, 2]);
        assert_eq!(
            nodes("4-6", &["0-2,4-6", "3,7", ""]),
            [3],
            "memory without processors"
        );
        assert_eq!(nodes("0-7", &[]), [8], "no lists");
        assert_eq!(parse_list("0-1,x"), None);
        assert_eq!(parse_list(""), None);
    }
}
