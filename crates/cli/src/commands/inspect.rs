//! `powerinfer inspect`: what an artifact is, how it was made, and whether it is intact.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{
    ArtifactError, ByteSize, Header, TensorFile,
    certificate::{self, Certificate},
    counted,
    document::Document,
    plan::Plan,
    predictor_file::{self, PredictorFile},
    prompt_cache::{self, PromptCacheFile},
    shell_quoted,
    write::write_file,
};
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_export::GpuIndex;
use powerinfer_import::open_checkpoint;
use powerinfer_kernels::Isa;
use powerinfer_model::{Checkpoint, Files, ModelConfig, Weight, gguf_model};
use powerinfer_profile::Profile;
use powerinfer_report::profile_page;
use serde_json::{Value, json};

use crate::{
    certificate_table,
    hint::Advised,
    model_argument,
    model_name::holds_model,
    output::{Output, percent, print, print_json},
    page_file::refuse_inside,
    plan_table, predictor_table, profile_stage,
};

/// Files to inspect.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  powerinfer inspect demo.powerinfer/bundle --verify")]
pub(crate) struct InspectArguments {
    /// Profile, predictors, bundle, plan, prompt cache or model (`org/name` on the hub too); or a folder with several of
    /// them, or the name of a model prepared here
    path: PathBuf,
    /// Write a self-contained page of a profile
    #[arg(long, value_name = "FILE", value_parser = crate::values::new_file)]
    html: Option<PathBuf>,
    /// Recompute every digest
    #[arg(long)]
    verify: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Points of a cumulative curve of a profile's page.
const CURVE_POINTS: usize = 100;

/// Actions beyond reading.
#[derive(Clone, Copy)]
struct Asked {
    /// Recompute digests.
    verify: bool,
    /// Describe single layers and files, inputs and settings.
    details: bool,
}

/// A description of a file, for people and for programs.
struct Report {
    text: String,
    json: Value,
    /// Whether there was something to verify it by.
    has_digests: bool,
    /// Whether `--verbose` describes more.
    has_details: bool,
}

pub(crate) fn run(arguments: &InspectArguments, output: Output) -> Result<()> {
    if let Some(page) = &arguments.html {
        draw(&model_argument::artifact(&arguments.path)?, page, output)?;
        if !(arguments.json || arguments.verify || output.verbose) {
            return Ok(());
        }
    }
    let asked = Asked {
        verify: arguments.verify,
        details: output.verbose,
    };
    let report = match model_argument::model_elsewhere(&arguments.path) {
        Some(name) => match model_argument::existing_work_folder(name) {
            Some(folder) => {
                let bundle = folder.join("bundle");
                if Bundle::is_bundle(&bundle) {
                    let bundle = Bundle::open(&bundle, IntegrityCheck::Quick)?;
                    model_argument::check_origin(name, &bundle)?;
                } else {
                    output.say(format!(
                        "there is no bundle yet; {} makes one",
                        model_argument::prepare_command(name)
                    ));
                }
                inspect(&folder, asked)?
            }
            None => {
                let checkpoint = model_argument::open_checkpoint(name, output)?;
                output.say(format!(
                    "this model is not prepared; {} prepares it",
                    model_argument::prepare_command(name)
                ));
                model(&checkpoint, asked)?
            }
        },
        None => {
            let path = model_argument::artifact(&arguments.path)?;
            let work = model_argument::existing_work_folder(&path.to_string_lossy());
            if let Some(work) = work.filter(|work| *work != path && holds_model(&path)) {
                output.say(format!(
                    "this is the source model; `powerinfer inspect {}` shows the prepared model of the same name",
                    shell_quoted(&work.to_string_lossy())
                ));
            }
            inspect(&path, asked)?
        }
    };
    if arguments.json {
        return print_json(&report.json);
    }
    print(report.text)?;
    if report.has_details && !output.verbose {
        output.say("`-v` prints layers, files, inputs and settings");
    }
    if arguments.verify {
        output.say(if report.has_digests { "every digest is right" } else { "there are no digests to check: a file has them in the manifest of the folder it belongs to" });
    }
    Ok(())
}

/// Draws the profile at `path`, or in the work folder there.
fn draw(path: &Path, page: &Path, output: Output) -> Result<()> {
    let inside = path.join("profile");
    let folder = if inside.is_dir() { &inside } else { path };
    let profile = Profile::open(folder)?;
    refuse_inside(Some(page), folder)?;
    let curves = profile.cumulative_curves(CURVE_POINTS);
    let (frequencies, hit_rates) = (profile.expert_frequencies(), profile.expert_hit_rates());
    let html = profile_page(&profile.json(), &curves, &frequencies, &hit_rates)?;
    write_file(page, html.as_bytes())?;
    output.say(format!("drawn in `{}`", page.display()));
    Ok(())
}

/// Finds out what `path` is.
fn inspect(path: &Path, asked: Asked) -> Result<Report> {
    let inside = |name: &str| path.join(name).exists();
    if path.is_file() {
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("safetensors") => tensors(path, asked),
            Some("json") => document(path, asked),
            Some("gpuidx") => gpu_index(path),
            ending
                if ending == Some("gguf")
                    || begins_with(path, 0, b"GGUF")
                    || begins_with(path, 0, b"PWRI") =>
            {
                model(&open_checkpoint(Files::open(path)?)?, asked)
            }
            _ if begins_with(path, 8, b"{") => tensors(path, asked),
            _ => bail!(Advised::new(
                format!("`{}` is not a powerinfer artifact", path.display()),
                "known are profile, predictors, bundle, plan.json, prompt caches, models and `.gpuidx` files"
            )),
        }
    } else if inside("manifest.json") {
        bundle(path, asked)
    } else if inside("profile.json") {
        profile(path, asked)
    } else if inside(predictor_file::FILE) {
        predictors(&path.join(predictor_file::FILE), asked)
    } else if inside("config.json") || gguf_model(path)?.is_some() {
        model(&open_checkpoint(Files::open(path)?)?, asked)
    } else {
        work_folder(path, asked)
    }
}

