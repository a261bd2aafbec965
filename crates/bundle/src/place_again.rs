//! Gives a bundle another plan: the neurons lie hottest first whatever the plan, so nothing but the
//! plan and the manifest changes.
//!
//! ```text
//! plan.next.json is written ──▶ manifest.json is replaced ──▶ plan.next.json becomes plan.json
//!        the old bundle                 the new bundle, whichever name its plan has
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
    bundle::{check_still_here, plan_path},
    manifest::{MANIFEST, NEXT_PLAN, PLAN, PLAN_VERSION, sealed},
};

/// The header's setting that says, of a bundle that was placed again, by what request it was made.
pub const FIRST_REQUEST: &str = "first_request";

impl Bundle {
    /// Replaces the plan by one that decides the same and was asked for by `request`. Killed at any
    /// point, it leaves the bundle as it was or as it is to be.
    ///
    /// # Panics
    ///
    /// When `plan` computes other neurons than the present one: it would need other files.
    pub fn place_again(mut self, plan: Plan, request: Value) -> Result<Self, BundleError> {
        assert_eq!(
            decisions(&plan.layers),
            decisions(&self.plan().layers),
            "placing again moves neurons and decides nothing"
        );
        let folder = self.folder().to_owned();
        let [usual, next] = [PLAN, NEXT_PLAN].map(|name| folder.join(name));
        plan.validate().map_err(|source| BundleError::Plan {
            path: usual.clone(),
            source,
        })?;
        let lock = FolderLock::of(&folder)?;
        check_still_here(&folder, &self.manifest)?;
        let settle = || fs::rename(&next, &usual).map_err(ArtifactError::write(&usual));
        // The last run may have been killed before this.
        if plan_path(&folder, &self.manifest.body) == next {
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
            .insert(PLAN.to_owned(), Digest::of(&bytes));
        let manifest = sealed(manifest);
        manifest.write(&folder.join(MANIFEST))?;
        settle()?;
        drop(lock);
        (self.manifest, self.plan) = (manifest, plan);
        Ok(self)
    }
}
