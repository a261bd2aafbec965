//! Prompt cache files: the KV cache of a bundle for a sequence of tokens, so that a prompt with this
//! prefix need not be prefilled again.
//!
//! ```text
//! tokens                   U32 [tokens]
//! layers.000.keys          F32, F16 or I8 [tiles, heads, blocks, 32, 32]    tiles of 32 positions, in four groups of 8
//! layers.000.keys.scales   F16 [tiles, heads, blocks, 32]                   q8_0 only
//! layers.000.values        as keys, but the innermost 32×32 are [position, element], not [group, element, position]
//! ```

use std::{collections::BTreeMap, path::Path};

use powerinfer_tensor::{BLOCK, CacheFormat};

use crate::{
    ArtifactError, Header, TensorFile,
    tensor_file::{CONTENT_SETTING, Dtype, content_digest},
    tensor_writer::{TensorShapes, fill_tensors},
};

/// Format name in the header.
pub const FORMAT: &str = "powerinfer-prompt-cache";
/// Version that this program reads and writes.
pub const VERSION: u32 = 4;
/// Header setting with the number format of the KV cache.
pub const KV_CACHE_SETTING: &str = "kv_cache";
const TOKENS: &str = "tokens";

/// KV cache of one layer: the bytes of elements and of scales (empty without block scales).
#[derive(Debug, Clone, Default)]
pub struct LayerCache<'a> {
    /// Keys.
    pub keys: (&'a [u8], &'a [u8]),
    /// Values.
    pub values: (&'a [u8], &'a [u8]),
}

/// Open prompt cache whose digest was checked.
#[derive(Debug)]
pub struct PromptCacheFile {
    file: TensorFile,
    header: Header,
    format: CacheFormat,
    tokens: Vec<u32>,
}

/// Writes a prompt cache atomically. `layers` hold `tokens` positions in `format`; `heads` are the number
/// of heads and the blocks of 32 elements of each.
///
/// # Errors
///
/// [`ArtifactError::Write`].
///
/// # Panics
///
/// If the planes of a layer are not of this shape.
pub fn write(
    path: &Path,
    header: Header,
    tokens: &[u32],
    format: CacheFormat,
    heads: [usize; 2],
    layers: &[LayerCache<'_>],
) -> Result<(), ArtifactError> {
    let tokens_bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    let tiles = tokens.len().div_ceil(BLOCK);
    let mut shapes = TensorShapes::from([(TOKENS.to_owned(), (Dtype::U32, vec![tokens.len()]))]);
    let mut pieces = BTreeMap::from([(TOKENS.to_owned(), vec![&tokens_bytes[..]])]);
    for (layer, planes) in layers.iter().enumerate() {
        for (name, (numbers, block_scales)) in [("keys", planes.keys), ("values", planes.values)] {
            let name = tensor_name(layer, name);
            let elements = shape(tiles, heads);
            if format == CacheFormat::Q8_0 {
                let scales = elements[..4].to_vec();
                let scales_name = scales_name(&name);
                shapes.insert(scales_name.clone(), (Dtype::F16, scales));
                pieces.insert(scales_name, vec![block_scales]);
            }
            shapes.insert(name.clone(), (dtype(format), elements));
            pieces.insert(name, vec![numbers]);
        }
    }
    let header = header.with_setting(KV_CACHE_SETTING, format.name());
    let tensors = pieces.iter().map(|(name, pieces)| {
        let (dtype, shape) = &shapes[name];
        (&name[..], *dtype, &shape[..], pieces.clone())
    });
    let content = content_digest(&header, tensors);
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
    /// Opens the prompt cache at `path` and checks its digest.
    ///
    /// # Errors
    ///
    /// The file cannot be read, has another format or version, or is damaged.
    pub fn open(path: &Path) -> Result<Self, ArtifactError> {
        let file = TensorFile::open(path)?;
        let mut header = file.header(FORMAT, VERSION)?;
        let damaged = || ArtifactError::DamagedContent {
            path: path.to_owned(),
        };
        if !file.check_content(&mut header)? {
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

    /// Returns the header, without the digest of the content.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the number format of the KV cache.
    pub fn format(&self) -> CacheFormat {
        self.format
    }

    /// Returns the cached tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the KV cache of `layer`; `heads` are the number of heads and the blocks of 32 elements of each.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another type or shape.
    pub fn layer(&self, layer: usize, heads: [usize; 2]) -> Result<LayerCache<'_>, ArtifactError> {
        let plane = |name: &str| {
            let name = tensor_name(layer, name);
            let shape = shape(self.tokens.len().div_ceil(BLOCK), heads);
            let elements = self.file.expect(&name, dtype(self.format), &shape)?;
            let scales = match self.format {
                CacheFormat::Q8_0 => {
                    self.file
                        .expect(&scales_name(&name), Dtype::F16, &shape[..4])?
                }
                _ => &[],
            };
            Ok::<_, ArtifactError>((elements, scales))
        };
        Ok(LayerCache {
            keys: plane("keys")?,
            values: plane("values")?,
        })
    }
}

fn tensor_name(layer: usize, name: &str) -> String {
    format!("layers.{layer:03}.{name}")
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

fn shape(tiles: usize, [heads, blocks]: [usize; 2]) -> Vec<usize> {
    vec![tiles, heads, blocks, BLOCK, BLOCK]
}