/// A folder with profile, predictors and bundle in it.
fn work_folder(path: &Path, asked: Asked) -> Result<Report> {
    let mut text = String::new();
    let mut json = serde_json::Map::new();
    for name in ["profile", "predictors", "bundle"] {
        if path.join(name).is_dir() {
            let report = inspect(&path.join(name), asked)?;
            text.push_str(&format!("{name}\n{}\n", report.text));
            json.insert(name.to_owned(), report.json);
        }
    }
    if json.is_empty() {
        bail!(Advised::new(
            format!(
                "there is nothing made by powerinfer in `{}`",
                path.display()
            ),
            "prepare a model with `powerinfer prepare MODEL`"
        ));
    }
    Ok(Report {
        has_digests: true,
        has_details: true,
        text: text.trim_end().to_owned() + "\n",
        json: json.into(),
    })
}

/// The lines that every artifact has.
fn describe(header: &Header, asked: Asked) -> String {
    let mut text = format!(
        "  {} version {}, by {}\n  model        {}\n  fingerprint  {}\n",
        header.format, header.version, header.tool, header.model.name, header.model.fingerprint
    );
    if !asked.details {
        return text;
    }
    for (name, digest) in &header.inputs {
        text.push_str(&format!("  {name:<11}  {digest}\n"));
    }
    let settings: Vec<String> = header
        .settings
        .iter()
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    text.push_str(&format!(
        "  settings     seed {}{}\n",
        header.seed,
        settings
            .iter()
            .fold(String::new(), |all, one| all + ", " + one)
    ));
    text
}

fn profile(path: &Path, asked: Asked) -> Result<Report> {
    let profile = Profile::open(path)?;
    if asked.verify {
        profile.verify()?;
    }
    let body = profile.document();
    let mut text = format!(
        "{}  tokens       {}, {} of them held out\n  neurons      {} in each of {}\n  zeros        {}\n",
        describe(profile.header(), asked),
        body.tokens,
        body.held_out_tokens,
        body.ffn_size,
        counted(body.layers.len(), "layer"),
        profile_stage::zeros(body),
    );
    if asked.details {
        text += &profile_stage::report(body);
    }
    Ok(Report {
        has_digests: true,
        has_details: true,
        text,
        json: json!({ "header": profile.header(), "profile": body }),
    })
}

fn predictors(path: &Path, asked: Asked) -> Result<Report> {
    let file = PredictorFile::open_file(path)?;
    let mut text = describe(file.header(), asked) + &predictor_table::summary(file.layers());
    if asked.details {
        text += &predictor_table::tables(&file, Isa::detect()?);
    }
    Ok(Report {
        has_digests: false,
        has_details: true,
        text,
        json: json!({ "header": file.header(), "layers": file.layers() }),
    })
}

