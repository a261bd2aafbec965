//! Protection against libraries that panic at hostile input, compute without end, or fill the memory.

pub mod panics;
pub mod worker;
