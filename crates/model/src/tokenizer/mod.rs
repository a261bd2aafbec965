//! Reads a checkpoint's tokenizer from `tokenizer.json`, or generates one from older files.
//!
//! ```text
//! tokenizer.model ──▶ SentencePieceModel ──▶ vocabulary as tokenizer.json, and the pieces that encode texts
//! vocab.json, merges.txt ──────────────────▶ tokenizer.json
//! added_tokens.json, tokenizer_config.json, special_tokens_map.json: added tokens and flags of both
//! ```

mod byte_level;
mod json;
mod protobuf;
mod sentence_piece;
mod settings;
mod splitting;

use std::{borrow::Cow, path::Path};

use crate::ModelError;
pub use sentence_piece::{Algorithm, Piece, PieceKind, SentencePieceModel};
use settings::Settings;

pub(crate) use json::{
    ByteLevelBpe, added_token, byte_level_bpe, post_processor, sentence_piece_decoder,
};
pub(crate) use splitting::{NAMES, Splitting};

/// Character that represents a space in SentencePiece vocabularies.
pub const SPACE: &str = "\u{2581}";

/// Reads a file of the checkpoint by name; `None` if it does not exist.
pub type ReadFile<'a, 'b, E> = dyn Fn(&str) -> Result<Option<Cow<'a, [u8]>>, E> + 'b;

/// A tokenizer in the form of `tokenizer.json`.
#[derive(Debug)]
pub struct TokenizerFile<'a> {
    /// Content of `tokenizer.json`, read or generated.
    pub json: Cow<'a, [u8]>,
    /// Name of the file from which the tokenizer was read.
    pub name: &'static str,
    /// SentencePiece pieces that encode texts instead of the model in `json`, if the source is `tokenizer.model`.
    pub pieces: Option<Pieces>,
    /// Id of the token that starts a text, if the files imply it without naming it.
    pub bos: Option<u32>,
    /// Id of the token that ends a text, if the files imply it without naming it.
    pub eos: Option<u32>,
}

/// Pieces of a `tokenizer.model`, and the rule for spaces in front.
#[derive(Debug, Clone)]
pub struct Pieces {
    /// The pieces and the algorithm that applies them.
    pub model: SentencePieceModel,
    /// Which parts of a text get a space in front.
    pub prefix: SpacePrefix,
}

/// Which parts of a text get a space in front; special tokens separate the parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpacePrefix {
    /// No part.
    None,
    /// The first part, unless the text begins with a special token (`legacy` false).
    Text,
    /// All parts (`legacy` true).
    EachPart,
}

/// Reads the tokenizer with `read`; `folder` is used in messages. Returns `None` if there is no tokenizer.
///
/// `tokenizer.json` comes first, as in transformers, unless `tokenizer_config.json` sets `use_fast` to false.
///
/// # Errors
///
/// Returns the error of `read`, or names the file that is damaged or not supported.
pub fn read_tokenizer<'a, E: From<ModelError>>(
    folder: &Path,
    read: &ReadFile<'a, '_, E>,
) -> Result<Option<TokenizerFile<'a>>, E> {
    const JSON: &str = "tokenizer.json";
    const MODEL: &str = "tokenizer.model";
    let json = read(JSON)?;
    if let Some(json) = json.as_ref().filter(|_| read_use_fast(read)) {
        return Ok(Some(TokenizerFile::from_json(json.clone())));
    }
    if let Some(bytes) = read(MODEL)? {
        let settings = Settings::read(folder, read)?;
        let path = folder.join(MODEL);
        return Ok(Some(sentence_piece::convert(&bytes, &settings, &path)?));
    }
    if let (Some(vocabulary), Some(merges)) = (read("vocab.json")?, read("merges.txt")?) {
        let settings = Settings::read(folder, read)?;
        let file = byte_level::convert(&vocabulary, &merges, &settings, folder)?;
        return Ok(Some(file));
    }
    Ok(json.map(TokenizerFile::from_json))
}

/// Returns whether to prefer `tokenizer.json`: true unless `tokenizer_config.json` sets `use_fast` to false.
fn read_use_fast<E>(read: &ReadFile<'_, '_, E>) -> bool {
    #[derive(serde::Deserialize)]
    struct Config {
        use_fast: Option<bool>,
    }
    let config = read("tokenizer_config.json").ok().flatten();
    let config = config.and_then(|bytes| serde_json::from_slice::<Config>(&bytes).ok());
    config.and_then(|config| config.use_fast) != Some(false)
}

impl<'a> TokenizerFile<'a> {
    fn from_json(json: Cow<'a, [u8]>) -> Self {
        Self {
            json,
            name: "tokenizer.json",
            pieces: None,
            bos: None,
            eos: None,
        }
    }
}
