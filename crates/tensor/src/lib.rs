//! Weights and KV caches as data: number formats, matrices, packing and dequantising.
//!
//! A [`Matrix`] borrows row-major weights in one of the [`Format`]s, an [`OwnedMatrix`] owns them;
//! [`pack`] makes one from `f32`. A [`SignMatrix`] keeps the signs alone. A [`CachePlane`] holds the
//! keys or the values of one head in a [`CacheFormat`]. [`NormKind`], [`FfnKind`] and [`Activation`] name the
//! functions of a layer, for configurations and kernels alike.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod cache;
mod error;
mod format;
mod layer;
mod matrix;
mod pack;
mod pack_q4_k;
mod signs;
mod transpose;

pub use cache::{
    CacheBlock, CacheData, CacheFormat, CacheLayout, CachePlane, HeadWriter, KEY_GROUP, KeyBlock,
};
pub use error::TensorError;
pub use format::{BLOCK, Format, SUPER_BLOCK};
pub use half::{bf16, f16};
pub use layer::{Activation, FfnKind, NormKind};
pub use matrix::{Block, Matrix, MatrixData};
pub use pack::{OwnedMatrix, pack, repack_q4_k};
pub use signs::{SignMatrix, pack_signs};
pub use transpose::{Transposed, transpose};
