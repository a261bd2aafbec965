//! Decides which existing files a page or other output file may replace.

use std::{fs::File, io::Read, path::Path};

use crate::hint::Advised;
use anyhow::{Result, bail};
use powerinfer_report::BEGINNING;

/// Refuses a page that would lie among the files of the artifact in `folder`, or replace a file that is not a page.
///
/// # Errors
///
/// The page is refused, with the reason.
pub(crate) fn refuse_inside(page: Option<&Path>, folder: &Path) -> Result<()> {
    let Some(page) = page else {
        return Ok(());
    };
    if is_inside(page, folder) {
        bail!(Advised::new(
            format!(
                "`{}` would be among the files of `{}`",
                page.display(),
                folder.display()
            ),
            "write the page elsewhere"
        ));
    }
    if page.is_dir() {
        bail!(Advised::new(
            format!("`{}` is a folder", page.display()),
            "name a file for the page"
        ));
    }
    if page.is_file() && !begins_with(page, BEGINNING.as_bytes()) {
        bail!(Advised::new(
            format!(
                "`{}` exists and is not a page of powerinfer",
                page.display()
            ),
            "remove it, or name another file"
        ));
    }
    Ok(())
}

/// Whether the file at `path` begins with these bytes, or is empty.
pub(crate) fn begins_with(path: &Path, beginning: &[u8]) -> bool {
    // Reading a pipe might never end.
    if !path.is_file() {
        return false;
    }
    let mut start = Vec::new();
    let read =
        File::open(path).and_then(|file| file.take(beginning.len() as u64).read_to_end(&mut start));
    read.is_ok() && (start.is_empty() || start == beginning)
}

/// Whether `file` would lie in `folder` or below.
pub(crate) fn is_inside(file: &Path, folder: &Path) -> bool {
    let place = match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let absolute = |path: &Path| {
        path.canonicalize()
            .or_else(|_| std::path::absolute(path))
            .ok()
    };
    match (absolute(place), absolute(folder)) {
        (Some(place), Some(folder)) => place.starts_with(folder),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_not_drawn_into_a_bundle() {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("bundle");
        let inside = bundle.join("page.html");
        for there in [false, true] {
            if there {
                std::fs::create_dir(&bundle).unwrap();
            }
            refuse_inside(Some(&inside), &bundle).unwrap_err();
            refuse_inside(Some(&folder.path().join("page.html")), &bundle).unwrap();
        }
        refuse_inside(None, &bundle).unwrap();
        refuse_inside(Some(&bundle.join("deeper/page.html")), &bundle).unwrap_err();
        let file = folder.path().join("page.html");
        let ours = format!("{BEGINNING}<title>");
        for (content, is_good) in [
            ("", true),
            (&ours, true),
            ("<!doctype html>\n<html>", false),
            ("<!", false),
            ("{}", false),
        ] {
            std::fs::write(&file, content).unwrap();
            assert_eq!(
                refuse_inside(Some(&file), &bundle).is_ok(),
                is_good,
                "{content}"
            );
        }
        refuse_inside(Some(folder.path()), &bundle).unwrap_err();
    }
}
