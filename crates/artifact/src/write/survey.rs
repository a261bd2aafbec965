//! Sorting the entries of a folder into ours and others, and deleting ours.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde::de::IgnoredAny;

use super::{
    contents::{Contents, is_file, matches},
    is_temporary, resolved,
};
use crate::{ArtifactError, counted::listed};

/// Evidence that a folder is ours.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mark {
    /// The manifest, in a finished folder.
    Manifest,
    /// A file of this name.
    File(&'static str),
}

/// Role of a file of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Part of a finished folder.
    Part,
    /// Unfinished work.
    Work,
    /// Temporary file of a killed run.
    Temporary,
    /// Shows that the folder is ours.
    Mark,
}

/// Name of the file that marks a partial folder.
pub(super) const MARK: &str = ".powerinfer-run";

impl Contents {
    /// Checks that a folder can be written in place: it has only files of this kind, is empty, or does not exist. Returns its
    /// path with links resolved.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::NotAnArtifact`] or [`ArtifactError::Foreign`], which list what else is in the folder, or
    /// [`ArtifactError::NotAFolder`].
    pub fn refuse_foreign(&self, folder: &Path) -> Result<PathBuf, ArtifactError> {
        let folder = resolved(folder)?;
        self.survey(&folder, Mark::Manifest)?.refuse_foreign()?;
        Ok(folder)
    }

    /// Sorts the entries of `folder` into ours and others. A missing folder has none; links are not followed.
    pub(super) fn survey(&self, folder: &Path, mark: Mark) -> Result<Survey, ArtifactError> {
        let found = self.survey_once(folder, mark)?;
        match found.foreign.is_empty() {
            true => Ok(found),
            // Another run may have renamed the folder during the survey.
            false => self.survey_once(folder, mark),
        }
    }

    fn survey_once(&self, folder: &Path, mark: Mark) -> Result<Survey, ArtifactError> {
        let mut survey = Survey {
            folder: folder.to_owned(),
            mark: match mark {
                Mark::Manifest => self.manifest(),
                Mark::File(name) => name,
            },
            is_marked: false,
            files: Vec::new(),
            folders: Vec::new(),
            foreign: Vec::new(),
        };
        let kind = match fs::symlink_metadata(folder) {
            Ok(found) if found.is_dir() => None,
            Ok(found) if found.is_symlink() => Some("a link, not a folder"),
            Ok(_) => Some("a file, not a folder"),
            // Creating it may fail, with a separate message.
            Err(error)
                if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) =>
            {
                return Ok(survey);
            }
            Err(error) => return Err(ArtifactError::read(folder)(error)),
        };
        if let Some(kind) = kind {
            let path = folder.to_owned();
            return Err(ArtifactError::NotAFolder { path, kind });
        }
        let named = match mark {
            Mark::Manifest => self.named(folder),
            Mark::File(name) => {
                let is_marked = is_file(&folder.join(name));
                is_marked.then(|| self.named(folder).unwrap_or_default())
            }
        };
        survey.is_marked = named.is_some();
        let own = named.map(|named| Own {
            contents: self,
            mark,
            named,
        });
        survey.walk(Path::new(""), own.as_ref())?;
        survey.foreign.sort();
        Ok(survey)
    }
}

/// Paths that are ours in a folder.
struct Own<'a> {
    contents: &'a Contents,
    mark: Mark,
    named: BTreeMap<String, IgnoredAny>,
}

impl Own<'_> {
    /// Role of the file at `path`; `None` if it is not ours.
    fn role(&self, path: &str) -> Option<Role> {
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, path));
        let mark = match self.mark {
            Mark::Manifest => self.contents.manifest(),
            Mark::File(name) => name,
        };
        match path.rsplit('/').next() {
            _ if path == mark => Some(Role::Mark),
            Some(name) if is_temporary(name) || name == MARK => Some(Role::Temporary),
            _ if self.named.contains_key(path) || any(&self.contents.names) => Some(Role::Part),
            _ if any(&self.contents.work) => Some(Role::Work),
            _ => None,
        }
    }

    /// Whether a file of ours may be in the folder `path`.
    fn may_be_in(&self, path: &str) -> bool {
        let depth = path.split('/').count();
        let names = self.contents.names.iter().chain(&self.contents.work);
        names.chain(self.named.keys()).any(|name| {
            let parts: Vec<&str> = name.split('/').collect();
            parts.len() > depth && matches(&parts[..depth].join("/"), path)
        })
    }
}

