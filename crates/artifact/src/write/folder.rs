//! Folders that appear under their name only when complete.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    Contents,
    lock::{FileLock, FolderLock, is_at},
    resolved,
    survey::{MARK, Mark, Role},
    unfollowed,
};
use crate::ArtifactError;

/// Folder that appears under its name only when it is complete.
///
/// The content is written to `NAME.partial` next to it. A partial folder left by an earlier run is resumed unless
/// [`clear`](Self::clear)ed; its files are whole, since they are written with [`write_file`](super::write_file). Only files of
/// this kind of folder are ever replaced or deleted, and only one run at a time works in a folder. If the name is a link, the
/// folder that it points to is written, and the link stays.
#[derive(Debug)]
pub struct PartialFolder {
    target: PathBuf,
    partial: PathBuf,
    contents: Contents,
    /// Marks the partial folder as ours; locked while this run works in it.
    lock: FileLock,
}

impl PartialFolder {
    /// Opens or creates the partial folder of `target`.
    ///
    /// An existing `target` must be empty or an older artifact with these `contents` and nothing else. The same holds for a
    /// folder left next to it by a killed run.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::NotAnArtifact`] or [`ArtifactError::Foreign`], which list other entries,
    /// [`ArtifactError::NotAFolder`], [`ArtifactError::Busy`] if another run works in the partial folder, or an error of
    /// the file system.
    pub fn open(target: &Path, contents: Contents) -> Result<Self, ArtifactError> {
        let target: PathBuf = target.components().collect();
        if target.file_name().is_none() {
            return Err(ArtifactError::NotAFolder {
                path: target,
                kind: "the current folder or one that contains it, which is not replaced",
            });
        }
        let target = resolved(&target)?;
        let [partial, old] = [".partial", ".old"].map(|ending| with_ending(&target, ending));
        for folder in [&target, &old] {
            contents.survey(folder, Mark::Manifest)?.refuse_foreign()?;
        }
        let survey = || contents.survey(&partial, Mark::File(MARK));
        survey()?.refuse_foreign()?;
        fs::create_dir_all(&partial).map_err(ArtifactError::write(&partial))?;
        let mark = partial.join(MARK);
        let lock = unfollowed().create(true).open(&mark);
        let lock = lock.map_err(ArtifactError::write(&mark))?;
        let lock = match FileLock::new(lock) {
            // The run that had the lock may have renamed the folder since.
            Ok(lock) if is_at(lock.file(), &mark) => lock,
            _ => return Err(ArtifactError::Busy { path: target }),
        };
        survey()?.delete(|role| role == Role::Temporary)?;
        // A run killed between its two renames has left the older artifact in `NAME.old`.
        if !exists(&target) && exists(&old.join(contents.manifest())) {
            fs::rename(&old, &target).map_err(ArtifactError::write(&target))?;
        }
        Ok(Self {
            target,
            partial,
            contents,
            lock,
        })
    }

