//! `powerinfer tokenize`: text to token ids and back, byte for byte.

use std::io::Read;

use anyhow::{Context, Result, bail};
use powerinfer_artifact::json;
use powerinfer_text::{SpecialText, SpecialTokens};

use crate::{hint::Advised, model_argument, output::Output, progress::while_waiting};

/// Model and text.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  printf 'def f(x):' | powerinfer tokenize demo\n  echo '[0, 5, 9]' | powerinfer tokenize demo --decode"
)]
pub(crate) struct TokenizeArguments {
    /// Model: a folder (its tokenizer files are enough), a GGUF file, `org/name` on the hub, or `demo`
    #[arg(default_value = model_argument::DEMO)]
    model: String,
    /// Read a JSON array of ids and write text
    #[arg(long)]
    decode: bool,
    /// Do not add the tokenizer's special tokens
    #[arg(long, conflicts_with = "decode")]
    no_special: bool,
    /// Print special tokens too
    #[arg(long, requires = "decode")]
    keep_special: bool,
}

pub(crate) fn run(arguments: &TokenizeArguments, output: Output) -> Result<()> {
    let tokenizer =
        powerinfer_pipeline::tokenizer(&model_argument::files(&arguments.model, output)?)?;
    output.say_if_typed(if arguments.decode {
        "a JSON array of ids"
    } else {
        "text"
    });
    let mut input = Vec::new();
    while_waiting(|| std::io::stdin().read_to_end(&mut input)).context("cannot read stdin")?;
    let Ok(text) = String::from_utf8(input) else {
        bail!(Advised::new("stdin is not UTF-8 text", "convert it first"));
    };
    if arguments.decode {
        let ids: Vec<u32> = json::from_slice(text.as_bytes())
            .context("stdin is not a JSON array of token ids, such as `[1, 2, 3]`")?;
        let special = if arguments.keep_special {
            SpecialText::Keep
        } else {
            SpecialText::Skip
        };
        crate::output::print_data(tokenizer.decode(&ids, special)?)
    } else {
        let special = if arguments.no_special {
            SpecialTokens::Omit
        } else {
            SpecialTokens::Add
        };
        let ids = tokenizer.encode(&text, special)?;
        crate::output::print_data(format!("{}\n", serde_json::to_string(&ids)?))
    }
}
