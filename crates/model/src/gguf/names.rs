//! Tensor names in GGUF files, and transformations by their converters.

use crate::{
    Block, Experts, LatentAttention, LayerWeight, ModelConfig, Weight,
    gguf::{architectures::Architecture, writer::Dialect},
    source::{Fused, Part, Rows, Transform, WeightSource, fused_concatenated},
};

/// Properties of a file that determine its tensor names and transformations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Whether queries, keys and values are one tensor.
    fused: bool,
    /// Whether down is stored transposed, as by the original PowerInfer.
    transposed_down: bool,
    /// Whether queries and keys are stored for interleaved rotary pairs.
    interleaved_rope: bool,
    /// Whether gate and up are one tensor.
    fused_gate: bool,
    /// Whether each expert has separate tensors, as in files from before 2024-04.
    separate_experts: bool,
    /// Whether the key and value projections of latent attention are separate tensors, each with one matrix per head.
    split_heads: bool,
}

impl Layout {
    /// Determines the layout of a file; `has` returns whether a tensor exists.
    pub(super) fn new(architecture: &Architecture, has: impl Fn(&str) -> bool) -> Self {
        Self {
            fused: has("blk.0.attn_qkv.weight"),
            transposed_down: has("blk.0.ffn_down_t.weight"),
            interleaved_rope: architecture.interleaved_rope,
            fused_gate: architecture.name == "phi3" && !has("blk.0.ffn_gate.weight"),
            separate_experts: has("blk.0.ffn_gate.0.weight"),
            split_heads: has("blk.0.attn_k_b.weight"),
        }
    }

    /// Layout in which a model is written.
    pub(super) fn written(architecture: &Architecture, dialect: Dialect) -> Self {
        Self {
            fused: architecture.fused_attention,
            transposed_down: dialect == Dialect::PowerInfer,
            interleaved_rope: architecture.interleaved_rope,
            fused_gate: architecture.name == "phi3",
            separate_experts: false,
            split_heads: true,
        }
    }

