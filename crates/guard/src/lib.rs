//! Protection against libraries that panic at hostile input, compute without end, or fill the memory.

mod executable;
pub mod panics;
pub mod worker;
