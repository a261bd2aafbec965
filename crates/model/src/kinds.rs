//! Kinds of models that are known but not supported, recognised by the names of their classes and architectures.

use std::path::Path;

use crate::{ModelError, keys::Keys};

/// Advice for models that are not text decoders.
const GIVE_DECODER: &str = "give a dense decoder that generates text";

/// Checks that a configuration of a dense family does not describe a mixture of experts.
pub(crate) fn check_dense(keys: &Keys<'_>, path: &Path) -> Result<(), ModelError> {
    for key in [
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
        "moe_num_primary_experts",
    ] {
        match keys.value(key) {
            Some(experts) if experts.as_u64() != Some(0) => {
                return Err(mixture(path, format!("`{key}` is {experts}")));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the error about a mixture of experts; `cause` is the setting that reveals it.
pub(crate) fn mixture(path: &Path, cause: String) -> ModelError {
    ModelError::UnsupportedKind {
        path: path.to_owned(),
        cause,
        kind: MIXTURES,
        remedy: GIVE_MIXTURE,
    }
}

/// Advice for a kind of model that is not supported.
fn remedy(kind: &str) -> &'static str {
    if kind == MIXTURES {
        GIVE_MIXTURE
    } else {
        GIVE_DECODER
    }
}

/// Returns an error if a class in `architectures` is known to be another kind of model.
pub(crate) fn classes(architectures: &[&str], path: &Path) -> Option<ModelError> {
    let (name, kind) =
        (architectures.iter()).find_map(|name| Some((name, kind_of_class(name)?)))?;
    Some(ModelError::UnsupportedKind {
        path: path.to_owned(),
        cause: format!("`architectures` is `{name}`"),
        kind,
        remedy: remedy(kind),
    })
}

/// Returns an error if the `general.architecture` called `name` is known to be another kind of model.
pub(crate) fn architecture(name: &str, path: &Path) -> Option<ModelError> {
    let starts = |known: &[&str]| known.iter().any(|known| name.starts_with(known));
    let kind = match name {
        _ if name.contains("moe")
            || starts(&[
                "deepseek",
                "dbrx",
                "grok",
                "arctic",
                "llama4",
                "dots1",
                "smallthinker",
                "qwen3next",
                "minimax",
            ]) =>
        {
            MIXTURES
        }
        _ if name.contains("bert") || starts(&["neo-bert", "gemma-embedding"]) => ENCODERS,
        _ if name.starts_with("t5") => ENCODER_DECODERS,
        _ if starts(&[
            "mamba",
            "rwkv",
            "jamba",
            "nemotron_h",
            "falcon-h1",
            "plamo2",
            "lfm2",
            "granitehybrid",
            "kimi-linear",
        ]) =>
        {
            RECURRENT
        }
        _ if starts(&["llada", "dream", "diffusion"]) => DIFFUSION,
        _ if name.ends_with("vl") || name.contains("vision") => OF_IMAGES,
        "whisper" | "wavtokenizer-dec" => OF_SOUND,
        "flux" | "sd1" | "sd3" | "sdxl" | "wan" | "hunyuan_video" => "models that make images",
        _ => return None,
    };
    Some(ModelError::UnsupportedKind {
        path: path.to_owned(),
        cause: format!("`general.architecture` is `{name}`"),
        kind,
        remedy: remedy(kind),
    })
}

const MIXTURES: &str = "mixture-of-experts models of this architecture";
const GIVE_MIXTURE: &str = "give a Mixtral, TurboSparse-Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2-Lite, SmallThinker or gpt-oss model, or a dense decoder";
const ENCODERS: &str = "encoders and embedding models";
const ENCODER_DECODERS: &str = "models of an encoder and a decoder";
const OF_IMAGES: &str = "models of images and text";
const OF_SOUND: &str = "models of sound";
const RECURRENT: &str = "recurrent and state-space models";
const DIFFUSION: &str = "diffusion models";
const CLASSIFIERS: &str = "classifiers and reward models";

/// Recognises by its name the kind of a transformers class that is not a dense text decoder.
fn kind_of_class(name: &str) -> Option<&'static str> {
    let lower = name.to_ascii_lowercase();
    let contains = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    let starts = |parts: &[&str]| parts.iter().any(|part| lower.starts_with(part));
    let ends = |parts: &[&str]| parts.iter().any(|part| name.ends_with(part));
    Some(match () {
        () if contains(&[
            "mamba",
            "rwkv",
            "recurrentgemma",
            "jamba",
            "zamba",
            "bamba",
            "falconh1",
            "nemotronh",
            "hybrid",
            "lfm2",
        ]) =>
        {
            RECURRENT
        }
        () if contains(&[
            "moe",
            "mixtral",
            "dbrx",
            "grok",
            "deepseekv",
            "arctic",
            "llama4",
            "dots1",
            "smallthinker",
            "qwen3next",
            "minimaxm",
            "kimi",
            "switchtransformers",
        ]) =>
        {
            MIXTURES
        }
        () if contains(&[
            "clip",
            "llava",
            "vision",
            "vl",
            "idefics",
            "paligemma",
            "mllama",
            "fuyu",
            "phi3v",
            "phi4mm",
            "minicpmv",
            "minicpmo",
            "molmo",
            "florence",
            "pixtral",
            "cogvlm",
            "siglip",
            "vit",
        ]) =>
        {
            OF_IMAGES
        }
        () if contains(&["whisper", "wav2vec", "speech", "audio", "musicgen", "bark"]) => OF_SOUND,
        () if contains(&["llada", "dream", "diffusion"]) => DIFFUSION,
        () if starts(&[
            "t5",
            "mt5",
            "umt5",
            "bart",
            "mbart",
            "pegasus",
            "longt5",
            "led",
            "m2m100",
            "marian",
            "blenderbot",
            "prophetnet",
            "encoderdecoder",
        ]) =>
        {
            ENCODER_DECODERS
        }
        () if contains(&["bert", "electra", "deberta", "xlm"])
            || ends(&["ForMaskedLM", "ForPreTraining"]) =>
        {
            ENCODERS
        }
        () if ends(&[
            "Classification",
            "QuestionAnswering",
            "RewardModel",
            "ScoreModel",
        ]) =>
        {
            CLASSIFIERS
        }
        () if ends(&["ForConditionalGeneration"]) => OF_IMAGES,
        () if ends(&["Model"]) && !ends(&["LMHeadModel"]) => {
            "models without an output head, such as embedding models,"
        }
        () => return None,
    })
}