    /// Returns the source of a weight.
    pub(crate) fn source(self, config: &ModelConfig, weight: Weight) -> WeightSource {
        let (layer, weight) = match weight {
            Weight::Embedding => return WeightSource::tensor("token_embd.weight"),
            Weight::Positions => return WeightSource::tensor("position_embd.weight"),
            Weight::ProjectIn => return WeightSource::tensor("project_in.weight"),
            Weight::ProjectOut => return WeightSource::tensor("project_out.weight"),
            Weight::FinalNorm => return WeightSource::tensor("output_norm.weight"),
            Weight::FinalNormBias if config.family == "cohere" => {
                return WeightSource::Constant(0.0);
            }
            Weight::FinalNormBias => return WeightSource::tensor("output_norm.bias"),
            Weight::Head => return WeightSource::tensor("output.weight"),
            Weight::HeadBias => return WeightSource::tensor("output.bias"),
            Weight::Layer(layer, weight) => (layer, weight),
        };
        let at = |name: &str| WeightSource::tensor(format!("blk.{layer}.{name}"));
        let projection =
            |projection: Fused, end: &str| self.projection(config, layer, projection, end);
        let half = |index: usize| WeightSource::Tensor {
            name: format!("blk.{layer}.ffn_up.weight"),
            rows: Rows::Strided {
                first: index * config.ffn_size,
                length: config.ffn_size,
                step: config.ffn_size,
                total: 2 * config.ffn_size,
            },
            transform: Transform::None,
        };
        if let (Some(experts), Some((name, by_columns))) =
            (&config.experts, matrix_of_neurons(weight))
        {
            let end = match weight {
                LayerWeight::GateBias | LayerWeight::UpBias => "bias",
                _ => "weight",
            };
            if let Some(size) = experts.dense_size(layer) {
                let part = Part {
                    source: at(&format!("{name}.{end}")),
                    size,
                };
                return WeightSource::Stacked {
                    parts: vec![part],
                    by_columns,
                };
            }
            return self.stacked(experts, layer, [name, end], by_columns);
        }
        let experts = config.experts.as_ref();
        let is_dense = experts.is_some_and(|experts| experts.dense_size(layer).is_some());
        // In Falcon with two norms, the FFN's is called that of attention.
        let two_norms = config.family == "falcon" && config.block == Block::Parallel;
        match weight {
            LayerWeight::AttentionNorm if two_norms => at("attn_norm_2.weight"),
            LayerWeight::AttentionNormBias if two_norms => at("attn_norm_2.bias"),
            LayerWeight::FfnNorm if two_norms => at("attn_norm.weight"),
            LayerWeight::FfnNormBias if two_norms => at("attn_norm.bias"),
            LayerWeight::AttentionNormBias if config.family == "cohere" => {
                WeightSource::Constant(0.0)
            }
            LayerWeight::Gate if self.fused_gate => half(0),
            LayerWeight::Up if self.fused_gate => half(1),
            LayerWeight::AttentionNorm => at("attn_norm.weight"),
            LayerWeight::AttentionNormBias => at("attn_norm.bias"),
            LayerWeight::QueryDown => at("attn_q_a.weight"),
            LayerWeight::QueryDownNorm => at("attn_q_a_norm.weight"),
            LayerWeight::LatentNorm => at("attn_kv_a_norm.weight"),
            LayerWeight::Query
            | LayerWeight::Key
            | LayerWeight::LatentQuery
            | LayerWeight::Value
                if let Some(latent) = &config.latent =>
            {
                self.latent(latent, config.head_count, layer, weight)
            }
            LayerWeight::LatentQuery => unreachable!("only latent attention has it"),
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
            LayerWeight::Sinks => at("attn_sinks.weight"),
            LayerWeight::Output => at("attn_output.weight"),
            LayerWeight::OutputBias => at("attn_output.bias"),
            LayerWeight::AttentionOutputNorm => at("post_attention_norm.weight"),
            LayerWeight::FfnOutputNorm => at("post_ffw_norm.weight"),
            LayerWeight::FfnNorm if config.family == "gpt-oss" => at("post_attention_norm.weight"),
            LayerWeight::FfnNorm => at("ffn_norm.weight"),
            LayerWeight::FfnNormBias => at("ffn_norm.bias"),
            LayerWeight::Router | LayerWeight::SharedGate if is_dense => {
                WeightSource::Constant(0.0)
            }
            LayerWeight::Router => at("ffn_gate_inp.weight"),
            LayerWeight::RouterBias => at("ffn_gate_inp.bias"),
            LayerWeight::SharedGate => at("ffn_gate_inp_shexp.weight"),
            // The first matrix of an FFN without gate is called up.
            LayerWeight::Gate if !config.is_gated() => at("ffn_up.weight"),
            LayerWeight::GateBias if !config.is_gated() => at("ffn_up.bias"),
            LayerWeight::Gate => at("ffn_gate.weight"),
            LayerWeight::GateBias => at("ffn_gate.bias"),
            LayerWeight::Up => at("ffn_up.weight"),
            LayerWeight::UpBias => at("ffn_up.bias"),
            LayerWeight::Down if self.transposed_down => {
                at("ffn_down_t.weight").with(Transform::Transposed)
            }
            LayerWeight::DownBias if self.transposed_down => at("ffn_down_t.bias"),
            LayerWeight::Down => at("ffn_down.weight"),
            LayerWeight::DownBias if config.experts.is_some() => at("ffn_down_exps.bias"),
            LayerWeight::DownBias => at("ffn_down.bias"),
        }
    }

