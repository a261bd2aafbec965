//! The command line as a user sees it.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod command_line;
mod families;
mod gguf;
#[path = "../support/golden.rs"]
mod golden;
mod goldens;
mod hub;
#[path = "../support/hub_server.rs"]
mod hub_server;
mod pipeline;
mod readme;
mod sandbox;
