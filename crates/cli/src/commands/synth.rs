//! `powerinfer synth`: a checkpoint of a real shape with random weights.

use std::path::PathBuf;

use anyhow::Result;
use powerinfer_artifact::{ByteSize, counted, tensor_file::Dtype};
use powerinfer_synth::{Settings, Shape, synthesise};
use serde_json::json;

use crate::{
    output::{Output, percent, print_json},
    progress::Bar,
};

/// Shape, statistics and target of a checkpoint.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Shapes: llama-1b, llama-7b, llama-13b, llama-30b, llama-70b, llama3-8b, llama3-70b, mistral-7b, bamboo-7b, opt-1.3b, opt-6.7b, opt-13b, opt-30b, opt-66b, opt-175b, falcon-7b, falcon-40b; with experts: mixtral-8x7b, qwen3-30b-a3b, olmoe-1b-7b, smallthinker-21b, deepseek-v2-lite; or a folder with a `config.json`.\n\nThe weights are random: text that comes out is noise. Speed and memory are those of a real model of this shape and sparsity.\n\nExample:\n  powerinfer synth --like llama-7b --layers 4 --out ./llama-7b-4"
)]
pub(crate) struct SynthArguments {
    /// Shape: a name, or a folder with a `config.json`
    #[arg(long, value_name = "SHAPE")]
    like: String,
    /// Layers [default: as many as the shape has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    layers: Option<u32>,
    /// Share of FFN activations that are exactly zero
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    sparsity: f64,
    /// Share of a layer's neurons that carry 80% of its activations
    #[arg(long, value_name = "SHARE", default_value_t = 0.26)]
    skew: f64,
    /// Make gate matrices that predictors of this rank predict exactly, and write the predictors too
    #[arg(long, value_name = "R")]
    predictor_rank: Option<usize>,
    /// Type of the weights
    #[arg(long, value_enum, default_value_t = WeightType::Bf16)]
    dtype: WeightType,
    /// Folder to write the checkpoint to, created if missing
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Seed of every random choice
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Types that checkpoints store weights in.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum WeightType {
    /// 32 bits
    F32,
    /// 16 bits, of which 5 are for the exponent
    F16,
    /// 16 bits, of which 8 are for the exponent
    Bf16,
}

pub(crate) fn run(arguments: &SynthArguments, output: Output) -> Result<()> {
    let mut shape = Shape::find(&arguments.like)?;
    if let Some(layers) = arguments.layers {
        shape = shape.with_layers(layers as usize);
    }
    let settings = Settings {
        sparsity: arguments.sparsity,
        skew: arguments.skew,
        dtype: match arguments.dtype {
            WeightType::F32 => Dtype::F32,
            WeightType::F16 => Dtype::F16,
            WeightType::Bf16 => Dtype::BF16,
        },
        predictor_rank: arguments.predictor_rank,
        seed: arguments.seed,
    };
    let checkpoint = synthesise(&shape, settings, &arguments.out, &Bar::new(output))?;
    let config = checkpoint.config();
    let numbers: usize = config
        .stored_tensors()
        .iter()
        .map(|tensor| tensor.shape.iter().product::<usize>())
        .sum();
    let bytes = (numbers * settings.dtype.bitsize() / 8) as u64;
    let predictors = arguments.out.join("predictors");
    if arguments.json {
        return print_json(&json!({
            "model": checkpoint.identity(),
            "out": arguments.out,
            "predictors": settings.predictor_rank.map(|_| &predictors),
            "parameters": numbers,
            "bytes": bytes,
        }));
    }
    // If the activation is never zero, all neurons of a selected expert are active.
    let sparsity = if config.activation.has_exact_zeros() {
        format!(
            "{} zeros, 80% of activations from {} of the neurons",
            percent(settings.sparsity),
            percent(settings.skew)
        )
    } else {
        format!(
            "80% of selections from about {} of the experts",
            percent(settings.skew)
        )
    };
    output.say(format!(
        "made a stand-in for {} with {}, {:.2} billion random weights in {}, {sparsity}: `{}`",
        shape.name,
        counted(config.layer_count, "layer"),
        numbers as f64 / 1e9,
        ByteSize(bytes),
        arguments.out.display(),
    ));
    if settings.predictor_rank.is_some() {
        output.say(format!(
            "its predictors are in `{}`; give that to `powerinfer place` as `--predictors`",
            predictors.display()
        ));
    }
    Ok(())
}
