//! The demo checkpoint and the Python functions it is calibrated and evaluated on, as data.
//!
//! `scripts/train-demo.py` trains the checkpoint.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

pub mod demo;
pub mod minipython;
