//! `powerinfer export`: a model for other programs.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use powerinfer_artifact::{ByteSize, counted};
use powerinfer_export::{
    ExpertLayers, Exported, GgufOptions, Source, index_path, to_gguf, to_original,
};
use powerinfer_tensor::Format;

use crate::{
    hint::Advised,
    model_argument,
    output::{Output, percent},
    page_file::{begins_with, is_inside},
    progress::Bar,
    values::{FORMATS, Offered},
};

/// Model, format and file of an export.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer export ./other-model --to gguf other-model.gguf --quant q8_0\n  powerinfer export my-model --to powerinfer ./exported"
)]
pub(crate) struct ExportArguments {
    /// Model (a folder, a GGUF file, `org/name` on the hub, or `demo`), or a bundle, or the name of a model prepared here
    #[arg(value_name = "MODEL|BUNDLE")]
    source: String,
    /// Program to export for
    #[arg(long, value_enum)]
    to: Target,
    /// File to write, or a folder that exists, for a file of the model's name in it
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Format of the matrices: f32, f16, bf16, q8_0, q4_0; for the original PowerInfer f16 or q4_0
    /// [default: f16; q4_0 for the original if the bundle is in it]
    #[arg(
        long,
        value_name = "FORMAT",
        value_parser = Offered(str::parse::<Format>, FORMATS),
        hide_possible_values = true
    )]
    quant: Option<Format>,
    /// Export a model whose activation function the file cannot state: it is as fast, but computes nonsense
    #[arg(long)]
    any_activation: bool,
    /// Leave out the tokenizer: the file takes token ids alone
    #[arg(long)]
    no_tokenizer: bool,
}

/// Programs that exported files are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Target {
    /// llama.cpp, Ollama and others that read GGUF
    Gguf,
    /// The original PowerInfer: a bundle, with its predictors and its placement
    Powerinfer,
    /// llama.cpp: arguments that place experts by whole layers, as close to a bundle's plan as possible
    Ot,
}

pub(crate) fn run(arguments: &ExportArguments, output: Output) -> Result<()> {
    match arguments.to {
        Target::Gguf => gguf(arguments, output),
        Target::Powerinfer => original(arguments, output),
        Target::Ot => experts(arguments, output),
    }
}

fn gguf(arguments: &ExportArguments, output: Output) -> Result<()> {
    let options = GgufOptions {
        quant: arguments.quant.unwrap_or(Format::F16),
        tokenizer: !arguments.no_tokenizer,
        any_activation: arguments.any_activation,
    };
    let bar = Bar::new(output);
    let export = |source: Source<'_>| -> Result<()> {
        let out = out_file(&arguments.out, source, "gguf")?;
        refuse_foreign(&out)?;
        let written = to_gguf(source, options, &out, &bar)?;
        say(&out, options.quant, &written, output);
        Ok(())
    };
    match model_argument::existing_bundle(&arguments.source) {
        Some(_) => {
            let bundle = model_argument::open_bundle(&arguments.source)?;
            export(Source::Bundle(&bundle))
        }
        None => {
            model_argument::check_model_or_bundle(&arguments.source)?;
            let checkpoint = model_argument::open_checkpoint(&arguments.source, output)?;
            export(Source::Checkpoint(&checkpoint))
        }
    }
}

/// Refuses the options that are only for GGUF files.
fn refuse_gguf_options(arguments: &ExportArguments) -> Result<()> {
    let options = [
        ("--any-activation", arguments.any_activation),
        ("--no-tokenizer", arguments.no_tokenizer),
    ];
    match options.into_iter().find(|(_, is_given)| *is_given) {
        Some((option, _)) => bail!("`{option}` applies only to `--to gguf`"),
        None => Ok(()),
    }
}

