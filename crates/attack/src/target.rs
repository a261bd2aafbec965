//! [`TARGETS`]: what is attacked, with the inputs that are mutated and the reader of each.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Result, ensure};
use powerinfer_artifact::{
    Digest, Header, TensorFile,
    document::{Document, Sealed},
    hardware::{Hardware, NAMES, named},
    predictor_file::PredictorFile,
    progress::Silent,
    prompt_cache::PromptCacheFile,
    tensor_file::CONTENT_SETTING,
    tensor_writer::{TensorSource, write_sealed_tensors},
};
use powerinfer_bundle::{Bundle, IntegrityCheck, Manifest};
use powerinfer_import::open_checkpoint;
use powerinfer_model::{Files, LanguageModel};
use powerinfer_profile::{Profile, ProfileDocument};
use powerinfer_reference::ReferenceModel;
use powerinfer_runtime::{Execution, SingleSession};
use powerinfer_text::{
    GenerationPrompt, Message, MessageTokens, SpecialText, SpecialTokens, Tokenizer,
};

use crate::{contexts, requests};

/// Bytes of a prompt that is encoded.
const MAX_PROMPT_BYTES: usize = 1 << 20;

/// Folders with valid inputs.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The repository's `tests/golden`.
    pub golden: PathBuf,
    /// Artifacts made by `powerinfer`: `bundle`, `profile`, `predictors`, `cache/prompt.safetensors`, and in `contexts` one
    /// bundle that is entirely on a GPU and one that is partly on a GPU.
    pub made: PathBuf,
}

/// How inputs are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Keeping most of their structure.
    Mutation,
    /// By one bit, which must be noticed.
    Flip,
}

/// Folders, each with the name of a file in it.
type Inputs = Vec<(PathBuf, String)>;

/// Makes digests in a folder match one of its files.
type Seal = fn(&Path, &str);

