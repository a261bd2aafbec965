//! End-to-end tests of the command line.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod bad_input;
mod bench;
mod cache_keys;
mod calibration_files;
mod changed_files;
mod cluster;
mod command_line;
#[path = "../support/command_lines.rs"]
mod command_lines;
#[cfg(target_os = "linux")]
mod drivers;
#[path = "../support/edit_checkpoint.rs"]
mod edit_checkpoint;
mod evaluation;
mod examples;
mod experts;
mod export;
mod families;
mod fidelity;
mod first_hour;
mod foreign_files;
mod gguf;
#[path = "../support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;
mod goldens;
mod hardware;
mod hub;
#[path = "../support/hub_server.rs"]
mod hub_server;
mod import;
mod input_sparsity;
#[cfg(target_os = "linux")]
mod memory;
mod model_files;
mod not_models;
mod older_tokenizers;
mod pipeline;
mod place_again;
mod place_interrupted;
mod placement;
mod policies;
mod profiles;
mod prompt_cache;
mod readme;
mod real;
mod sandbox;
mod serve;
mod settings;
mod shards;
mod simulate;
#[path = "../support/split_gguf.rs"]
mod split_gguf;
mod sweep;
mod synth;
#[path = "../support/torch.rs"]
mod torch;
