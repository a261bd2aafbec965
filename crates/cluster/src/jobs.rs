//! The folder of the jobs: scripts, their logs and status, and `jobs.json`, which names the scripts.

use std::{collections::BTreeMap, fs, path::Path};

use powerinfer_artifact::{
    ArtifactError, Digest, Header, ModelIdentity,
    document::Document,
    write::{Contents, write_file},
};
use serde::{Deserialize, Serialize};

use crate::{ClusterError, Preparation, Stage, StageKind, stages::RUN};

/// Name of the script that submits all stages.
pub(crate) const SUBMIT: &str = "submit.sh";

/// Name of the script that all stages read.
const RUN_FILE: &str = "run.sh";

const MANIFEST: &str = "jobs.json";
const FORMAT: &str = "powerinfer-jobs";
const VERSION: u32 = 1;

/// Body of `jobs.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Jobs {
    /// Digests of the scripts, by name.
    files: BTreeMap<String, Digest>,
}

/// Files of a folder of jobs.
fn contents() -> Contents {
    let names = StageKind::ALL.into_iter().flat_map(|kind| {
        [
            "NAME.sh",
            "NAME.yaml",
            "logs/NAME.log",
            "logs/NAME-#.log",
            "status/NAME-#",
        ]
        .map(|file| file.replace("NAME", kind.name()))
    });
    Contents::new(MANIFEST, FORMAT)
        .with_names(&[RUN_FILE, SUBMIT])
        .with_names(&names.collect::<Vec<_>>())
}

/// Scripts to write into a folder, by name.
pub(crate) struct Scripts(BTreeMap<String, String>);

impl Scripts {
    /// The scripts for `folder`: one for each of `stages`, which begins with the lines of `head`, and `submit.sh`.
    pub(crate) fn new(
        preparation: &Preparation,
        stages: &[Stage],
        folder: &Path,
        head: impl Fn(&Stage) -> String,
        submit: String,
    ) -> Self {
        let scripts = stages.iter().map(|stage| {
            let folder = folder.to_string_lossy();
            let script = stage.script(&head(stage), &folder, &preparation.directory);
            (format!("{}.sh", stage.kind.name()), script)
        });
        let others = [(RUN_FILE, RUN.to_owned()), (SUBMIT, submit)];
        let others = others.map(|(name, text)| (name.to_owned(), text));
        Self(scripts.chain(others).collect())
    }

    /// Adds a file.
    pub(crate) fn insert(&mut self, name: String, text: String) {
        self.0.insert(name, text);
    }

    /// Writes all scripts into `folder`, whose jobs prepare `model`.
    ///
    /// # Errors
    ///
    /// The folder has other files, which are listed, or a file cannot be written.
    pub(crate) fn write(self, folder: &Path, model: &ModelIdentity) -> Result<(), ClusterError> {
        let folder = contents().refuse_foreign(folder)?;
        for name in ["logs", "status"] {
            let folder = folder.join(name);
            fs::create_dir_all(&folder).map_err(ArtifactError::write(&folder))?;
        }
        let digests = self.0.iter();
        let digests =
            digests.map(|(name, text)| (name.clone(), Digest::from_content(text.as_bytes())));
        // First, so that the folder is recognised even if this run is killed.
        Document {
            header: Header::new(FORMAT, VERSION, model.clone(), 0),
            body: Jobs {
                files: digests.collect(),
            },
        }
        .write(&folder.join(MANIFEST))?;
        for (name, text) in &self.0 {
            let path = folder.join(name);
            write_file(&path, text.as_bytes())?;
            #[cfg(unix)]
            if name.ends_with(".sh") && name != RUN_FILE {
                use std::os::unix::fs::PermissionsExt;
                let permissions = fs::Permissions::from_mode(0o755);
                fs::set_permissions(&path, permissions).map_err(ArtifactError::write(&path))?;
            }
        }
        Ok(())
    }
}
