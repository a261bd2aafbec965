//! The kernels as PTX, which `scripts/generate-ptx.sh` makes and the driver compiles.

/// Names of the modules, and their compressed text.
const MODULES: [(&str, &[u8]); 6] = [
    ("attention", include_bytes!("../../ptx/attention.ptx.zst")),
    (
        "feed_forward",
        include_bytes!("../../ptx/feed_forward.ptx.zst"),
    ),
    ("observe", include_bytes!("../../ptx/observe.ptx.zst")),
    ("projection", include_bytes!("../../ptx/projection.ptx.zst")),
    ("prompt", include_bytes!("../../ptx/prompt.ptx.zst")),
    ("route", include_bytes!("../../ptx/route.ptx.zst")),
];

/// Names and PTX of the modules.
///
/// # Panics
///
/// Panics if the text is damaged, as a test would have shown.
pub fn ptx_modules() -> impl Iterator<Item = (&'static str, String)> {
    MODULES.into_iter().map(|(name, compressed)| {
        let ptx = zstd::decode_all(compressed).expect("compressed when it was generated");
        let ptx = String::from_utf8(ptx).expect("PTX is ASCII");
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