fn experts(arguments: &ExportArguments, output: Output) -> Result<()> {
    refuse_gguf_options(arguments)?;
    if arguments.quant.is_some() {
        bail!("`--quant` does not apply to `--to ot`, which writes no weights");
    }
    let bundle = model_argument::open_bundle(&arguments.source)?;
    let placed = ExpertLayers::new(&bundle)?;
    let out = out_file(&arguments.out, Source::Bundle(&bundle), "ot.txt")?;
    refuse_unless(&out, &[b"--n-gpu-layers"], "a file of llama.cpp arguments")?;
    placed.write(&bundle, &out)?;
    let plan = bundle.plan();
    let neurons: usize = plan.layers.iter().map(|layer| layer.neuron_count).sum();
    output.say(format!(
        "exported to `{}`: llama.cpp can place the experts of {} of {} on the GPU within the plan's bytes ({} of the neurons; the plan has {} there): the last layers (line 1) or the layers with the most neurons on the GPU in the plan (line 2)",
        out.display(),
        placed.on_gpu.len(),
        counted(placed.layers, "layer"),
        percent(placed.on_gpu.len() as f64 / placed.layers as f64),
        percent(plan.totals.hot_count as f64 / neurons as f64),
    ));
    Ok(())
}

fn original(arguments: &ExportArguments, output: Output) -> Result<()> {
    refuse_gguf_options(arguments)?;
    let bundle = model_argument::open_bundle(&arguments.source)?;
    let out = out_file(&arguments.out, Source::Bundle(&bundle), "powerinfer.gguf")?;
    refuse_foreign(&out)?;
    refuse_foreign(&index_path(&out))?;
    let written = to_original(&bundle, arguments.quant, &out, &Bar::new(output))?;
    say(&out, written.quant, &written.model, output);
    output.say(format!(
        "{} on the GPU: `{}`",
        counted(written.hot_neurons, "neuron"),
        written.index.display()
    ));
    Ok(())
}

/// The file to write: `out`, or the model's name in it if it is a folder.
///
/// # Errors
///
/// The file would be among a bundle's files, or replace the model itself.
fn out_file(out: &Path, source: Source<'_>, ending: &str) -> Result<PathBuf> {
    let out = if out.is_dir() {
        out.join(format!("{}.{ending}", source.name()))
    } else {
        out.to_owned()
    };
    let path = out.display();
    match source {
        Source::Bundle(bundle) if is_inside(&out, bundle.folder()) => {
            bail!(Advised::new(
                format!("`{path}` would be among the bundle's own files"),
                "write it elsewhere"
            ));
        }
        Source::Checkpoint(checkpoint) => {
            let own = checkpoint.files().path("config.json").canonicalize();
            if let (Ok(own), Ok(out)) = (own, out.canonicalize())
                && own == out
            {
                bail!(Advised::new(
                    format!("`{path}` is the model itself"),
                    "name another file"
                ));
            }
        }
        Source::Bundle(_) => {}
    }
    Ok(out)
}

/// Refuses to replace a file that is not a GGUF file.
fn refuse_foreign(file: &Path) -> Result<()> {
    refuse_unless(file, &[b"GGUF", b"PWRI"], "a GGUF file")
}

/// Refuses to replace an existing file that starts with none of `beginnings`; the error says that it is not `kind`.
fn refuse_unless(file: &Path, beginnings: &[&[u8]], kind: &str) -> Result<()> {
    if file.exists()
        && !beginnings
            .iter()
            .any(|beginning| begins_with(file, beginning))
    {
        bail!(Advised::new(
            format!("`{}` exists and is not {kind}", file.display()),
            "remove it, or name another file"
        ));
    }
    Ok(())
}

/// Describes a written file.
fn say(out: &Path, quant: Format, written: &Exported, output: Output) {
    for note in &written.notes {
        output.say(format!("note: {note}"));
    }
    output.say(format!(
        "exported to `{}`: {}, matrices in {quant}, {}",
        out.display(),
        counted(written.tensors, "tensor"),
        ByteSize(written.bytes)
    ));
}
