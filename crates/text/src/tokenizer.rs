//! [`Tokenizer`]: reads a checkpoint's tokenizer files, encodes and decodes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use powerinfer_model::ModelError;
use powerinfer_model::tokenizer::{TokenizerFile, read_tokenizer};
use tokenizers::DecoderWrapper;

use crate::conversation::{ControlToken, control_tokens};
use crate::guard::{check_growth, guarded};
use crate::pieces::PieceEncoder;
use crate::settings::{ReadFile, Settings, text_of};
use crate::stream::{byte_of_fallback, flatten};
use crate::{ChatTemplate, SpecialToken, StreamDecoder, TextError};

/// Whether encoding adds the model's special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Add them as in training: usually BOS at the start.
    Add,
    /// Add none, for a rendered chat template or a continuation.
    Omit,
}

/// Treatment of special tokens in decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialText {
    /// Include their text, such as `<s>`.
    Keep,
    /// Omit them.
    Skip,
}

/// Tokenizer, read from `tokenizer.json` or the older files that replace it, with the settings from the files next to it.
///
/// `tokenizer.json` alone determines the ids of a text; without it, `tokenizer.model` or `vocab.json` with `merges.txt` do, together
/// with `added_tokens.json` and `tokenizer_config.json`. `special_tokens_map.json`, `tokenizer_config.json` and
/// `generation_config.json` name the special tokens; `chat_template.jinja` or `tokenizer_config.json` contain
/// the chat template.
#[derive(Debug)]
pub struct Tokenizer {
    pub(crate) inner: tokenizers::Tokenizer,
    /// Encodes texts instead of `inner`, if the tokenizer is a `tokenizer.model`.
    pub(crate) pieces: Option<PieceEncoder>,
    bos: Option<SpecialToken>,
    eos: Option<SpecialToken>,
    stop_ids: Vec<u32>,
    chat_template: Option<ChatTemplate>,
    pub(crate) control_tokens: Vec<ControlToken>,
}

impl Tokenizer {
    /// Names of the files that are read.
    pub const FILES: [&str; 9] = [
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "generation_config.json",
    ];

    /// Reads the tokenizer in `directory`: `tokenizer.json`, `tokenizer.model`, or `vocab.json` with `merges.txt`.
    ///
    /// # Errors
    ///
    /// There is no tokenizer, or a file is unreadable or invalid.
    pub fn from_directory(directory: &Path) -> Result<Self, TextError> {
        Self::load(directory, &|name| {
            let path = directory.join(name);
            match std::fs::read(&path) {
                Ok(bytes) => Ok(Some(Cow::Owned(bytes))),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(source) => Err(TextError::Read { path, source }),
            }
        })
    }

