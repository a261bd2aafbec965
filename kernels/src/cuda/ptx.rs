//! The kernels as PTX, which `scripts/generate-ptx.sh` makes and the driver compiles.

use std::io::Read as _;

use flate2::read::GzDecoder;

/// Names of the modules, and their compressed text.
const MODULES: [(&str, &[u8]); 5] = [
    ("attention", include_bytes!("../../ptx/attention.ptx.gz")),
    (
        "feed_forward",
        include_bytes!("../../ptx/feed_forward.ptx.gz"),
    ),
    ("observe", include_bytes!("../../ptx/observe.ptx.gz")),
    ("projection", include_bytes!("../../ptx/projection.ptx.gz")),
    ("prompt", include_bytes!("../../ptx/prompt.ptx.gz")),
];

/// Names and PTX of the modules.
///
/// # Panics
///
/// Panics if the text is damaged, as a test would have shown.
pub fn ptx_modules() -> impl Iterator<Item = (&'static str, String)> {
    MODULES.into_iter().map(|(name, compressed)| {
        let mut ptx = String::new();
        let read = GzDecoder::new(compressed).read_to_string(&mut ptx);
        read.expect("the text was compressed when it was generated");
        (name, ptx)
    })
}

/// Names of the kernels in a PTX module.
pub(super) fn entries(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.lines()
        .filter_map(|line| line.strip_prefix(".visible .entry "))
        .map(|rest| rest.trim_end_matches('(').trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_every_kernel_is_read_from_the_ptx() {
        for (name, ptx) in ptx_modules() {
            let found: Vec<&str> = entries(&ptx).collect();
            assert_eq!(found.len(), ptx.matches(".entry").count(), "{name}");
            assert!(
                found.iter().all(|kernel| kernel
                    .chars()
                    .all(|letter| letter.is_alphanumeric() || letter == '_')),
                "{name}: {found:?}"
            );
        }
    }
}
