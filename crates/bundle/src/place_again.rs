//! Replacing the plan of a bundle: neurons are stored hottest first under every plan, so only plan and
//! manifest change.
//!
//! ```text
//! plan.next.json is written ──▶ manifest.json is replaced ──▶ plan.next.json becomes plan.json
//!        old bundle                     new bundle, under either name of its plan
//! ```

use std::fs;

use powerinfer_artifact::{
    ArtifactError, Digest,
    certificate::decisions,
    document::Document,
    plan::Plan,
    write::{FolderLock, write_file},
};
use serde_json::Value;

use crate::{
    Bundle, BundleError, REQUEST,
    bundle::{check_unchanged, open_plan},
    manifest::{MANIFEST, NEXT_PLAN, PLAN, PLAN_VERSION},
};

/// Header setting with the request that a bundle was made by, if it was re-planned since.
pub const FIRST_REQUEST: &str = "first_request";

impl Bundle {
    /// Replaces the plan by one with the same policies and thresholds, made for `request`. If the program is
    /// killed, the bundle has either the old or the new plan.
    ///
    /// # Errors
    ///
    /// `plan` is inconsistent, another run changes the bundle, or a file cannot be written.
    ///
    /// # Panics
    ///
    /// If `plan` has other policies or thresholds than the present one, which would need other files.
    pub fn place_again(mut self, plan: Plan, request: Value) -> Result<Self, BundleError> {
        assert_eq!(
            decisions(&plan.layers),
            decisions(&self.plan().layers),
            "the new plan has the same policies and thresholds"
        );
        let folder = self.folder().to_owned();
        let [current, next] = [PLAN, NEXT_PLAN].map(|name| folder.join(name));
        plan.validate().map_err(|source| BundleError::Plan {
            path: current.clone(),
            source,
        })?;
        let lock = FolderLock::new(&folder)?;
        check_unchanged(&folder, &self.manifest)?;
        let settle = || fs::rename(&next, &current).map_err(ArtifactError::write(&current));
        // The last run may have been killed before this.
        if open_plan(&folder, &self.manifest.body)?.0 == next {
            settle()?;
        }
        let mut header = self.plan.header.clone();
        header.version = PLAN_VERSION;
        let mut manifest = self.manifest.clone();
        for settings in [&mut header.settings, &mut manifest.header.settings] {
            let before = settings.insert(REQUEST.to_owned(), request.clone());
            let before = before.unwrap_or(Value::Null);
            settings.entry(FIRST_REQUEST.to_owned()).or_insert(before);
        }
        let plan = Document { header, body: plan };
        let bytes = plan.to_bytes();
        write_file(&next, &bytes)?;
        manifest
            .body
            .files
            .insert(PLAN.to_owned(), Digest::from_content(&bytes));
        let manifest = manifest.sealed();
        manifest.write(&folder.join(MANIFEST))?;
        settle()?;
        drop(lock);
        (self.manifest, self.plan) = (manifest, plan);
        Ok(self)
    }
}