/// Entries of a folder: ours and others.
#[derive(Debug)]
pub(super) struct Survey {
    folder: PathBuf,
    /// File that shows that the folder is ours.
    mark: &'static str,
    is_marked: bool,
    /// Files of ours, relative to the folder.
    files: Vec<(PathBuf, Role)>,
    /// Folders of ours, each before those in it.
    folders: Vec<PathBuf>,
    /// Everything else.
    foreign: Vec<String>,
}

impl Survey {
    fn walk(&mut self, inside: &Path, own: Option<&Own<'_>>) -> Result<(), ArtifactError> {
        let folder = self.folder.join(inside);
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            // Another run has finished, and renamed it.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(ArtifactError::read(&folder)(error)),
        };
        for entry in entries {
            let entry = entry.map_err(ArtifactError::read(&folder))?;
            let kind = entry.file_type().map_err(ArtifactError::read(&folder))?;
            let path = inside.join(entry.file_name());
            let name = path.to_string_lossy().replace('\\', "/");
            let known = own.filter(|_| path.to_str().is_some());
            if kind.is_dir() {
                if known.is_some_and(|own| own.may_be_in(&name)) {
                    self.folders.push(path.clone());
                    self.walk(&path, own)?;
                } else {
                    self.foreign.push(format!("{name}/"));
                }
                continue;
            }
            match known.and_then(|own| own.role(&name)) {
                Some(role) if kind.is_file() || role == Role::Temporary => {
                    self.files.push((path, role));
                }
                _ => self.foreign.push(name),
            }
        }
        Ok(())
    }

    /// Whether there is nothing of ours in the folder.
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Refuses a folder with entries that are not ours.
    pub(super) fn refuse_foreign(&self) -> Result<(), ArtifactError> {
        let (path, found) = (self.folder.clone(), listed(&self.foreign));
        match self.foreign.is_empty() {
            true => Ok(()),
            false if self.is_marked => Err(ArtifactError::Foreign { path, found }),
            false => Err(ArtifactError::NotAnArtifact {
                path,
                manifest: self.mark,
                found,
            }),
        }
    }

    /// Deletes our files whose role `is_meant` selects, the mark last, and our folders that are then empty.
    pub(super) fn delete(&self, is_meant: impl Fn(Role) -> bool) -> Result<(), ArtifactError> {
        let meant = |(_, role): &&(PathBuf, Role)| is_meant(*role);
        let (mark, files): (Vec<_>, Vec<_>) =
            (self.files.iter().filter(meant)).partition(|(_, role)| *role == Role::Mark);
        for (path, _) in files {
            unlink(&self.folder.join(path))?;
        }
        for folder in self.folders.iter().rev() {
            // A folder with other files stays.
            let _ = fs::remove_dir(self.folder.join(folder));
        }
        for (path, _) in mark {
            unlink(&self.folder.join(path))?;
        }
        Ok(())
    }

    /// Deletes all our files and the folder, so that an interrupted deletion can be recognised and repeated.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Foreign`] if something else is in the folder, which is then kept.
    pub(super) fn delete_folder(&self) -> Result<(), ArtifactError> {
        self.refuse_foreign()?;
        self.delete(|_| true)?;
        match fs::remove_dir(&self.folder) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(ArtifactError::write(&self.folder)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Deletes a file, or a link without following it.
fn unlink(path: &Path) -> Result<(), ArtifactError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(ArtifactError::write(path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind() -> Contents {
        Contents::new("manifest.json", "powerinfer-test")
            .with_names(&["weights", "traces/layer-#.x"])
            .with_work(&["state-#-#.x"])
    }

    /// Names of our and of foreign entries in a folder with these `entries`; a name that ends in `/` is a folder.
    fn sorted(manifest: &str, entries: &[&str]) -> (Vec<String>, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        for entry in entries {
            let path = folder.path().join(entry);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            if entry.ends_with('/') {
                fs::create_dir_all(path).unwrap()
            } else {
                fs::write(path, "x").unwrap()
            }
        }
        fs::write(folder.path().join("manifest.json"), manifest).unwrap();
        let survey = kind().survey(folder.path(), Mark::Manifest).unwrap();
        let files = survey.files.into_iter();
        let mut own: Vec<_> = files
            .map(|(path, _)| path.to_string_lossy().into_owned())
            .collect();
        own.sort();
        (own, survey.foreign)
    }

    const MANIFEST: &str = r#"{ "header": { "format": "powerinfer-test", "version": 1, "tool": "powerinfer 0.1.0" },
        "files": { "tokenizer.json": "b3:0", "../thesis": "b3:0", "/etc/passwd": "b3:0", "a/b": "b3:0" } }"#;

    #[test]
    fn named_and_defined_files_are_ours() {
        let entries = [
            "weights",
            "tokenizer.json",
            "a/b",
            "traces/layer-012.x",
            "state-1-22.x",
            ".powerinfer-x-1.partial",
            ".powerinfer-run",
        ];
        let (own, foreign) = sorted(MANIFEST, &entries);
        let mut expected = [&entries[..], &["manifest.json"]].concat();
        expected.sort_unstable();
        assert_eq!(own, expected);
        assert_eq!(foreign, [""; 0]);
    }

    #[test]
    fn everything_else_is_foreign() {
        let entries = [
            "notes/",
            "notes.txt",
            "traces/layer-x.x",
            "traces/layer-.x",
            "traces/deep/layer-1.x",
            "a/c",
            "weights2",
            "state-1.x",
            ".powerinfer-x",
            "tokenizer.json/x",
        ];
        let (own, foreign) = sorted(MANIFEST, &entries);
        assert_eq!(own, ["manifest.json"]);
        assert_eq!(
            foreign,
            [
                ".powerinfer-x",
                "a/c",
                "notes.txt",
                "notes/",
                "state-1.x",
                "tokenizer.json/",
                "traces/deep/",
                "traces/layer-.x",
                "traces/layer-x.x",
                "weights2"
            ]
        );
    }

    #[test]
    fn a_manifest_of_another_program_makes_nothing_ours() {
        for manifest in [
            "",
            "{}",
            "powerinfer-test",
            r#"{ "dependencies": ["powerinfer-client", "powerinfer-test"] }"#,
            r#"{ "header": "powerinfer-test" }"#,
            &MANIFEST.replace("powerinfer-test", "powerinfer-other"),
            &MANIFEST.replace("powerinfer 0.1.0", "webpack"),
        ] {
            let (own, foreign) = sorted(manifest, &["weights"]);
            assert_eq!(own, [""; 0], "{manifest}");
            assert_eq!(foreign, ["manifest.json", "weights"], "{manifest}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_are_foreign_and_not_followed() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("manifest.json"), MANIFEST).unwrap();
        fs::create_dir(path("traces")).unwrap();
        symlink("manifest.json", path("weights")).unwrap();
        symlink(".", path("traces/layer-1.x")).unwrap();
        symlink("traces", path("a")).unwrap();
        symlink("manifest.json", path(".powerinfer-1.partial")).unwrap();
        let survey = kind().survey(folder.path(), Mark::Manifest).unwrap();
        assert_eq!(survey.foreign, ["a", "traces/layer-1.x", "weights"]);
        survey.refuse_foreign().unwrap_err();
        survey.delete(|role| role == Role::Temporary).unwrap();
        assert!(!path(".powerinfer-1.partial").is_symlink());
        assert!(path("weights").is_symlink() && path("manifest.json").exists());
    }
}