    /// Reads the tokenizer from files provided by `read`, which returns `None` for an absent file.
    ///
    /// # Errors
    ///
    /// As [`from_directory`](Self::from_directory).
    pub fn from_files<'a>(
        read: impl Fn(&str) -> Option<Cow<'a, [u8]>> + 'a,
    ) -> Result<Self, TextError> {
        Self::from_files_in(Path::new(""), read)
    }

    /// As [`from_files`](Self::from_files); messages name the files in `directory`, which is not read.
    ///
    /// # Errors
    ///
    /// As [`from_directory`](Self::from_directory).
    pub fn from_files_in<'a>(
        directory: &Path,
        read: impl Fn(&str) -> Option<Cow<'a, [u8]>> + 'a,
    ) -> Result<Self, TextError> {
        Self::load(directory, &|name| Ok(read(name)))
    }

    /// Parses a `tokenizer.json` without settings: no special tokens by name, no chat template.
    ///
    /// # Errors
    ///
    /// The bytes are not a valid tokenizer.
    pub fn from_bytes(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        Self::from_files(|name| (name == "tokenizer.json").then_some(Cow::Borrowed(tokenizer_json)))
    }

    fn load(directory: &Path, read: &ReadFile<'_>) -> Result<Self, TextError> {
        let file = read_tokenizer(directory, read)?.ok_or_else(|| TextError::NoTokenizer {
            path: directory.join("tokenizer.json"),
        })?;
        let path = directory.join(file.name);
        let inner = parse_tokenizer(&file, &path)?;
        let pieces = file.pieces.map(PieceEncoder::new).transpose();
        let pieces = pieces.map_err(|reason| ModelError::BadTokenizer { path, reason })?;
        let settings = Settings::read(directory, read)?;

        let bos = special_token(&inner, &settings, "bos_token", settings.bos_id.or(file.bos))?;
        let eos_id = settings.eos_ids.first().copied().or(file.eos);
        let eos = special_token(&inner, &settings, "eos_token", eos_id)?;

        let mut stop_ids = settings.eos_ids;
        stop_ids.extend(eos.as_ref().map(|token| token.id));
        stop_ids.sort_unstable();
        stop_ids.dedup();

        // Templates use these without checking whether they exist.
        let text_of = |token: &Option<SpecialToken>| {
            token
                .as_ref()
                .map_or_else(String::new, |token| token.text.clone())
        };
        let mut variables: BTreeMap<String, String> = settings
            .special_tokens
            .into_iter()
            .map(|(key, (text, _))| (key, text))
            .collect();
        variables.insert("bos_token".to_owned(), text_of(&bos));
        variables.insert("eos_token".to_owned(), text_of(&eos));

        let chat_template = settings.chat_template;
        let chat_template = chat_template.map(|template| ChatTemplate::new(template, variables));
        // This is checked here, before hours of work on the model.
        chat_template.as_ref().map_or(Ok(()), ChatTemplate::check)?;
        Ok(Self {
            control_tokens: control_tokens(
                &inner,
                pieces.as_ref(),
                &stop_ids,
                chat_template.as_ref(),
            ),
            inner,
            pieces,
            bos,
            eos,
            stop_ids,
            chat_template,
        })
    }

    /// Encodes a text; special tokens written in it are recognised in either case.
    ///
    /// # Errors
    ///
    /// [`TextError::Encode`].
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TextError> {
        let encode = || match &self.pieces {
            Some(pieces) => self.encode_parts(pieces, text, None, special),
            None => self.inner.encode_fast(text, special == SpecialTokens::Add),
        };
        let encoding = guarded(encode).map_err(|source| TextError::Encode {
            bytes: text.len(),
            source,
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Decodes ids without cleaning up spaces; invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    ///
    /// [`TextError::UnknownId`] or [`TextError::Decode`].
    pub fn decode(&self, ids: &[u32], special: SpecialText) -> Result<String, TextError> {
        for &id in ids {
            self.token(id)?;
        }
        self.decode_known(ids, special)
    }

    /// Decodes ids that continue `prompt`. A leading space is kept, although decoders strip it at the start of a text.
    ///
    /// # Errors
    ///
    /// [`TextError::UnknownId`] or [`TextError::Decode`].
    pub fn decode_after(
        &self,
        prompt: &[u32],
        ids: &[u32],
        special: SpecialText,
    ) -> Result<String, TextError> {
        let mut stream = StreamDecoder::after(self, prompt, special)?;
        let mut text = String::new();
        for id in ids {
            text.extend(stream.push(*id)?);
        }
        text.extend(stream.finish()?);
        Ok(text)
    }

    /// Creates a streaming decoder of a text from its start. [`StreamDecoder::after`] continues a text.
    pub fn decode_stream(&self, special: SpecialText) -> StreamDecoder<&Self> {
        StreamDecoder::new(self, special)
    }

    /// Returns the number of tokens; ids may have gaps, and the model's head may be larger.
    pub fn vocabulary_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the id of a token in its vocabulary form (`Ġthe`, `▁the`, `<s>`).
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns whether a token is a special one, which decoding may omit.
    pub fn is_special(&self, id: u32) -> bool {
        let vocabulary = self.inner.get_added_vocabulary();
        self.inner
            .id_to_token(id)
            .is_some_and(|token| vocabulary.is_special_token(&token))
    }

    /// Returns the bytes that a token adds within a text; for a special token, those of its text.
    ///
    /// # Errors
    ///
    /// [`TextError::UnknownId`] or [`TextError::Decode`].
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, TextError> {
        let token = self.token(id)?;
        if self.inner.get_added_vocabulary().is_special_token(&token) {
            return Ok(token.into_bytes());
        }
        Ok(match TokenForm::new(self.inner.get_decoder()) {
            TokenForm::ByteLevel => match token.chars().map(byte_of_level).collect() {
                Some(bytes) => bytes,
                None => token.into_bytes(), // an added token
            },
            TokenForm::Metaspace => match byte_of_fallback(&token) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
            TokenForm::Other => {
                // Decode the token once and twice, and keep the difference: decoders may strip a space at the start of a text.
                let alone = self.decode_known(&[id], SpecialText::Keep)?;
                let twice = self.decode_known(&[id, id], SpecialText::Keep)?;
                match twice.strip_prefix(&alone) {
                    Some(added) if !added.is_empty() => added.to_owned().into_bytes(),
                    _ => alone.into_bytes(),
                }
            }
        })
    }

    /// Returns the token that starts a text (BOS).
    pub fn bos(&self) -> Option<&SpecialToken> {
        self.bos.as_ref()
    }

    /// Returns the token that ends a text (EOS).
    pub fn eos(&self) -> Option<&SpecialToken> {
        self.eos.as_ref()
    }

    /// Returns the ids that stop generation, ascending: EOS and those of `generation_config.json`.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Returns the chat template, if there is one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// Returns the vocabulary form of an id.
    pub(crate) fn token(&self, id: u32) -> Result<String, TextError> {
        self.inner
            .id_to_token(id)
            .ok_or_else(|| TextError::UnknownId {
                id,
                vocabulary_size: self.vocabulary_size(),
            })
    }

    /// Decodes ids that are known to be in the vocabulary.
    pub(crate) fn decode_known(
        &self,
        ids: &[u32],
        special: SpecialText,
    ) -> Result<String, TextError> {
        guarded(|| self.inner.decode(ids, special == SpecialText::Skip)).map_err(|source| {
            TextError::Decode {
                count: ids.len(),
                source,
            }
        })
    }
}

/// How the vocabulary writes a token's bytes.
enum TokenForm {
    /// A character per byte, as GPT-2 does.
    ByteLevel,
    /// A lower one eighth block per space and `<0x41>` for other bytes, as SentencePiece does.
    Metaspace,
    /// Some other form.
    Other,
}

impl TokenForm {
    fn new(decoder: Option<&DecoderWrapper>) -> Self {
        let mut steps = Vec::new();
        decoder
            .into_iter()
            .for_each(|decoder| flatten(decoder, &mut steps));
        use DecoderWrapper as Step;
        if steps.iter().any(|step| matches!(step, Step::ByteLevel(_))) {
            return Self::ByteLevel;
        }
        let writes_spaces =
            |step: &&Step| matches!(step, Step::Metaspace(_) | Step::ByteFallback(_));
        if steps.iter().any(writes_spaces) {
            Self::Metaspace
        } else {
            Self::Other
        }
    }
}

/// The byte that GPT-2 writes as `letter`: printable ones of Latin-1 as they are, the others from U+0100 on, in order.
fn byte_of_level(letter: char) -> Option<u8> {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(letter) {
        code @ 0..=0xff => u8::try_from(code).ok().filter(|byte| is_itself(*byte)),
        code => (0..=u8::MAX)
            .filter(|byte| !is_itself(*byte))
            .nth((code - 0x100) as usize),
    }
}

/// Parses `file`, which was read from `path`.
fn parse_tokenizer(
    file: &TokenizerFile<'_>,
    path: &Path,
) -> Result<tokenizers::Tokenizer, TextError> {
    let text = text_of(&file.json, path)?;
    let parse = || {
        let inner: tokenizers::Tokenizer = text.parse()?;
        check_growth(&inner)?;
        Ok(inner)
    };
    let mut inner = guarded(parse).map_err(|source| TextError::BadTokenizer {
        path: path.to_owned(),
        source,
    })?;

    // Some files contain truncation and padding settings of a training run.
    let untruncated = inner.with_truncation(None);
    untruncated.expect("removing truncation cannot fail");
    inner.with_padding(None);
    Ok(inner)
}

/// Looks up the special token that a settings file names, else the one with the `fallback` id.
fn special_token(
    inner: &tokenizers::Tokenizer,
    settings: &Settings,
    key: &'static str,
    fallback: Option<u32>,
) -> Result<Option<SpecialToken>, TextError> {
    if let Some((text, path)) = settings.special_tokens.get(key) {
        return match inner.token_to_id(text) {
            Some(id) => Ok(Some(SpecialToken {
                text: text.clone(),
                id,
            })),
            None => Err(TextError::UnknownSpecialToken {
                path: path.clone(),
                key,
                token: text.clone(),
            }),
        };
    }
    Ok(fallback.and_then(|id| inner.id_to_token(id).map(|text| SpecialToken { text, id })))
}
