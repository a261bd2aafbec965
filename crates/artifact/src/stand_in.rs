//! Detection of files that replace the intended one: Git LFS pointers, and the error pages of failed downloads.

use std::path::Path;

use crate::ArtifactError;

/// Checks that the file at `path`, whose content is `bytes`, is neither a Git LFS pointer nor a web page.
///
/// # Errors
///
/// [`ArtifactError::LfsPointer`] or [`ArtifactError::WebPage`].
pub(crate) fn refuse(path: &Path, bytes: &[u8]) -> Result<(), ArtifactError> {
    /// Size limit of a pointer in bytes, from the Git LFS specification.
    const LONGEST_POINTER: usize = 1024;
    let head = &bytes[..bytes.len().min(LONGEST_POINTER)];
    let head = head.trim_ascii_start();
    let starts = |start: &str| {
        let there = head.get(..start.len());
        there.is_some_and(|there| there.eq_ignore_ascii_case(start.as_bytes()))
    };
    let pointers = [
        "version https://git-lfs.github.com/spec/",
        "version https://hawser.github.com/spec/",
    ];
    // The last entries are replies of the hub and of cloud storage for missing files.
    let pages = [
        "<!doctype html",
        "<html",
        "<?xml",
        "Entry not found",
        "Repository not found",
        "Invalid credentials",
        "Access to model ",
    ];
    let path = path.to_owned();
    if bytes.len() < LONGEST_POINTER && pointers.into_iter().any(starts) {
        return Err(ArtifactError::LfsPointer { path });
    }
    if pages.into_iter().any(starts) {
        Err(ArtifactError::WebPage { path })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_and_pages_are_refused_by_name() {
        let message =
            |bytes: &str| refuse(Path::new("x"), bytes.as_bytes()).map_err(|e| e.to_string());
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4\n";
        assert!(message(pointer).unwrap_err().contains("Git LFS pointer"));
        assert!(message(&pointer.replace('\n', "\r\n")).is_err());
        for page in [
            "<!DOCTYPE html>\n<html>",
            "\n <html lang=en>",
            "Entry not found",
        ] {
            assert!(message(page).unwrap_err().contains("web page"), "{page}");
        }
        // A long text that begins like a pointer is not a pointer.
        let long = format!("{pointer}{}", " ".repeat(1024));
        for good in ["", "{}", "version", "{% if html %}", &long] {
            message(good).unwrap();
        }
    }
}