/// Something that reads files.
pub struct Target {
    /// Its name.
    pub name: &'static str,
    pub(crate) change: Change,
    /// Folders, and the file to mutate in each.
    pub(crate) inputs: fn(&Sources) -> io::Result<Inputs>,
    /// File whose digests are made to match most of the mutated ones, if that is another file.
    pub(crate) seal: Option<(Option<&'static str>, Seal)>,
    pub(crate) read: fn(&Path, &str) -> Result<()>,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "safetensors",
        change: Change::Mutation,
        inputs: |sources| {
            let mut inputs = Vec::new();
            for model in ["gptneox-serial", "llama-linear", "phi-qknorm"] {
                inputs.push((sources.model(model), "model.safetensors".to_owned()));
            }
            let sharded = sources.model("llama-sharded");
            inputs.extend(listed(&sharded, |name| name.starts_with("model"))?);
            Ok(inputs)
        },
        seal: None,
        read: |folder, _| read_weights(folder),
    },
    Target {
        name: "gguf",
        change: Change::Mutation,
        inputs: |sources| {
            let folder = sources.golden.join("gguf");
            let is_small = |name: &str| {
                ["qwen2-bias-tied.f16.gguf", "splitting-llama3.gguf"].contains(&name)
                    || name.starts_with("quants") && name.ends_with(".gguf")
                    || name.starts_with("tiny") && name.ends_with(".gguf")
                    || name == "llama-sp.q4_0.gguf"
            };
            listed(&folder, is_small)
        },
        seal: None,
        read: |folder, file| {
            let path = folder.join(file);
            let weights = read_weights(&path);
            let files = Files::open(&path)?;
            let read = |name: &str| {
                let bytes = files.read(name).ok().flatten()?;
                Some(bytes.to_vec().into())
            };
            tokenize(&Tokenizer::from_files(read)?)?;
            weights
        },
    },
    Target {
        name: "pickle",
        change: Change::Mutation,
        inputs: |sources| {
            let folder = sources.model("llama-bin-only");
            Ok(vec![(folder, "pytorch_model.bin".to_owned())])
        },
        seal: None,
        read: |folder, _| read_weights(folder),
    },
    Target {
        name: "config",
        change: Change::Mutation,
        inputs: |sources| {
            let mut inputs = Vec::new();
            for model in folders(&sources.golden.join("models"))? {
                inputs.extend(listed(&model, |name| {
                    ["config.json", "generation_config.json"].contains(&name)
                })?);
            }
            Ok(inputs)
        },
        seal: None,
        read: |folder, _| {
            let checkpoint = open_checkpoint(Files::open(folder)?)?;
            let mut model = ReferenceModel::load(&checkpoint)?;
            let logits = model.forward(&[1, 2, 3])?;
            assert!(
                logits.iter().all(|logit| logit.is_finite()),
                "logits are not finite"
            );
            Ok(())
        },
    },
    Target {
        name: "tokenizer settings",
        change: Change::Mutation,
        inputs: |sources| {
            let mut inputs = Vec::new();
            for folder in folders(&sources.golden.join("tokenizers"))? {
                inputs.extend(listed(&folder, |name| Tokenizer::FILES.contains(&name))?);
            }
            Ok(inputs)
        },
        seal: None,
        read: |folder, _| tokenize(&Tokenizer::from_directory(folder)?),
    },
    Target {
        name: "template",
        change: Change::Mutation,
        inputs: templates,
        seal: None,
        read: |folder, _| {
            let tokenizer = Tokenizer::from_directory(folder)?;
            let message = |role: &str, content: &str| Message {
                role: role.to_owned(),
                content: content.to_owned(),
            };
            let messages = [
                message("user", "Hello"),
                message("assistant", "Good morning."),
                message("user", "é {{ x }}</s><|im_end|>"),
            ];
            if tokenizer.chat_template().is_some() {
                let chat = tokenizer.render_chat(
                    &messages,
                    GenerationPrompt::Add,
                    MessageTokens::Plain,
                )?;
                // Longer texts do not fit a context and are refused before they are encoded.
                if chat.size() <= MAX_PROMPT_BYTES {
                    tokenizer.encode_chat(&chat)?;
                }
            }
            Ok(())
        },
    },
    Target {
        name: "manifest",
        change: Change::Mutation,
        inputs: |sources| listed(&sources.made.join("bundle"), |name| name == "manifest.json"),
        seal: Some((None, seal_bundle)),
        read: |folder, _| run_bundle(folder),
    },
    Target {
        name: "plan",
        change: Change::Mutation,
        inputs: |sources| listed(&sources.made.join("bundle"), |name| name == "plan.json"),
        seal: Some((Some("manifest.json"), seal_bundle)),
        read: |folder, _| run_bundle(folder),
    },
    Target {
        name: "bundle's other files",
        change: Change::Mutation,
        inputs: |sources| {
            listed(&sources.made.join("bundle"), |name| {
                !["manifest.json", "plan.json"].contains(&name)
            })
        },
        seal: Some((Some("manifest.json"), seal_bundle)),
        read: |folder, _| run_bundle(folder),
    },
    Target {
        name: "contexts on a device",
        change: Change::Mutation,
        inputs: |sources| {
            let folder = |name| sources.made.join("contexts").join(name);
            Ok(["whole", "part"]
                .map(|name| (folder(name), "steps".to_owned()))
                .into())
        },
        seal: None,
        read: |folder, file| {
            contexts::run(&folder.join("bundle"), &fs::read(folder.join(file))?);
            Ok(())
        },
    },
    Target {
        name: "predictors",
        change: Change::Mutation,
        inputs: |sources| listed(&sources.made.join("predictors"), |_| true),
        seal: Some((None, seal_tensors)),
        read: |folder, file| {
            let file = PredictorFile::open_file(&folder.join(file))?;
            for layer in 0..file.layers().len() {
                file.find(layer, HIDDEN, NEURONS)?;
                file.signs(layer, HIDDEN, NEURONS)?;
                file.scores(layer, HIDDEN, NEURONS)?;
            }
            Ok(())
        },
    },
    Target {
        name: "profile",
        change: Change::Mutation,
        inputs: |sources| listed(&sources.made.join("profile"), |name| name == "profile.json"),
        seal: Some((None, seal_profile)),
        read: |folder, _| read_profile(folder),
    },
    Target {
        name: "profile's other files",
        change: Change::Mutation,
        inputs: |sources| listed(&sources.made.join("profile"), |name| name != "profile.json"),
        seal: Some((Some("profile.json"), seal_profile)),
        read: |folder, _| read_profile(folder),
    },
    Target {
        name: "prompt cache",
        change: Change::Mutation,
        inputs: |sources| listed(&sources.made.join("cache"), |_| true),
        seal: Some((None, seal_tensors)),
        read: |folder, file| {
            let path = folder.join(file);
            let file = PromptCacheFile::open(&path)?;
            MODEL.with_borrow_mut(|runtime| {
                let runtime = match runtime {
                    Some(runtime) => runtime,
                    None => runtime.insert(requests::open_model(requests::bundle())?),
                };
                let prompt = [file.tokens(), &[1]].concat();
                let SingleSession { engine, session } = &mut *runtime;
                engine.load_prompt_cache(session, &path, &file, &prompt)?;
                runtime.forward_last(&[1])?;
                Ok(())
            })
        },
    },
    Target {
        name: "hardware",
        change: Change::Mutation,
        inputs: |sources| {
            let folder = sources.made.join("hardware");
            fs::create_dir_all(&folder)?;
            for name in NAMES {
                if let Some(hardware) = named(name) {
                    let written = hardware.write(&folder.join(format!("{name}.toml")));
                    written.map_err(io::Error::other)?;
                }
            }
            listed(&folder, |_| true)
        },
        seal: None,
        read: |folder, file| {
            let path = folder.join(file);
            let hardware = Hardware::read(&path)?;
            hardware.write(&path)?;
            assert_eq!(Hardware::read(&path)?, hardware, "written and read again");
            Ok(())
        },
    },
    Target {
        name: "requests",
        change: Change::Mutation,
        inputs: |sources| {
            let folder = sources.made.join("requests");
            requests::write(&folder)?;
            listed(&folder, |_| true)
        },
        seal: None,
        read: |folder, file| requests::send(file, &fs::read(folder.join(file))?),
    },
    Target {
        name: "flipped bits",
        change: Change::Flip,
        inputs: |sources| {
            let mut inputs = Vec::new();
            for folder in ["bundle", "profile", "predictors", "cache"] {
                inputs.extend(listed(&sources.made.join(folder), |_| true)?);
            }
            Ok(inputs)
        },
        seal: None,
        read: |folder, file| {
            let has = |name: &str| folder.join(name).exists();
            match (has("manifest.json"), has("profile.json")) {
                (true, _) => drop(Bundle::open(folder, IntegrityCheck::Full)?),
                (_, true) => drop(Profile::open(folder)?.verify()?),
                _ => {
                    let file = TensorFile::open(&folder.join(file))?;
                    let text = file.text("powerinfer").unwrap_or_default();
                    let mut header = serde_json::from_str(text)?;
                    ensure!(file.check_content(&mut header)?, "no digest");
                }
            }
            Ok(())
        },
    },
];

