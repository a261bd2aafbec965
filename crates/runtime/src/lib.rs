//! Executes a bundle: a sparse forward with a KV cache, and sampling.
//!
//! Where a neuron is computed never changes the result beyond summation order; whether it is
//! computed is the policy's choice, made at one place, the FFN.

mod attention;
mod audit;
mod bandwidth;
mod choice;
mod error;
mod experiments;
mod ffn;
mod forward;
mod hybrid;
mod input;
mod input_magnitudes;
mod linear;
mod masks;
mod memory;
mod next_token;
mod norm;
mod open;
mod prediction;
mod prompt_cache;
mod rotary;
mod sampling;
mod sequence;
mod speed;
mod stages;
mod statistics;
mod threads;
mod verification;

pub use audit::LayerAudit;
pub use bandwidth::ReadProbe;
pub use error::RuntimeError;
pub use ffn::PolicyChoice;
pub use forward::{Options, Runtime};
pub use hybrid::{LayerTimes, LayerWeights, ObservedLayer, ObservedToken, SideTimes};
pub use input::ActivationFormat;
pub use input_magnitudes::{InputMagnitudes, Magnitudes};
pub use memory::Held;
pub use next_token::LastLogits;
pub use open::{DeviceChoice, Execution, warn_of_too_many_threads};
pub use sampling::{Sampler, SamplingSettings};
pub use sequence::Sequence;
pub use speed::{BesideMatrices, SpeedTest, WEIGHT_BYTE};
pub use stages::{Lap, Reads, Stage, StageTimes};
pub use statistics::Statistics;
pub use threads::Threads;
pub use verification::{Alarm, Drift, Verification, WINDOW};
