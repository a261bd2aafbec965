//! Exports to GGUF against the checkpoints they are made from, and against files of llama.cpp's converter.
#![expect(clippy::unwrap_used, reason = "a failed test panics")]

#[path = "../../../tests/support/golden.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod golden;

use std::path::{Path, PathBuf};

use golden::{FAMILIES, Golden, MIXTURES, MODELS};
use powerinfer_artifact::{Hint, progress::Silent};
use powerinfer_export::{ExportError, Exported, GgufOptions, Source, to_gguf};
use powerinfer_import::open_checkpoint;
use powerinfer_model::{
    Checkpoint, Files, LanguageModel, ModelError, Weight,
    container::Container,
    gguf::{GgufFile, Value},
};
use powerinfer_reference::ReferenceModel;
use powerinfer_tensor::Format;
use powerinfer_text::{SpecialTokens, Tokenizer};

const OPTIONS: GgufOptions = GgufOptions {
    quant: Format::F16,
    tokenizer: true,
    any_activation: false,
};

/// Models that no GGUF file represents, and what the error names.
const REFUSED: [(&str, &str); 18] = [
    ("falcon-new-relu", "computes GELU, the model ReLU"),
    ("falcon-rw-alibi", "position encoding"),
    ("llama-relu-gqa", "computes SiLU, the model ReLU"),
    ("llama-sharded", "computes SiLU, the model ReLU"),
    ("llama-yarn", "position encoding"),
    ("mistral-swa-relu", "computes SiLU, the model ReLU"),
    (
        "opt-postln-proj",
        "`embedding_size` would be 64 instead of 32",
    ),
    ("phi-qknorm", "`query_key_norm` would be \"none\""),
    ("gemma3", "position encoding"),
    ("minicpm-s", "computes SiLU, the model FATReLU"),
    ("nanochat", "no architecture for the family nanochat"),
    ("phi3-longrope", "position encoding"),
    ("relullama-spm", "computes SiLU, the model ReLU"),
    ("smollm3", "position encoding"),
    ("sparsellama-fatrelu", "computes SiLU, the model FATReLU"),
    (
        "smallthinker",
        "no architecture for the family smallthinker",
    ),
    ("sparselm", "computes SiLU, the model ReLU"),
    ("turbosparse-mixtral", "no architecture for the family"),
];

/// Models whose context ends at their sliding window, which files do not state.
const SHORTENED: [&str; 3] = ["bamboo", "phi3", "starcoder2"];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn open(path: &Path) -> Checkpoint {
    open_checkpoint(Files::open(path).unwrap()).unwrap()
}

fn export(from: &Path, options: GgufOptions, to: &Path) -> Result<Exported, ExportError> {
    let checkpoint = open(from);
    to_gguf(Source::Checkpoint(&checkpoint), options, to, &Silent)
}

fn refusal(name: &str) -> Option<&'static str> {
    let found = REFUSED.iter().find(|(refused, _)| *refused == name);
    found.map(|(_, reason)| *reason)
}

#[test]
fn exported_checkpoints_are_read_back_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    let mut exported = 0;
    let mut goldens = Golden::present(&[&MODELS[..], &FAMILIES, &MIXTURES].concat());
    let present = goldens.len();
    let mut refused = 0;
    for (name, golden) in goldens.drain(..) {
        let name = &name[..];
        let options = GgufOptions {
            quant: Format::F32,
            ..OPTIONS
        };
        let written = export(&golden.folder, options, &out);
        if let Some(reason) = refusal(name) {
            let message = written.unwrap_err().to_string();
            assert!(message.contains(reason), "{name}: {message}");
            refused += 1;
            continue;
        }
        assert_eq!(written.unwrap().bytes, out.metadata().unwrap().len());
        exported += 1;
        let (own, back) = (golden.checkpoint(), open(&out));
        let mut config = back.config().clone();
        config.positions = own.config().positions.clone();
        config.end_of_text = own.config().end_of_text.clone();
        // Weights contain them.
        config.multipliers = own.config().multipliers.clone();
        let is_shortened = SHORTENED.contains(&name);
        if is_shortened {
            config.attention_windows = own.config().attention_windows.clone();
            config.context_length = own.config().context_length;
        }
        if name == "gptneox-serial" {
            // llama.cpp needs the head in this architecture, although it is the embedding.
            let [head, embedding] =
                [Weight::Head, Weight::Embedding].map(|weight| back.read(weight));
            assert_eq!(head.unwrap(), embedding.unwrap());
            config.tied_embeddings = true;
        }
        assert_eq!(&config, own.config(), "{name}");
        for weight in config.weights() {
            assert!(
                back.read(weight).unwrap() == own.read(weight).unwrap(),
                "{name} {weight:?}"
            );
        }
        // Frequencies of RoPE have passed through float32: the logits are those of the field's own implementation.
        let mut model = ReferenceModel::load(&back).unwrap();
        for prompt in &golden::PROMPTS[..if is_shortened { 2 } else { 3 }] {
            model.reset();
            let logits = model
                .forward(&golden.ids(&format!("{prompt}.input_ids")))
                .unwrap();
            golden.assert_logits(&logits, prompt, name);
        }
    }
    assert_eq!(exported + refused, present);
    assert!(exported >= MODELS.len() - 8, "{exported}");
}

