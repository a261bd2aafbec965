//! Protection against libraries that panic at hostile input, compute without end, or fill the memory.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

#[cfg(unix)]
mod descriptors;
mod executable;
pub mod panics;
pub mod worker;

#[cfg(unix)]
pub use descriptors::inherit_no_descriptors;
