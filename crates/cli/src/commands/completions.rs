//! `powerinfer completions`: shell completions.

use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;

/// Which shell.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  powerinfer completions bash > /etc/bash_completion.d/powerinfer"
)]
pub(crate) struct CompletionsArguments {
    /// The shell to complete for
    shell: Shell,
}

pub(crate) fn run<Arguments: CommandFactory>(arguments: &CompletionsArguments) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(
        arguments.shell,
        &mut Arguments::command(),
        "powerinfer",
        &mut script,
    );
    crate::output::print_data(script)
}
