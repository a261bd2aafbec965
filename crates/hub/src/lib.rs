//! Downloads models of the Hugging Face hub into the cache that its Python client uses: with digests
//! checked, and resumed after an interruption.
//!
//! ```text
//! org/name@revision ── listing ── selection ── one file after another ──▶ snapshots/<commit>/
//! ```
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod cache;
mod checksum;
mod client;
mod download;
mod error;
mod fetch;
mod file_name;
mod hub;
mod listing;
mod model_name;
mod offline;
mod proxies;
mod remote_file;
mod selection;
mod settings;
mod snapshot;

pub use error::HubError;
pub use hub::Hub;
pub use model_name::ModelName;
pub use settings::{Settings, Token};
pub use snapshot::{Check, Snapshot, SnapshotFile};
