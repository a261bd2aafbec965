//! The demo checkpoint and the Python functions it is calibrated and evaluated on, as data.
//!
//! The trainer crate generates both; nothing here draws a task at run time.

pub mod demo;
pub mod minipython;