#[test]
fn weights_are_rounded_as_the_format_rounds_them() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    let golden = Golden::open("llama-silu");
    for quant in [Format::F16, Format::Bf16, Format::Q8_0, Format::Q4_0] {
        let options = GgufOptions { quant, ..OPTIONS };
        let written = export(&golden.folder, options, &out).unwrap();
        // The rows of down have 172 numbers.
        let notes = written
            .notes
            .iter()
            .filter(|note| note.contains("2 matrices are in f16"));
        assert_eq!(notes.count(), usize::from(quant.is_quantised()));
        let (own, back) = (golden.checkpoint(), open(&out));
        for weight in own.config().weights() {
            let shape = own.config().shape(weight);
            let columns = shape[shape.len() - 1];
            let format = match shape.len() {
                1 => Format::F32,
                _ if quant.is_quantised() && columns % 32 != 0 => Format::F16,
                _ => quant,
            };
            let values = own.read(weight).unwrap();
            let packed = powerinfer_tensor::pack(format, values.len() / columns, columns, &values);
            let mut expected = vec![0.0; values.len()];
            for (row, values) in expected.chunks_exact_mut(columns).enumerate() {
                packed.as_view().dequantise_row(row, values);
            }
            assert!(back.read(weight).unwrap() == expected, "{quant} {weight:?}");
        }
    }
    let q4_k = GgufOptions {
        quant: Format::Q4K,
        ..OPTIONS
    };
    let message = export(&golden.folder, q4_k, &out).unwrap_err().to_string();
    assert!(message.contains("llama-quantize"), "{message}");
}

/// Keys that an export does not repeat, or adds if the converter relies on defaults.
const OTHER_KEYS: [&str; 8] = [
    "general.name",
    "general.size_label",
    "general.file_type",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
];

/// Fails if tensors or metadata of two files differ.
fn assert_same_file(got: &Path, want: &Path, types: &[&str], what: &str) {
    let (got, want) = (GgufFile::open(got).unwrap(), GgufFile::open(want).unwrap());
    assert_eq!(got.names(), want.names(), "{what}");
    for name in want.names() {
        assert_eq!(got.shape(&name), want.shape(&name), "{what} {name}");
        let (kind, bytes) = want.stored(&name).unwrap();
        if name == "rope_freqs.weight" {
            // The converter computes them in float32.
            let pairs = got
                .read(&name)
                .unwrap()
                .into_iter()
                .zip(want.read(&name).unwrap());
            let mut far = pairs.filter(|(got, want)| (got - want).abs() > 1e-6 * want);
            assert_eq!(far.next(), None, "{what}");
        } else if types.contains(&kind) {
            let same = got.stored(&name).unwrap() == (kind, bytes);
            assert!(same, "{what} {name}");
        }
    }
    let is_other = |key: &str| OTHER_KEYS.iter().any(|other| key.ends_with(other));
    for (key, value) in want.entries() {
        match got.value(key) {
            Some(found) => assert!(is_other(key) || found == value, "{what} {key}: {found:?}"),
            None => assert!(is_other(key), "{what} {key}"),
        }
    }
    for (key, value) in got.entries() {
        let is_new = want.value(key).is_none();
        assert!(!is_new || is_other(key), "{what} {key}: {value:?}");
    }
}

