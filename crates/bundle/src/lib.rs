//! Packs a model for running: neurons permuted hottest first, weights quantised, predictors and
//! plan beside them, every file's digest in one manifest. And opens what it packed.

mod bundle;
mod error;
mod manifest;
pub mod memory;
mod pack;
mod place_again;
mod weights;

pub use bundle::{Bundle, Verification};
pub use error::BundleError;
pub use manifest::{FORMAT, Manifest, VERSION};
pub use pack::{PackInputs, REQUEST, pack};
pub use place_again::FIRST_REQUEST;
pub use weights::{
    Layout, StoredLayer, StoredLinear, StoredNorm, StoredWeights, is_permutation, neuron_bytes,
    weight_bytes, weight_bytes_by_input,
};