/// Where the original PowerInfer computes each neuron.
fn gpu_index(path: &Path) -> Result<Report> {
    let index = GpuIndex::read(path)?;
    let mut text = format!(
        "  neurons on the GPU for the original PowerInfer, {}\n",
        ByteSize(index.capacity)
    );
    for (layer, hot) in index.hot.iter().enumerate() {
        text += &format!("  layer {layer:<6} {} of {}\n", hot.len(), index.neurons);
    }
    let hot: Vec<usize> = index.hot.iter().map(Vec::len).collect();
    Ok(Report {
        has_digests: false,
        has_details: false,
        text,
        json: json!({ "neurons": index.neurons, "hot_counts": hot, "bytes": index.capacity }),
    })
}

fn bundle(path: &Path, asked: Asked) -> Result<Report> {
    let check = if asked.verify {
        IntegrityCheck::Full
    } else {
        IntegrityCheck::Quick
    };
    let bundle = Bundle::open(path, check)?;
    let manifest = &bundle.manifest_document().body;
    let plan = bundle.plan();
    let (shape, _) = shape(bundle.config(), "");
    let mut text = format!(
        "{}{shape}  weights      {}\n  plan         {} of {} neurons on the GPU, {} on the GPU, {} on the CPU, context {}, KV cache in {}, prompts in passes of {} tokens\n",
        describe(bundle.header(), asked),
        manifest.quant,
        plan.totals.hot_count,
        plan.totals.neuron_count,
        ByteSize(plan.totals.gpu_bytes),
        ByteSize(plan.totals.cpu_bytes),
        plan.budget.context_tokens,
        plan.budget.kv_cache,
        plan.prompt_batch,
    );
    if let Some(inputs) = plan_table::inputs(plan) {
        text.push_str(&format!("  inputs       {inputs}\n"));
    }
    text.push_str(&format!(
        "  files        {}, {}\n",
        manifest.files.len(),
        ByteSize(bundle.bytes_on_disk())
    ));
    if asked.details {
        for (name, digest) in &manifest.files {
            let bytes = std::fs::metadata(path.join(name)).map_or(0, |found| found.len());
            let bytes = ByteSize(bytes).to_string();
            text.push_str(&format!("  {name:<28} {bytes:>10}  {digest}\n"));
        }
    }
    let certificate = bundle.certificate();
    if asked.verify && certificate.is_some() && !bundle.certificate_matches() {
        bail!(Advised::new(
            format!(
                "the certificate in `{}` is for another plan or another text",
                path.display()
            ),
            "run `powerinfer place MODEL` again"
        ));
    }
    if let Some(certificate) = certificate {
        text.push_str(&certificate_table::describe(certificate));
        if asked.details {
            text.push_str(&certificate_table::layers(certificate));
        }
        if asked.verify {
            text.push_str("the certificate is of these weights, this plan and this text; `powerinfer eval fidelity --certificate` measures it again\n");
        }
    } else {
        text.push_str(match certificate_table::state(&bundle) {
            certificate_table::INCOMPLETE => {
                "the certificate is incomplete; preparing or placing the model again completes it\n"
            }
            _ => "there is no certificate\n",
        });
    }
    let predictors = bundle.predictors().map(PredictorFile::layers);
    Ok(Report {
        has_digests: true,
        has_details: true,
        text,
        json: json!({ "manifest": bundle.manifest_document(), "plan": plan, "predictors": predictors, "certificate": certificate }),
    })
}

fn model(checkpoint: &Checkpoint, asked: Asked) -> Result<Report> {
    let config = checkpoint.config();
    if asked.verify {
        for weight in config.weights() {
            checkpoint.read(weight)?; // every value is there and finite
        }
    }
    let identity = checkpoint.identity();
    let assumption = if checkpoint.assumes_activation() {
        " (assumed, the file states none)"
    } else {
        ""
    };
    let (shape, parameters) = shape(config, assumption);
    Ok(Report {
        has_digests: true,
        has_details: false,
        text: format!(
            "  model        {}\n  fingerprint  {}\n{shape}",
            identity.name, identity.fingerprint
        ),
        json: json!({ "model": identity, "config": config, "parameters": parameters }),
    })
}