#[test]
fn files_of_llama_cpp_are_exported_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    let own = repository().join("tests/golden/gguf");
    let shared = repository().join("../shared/golden/gguf");
    let plain = ["F32", "F16"];
    let mut compared = 0;
    for (file, quant, types) in [
        ("llama-sp.f16", Format::F16, &plain[..]),
        ("llama-bpe.f16", Format::F16, &plain),
        ("qwen2-bias-tied.f16", Format::F16, &plain),
        ("gptneox.f16", Format::F16, &plain),
        ("llama-rope3.f16", Format::F16, &plain),
        ("llama-sp.q8_0", Format::Q8_0, &["F32", "Q8_0"]),
        ("llama-bpe.q8_0", Format::Q8_0, &["F32", "Q8_0"]),
        // Mixtures: tensors in Q6_K are packed again.
        ("llama-sp.q4_0", Format::Q4_0, &["F32", "Q4_0"]),
        ("llama-bpe.q4_0", Format::Q4_0, &["F32", "Q4_0"]),
    ] {
        let file = format!("{file}.gguf");
        let Some(from) = [&own, &shared]
            .map(|folder| folder.join(&file))
            .into_iter()
            .find(|path| path.is_file())
        else {
            println!("skipped: {} is not there", shared.join(&file).display());
            continue;
        };
        export(&from, GgufOptions { quant, ..OPTIONS }, &out).unwrap();
        assert_same_file(&out, &from, types, &file);
        compared += 1;
    }
    assert!(compared >= 5, "{compared}");
}

#[test]
fn checkpoints_are_exported_as_by_llama_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    for name in ["qwen2-bias-tied", "gptneox", "llama-rope3"] {
        export(&Golden::open(name).folder, OPTIONS, &out).unwrap();
        let file = format!("tests/golden/gguf/{name}.f16.gguf");
        assert_same_file(&out, &repository().join(file), &["F32", "F16"], name);
    }
}

/// The tokenizer among the files at `path`.
fn tokenizer(path: &Path) -> Tokenizer {
    let files = Files::open(path).unwrap();
    let read = |name: &str| files.read(name).unwrap().map(|bytes| bytes.to_vec().into());
    Tokenizer::from_files(read).unwrap()
}

/// Makes a checkpoint with the tokenizer in `from` and weights of `like`, resized to its vocabulary.
fn with_tokenizer(from: &Path, folder: &Path) {
    use powerinfer_artifact::tensor_file::Dtype;
    use powerinfer_artifact::tensor_writer::{TensorSource, write_tensors};
    let tokens = tokenizer(from).vocabulary_size();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4, "intermediate_size": 4,
        "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": tokens,
        "max_position_embeddings": 64, "tie_word_embeddings": true,
    });
    let parsed =
        powerinfer_model::ModelConfig::parse(config.to_string().as_bytes(), folder).unwrap();
    let tensors = parsed.stored_tensors().into_iter().map(|tensor| {
        let bytes = vec![0; tensor.shape.iter().product::<usize>() * 4];
        (
            tensor.name,
            TensorSource::owned(Dtype::F32, tensor.shape, bytes),
        )
    });
    std::fs::create_dir_all(folder).unwrap();
    write_tensors(&folder.join("model.safetensors"), None, &tensors.collect()).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    for file in Tokenizer::FILES {
        if from.join(file).exists() {
            std::fs::copy(from.join(file), folder.join(file)).unwrap();
        }
    }
}

