//! The golden checkpoints and the results of the reference implementation for them.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

use powerinfer_artifact::TensorFile;
use powerinfer_model::{Checkpoint, Files};

/// Every golden checkpoint.
pub(crate) const MODELS: [&str; 23] = [
    "falcon-new-relu",
    "falcon-old-7b",
    "falcon-rw-alibi",
    "gemma",
    "gptneox",
    "gptneox-serial",
    "llama-bf16",
    "llama-bin-only",
    "llama-linear",
    "llama-relu-gqa",
    "llama-rope3",
    "llama-sharded",
    "llama-silu",
    "llama-tied-headdim",
    "llama-yarn",
    "mistral-swa-relu",
    "opt-fp16",
    "opt-postln-proj",
    "opt-preln",
    "phi",
    "phi-qknorm",
    "qwen2-bias-tied",
    "qwen3-qknorm",
];

/// Golden checkpoints of more families. Some are in the repository; all are in the folder `shared/golden` next to it, if it exists.
#[allow(dead_code, reason = "not in all tests")]
pub(crate) const FAMILIES: [&str; 25] = [
    "arcee",
    "arcee-yarn",
    "bamboo",
    "cohere",
    "gemma2",
    "gemma3",
    "gpt2",
    "gptbigcode",
    "granite",
    "llama-bias",
    "llama-rope3-v5config",
    "llama-v5-yarn",
    "minicpm",
    "minicpm-s",
    "nanochat",
    "nemotron",
    "olmo2",
    "phi3",
    "phi3-longrope",
    "relullama-spm",
    "smollm3",
    "sparsellama-fatrelu",
    "sparselm",
    "stablelm",
    "starcoder2",
];

/// Golden mixtures of experts. Two are in the repository; all are in the folder `shared/golden` next to it, if it exists.
#[allow(dead_code, reason = "not in all tests")]
pub(crate) const MIXTURES: [&str; 8] = [
    "deepseekv2",
    "gptoss",
    "mixtral",
    "olmoe",
    "qwen2moe",
    "qwen3moe",
    "smallthinker",
    "turbosparse-mixtral",
];

/// The models with logits of masked FFNs.
pub(crate) const SPARSE_MODELS: [&str; 3] = ["falcon-new-relu", "llama-relu-gqa", "opt-preln"];

/// Names of the prompts.
pub(crate) const PROMPTS: [&str; 3] = ["p1", "p17", "p70"];

/// A golden checkpoint and its expected results.
pub(crate) struct Golden {
    pub(crate) folder: PathBuf,
    pub(crate) expected: TensorFile,
    pub(crate) absolute: f32,
    pub(crate) relative: f32,
}

impl Golden {
    /// Opens the golden checkpoint `name`.
    pub(crate) fn open(name: &str) -> Self {
        Self::find(name).expect("the goldens are in the repository")
    }

    /// Opens those of the golden checkpoints `names` that exist, and prints the names of the others.
    #[allow(dead_code, reason = "not in all tests")]
    pub(crate) fn present(names: &[&str]) -> Vec<(String, Self)> {
        let mut found = Vec::new();
        for name in names {
            match Self::find(name) {
                Some(golden) => found.push(((*name).to_owned(), golden)),
                // Not captured by the test harness.
                None => drop(writeln!(
                    std::io::stderr(),
                    "skipped: the golden `{name}` is not in the repository"
                )),
            }
        }
        found
    }

    /// Opens the golden checkpoint `name` if it exists.
    fn find(name: &str) -> Option<Self> {
        // Where the test was built, or is run now: binaries travel to machines that build nothing.
        let own = std::env::var("CARGO_MANIFEST_DIR");
        let own = own.as_deref().unwrap_or(env!("CARGO_MANIFEST_DIR"));
        let folder = Path::new(own)
            .ancestors()
            .flat_map(|folder| {
                ["tests/golden/models", "shared/golden"].map(|place| folder.join(place).join(name))
            })
            .find(|folder| folder.is_dir())?;
        let expected = TensorFile::open(&folder.join("expected.safetensors")).unwrap();
        let text = std::fs::read(folder.join("expected.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let tolerance = |key: &str| json["tolerance"][key].as_f64().unwrap() as f32;
        Some(Self {
            absolute: tolerance("atol"),
            relative: tolerance("rtol"),
            folder,
            expected,
        })
    }

    /// Opens the checkpoint itself.
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        let files = Files::open(&self.folder).unwrap();
        powerinfer_import::open_checkpoint(files).unwrap()
    }

    /// A float32 tensor of the expected results.
    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        floats(&self.expected, name)
    }

    /// An int64 tensor of the expected results, as token ids.
    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        let bytes = self.expected.find(name).unwrap().bytes;
        bytes
            .chunks_exact(8)
            .map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()) as u32)
            .collect()
    }

    /// Fails if the logits of a whole prompt, `[tokens, vocabulary]`, are not those expected. For the longest prompt, most
    /// models have only the logits of the last 8 tokens.
    pub(crate) fn assert_logits(&self, got: &[f32], prompt: &str, what: &str) {
        let want = self.floats(&format!("{prompt}.logits"));
        let tokens = self.ids(&format!("{prompt}.input_ids")).len();
        let row = got.len() / tokens;
        assert!(
            got.len() == tokens * row && want.len() / row >= tokens.min(8),
            "{what}: lengths"
        );
        let last = got.len().saturating_sub(want.len());
        self.assert_close(&got[last..], &want, what);
    }

    /// Fails if `got` is further from `want` than the stated tolerance.
    pub(crate) fn assert_close(&self, got: &[f32], want: &[f32], what: &str) {
        assert_eq!(got.len(), want.len(), "{what}: lengths");
        for (index, (got, want)) in got.iter().zip(want).enumerate() {
            assert!(
                (got - want).abs() <= self.absolute + self.relative * want.abs(),
                "{what}[{index}]: {got}, expected {want}"
            );
        }
    }
}

/// A float32 tensor of `file`.
pub(crate) fn floats(file: &TensorFile, name: &str) -> Vec<f32> {
    let bytes = file.find(name).unwrap_or_else(|| panic!("{name}")).bytes;
    bytes
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}