/// Hidden size and neurons per layer of the model that artifacts are made of.
const HIDDEN: usize = 64;
const NEURONS: usize = 172;

thread_local! {
    static MODEL: RefCell<Option<SingleSession>> = const { RefCell::new(None) };
}

impl Sources {
    fn model(&self, name: &str) -> PathBuf {
        self.golden.join("models").join(name)
    }
}

/// The target called `name`.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Folders in `folder`, in order.
fn folders(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries: io::Result<Vec<_>> = fs::read_dir(folder)?.collect();
    let paths = entries?.into_iter().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.is_dir()).collect();
    paths.sort();
    Ok(paths)
}

/// `folder` with each of its files, also in folders within, whose name `is_input`.
fn listed(folder: &Path, is_input: impl Fn(&str) -> bool) -> io::Result<Inputs> {
    let mut files = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(inner) = open.pop() {
        for entry in fs::read_dir(inner)? {
            let path = entry?.path();
            let name = path.strip_prefix(folder).ok().and_then(Path::to_str);
            match name {
                _ if path.is_dir() => open.push(path),
                Some(name) if is_input(name) => files.push(name.to_owned()),
                _ => {}
            }
        }
    }
    files.sort();
    Ok(files
        .into_iter()
        .map(|file| (folder.to_owned(), file))
        .collect())
}

