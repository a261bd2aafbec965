//! The files that a folder of ours consists of: nothing else in it is ever replaced or deleted.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    path::Path,
};

use serde::{Deserialize, de::IgnoredAny};

use crate::tensor_file::HEADER_KEY;

/// Longest manifest that is read, in bytes.
const MANIFEST_BYTES: u64 = 64 << 20;

/// Files that a kind of folder consists of.
///
/// A folder is of the kind if the header of its manifest has the format. A file in it is ours if its path is listed in the
/// manifest's `files`, is defined by the format, or is that of a temporary file. Links are never ours.
#[derive(Debug, Clone)]
pub struct Contents {
    manifest: &'static str,
    format: Option<&'static str>,
    /// Paths that the format defines; `#` stands for a number.
    pub(super) names: Vec<String>,
    /// Paths that exist only until the folder is finished.
    pub(super) work: Vec<String>,
}

impl Contents {
    /// Kind of folder that is identified by the header of the file `manifest`: a JSON document or a safetensors file.
    pub fn new(manifest: &'static str, format: &'static str) -> Self {
        Self {
            format: Some(format),
            ..Self::never_replaced(manifest)
        }
    }

    /// Kind of folder that is never replaced, since `manifest` has no header.
    pub fn never_replaced(manifest: &'static str) -> Self {
        Self {
            manifest,
            format: None,
            names: vec![manifest.to_owned()],
            work: Vec::new(),
        }
    }

    /// Adds paths that the format defines; `#` stands for a number.
    #[must_use]
    pub fn with_names<Name: AsRef<str>>(mut self, names: &[Name]) -> Self {
        let names = names.iter().map(|name| name.as_ref().to_owned());
        self.names.extend(names);
        self
    }

    /// Adds paths of unfinished work, which a finished folder does not have; `#` stands for a number.
    #[must_use]
    pub fn with_work(mut self, names: &[&str]) -> Self {
        self.work
            .extend(names.iter().map(|name| (*name).to_owned()));
        self
    }

    /// Contents of a folder that is recognised by the file `mark` and contains a folder `name` of this kind, finished or not.
    pub(super) fn nested(&self, mark: &'static str, name: &str) -> Self {
        let own = self.names.iter().chain(&self.work);
        let endings = ["", ".partial", ".old"];
        let names = own.flat_map(|own| endings.map(|ending| format!("{name}{ending}/{own}")));
        Self::never_replaced(mark).with_names(&names.collect::<Vec<_>>())
    }

    /// Name of the file that identifies the kind.
    pub(super) fn manifest(&self) -> &'static str {
        self.manifest
    }

    /// Files that the manifest in `folder` names; `None` if there is no manifest of this format.
    pub(super) fn named(&self, folder: &Path) -> Option<BTreeMap<String, IgnoredAny>> {
        #[derive(Deserialize)]
        struct Origin {
            format: String,
            #[serde(rename = "version")]
            _version: u32,
            tool: String,
        }
        #[derive(Deserialize)]
        struct Manifest {
            header: Origin,
            #[serde(default)]
            files: BTreeMap<String, IgnoredAny>,
        }
        #[derive(Deserialize)]
        struct TensorTable {
            #[serde(rename = "__metadata__")]
            metadata: BTreeMap<String, String>,
        }
        let path = folder.join(self.manifest);
        // Reading a pipe might never end.
        if !is_file(&path) {
            return None;
        }
        let mut file = File::open(&path).ok()?;
        let manifest = if self.manifest.ends_with(".safetensors") {
            let mut length = [0; 8];
            file.read_exact(&mut length).ok()?;
            let table: TensorTable = parse(file.take(u64::from_le_bytes(length)))?;
            Manifest {
                header: serde_json::from_str(table.metadata.get(HEADER_KEY)?).ok()?,
                files: BTreeMap::new(),
            }
        } else {
            parse(file)?
        };
        let Origin { format, tool, .. } = manifest.header;
        let is_ours = self.format == Some(&format[..]) && tool.starts_with("powerinfer ");
        is_ours.then_some(manifest.files)
    }
}

/// Parses JSON of at most [`MANIFEST_BYTES`].
fn parse<T: serde::de::DeserializeOwned>(from: impl Read) -> Option<T> {
    let mut bytes = Vec::new();
    from.take(MANIFEST_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Whether `path` is a file, not a link to one.
pub(super) fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
}

/// Whether `name` is `pattern`, in which `#` stands for a number.
pub fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('#') else {
        return pattern == name;
    };
    name.strip_prefix(before).is_some_and(|rest| {
        let rest_of_name = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        rest_of_name.len() < rest.len() && matches(after, rest_of_name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_stands_for_digits() {
        assert!(matches("model-#-of-#.x", "model-00001-of-2.x"));
        for name in [
            "model--of-2.x",
            "model-1-of-2.xx",
            "model-1x-of-2.x",
            "model",
        ] {
            assert!(!matches("model-#-of-#.x", name), "{name}");
        }
    }

    #[test]
    fn the_header_of_a_safetensors_file_is_a_manifest() {
        let folder = tempfile::tempdir().unwrap();
        let kind = Contents::new("p.safetensors", "powerinfer-test");
        let header = r#"{ \"format\": \"powerinfer-test\", \"version\": 1, \"tool\": \"powerinfer 0.1.0\" }"#;
        let table = format!(r#"{{ "__metadata__": {{ "powerinfer": "{header}" }} }}"#);
        let write = |table: &str| {
            let bytes = [&(table.len() as u64).to_le_bytes(), table.as_bytes()].concat();
            fs::write(folder.path().join("p.safetensors"), bytes).unwrap();
            kind.refuse_foreign(folder.path())
        };
        write(&table).unwrap();
        write(&table.replace("-test", "-other")).unwrap_err();
        write("").unwrap_err();
        fs::write(folder.path().join("p.safetensors"), [255; 20]).unwrap();
        kind.refuse_foreign(folder.path()).unwrap_err();
    }
}
