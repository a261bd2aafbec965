//! Protection against libraries that panic at hostile input, compute without end, or fill the memory.

#[cfg(unix)]
mod descriptors;
mod executable;
pub mod panics;
pub mod worker;

#[cfg(unix)]
pub use descriptors::inherit_no_descriptors;
