//! Split GGUF files: `NAME-00001-of-00003.gguf` and so on. Each part has a share of the tensors; the
//! first one also has the metadata.

use std::path::Path;

use powerinfer_artifact::PartName;

use super::file::{GgufFile, bad};
use crate::{ModelError, container::Container};

/// Key of the number of parts (`u16` in llama.cpp).
const COUNT: &str = "split.count";
/// Key of the part's number, from 0.
const NUMBER: &str = "split.no";
/// Key of the number of tensors in all parts.
const TENSORS: &str = "split.tensors.count";

impl GgufFile {
    /// Opens the file at `path`, or all parts if it belongs to a split file, and checks everything except the
    /// tensors' data.
    ///
    /// # Errors
    ///
    /// Returns [`ModelError::BadGguf`] if the file is damaged or of an unsupported version, and
    /// [`ModelError::MissingParts`] if parts are missing.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        join_parts(Self::open_part(path)?)
    }
}

/// Opens the other parts if `file` is part of a split file, and joins them all.
///
/// # Errors
///
/// A part is missing, damaged or does not belong to the others, or the file's name is not that of a part.
fn join_parts(file: GgufFile) -> Result<GgufFile, ModelError> {
    let count = match number(&file, COUNT)? {
        None | Some(0 | 1) => return Ok(file),
        Some(count) => count,
    };
    let path = file.path().to_owned();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some(name) = PartName::parse(&name).filter(|name| name.count as u64 == count) else {
        let part = number(&file, NUMBER)?.unwrap_or(0).saturating_add(1);
        return Err(bad(
            &file,
            format!(
                "it is part {part} of {count} of a split file, but is not named `NAME-{part:05}-of-{count:05}.gguf`; rename it so, and put all parts in one folder"
            ),
        ));
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let names: Vec<String> = name.all().collect();
    let missing = |part: &&String| !folder.join(part).exists();
    let missing: Vec<String> = names.iter().filter(missing).cloned().collect();
    if !missing.is_empty() {
        return Err(ModelError::MissingParts {
            path: path.clone(),
            parts: missing,
        });
    }
    let mut given = Some(file);
    let mut joined: Option<GgufFile> = None;
    for (index, part) in names.iter().enumerate() {
        let part = match given.take_if(|_| index + 1 == name.number) {
            Some(given) => given,
            None => GgufFile::open_part(&folder.join(part))?,
        };
        check(&part, index, count, joined.as_ref())?;
        joined = Some(match joined {
            None => part,
            Some(joined) => joined.with_part(part)?,
        });
    }
    let joined = joined.expect("there is a part");
    let tensors = joined.names().len() as u64;
    match number(&joined, TENSORS)? {
        Some(stated) if stated != tensors => Err(bad(
            &joined,
            format!(
                "its {count} parts have {tensors} tensors, `{TENSORS}` is {stated}; the parts do not belong together, download them again"
            ),
        )),
        _ => Ok(joined),
    }
}

/// Checks that `part` states the number `index`, and agrees with the `first` part.
fn check(
    part: &GgufFile,
    index: usize,
    count: u64,
    first: Option<&GgufFile>,
) -> Result<(), ModelError> {
    let first = first.unwrap_or(part);
    let total = number(first, TENSORS)?.unwrap_or(0);
    for (key, expected) in [(NUMBER, index as u64), (COUNT, count), (TENSORS, total)] {
        let stated = number(part, key)?.unwrap_or(0);
        if stated != expected {
            return Err(bad(
                part,
                format!(
                    "`{key}` is {stated} instead of {expected}; the parts do not belong together, download them again"
                ),
            ));
        }
    }
    if part.is_powerinfer() == first.is_powerinfer() {
        Ok(())
    } else {
        Err(bad(
            part,
            "its variant of GGUF differs from that of the first part".to_owned(),
        ))
    }
}

/// Reads the non-negative integer under `key`.
fn number(file: &GgufFile, key: &str) -> Result<Option<u64>, ModelError> {
    match file.value(key) {
        None => Ok(None),
        Some(value) => match value.as_u64() {
            Some(number) => Ok(Some(number)),
            None => Err(bad(file, format!("`{key}` is not a number of parts"))),
        },
    }
}
