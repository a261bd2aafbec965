//! Runs a bundle: the sparse forward pass with a KV cache, sampling, and the token loop.
//!
//! Start with `forward.rs`, the forward pass on a page, and `generate.rs`, the token loop. `executor.rs` computes layers on
//! the CPU and `hybrid/executor.rs` on a GPU and the CPU; `load.rs` builds a [`Engine`].
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod attention;
mod audit;
mod bandwidth;
mod engine;
mod error;
mod executor;
mod experiments;
mod ffn;
mod forward;
mod generate;
mod hybrid;
mod input;
mod input_magnitudes;
mod latent;
mod linear;
mod load;
mod masks;
pub mod memory;
mod memory_use;
mod model;
mod observer;
mod open;
mod pass;
mod predictor;
mod prompt_cache;
mod rotary;
mod router;
mod sampling;
mod scratch;
mod selector;
mod session;
mod sign_bits;
mod single;
mod speculation;
mod speed;
mod stages;
mod statistics;
mod text;
mod threads;
mod verification;

pub use audit::LayerAudit;
pub use bandwidth::ReadProbe;
pub use engine::{Engine, Wanted};
pub use error::RuntimeError;
pub use experiments::{Experiments, RecordedToken};
pub use generate::{Generation, OneText, Passes, Piece, Ran, Running, Sampled, run_pass};
pub use hybrid::{EXPERT_COPY_BYTES, EXPERT_DISTANCES, LayerTimes, PassTimes};
pub use input::ActivationFormat;
pub use input_magnitudes::{InputMagnitudes, Magnitudes};
pub use load::Options;
pub use memory_use::MemoryUse;
pub use observer::Observers;
pub use open::{DeviceChoice, Execution, warn_about_threads};
pub use powerinfer_pool::RecordedJob;
pub use sampling::{Sampler, SamplingSettings};
pub use session::Session;
pub use single::SingleSession;
pub use speculation::{Speculation, SpeculationCounts};
pub use speed::{DecodeOverheads, SpeedTest, WEIGHT_BYTE};
pub use stages::{Reads, Stage, StageMark, StageTimes, StageTotal};
pub use statistics::Statistics;
pub use text::{Constraint, Logits, StopConditions, StopReason, Text, Token};
pub use threads::Threads;
pub use verification::{DRIFT_WINDOW, Drift, DriftAlarm, Verification};
