//! A model of the hub as a folder on this machine.

use std::path::PathBuf;

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

/// The hub, and the cache it is fetched into.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
}

/// A model, or a file of one, in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder of the commit; more files of it may be there than were asked for.
    pub folder: PathBuf,
    /// What to open: the folder, or the file where a single one was asked for or is the model.
    pub path: PathBuf,
    /// The commit that the revision is at.
    pub commit: String,
    /// The files that were asked for.
    pub files: Vec<SnapshotFile>,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Its name in the repository.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Whether it was not in the cache before.
    pub fetched: bool,
}

/// What is wanted of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wish<'a> {
    /// Everything needed to run it.
    Model,
    /// One file.
    File(&'a FileName),
}

impl Hub {
    /// The hub that `settings` describe.
    pub fn new(settings: Settings) -> Self {
        Self { settings }
    }

    /// The hub that the environment describes.
    pub fn from_environment() -> Result<Self, HubError> {
        Settings::from_environment().map(Self::new)
    }

    /// Fetches what `model` needs to be run and is not in the cache yet: configuration, tokenizer,
    /// and weights in one form. An interrupted fetch goes on where it stopped.
    ///
    /// Where the network is not to be used, or the hub cannot be reached, a complete model in the
    /// cache is taken instead.
    pub fn pull(&self, model: &ModelName, progress: &dyn Progress) -> Result<Snapshot, HubError> {
        self.pull_wish(model, Wish::Model, progress)
    }

    /// Like [`Self::pull`], for the file called `file` alone.
    pub fn pull_file(
        &self,
        model: &ModelName,
        file: &str,
        progress: &dyn Progress,
    ) -> Result<Snapshot, HubError> {
        self.pull_wish(model, Wish::File(&FileName::parse(file)?), progress)
    }

    fn pull_wish(
        &self,
        model: &ModelName,
        wish: Wish<'_>,
        progress: &dyn Progress,
    ) -> Result<Snapshot, HubError> {
        let cache = ModelCache::new(&self.settings.cache, model);
        if self.settings.offline {
            let snapshot = cached(&cache, model, wish).ok_or_else(|| HubError::NotCached {
                model: match wish {
                    Wish::Model => model.to_string(),
                    Wish::File(file) => format!("{model}/{file}"),
                },
                cache: self.settings.cache.clone(),
            })?;
            progress.note(&format!(
                "`HF_HUB_OFFLINE` is set: `{model}` is taken from the cache, commit {}",
                snapshot.commit
            ));
            return Ok(snapshot);
        }
        let client = Client::new(&self.settings)?;
        let listing = match Listing::ask(&client, model) {
            Ok(listing) => listing,
            Err(Failure::Lasting(error)) => return Err(error),
            Err(Failure::Passing(error)) => {
                let Some(snapshot) = cached(&cache, model, wish) else {
                    return Err(error);
                };
                // The last part of the message is advice for those who have no copy.
                let error = error.to_string();
                let (what, _) = error.rsplit_once("; ").unwrap_or((&error, ""));
                progress.note(&format!(
                    "{what}; `{model}` is taken from the cache, commit {}",
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
        let snapshot = fetch.wish(wish, &listing.names)?;
        // Only now, so that an older complete snapshot is not forgotten for one half fetched.
        cache.remember(model.revision(), &listing.commit)?;
        Ok(snapshot)
    }
}
