//! What GGUF files call the weights, and what their converters did to them.

use crate::{
    Block, LayerWeight, ModelConfig, Weight,
    gguf::configuration::Architecture,
    source::{Change, Fused, Source, fused_in_turn},
};

/// What of a file its names depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Queries, keys and values are one tensor.
    fused: bool,
    /// Down is stored transposed, as the original PowerInfer does.
    transposed_down: bool,
    /// Queries and keys are stored for rotation of neighbours.
    rotates_neighbours: bool,
}

impl Layout {
    /// The layout of a file that has the tensors `has` says.
    pub(super) fn of(architecture: &Architecture, has: impl Fn(&str) -> bool) -> Self {
        Self {
            fused: has("blk.0.attn_qkv.weight"),
            transposed_down: has("blk.0.ffn_down_t.weight"),
            rotates_neighbours: architecture.rotates_neighbours,
        }
    }

    /// Where the file keeps a weight.
    pub(crate) fn source(self, config: &ModelConfig, weight: Weight) -> Source {
        let (layer, weight) = match weight {
            Weight::Embedding => return Source::whole("token_embd.weight"),
            Weight::Positions => return Source::whole("position_embd.weight"),
            Weight::ProjectIn => return Source::whole("project_in.weight"),
            Weight::ProjectOut => return Source::whole("project_out.weight"),
            Weight::FinalNorm => return Source::whole("output_norm.weight"),
            Weight::FinalNormBias => return Source::whole("output_norm.bias"),
            Weight::Head => return Source::whole("output.weight"),
            Weight::HeadBias => return Source::whole("output.bias"),
            Weight::Layer(layer, weight) => (layer, weight),
        };
        let at = |name: &str| Source::whole(format!("blk.{layer}.{name}"));
        let projection = |part: Fused, end: &str| self.projection(config, layer, part, end);
        // Falcon with two norms side by side calls the FFN's the norm of attention.
        let two_norms = config.family == "falcon" && config.block == Block::Parallel;
        match weight {
            LayerWeight::AttentionNorm if two_norms => at("attn_norm_2.weight"),
            LayerWeight::AttentionNormBias if two_norms => at("attn_norm_2.bias"),
            LayerWeight::FfnNorm if two_norms => at("attn_norm.weight"),
            LayerWeight::FfnNormBias if two_norms => at("attn_norm.bias"),
            LayerWeight::AttentionNorm => at("attn_norm.weight"),
            LayerWeight::AttentionNormBias => at("attn_norm.bias"),
            LayerWeight::Query => projection(Fused::Query, "weight"),
            LayerWeight::QueryBias => projection(Fused::Query, "bias"),
            LayerWeight::Key => projection(Fused::Key, "weight"),
            LayerWeight::KeyBias => projection(Fused::Key, "bias"),
            LayerWeight::Value => projection(Fused::Value, "weight"),
            LayerWeight::ValueBias => projection(Fused::Value, "bias"),
            LayerWeight::QueryNorm => at("attn_q_norm.weight"),
            LayerWeight::QueryNormBias => at("attn_q_norm.bias"),
            LayerWeight::KeyNorm => at("attn_k_norm.weight"),
            LayerWeight::KeyNormBias => at("attn_k_norm.bias"),
            LayerWeight::Output => at("attn_output.weight"),
            LayerWeight::OutputBias => at("attn_output.bias"),
            LayerWeight::FfnNorm => at("ffn_norm.weight"),
            LayerWeight::FfnNormBias => at("ffn_norm.bias"),
            // An ungated FFN's first matrix is called up there.
            LayerWeight::Gate if !config.is_gated() => at("ffn_up.weight"),
            LayerWeight::GateBias if !config.is_gated() => at("ffn_up.bias"),
            LayerWeight::Gate => at("ffn_gate.weight"),
            LayerWeight::GateBias => at("ffn_gate.bias"),
            LayerWeight::Up => at("ffn_up.weight"),
            LayerWeight::UpBias => at("ffn_up.bias"),
            LayerWeight::Down if self.transposed_down => {
                at("ffn_down_t.weight").changed(Change::Transposed)
            }
            LayerWeight::DownBias if self.transposed_down => at("ffn_down_t.bias"),
            LayerWeight::Down => at("ffn_down.weight"),
            LayerWeight::DownBias => at("ffn_down.bias"),
        }
    }

    /// Queries, keys or values of a layer.
    fn projection(self, config: &ModelConfig, layer: usize, part: Fused, end: &str) -> Source {
        let (heads, kv_heads) = (config.head_count, config.kv_head_count);
        if self.fused {
            return Source::Tensor {
                name: format!("blk.{layer}.attn_qkv.{end}"),
                rows: fused_in_turn(part, heads, kv_heads, config.head_size),
                change: Change::None,
            };
        }
        let (name, heads) = match part {
            Fused::Query => ("attn_q", Some(heads)),
            Fused::Key => ("attn_k", Some(kv_heads)),
            Fused::Value => ("attn_v", None), // values are not rotated
        };
        let source = Source::whole(format!("blk.{layer}.{name}.{end}"));
        match heads.filter(|_| self.rotates_neighbours) {
            Some(heads) => source.changed(Change::PairsToHalves { heads }),
            None => source,
        }
    }
}
