//! Models of the Hugging Face hub: fetched into the cache that its Python client uses, checked,
//! and taken up again where a fetch stopped.
//!
//! ```text
//! org/name@revision ── listing ── selection ── one file after another ──▶ snapshots/<commit>/
//! ```
//!
//! The crate `hf-hub` names things: addresses, answers, the folders of the cache. Its downloads
//! are not used: they check neither size nor digest, take any answer to a request for the rest
//! of a file for that rest, and send the token to wherever the hub redirects.

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

pub use error::HubError;
pub use hub::{Hub, Snapshot, SnapshotFile};
pub use model_name::ModelName;
pub use settings::{Settings, Token};
