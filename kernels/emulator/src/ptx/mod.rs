//! An interpreter of PTX, so that the kernels which ship are tested on a CPU, and not only their source.
//!
//! ```text
//! text ─ parse ─► statements ─ decode (arithmetic, operand) ─► instructions ─ run (step, memory, tensor_core) ─► results
//! ```

mod arithmetic;
mod decode;
mod device;
mod instruction;
mod memory;
mod operand;
mod parse;
mod run;
mod step;
mod tensor_core;
#[cfg(test)]
mod tests;

pub use device::PtxDevice;

/// PTX that the interpreter does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}, line {line}: {reason}: `{statement}`")]
pub struct PtxError {
    /// Name of the module.
    pub file: String,
    /// Line of the statement, from 1.
    pub line: u32,
    /// The statement.
    pub statement: String,
    /// What is not known.
    pub reason: String,
}
