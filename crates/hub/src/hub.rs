//! [`Hub`]: a model of the hub as a local folder.

use std::{
    error::Error,
    path::{Path, PathBuf},
};

use powerinfer_artifact::Progress;

use crate::{
    HubError, ModelName, Settings,
    cache::ModelCache,
    client::{Client, Failure},
    fetch::Fetch,
    file_name::FileName,
    listing::Listing,
    offline::cached,
};

/// A hub and the local cache of its models.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
}

/// A model, or a file of one, in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder of the commit; it may hold more files than were requested.
    pub folder: PathBuf,
    /// Path to open: the folder, or the file if a single one was requested or is the whole model.
    pub path: PathBuf,
    /// Commit of the revision, 40 hexadecimal digits.
    pub commit: String,
    /// The requested files.
    pub files: Vec<SnapshotFile>,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Its name in the repository.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Whether it was downloaded, rather than found in the cache.
    pub fetched: bool,
}

/// Check of the small files of a model, in a folder that has no weights yet.
pub type Check<'a> = dyn Fn(&Path) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

/// Part of a model to fetch.
#[derive(Clone, Copy)]
pub(crate) enum Selection<'a> {
    /// Everything needed to run the model, if the check of its small files succeeds.
    Model(&'a Check<'a>),
    /// One file.
    File(&'a FileName),
}

impl Hub {
    /// A hub with the address, token and cache in `settings`.
    pub fn new(settings: Settings) -> Self {
        Self { settings }
    }

    /// A hub configured by the environment; see [`Settings::from_lookup`].
    ///
    /// # Errors
    ///
    /// If no variable leads to a cache folder.
    pub fn from_environment() -> Result<Self, HubError> {
        Settings::from_environment().map(Self::new)
    }

    /// Downloads the files that running `model` needs and the cache lacks: configuration, tokenizer,
    /// and weights in one format. An interrupted download resumes where it stopped.
    ///
    /// Offline, or if the hub cannot be reached, a complete model in the cache is used.
    ///
    /// # Errors
    ///
    /// If the hub refuses or lacks the model, the model has no readable weights, a download fails
    /// repeatedly or has the wrong digest, the cache cannot be written, or `progress` interrupts.
    pub fn pull(&self, model: &ModelName, progress: &dyn Progress) -> Result<Snapshot, HubError> {
        self.pull_checked(model, &|_| Ok(()), progress)
    }

    /// Like [`Self::pull`]; `check` reads the small files in the folder of the commit before the weights are downloaded,
    /// and refuses a model that cannot be used.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::pull`], or [`HubError::OfNoUse`] with the error of `check`.
    pub fn pull_checked(
        &self,
        model: &ModelName,
        check: &Check<'_>,
        progress: &dyn Progress,
    ) -> Result<Snapshot, HubError> {
        self.pull_selected(model, Selection::Model(check), progress)
    }

    /// Like [`Self::pull`], for the single file called `file`.
    ///
    /// # Errors
    ///
    /// As [`Self::pull`], and if the revision has no such file.
    pub fn pull_file(
        &self,
        model: &ModelName,
        file: &str,
        progress: &dyn Progress,
    ) -> Result<Snapshot, HubError> {
        self.pull_selected(model, Selection::File(&FileName::parse(file)?), progress)
    }

    fn pull_selected(
        &self,
        model: &ModelName,
        selection: Selection<'_>,
        progress: &dyn Progress,
    ) -> Result<Snapshot, HubError> {
        let cache = ModelCache::new(&self.settings.cache, model);
        if self.settings.offline {
            let snapshot = cached(&cache, model, selection).ok_or_else(|| HubError::NotCached {
                model: match selection {
                    Selection::Model(_) => model.to_string(),
                    Selection::File(file) => format!("{model}/{file}"),
                },
                cache: self.settings.cache.clone(),
            })?;
            progress.note(&format!(
                "`HF_HUB_OFFLINE` is set: using `{model}` from the cache, commit {}",
                snapshot.commit
            ));
            return Ok(snapshot);
        }
        let client = Client::new(&self.settings)?;
        let listing = match Listing::ask(&client, model) {
            Ok(listing) => listing,
            Err(Failure::Lasting(error)) => return Err(error),
            Err(Failure::Passing(error)) => {
                let Some(snapshot) = cached(&cache, model, selection) else {
                    return Err(error);
                };
                // The last part of the message is advice for a user without a copy.
                let error = error.to_string();
                let (what, _) = error.rsplit_once("; ").unwrap_or((&error, ""));
                progress.note(&format!(
                    "{what}; using `{model}` from the cache, commit {}",
                    snapshot.commit
                ));
                return Ok(snapshot);
            }
        };
        let fetch = Fetch {
            client: &client,
            model,
            cache: &cache,
            commit: &listing.commit,
            progress,
        };
        let snapshot = fetch.selection(selection, &listing.names)?;
        // Only now, so that an incomplete download never replaces an older complete snapshot.
        cache.remember(model.revision(), &listing.commit)?;
        Ok(snapshot)
    }
}
