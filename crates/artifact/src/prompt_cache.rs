//! Prompt caches: tokens, and the keys and values that a bundle computed for them, so that a prompt
//! that begins with them need not be read again.
//!
//! ```text
//! tokens                   U32 [tokens]
//! layers.000.keys          F32, F16 or I8 [heads, tiles, blocks, 32, 32]    a tile is 32 positions
//! layers.000.keys.scales   F16 [heads, tiles, blocks, 32]                   q8_0 only
//! layers.000.values        as the keys, but a square's rows are positions, not numbers of a head
//! ```

use std::{collections::BTreeMap, path::Path};

use powerinfer_tensor::{BLOCK, CacheFormat};

use crate::{
    ArtifactError, Digest, Header, TensorFile,
    digest::DigestBuilder,
    tensor_file::Dtype,
    tensor_writer::{TensorShapes, fill_tensors},
};

/// Format name in the header.
pub const FORMAT: &str = "powerinfer-prompt-cache";
/// Newest version read here.
pub const VERSION: u32 = 1;
/// Setting of the header: how numbers are stored.
pub const KV_CACHE_SETTING: &str = "kv_cache";
/// Setting of the header: a digest of all the rest.
pub const CONTENT_SETTING: &str = "content";

const TOKENS: &str = "tokens";

/// Numbers and scales of the planes of one layer, head by head; no scales where numbers have none.
#[derive(Debug, Clone, Default)]
pub struct Planes<'a> {
    /// Keys.
    pub keys: Vec<(&'a [u8], &'a [u8])>,
    /// Values.
    pub values: Vec<(&'a [u8], &'a [u8])>,
}

/// An open prompt cache that is as it was written.
#[derive(Debug)]
pub struct PromptCacheFile {
    file: TensorFile,
    header: Header,
    format: CacheFormat,
    tokens: Vec<u32>,
}

/// Writes a prompt cache, beside and renamed. `layers` hold `tokens` positions of heads of `blocks`
/// times 32 numbers each, in `format`.
pub fn write(
    path: &Path,
    header: Header,
    tokens: &[u32],
    format: CacheFormat,
    blocks: usize,
    layers: &[Planes<'_>],
) -> Result<(), ArtifactError> {
    let tokens_bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    let tiles = tokens.len().div_ceil(BLOCK);
    let mut shapes = TensorShapes::from([(TOKENS.to_owned(), (Dtype::U32, vec![tokens.len()]))]);
    let mut pieces = BTreeMap::from([(TOKENS.to_owned(), vec![&tokens_bytes[..]])]);
    for (layer, planes) in layers.iter().enumerate() {
        for (part, planes) in [("keys", &planes.keys), ("values", &planes.values)] {
            let name = name(layer, part);
            let numbers = shape(planes.len(), tiles, blocks);
            if format == CacheFormat::Q8_0 {
                let scales = numbers[..4].to_vec();
                let scales_name = scales_name(&name);
                shapes.insert(scales_name.clone(), (Dtype::F16, scales));
                pieces.insert(scales_name, planes.iter().map(|plane| plane.1).collect());
            }
            shapes.insert(name.clone(), (dtype(format), numbers));
            pieces.insert(name, planes.iter().map(|plane| plane.0).collect());
        }
    }
    let header = header.with_setting(KV_CACHE_SETTING, format.name());
    let tensors = pieces.iter().map(|(name, pieces)| {
        let (dtype, shape) = &shapes[name];
        (&name[..], *dtype, &shape[..], pieces.clone())
    });
    let content = content(&header, tensors);
    let header = header.with_setting(CONTENT_SETTING, content.to_string());
    fill_tensors(path, Some(&header), &shapes, |writer| {
        for (name, pieces) in &pieces {
            for piece in pieces {
                writer.append(name, piece)?;
            }
        }
        Ok(())
    })
}

impl PromptCacheFile {
    /// Opens the file at `path`; fails where it is not as it was written.
    pub fn open(path: &Path) -> Result<Self, ArtifactError> {
        let file = TensorFile::open(path)?;
        let mut header = file.header(FORMAT, VERSION)?;
        let damaged = || ArtifactError::DamagedContent {
            path: path.to_owned(),
        };
        let expected = header.settings.remove(CONTENT_SETTING);
        let names = file.names();
        let tensors = names.iter().filter_map(|name| {
            let view = file.find(name)?;
            Some((&name[..], view.dtype, view.shape, vec![view.bytes]))
        });
        let found = content(&header, tensors);
        if expected != Some(found.to_string().into()) {
            return Err(damaged());
        }
        let format = header.settings.get(KV_CACHE_SETTING);
        let format = format.and_then(serde_json::Value::as_str).unwrap_or("");
        let format = format.parse().map_err(|_| damaged())?;
        let tokens = file.find(TOKENS).ok_or_else(damaged)?.shape.to_vec();
        let tokens = file.expect(TOKENS, Dtype::U32, &tokens)?;
        let tokens = tokens.as_chunks::<4>().0.iter();
        let tokens = tokens.map(|bytes| u32::from_le_bytes(*bytes)).collect();
        Ok(Self {
            file,
            header,
            format,
            tokens,
        })
    }

    /// Who made it, for what; without the digest of its content.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// How numbers are stored.
    pub fn format(&self) -> CacheFormat {
        self.format
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The planes of `layer`, which must be of so many heads of `blocks` times 32 numbers.
    pub fn planes(
        &self,
        layer: usize,
        heads: usize,
        blocks: usize,
    ) -> Result<Planes<'_>, ArtifactError> {
        let part = |part: &str| {
            let name = name(layer, part);
            let shape = shape(heads, self.tokens.len().div_ceil(BLOCK), blocks);
            let numbers = self.file.expect(&name, dtype(self.format), &shape)?;
            let scales = match self.format {
                CacheFormat::Q8_0 => {
                    self.file
                        .expect(&scales_name(&name), Dtype::F16, &shape[..4])?
                }
                _ => &[],
            };
            let head = |head: usize| {
                let part = |bytes: &'_ [u8]| {
                    let size = bytes.len() / heads.max(1);
                    head * size..(head + 1) * size
                };
                (&numbers[part(numbers)], &scales[part(scales)])
            };
            Ok::<_, ArtifactError>((0..heads).map(head).collect())
        };
        Ok(Planes {
            keys: part("keys")?,
            values: part("values")?,
        })
    }
}

/// The digest of a header without this digest, and of all tensors by name, whose bytes are in pieces.
fn content<'a>(
    header: &Header,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [usize], Vec<&'a [u8]>)>,
) -> Digest {
    let mut digest = DigestBuilder::default();
    digest.add(&serde_json::to_vec(header).expect("a header is plain JSON"));
    for (name, dtype, shape, pieces) in tensors {
        digest.add(format!("\n{name} {dtype:?} {shape:?}\n").as_bytes());
        pieces.into_iter().for_each(|bytes| digest.add(bytes));
    }
    digest.finish()
}

fn name(layer: usize, part: &str) -> String {
    format!("layers.{layer:03}.{part}")
}

fn scales_name(name: &str) -> String {
    format!("{name}.scales")
}

fn dtype(format: CacheFormat) -> Dtype {
    match format {
        CacheFormat::F32 => Dtype::F32,
        CacheFormat::F16 => Dtype::F16,
        CacheFormat::Q8_0 => Dtype::I8,
    }
}

fn shape(heads: usize, tiles: usize, blocks: usize) -> Vec<usize> {
    vec![heads, tiles, blocks, BLOCK, BLOCK]
}