#[test]
fn exported_tokenizers_encode_texts_to_the_same_ids() {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(repository().join("tests/golden/tokenizers"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.sort();
    let shared = repository().join("../shared/golden/tok-sp-llama2-32k");
    if shared.is_dir() {
        folders.push(shared)
    } else {
        println!("skipped: {} is not there", shared.display())
    }
    let work = tempfile::tempdir().unwrap();
    let mut cases = 0;
    for folder in &folders {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let model = work.path().join(name);
        with_tokenizer(folder, &model);
        let out = work.path().join("model.gguf");
        let written =
            export(&model, OPTIONS, &out).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (own, back) = (tokenizer(folder), tokenizer(&out));
        assert_eq!(
            own.chat_template().is_some(),
            back.chat_template().is_some(),
            "{name}"
        );
        assert_eq!(
            own.eos().map(|eos| eos.id),
            back.eos().map(|eos| eos.id),
            "{name}"
        );
        let text = std::fs::read(folder.join("tokenizer_golden.json")).unwrap();
        let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let mut different = Vec::new();
        for case in golden["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ids = back.encode(text, SpecialTokens::Add).unwrap();
            cases += 1;
            if ids != own.encode(text, SpecialTokens::Add).unwrap() {
                different.push(text.to_owned());
            }
        }
        let explained = |text: &String| match name {
            // As the notes say.
            "tok-bpe-neox" => !text.is_ascii(),
            "tok-sp-metaspace" => text.starts_with([' ', '\u{2581}']) || text.contains('<'),
            "tok-spm-llama" | "tok-spm-user" => text.contains('<'),
            _ => false,
        };
        let unexplained: Vec<_> = different.iter().filter(|text| !explained(text)).collect();
        assert!(unexplained.is_empty(), "{name}: {unexplained:?}");
        assert!(different.is_empty() || !written.notes.is_empty(), "{name}");
    }
    assert!(cases > 1000, "{cases}");
}

#[test]
fn unknown_tokenizers_are_refused_and_may_be_left_out() {
    let work = tempfile::tempdir().unwrap();
    let (model, out) = (work.path().join("model"), work.path().join("model.gguf"));
    with_tokenizer(
        &repository().join("tests/golden/tokenizers/tok-bpe-gpt2"),
        &model,
    );
    let path = model.join("tokenizer.json");
    let good: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (place, value, part) in [
        ("/model/type", serde_json::json!("WordPiece"), "WordPiece"),
        (
            "/pre_tokenizer/use_regex",
            serde_json::json!(false),
            "pre-tokenizer (ByteLevel)",
        ),
        (
            "/normalizer",
            serde_json::json!({ "type": "Lowercase" }),
            "`Lowercase`",
        ),
        (
            "/post_processor",
            serde_json::json!({ "type": "BertProcessing" }),
            "`BertProcessing`",
        ),
        (
            "/added_tokens/0/lstrip",
            serde_json::json!(true),
            "`lstrip`",
        ),
        (
            "/added_tokens/0/id",
            serde_json::json!(5000),
            "beyond the 1024 embeddings",
        ),
    ] {
        let mut changed = good.clone();
        *changed.pointer_mut(place).unwrap() = value;
        std::fs::write(&path, changed.to_string()).unwrap();
        let error = export(&model, OPTIONS, &out).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(part), "{message}");
        assert_eq!(error.hint(), Some(Hint::NoTokenizer));
        assert!(matches!(
            error,
            ExportError::Model(ModelError::TokenizerNotInGguf { .. })
        ));
        assert!(!out.exists());
    }
    let bare = GgufOptions {
        tokenizer: false,
        ..OPTIONS
    };
    export(&model, bare, &out).unwrap();
    let file = GgufFile::open(&out).unwrap();
    assert_eq!(
        file.value("tokenizer.ggml.model"),
        Some(&Value::from("no_vocab"))
    );
    assert!(open(&out).files().read("tokenizer.json").unwrap().is_none());
}

#[test]
fn a_sliding_window_ends_the_context_and_any_activation_is_for_speed() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    let options = GgufOptions {
        any_activation: true,
        ..OPTIONS
    };
    let written = export(&Golden::open("mistral-swa-relu").folder, options, &out).unwrap();
    assert!(
        written
            .notes
            .iter()
            .any(|note| note.contains("the context is 24 tokens"))
    );
    let back = open(&out);
    assert_eq!(back.config().context_length, 24);
    assert_eq!(back.config().activation.name(), "SiLU");
}

#[test]
fn an_interrupted_export_leaves_nothing() {
    use powerinfer_artifact::{Progress, progress::Interrupted};
    /// Stops at the tenth step.
    struct Stop(std::sync::atomic::AtomicUsize);
    impl Progress for Stop {
        fn begin(&self, _: &str, _: u64, _: &'static str) {}
        fn advance(&self, _: u64) -> Result<(), Interrupted> {
            let step = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if step == 10 { Err(Interrupted) } else { Ok(()) }
        }
        fn note(&self, _: &str) {}
        fn end(&self) {}
    }
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Golden::open("llama-silu").checkpoint();
    let out = folder.path().join("model.gguf");
    let stop = Stop(0.into());
    let error = to_gguf(Source::Checkpoint(&checkpoint), OPTIONS, &out, &stop).unwrap_err();
    assert!(matches!(error, ExportError::Interrupted(_)), "{error}");
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}
