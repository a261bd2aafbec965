//! Prints tasks that the demo was not trained on, solutions and all: text to judge a model by.
//!
//! `cargo run -p powerinfer-datasets --example tasks -- 200`

use std::io::{Result, Write, stdout};

use powerinfer_datasets::minipython::{Split, tasks};

fn main() -> Result<()> {
    let count = std::env::args().nth(1).and_then(|count| count.parse().ok());
    for task in tasks(Split::HeldOut, 1).take(count.unwrap_or(100)) {
        writeln!(stdout(), "{}", task.text())?;
    }
    Ok(())
}