/// Folders with a chat template and a tokenizer of one token.
fn templates(sources: &Sources) -> io::Result<Inputs> {
    let mut inputs = Vec::new();
    for folder in folders(&sources.golden.join("tokenizers"))? {
        let tokenizer = Tokenizer::from_directory(&folder).map_err(io::Error::other)?;
        let Some(template) = tokenizer.chat_template() else {
            continue;
        };
        let name = folder.file_name().unwrap_or_default();
        let made = sources.made.join("templates").join(name);
        fs::create_dir_all(&made)?;
        let model = r#"{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;
        fs::write(made.join("tokenizer.json"), model)?;
        fs::write(made.join("chat_template.jinja"), template.source())?;
        inputs.push((made, "chat_template.jinja".to_owned()));
    }
    Ok(inputs)
}

fn read_weights(path: &Path) -> Result<()> {
    let checkpoint = open_checkpoint(Files::open(path)?)?;
    for weight in checkpoint.config().weights() {
        checkpoint.read(weight)?;
    }
    Ok(())
}

fn tokenize(tokenizer: &Tokenizer) -> Result<()> {
    let ids = tokenizer.encode("Hello, wörld!  \u{1f980} 123\n", SpecialTokens::Add)?;
    tokenizer.decode(&ids, SpecialText::Keep)?;
    let mut stream = tokenizer.decode_stream(SpecialText::Skip);
    for id in ids {
        stream.push(id)?;
    }
    Ok(())
}

fn read_profile(folder: &Path) -> Result<()> {
    let profile = Profile::open(folder)?;
    profile.reserved()?;
    for layer in 0..profile.activities().len() {
        // A profile may have no traces.
        if let Ok(traces) = profile.traces(layer) {
            let _ = traces.held_out.first_not_finite();
        }
    }
    profile.cumulative_curves(10);
    profile.verify()?;
    Ok(())
}

fn run_bundle(folder: &Path) -> Result<()> {
    let bundle = Bundle::open(folder, IntegrityCheck::Full)?;
    let _ = (bundle.certificate_matches(), bundle.placement_inputs());
    let tokenizer = Tokenizer::from_directory(folder).map(|tokenizer| tokenize(&tokenizer));
    let mut runtime = SingleSession::open(bundle, None, &Execution::on_cpu(1), &Silent)?;
    runtime.forward_last(&[1, 2, 3])?;
    runtime.forward_last(&[4])?;
    tokenizer?
}

fn seal_bundle(folder: &Path, changed: &str) {
    let path = folder.join("manifest.json");
    seal_document::<Manifest>(&path, folder, changed, |manifest| &mut manifest.files);
}

fn seal_profile(folder: &Path, changed: &str) {
    let path = folder.join("profile.json");
    seal_document::<ProfileDocument>(&path, folder, changed, |document| &mut document.files);
}

/// Writes into the document at `path` the digest of the file `changed`, unless that is the document, and its own.
fn seal_document<Body: Sealed>(
    path: &Path,
    folder: &Path,
    changed: &str,
    files: impl Fn(&mut Body) -> &mut BTreeMap<String, Digest>,
) {
    let parsed = fs::read(path).map(|bytes| serde_json::from_slice::<Document<Body>>(&bytes));
    let Ok(Ok(mut document)) = parsed else {
        return;
    };
    let file = folder.join(changed);
    if file != path
        && let Ok(digest) = Digest::of_file(&file)
    {
        files(&mut document.body).insert(changed.to_owned(), digest);
    }
    let _ = fs::write(path, document.sealed().to_bytes());
}

fn seal_tensors(folder: &Path, changed: &str) {
    let path = folder.join(changed);
    let Ok(file) = TensorFile::open(&path) else {
        return;
    };
    let text = file.text("powerinfer").unwrap_or_default();
    let Ok(mut header) = serde_json::from_str::<Header>(text) else {
        return;
    };
    header.settings.remove(CONTENT_SETTING);
    let names = file.names();
    let tensors: BTreeMap<String, TensorSource<'_>> = names
        .into_iter()
        .filter_map(|name| {
            let view = file.find(&name)?;
            let source = TensorSource {
                dtype: view.dtype,
                shape: view.shape.to_vec(),
                bytes: view.bytes.into(),
            };
            Some((name, source))
        })
        .collect();
    let _ = write_sealed_tensors(&path, &header, &tensors);
}