    /// Removes the content left by an earlier run.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    pub fn clear(&self) -> Result<(), ArtifactError> {
        let survey = self.contents.survey(&self.partial, Mark::File(MARK))?;
        survey.delete(|role| role != Role::Mark)
    }

    /// Temporary path that is renamed to the target by [`finish`](Self::finish).
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Deletes unfinished work from the partial folder and renames it to the target, replacing an older artifact.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Foreign`] if other files have appeared in one of the folders, which are then all kept, or
    /// [`ArtifactError::Write`].
    pub fn finish(self) -> Result<(), ArtifactError> {
        debug_assert!(
            self.partial.join(self.contents.manifest()).exists(),
            "the manifest is written"
        );
        let survey = |folder: &Path| self.contents.survey(folder, Mark::Manifest);
        let work = self.contents.survey(&self.partial, Mark::File(MARK))?;
        work.refuse_foreign()?;
        work.delete(|role| [Role::Work, Role::Temporary].contains(&role))?;
        let mut lock = Some(self.lock);
        if cfg!(windows) {
            lock = None; // a folder with an open file cannot be renamed
        }
        // Not while another run changes files of the older artifact, which it finds by their paths; and no other run
        // replaces the new one before the older one is gone.
        let locks = [&self.target, &self.partial].map(|folder| FolderLock::wait(folder));
        let old = with_ending(&self.target, ".old");
        if exists(&self.target) {
            survey(&self.target)?.refuse_foreign()?;
            survey(&old)?.delete_folder()?;
            fs::rename(&self.target, &old).map_err(ArtifactError::write(&self.target))?;
            // Files that have appeared since go back to where their owner looks for them.
            if let Err(error) = survey(&old)?.refuse_foreign() {
                fs::rename(&old, &self.target).map_err(ArtifactError::write(&self.target))?;
                return Err(error);
            }
        }
        fs::rename(&self.partial, &self.target).map_err(ArtifactError::write(&self.target))?;
        // Last, so that a folder left by a killed run is recognised by the next one.
        let mark = self.target.join(MARK);
        fs::remove_file(&mark).map_err(ArtifactError::write(&mark))?;
        let removed = survey(&old)?.delete_folder();
        drop((lock, locks));
        removed
    }
}

/// Whether there is anything at `path`, a link included.
fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Appends `ending` to the file name of `path`.
pub(super) fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write::write_file;

    fn contents() -> Contents {
        Contents::new("manifest.json", "powerinfer-test").with_names(&["weights"])
    }

    /// A manifest that lists the file `named` and contains `content`.
    fn manifest(content: &str) -> String {
        let header = r#"{ "format": "powerinfer-test", "version": 1, "tool": "powerinfer 0.1.0" }"#;
        format!(r#"{{ "header": {header}, "files": {{ "named": "" }}, "content": "{content}" }}"#)
    }

    /// Writes a folder with `content` to `target`.
    fn make(target: &Path, content: &str) -> Result<(), ArtifactError> {
        let made = PartialFolder::open(target, contents())?;
        made.clear()?;
        write_file(
            &made.path().join("manifest.json"),
            manifest(content).as_bytes(),
        )?;
        for name in ["weights", "named"] {
            write_file(&made.path().join(name), content.as_bytes())?;
        }
        made.finish()
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_partial_folder_resumes_and_replaces_the_target() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("profile");
        let open = || PartialFolder::open(&target, contents().with_work(&["work/state-#"]));
        let first = open().unwrap();
        write_file(
            &first.path().join("manifest.json"),
            manifest("1").as_bytes(),
        )
        .unwrap();
        write_file(&first.path().join("work/state-1"), b"half").unwrap();
        assert!(!target.exists());
        let busy = open().unwrap_err();
        assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        fs::write(first.path().join(".powerinfer-x.partial"), b"killed").unwrap();
        drop(first);
        let second = open().unwrap();
        assert_eq!(
            names(second.path()),
            [MARK, "manifest.json", "work"],
            "the content of the earlier run is kept"
        );
        second.finish().unwrap();
        assert_eq!(names(&target), ["manifest.json"], "no other file is left");
        make(&target, "2").unwrap();
        assert_eq!(fs::read(target.join("weights")).unwrap(), b"2");
        assert_eq!(names(folder.path()), ["profile"]);
    }

    #[test]
    fn folders_of_other_programs_are_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("profile");
        for name in ["profile", "profile.partial", "profile.old"] {
            let precious = folder.path().join(name);
            fs::create_dir(&precious).unwrap();
            fs::write(precious.join("thesis.txt"), b"years").unwrap();
            for manifest in [
                None,
                // Many programs write a file of this name.
                Some(r#"{ "name": "my web app" }"#),
                Some(r#"{ "dependencies": ["powerinfer-client"] }"#),
            ] {
                if let Some(manifest) = manifest {
                    fs::write(precious.join("manifest.json"), manifest).unwrap();
                }
                let error = make(&target, "1").unwrap_err();
                assert!(
                    matches!(error, ArtifactError::NotAnArtifact { .. }),
                    "{error}"
                );
                assert!(error.to_string().contains("`thesis.txt`"), "{error}");
            }
            assert_eq!(fs::read(precious.join("thesis.txt")).unwrap(), b"years");
            fs::remove_dir_all(&precious).unwrap();
        }
        fs::write(&target, b"a file").unwrap();
        let error = make(&target, "1").unwrap_err();
        assert!(matches!(error, ArtifactError::NotAFolder { .. }), "{error}");
        fs::remove_file(&target).unwrap();
        fs::create_dir(&target).unwrap();
        make(&target, "1").unwrap();
    }

    #[test]
    fn foreign_files_in_an_artifact_are_listed_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("bundle");
        make(&target, "1").unwrap();
        fs::create_dir(target.join("notes")).unwrap();
        fs::write(target.join("notes/a.txt"), b"mine").unwrap();
        fs::write(target.join("todo.txt"), b"mine").unwrap();
        let error = make(&target, "2").unwrap_err();
        assert!(matches!(error, ArtifactError::Foreign { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("`notes/`, `todo.txt`"), "{text}");
        assert_eq!(names(folder.path()), ["bundle"]);
        assert_eq!(
            names(&target),
            ["manifest.json", "named", "notes", "todo.txt", "weights"]
        );
        // The same in folders that killed runs have left.
        for ending in ["old", "partial"] {
            fs::remove_dir_all(folder.path()).unwrap();
            drop(PartialFolder::open(&target, contents()).unwrap());
            let left = folder.path().join(format!("bundle.{ending}"));
            fs::create_dir_all(&left).unwrap();
            fs::write(left.join("manifest.json"), manifest("0")).unwrap();
            fs::write(left.join("todo.txt"), b"mine").unwrap();
            let error = make(&target, "2").unwrap_err();
            assert!(matches!(error, ArtifactError::Foreign { .. }), "{error}");
            assert_eq!(fs::read(left.join("todo.txt")).unwrap(), b"mine");
        }
    }

    #[test]
    fn files_that_appear_while_a_folder_is_made_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("bundle");
        make(&target, "1").unwrap();
        for appeared in ["bundle/todo.txt", "bundle.partial/todo.txt"] {
            let made = PartialFolder::open(&target, contents()).unwrap();
            let path = made.path().join("manifest.json");
            write_file(&path, manifest("2").as_bytes()).unwrap();
            let appeared = folder.path().join(appeared);
            fs::write(&appeared, b"mine").unwrap();
            let error = made.finish().unwrap_err();
            assert!(matches!(error, ArtifactError::Foreign { .. }), "{error}");
            assert_eq!(fs::read(&appeared).unwrap(), b"mine");
            assert_eq!(fs::read(target.join("weights")).unwrap(), b"1");
            assert_eq!(fs::read_to_string(path).unwrap(), manifest("2"));
            fs::remove_file(&appeared).unwrap();
        }
        make(&target, "3").unwrap();
        assert_eq!(names(folder.path()), ["bundle"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_to_a_folder_are_followed_and_stay() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        symlink("real/bundle", path("link")).unwrap();
        symlink(path("link"), path("link-to-link")).unwrap();
        for content in ["1", "2"] {
            make(&path("link-to-link/"), content).unwrap();
            assert!(path("link").is_symlink() && path("link-to-link").is_symlink());
            let written = path("real/bundle/weights");
            assert_eq!(fs::read_to_string(written).unwrap(), content);
            assert_eq!(names(&path("real")), ["bundle"]);
        }
        // A folder with other files is refused and left unchanged, as without a link.
        fs::create_dir(path("photos")).unwrap();
        fs::write(path("photos/cat"), b"mew").unwrap();
        symlink("photos", path("to-photos")).unwrap();
        symlink(".", path("photos/here")).unwrap();
        symlink("ring", path("ring")).unwrap();
        for name in ["to-photos", "photos/here", "ring"] {
            make(&path(name), "1").unwrap_err();
        }
        assert_eq!(names(&path("photos")), ["cat", "here"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_in_a_partial_folder_are_never_followed() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("photos")).unwrap();
        fs::write(path("photos/cat"), b"mew").unwrap();
        fs::write(path("photos/.powerinfer-run"), b"").unwrap();
        let is_kept = || names(&path("photos")) == [MARK, "cat"];
        symlink("photos", path("bundle.partial")).unwrap();
        let error = make(&path("bundle"), "1").unwrap_err();
        assert!(matches!(error, ArtifactError::NotAFolder { .. }), "{error}");
        assert!(is_kept());
        fs::remove_file(path("bundle.partial")).unwrap();
        fs::create_dir(path("bundle.partial")).unwrap();
        symlink("../photos/cat", path("bundle.partial/.powerinfer-run")).unwrap();
        make(&path("bundle"), "1").unwrap_err();
        assert_eq!(fs::read(path("photos/cat")).unwrap(), b"mew");
        fs::remove_file(path("bundle.partial/.powerinfer-run")).unwrap();
        fs::write(path("bundle.partial/.powerinfer-run"), b"").unwrap();
        for (target, name) in [
            ("../photos", "all"),
            (".", "here"),
            ("../photos/cat", "weights"),
        ] {
            let link = path("bundle.partial").join(name);
            symlink(target, &link).unwrap();
            let error = make(&path("bundle"), "1").unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
            assert!(is_kept() && link.is_symlink());
            fs::remove_file(link).unwrap();
        }
        // Links with the name of a temporary file are deleted, not their targets.
        let temporary = path("bundle.partial/.powerinfer-x.partial");
        symlink("../photos", &temporary).unwrap();
        make(&path("bundle"), "1").unwrap();
        assert!(is_kept());
        assert_eq!(names(folder.path()), ["bundle", "photos"]);
    }

    #[test]
    fn folders_of_killed_runs_are_recognised() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("bundle");
        make(&target, "1").unwrap();
        // Killed between the two renames: the older artifact is restored.
        fs::rename(&target, folder.path().join("bundle.old")).unwrap();
        drop(PartialFolder::open(&target, contents()).unwrap());
        assert_eq!(fs::read(target.join("weights")).unwrap(), b"1");
        // Killed after them, before or during the removal of the older artifact.
        for left in [
            &["manifest.json", "weights", "named"][..],
            &["manifest.json"],
            &[],
        ] {
            let old = folder.path().join("bundle.old");
            fs::create_dir(&old).unwrap();
            for name in left {
                fs::write(old.join(name), manifest("0")).unwrap();
            }
            make(&target, "2").unwrap();
            assert_eq!(fs::read(target.join("weights")).unwrap(), b"2");
            assert_eq!(names(folder.path()), ["bundle"]);
        }
        // Killed before the mark was deleted.
        fs::write(target.join(MARK), b"").unwrap();
        make(&target, "3").unwrap();
        assert_eq!(names(&target), ["manifest.json", "named", "weights"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_is_not_replaced_while_its_files_are_changed() {
        use std::{thread, time::Duration};

        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("artifact");
        make(&target, "old").unwrap();
        let partial = PartialFolder::open(&target, contents()).unwrap();
        fs::write(partial.path().join("manifest.json"), manifest("new")).unwrap();
        let content = || fs::read_to_string(target.join("manifest.json")).unwrap();
        let lock = FolderLock::new(&target).unwrap();
        let other = fs::File::open(&target).unwrap();
        thread::scope(|scope| {
            let finished = scope.spawn(|| partial.finish());
            thread::sleep(Duration::from_millis(100));
            assert!(!finished.is_finished());
            assert_eq!(content(), manifest("old"));
            drop(lock);
            finished.join().unwrap().unwrap();
        });
        assert_eq!(content(), manifest("new"));
        assert!(!is_at(&other, &target), "a lock on the old one is none");
        assert_eq!(names(parent.path()), ["artifact"]);
        FolderLock::new(&target).unwrap();
    }

    #[test]
    fn no_run_enters_a_folder_that_another_one_finishes() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("artifact");
        let partial = PartialFolder::open(&target, contents()).unwrap();
        fs::write(partial.path().join("manifest.json"), manifest("new")).unwrap();
        let busy = PartialFolder::open(&target, contents()).unwrap_err();
        assert!(matches!(busy, ArtifactError::Busy { .. }), "{busy}");
        partial.finish().unwrap();
        assert_eq!(names(&target), ["manifest.json"]);
        PartialFolder::open(&target, contents()).unwrap();
    }
}
