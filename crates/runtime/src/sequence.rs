//! A sequence of tokens, and what attention keeps of them.

use powerinfer_kernels::CacheFormat;
use powerinfer_model::ModelConfig;

use crate::attention::LayerCache;

/// Tokens that were run, with their keys and values in every layer.
///
/// It belongs to no [`Runtime`](crate::Runtime) in particular: any of the same bundle goes on with it.
#[derive(Debug, Default)]
pub struct Sequence {
    pub(crate) layers: Vec<LayerCache>,
    pub(crate) tokens: Vec<u32>,
}

impl Sequence {
    /// An empty sequence with room for `context` tokens; none where memory has not got it. What is not
    /// used yet is not touched.
    pub(crate) fn new(config: &ModelConfig, format: CacheFormat, context: usize) -> Option<Self> {
        let (heads, size) = (config.kv_head_count, config.head_size);
        let layer = |_| LayerCache::new(heads, size, format, context);
        let mut tokens = Vec::new();
        tokens.try_reserve_exact(context).ok()?;
        Some(Self {
            layers: (0..config.layer_count).map(layer).collect::<Option<_>>()?,
            tokens,
        })
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many there are.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that it begins with like `tokens` does.
    pub fn common_prefix(&self, tokens: &[u32]) -> usize {
        let both = self.tokens.iter().zip(tokens);
        both.take_while(|(own, other)| own == other).count()
    }

    /// Forgets all tokens from number `tokens` on.
    pub fn truncate(&mut self, tokens: usize) {
        self.tokens.truncate(tokens);
        self.layers
            .iter_mut()
            .for_each(|layer| layer.truncate(tokens));
    }

    /// Takes over the first `tokens` tokens of `other`, a sequence of the same bundle, instead of what
    /// is here.
    ///
    /// Panics where `other` has fewer.
    pub fn copy_from(&mut self, other: &Sequence, tokens: usize) {
        self.tokens.clear();
        self.tokens.extend(&other.tokens[..tokens]);
        for (layer, other) in self.layers.iter_mut().zip(&other.layers) {
            for (plane, other) in layer.planes_mut().zip(other.planes()) {
                plane.copy_from(other, tokens);
            }
        }
    }

    /// Bytes that are reserved for keys and values.
    pub(crate) fn bytes(&self) -> usize {
        self.layers.iter().map(LayerCache::bytes).sum()
    }
}