    /// Source of a matrix of all experts, called `name` in tensor names, or of its bias; `end` is `weight` or `bias`.
    fn stacked(
        self,
        experts: &Experts,
        layer: usize,
        [name, end]: [&str; 2],
        by_columns: bool,
    ) -> WeightSource {
        let part = |block: usize| {
            let (name, rows) = if block == experts.count {
                (format!("{name}_shexp.{end}"), Rows::All)
            } else if self.separate_experts {
                (format!("{name}.{block}.{end}"), Rows::All)
            } else {
                let slice = Rows::Slice {
                    index: block,
                    count: experts.count,
                };
                (format!("{name}_exps.{end}"), slice)
            };
            Part {
                source: WeightSource::Tensor {
                    name: format!("blk.{layer}.{name}"),
                    rows,
                    transform: Transform::None,
                },
                size: experts.neurons_of(block).len(),
            }
        };
        WeightSource::Stacked {
            parts: (0..experts.blocks()).map(part).collect(),
            by_columns,
        }
    }

    /// Source of a projection of latent attention with `heads` heads.
    fn latent(
        self,
        latent: &LatentAttention,
        heads: usize,
        layer: usize,
        weight: LayerWeight,
    ) -> WeightSource {
        let of = |name: &str, rows: Rows, transform: Transform| WeightSource::Tensor {
            name: format!("blk.{layer}.{name}.weight"),
            rows,
            transform,
        };
        let rotary = latent.rotary_size;
        let step = latent.key_size + latent.value_size;
        let of_heads = |first: usize, length: usize| Rows::Strided {
            first,
            length,
            step,
            total: heads * step,
        };
        match weight {
            LayerWeight::Query => {
                let name = match latent.query_rank {
                    Some(_) => "attn_q_b",
                    None => "attn_q",
                };
                of(name, Rows::All, Transform::RotaryFirst { heads, rotary })
            }
            LayerWeight::Key => {
                let transform = Transform::RotaryFirst { heads: 1, rotary };
                of("attn_kv_a_mqa", Rows::All, transform)
            }
            // Newer files store one matrix per head; llama.cpp's converter has transposed the key matrices.
            LayerWeight::LatentQuery if self.split_heads => {
                of("attn_k_b", Rows::Heads { count: heads }, Transform::None)
            }
            LayerWeight::Value if self.split_heads => {
                of("attn_v_b", Rows::Heads { count: heads }, Transform::None)
            }
            LayerWeight::LatentQuery => {
                let transform = Transform::TransposedHeads { heads };
                of("attn_kv_b", of_heads(0, latent.key_size), transform)
            }
            _ => of(
                "attn_kv_b",
                of_heads(latent.key_size, latent.value_size),
                Transform::None,
            ),
        }
    }

    /// Source of the query, key or value projection of a layer.
    fn projection(
        self,
        config: &ModelConfig,
        layer: usize,
        projection: Fused,
        end: &str,
    ) -> WeightSource {
        let (heads, kv_heads) = (config.head_count, config.kv_head_count);
        if self.fused {
            return WeightSource::Tensor {
                name: format!("blk.{layer}.attn_qkv.{end}"),
                rows: fused_concatenated(projection, heads, kv_heads, config.head_size),
                transform: Transform::None,
            };
        }
        let (name, heads) = match projection {
            Fused::Query => ("attn_q", Some(heads)),
            Fused::Key => ("attn_k", Some(kv_heads)),
            Fused::Value => ("attn_v", None), // values have no rotary embedding
        };
        let source = WeightSource::tensor(format!("blk.{layer}.{name}.{end}"));
        match heads.filter(|_| self.interleaved_rope) {
            Some(heads) => source.with(Transform::Deinterleave { heads }),
            None => source,
        }
    }
}

/// Name of a matrix of neurons or of its bias, and whether the neurons are its columns.
fn matrix_of_neurons(weight: LayerWeight) -> Option<(&'static str, bool)> {
    match weight {
        LayerWeight::Gate | LayerWeight::GateBias => Some(("ffn_gate", false)),
        LayerWeight::Up | LayerWeight::UpBias => Some(("ffn_up", false)),
        LayerWeight::Down => Some(("ffn_down", true)),
        _ => None,
    }
}
