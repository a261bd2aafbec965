//! HTML pages made from the JSON documents of sweeps, plans and profiles.
//!
//! A page is one file: it loads nothing, follows the browser's light or dark theme, and is readable without scripts. The
//! same document gives the same bytes, and no name in it can break out of the HTML.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod chart;
mod page;
mod plan;
mod profile;
mod sweep;

pub use page::ReportError;
pub use plan::plan_page;
pub use profile::profile_page;
pub use sweep::sweep_page;

/// First bytes of every page, which distinguish a page from other files.
pub const BEGINNING: &str =
    "<!doctype html>\n<html lang=\"en\"><head><meta name=\"generator\" content=\"powerinfer\">";
