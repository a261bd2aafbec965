//! [`Hub`]: a model of the hub as a local folder.

use powerinfer_artifact::Progress;

use crate::{
    HubError, ModelName, Settings,
    cache::ModelCache,
    client::{Client, Failure},
    fetch::Fetch,
    file_name::FileName,
    listing::Listing,
    offline::cached,
    snapshot::{Check, Selection, Snapshot},
};

/// A hub and the local cache of its models.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
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

    /// The files that running `model` needs, if the cache has all of them.
    pub fn in_cache(&self, model: &ModelName) -> Option<Snapshot> {
        let cache = ModelCache::new(&self.settings.cache, model);
        cached(&cache, model, Selection::Model(&|_| Ok(())))
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
                progress.note(&format!(
                    "{error}; using `{model}` from the cache, commit {}",
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
