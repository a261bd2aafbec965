//! Bundles: packed models for running, with neurons permuted hottest first, quantised weights, predictors,
//! plan, and a manifest with the digest of every file.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod bundle;
mod error;
mod manifest;
mod pack;
mod place_again;
mod read;
mod weights;

pub use bundle::{Bundle, IntegrityCheck};
pub use error::BundleError;
pub use manifest::{DENSE_VERSION, FORMAT, Manifest, VERSION, contents};
pub use pack::{PackInputs, REQUEST, pack, pack_plain, pack_with};
pub use place_again::FIRST_REQUEST;
pub use weights::{
    Layout, StoredLayer, StoredLinear, StoredNorm, StoredWeights, is_permutation, neuron_bytes,
    weight_bytes, weight_bytes_by_input,
};