/// Lines about parameters, layers and activation, with `assumption` after the activation; and the number of parameters.
fn shape(config: &ModelConfig, assumption: &str) -> (String, usize) {
    let count = |weight| config.shape(weight).iter().product::<usize>();
    let weights = config.weights();
    let parameters: usize = weights.iter().copied().map(count).sum();
    let ffn = weights.into_iter().filter(|weight| {
        use powerinfer_model::LayerWeight::{Down, Gate, Up};
        matches!(weight, Weight::Layer(_, Gate | Up | Down))
    });
    let ffn: usize = ffn.map(count).sum();
    let experts = config.experts.as_ref().map_or_else(String::new, |experts| {
        let shared = match experts.shared_size {
            0 => String::new(),
            neurons => format!(" and a shared one of {neurons}"),
        };
        format!(
            " in {} of {}{shared}, {} per token",
            counted(experts.count, "expert"),
            experts.size,
            experts.per_token
        )
    });
    let text = format!(
        "  parameters   {:.1} M, {} of them in FFNs\n  layers       {} of {} hidden, {} neurons{experts}, {} on {}\n  activation   {}{assumption}, vocabulary {}, context {}\n",
        parameters as f64 / 1e6,
        percent(ffn as f64 / parameters as f64),
        config.layer_count,
        config.hidden_size,
        config.ffn_size,
        counted(config.head_count, "head"),
        counted(config.kv_head_count, "key and value head"),
        config.activation.name(),
        config.vocabulary_size,
        config.context_length,
    );
    (text, parameters)
}

/// A safetensors file: predictors, or anything with tensors.
fn tensors(path: &Path, asked: Asked) -> Result<Report> {
    if let Ok(report) = predictors(path, asked) {
        return Ok(report);
    }
    let file = TensorFile::open(path)?;
    let header = file.header(prompt_cache::FORMAT, prompt_cache::VERSION);
    if !matches!(header, Err(ArtifactError::WrongFormat { .. })) {
        return prompt_cache(path, asked);
    }
    let mut text = String::new();
    let mut entries = Vec::new();
    for name in file.names() {
        let Some(view) = file.find(&name) else {
            continue;
        };
        text.push_str(&format!("  {name:<40} {:?} {:?}\n", view.dtype, view.shape));
        entries.push(
            json!({ "name": name, "dtype": format!("{:?}", view.dtype), "shape": view.shape }),
        );
    }
    Ok(Report {
        has_digests: false,
        has_details: false,
        text,
        json: json!({ "tensors": entries }),
    })
}

/// A prompt cache, whose content is verified by opening it.
fn prompt_cache(path: &Path, asked: Asked) -> Result<Report> {
    let file = PromptCacheFile::open(path)?;
    let length = std::fs::metadata(path)?.len();
    let text = format!(
        "{}  tokens       {}, with keys and values in {}\n  size         {}\n",
        describe(file.header(), asked),
        file.tokens().len(),
        file.format(),
        ByteSize(length),
    );
    Ok(Report {
        has_digests: true,
        has_details: true,
        text,
        json: json!({ "header": file.header(), "tokens": file.tokens(), "bytes": length }),
    })
}

/// Whether the file has `bytes` at the offset `at`.
fn begins_with(path: &Path, at: usize, bytes: &[u8]) -> bool {
    let mut start = vec![0; at + bytes.len()];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && start[at..] == *bytes
}

/// A JSON artifact.
fn document(path: &Path, asked: Asked) -> Result<Report> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let folder = path
        .parent()
        .filter(|folder| *folder != Path::new(""))
        .unwrap_or(Path::new("."));
    match name {
        "manifest.json" => bundle(folder, asked),
        "profile.json" => profile(folder, asked),
        certificate::FILE => {
            let (format, version) = (certificate::FORMAT, certificate::VERSION);
            let document = Document::<Certificate>::read(path, format, version)?;
            let certificate = &document.body;
            let mut text =
                describe(&document.header, asked) + &certificate_table::describe(certificate);
            if asked.details {
                text += &certificate_table::layers(certificate);
            }
            Ok(Report {
                has_digests: false,
                has_details: true,
                text,
                json: json!(document),
            })
        }
        _ => {
            let plan = Document::<Plan>::read(path, "powerinfer-plan", 3)?;
            plan.body
                .validate()
                .with_context(|| format!("`{}` cannot be used", path.display()))?;
            let body = if asked.details {
                plan_table::describe(&plan.body, None)
            } else {
                plan_table::summary(&plan.body, None)
            };
            Ok(Report {
                has_digests: false,
                has_details: true,
                text: describe(&plan.header, asked) + &body,
                json: json!(plan),
            })
        }
    }
}
