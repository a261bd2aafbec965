//! Tensors that a checkpoint of a model stores, for writing one.

use std::collections::BTreeSet;

use crate::{
    ModelConfig, Weight, families,
    source::{Transform, WeightSource},
};

/// Tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredTensor {
    /// Name.
    pub name: String,
    /// Shape, rows first.
    pub shape: Vec<usize>,
    /// Weight in the tensor; the first one if several are fused.
    pub weight: Weight,
    /// First row of the weight that the tensor contains, or first column if the tensors of the weight are side by side; 0 if the tensor
    /// contains the whole weight.
    pub first: usize,
    /// Stored value that represents one: 0 if the family stores `weight − 1`.
    pub one: f32,
}

impl ModelConfig {
    /// Lists the tensors of a checkpoint of this model, in the order of the forward pass.
    #[expect(
        clippy::missing_panics_doc,
        reason = "every configuration has a known family"
    )]
    pub fn stored_tensors(&self) -> Vec<StoredTensor> {
        let family = families::named(&self.family).expect("a configuration names its family");
        let mut seen = BTreeSet::new();
        let mut tensors = Vec::new();
        for weight in self.weights() {
            let source = (family.source)(self, weight);
            let is_stacked = matches!(source, WeightSource::Stacked { .. });
            let axis = usize::from(matches!(
                source,
                WeightSource::Stacked {
                    by_columns: true,
                    ..
                }
            ));
            let mut first = 0;
            for (source, shape) in source.tensors(&self.shape(weight)) {
                let WeightSource::Tensor {
                    name, transform, ..
                } = source
                else {
                    continue;
                };
                if seen.insert(name.clone()) {
                    tensors.push(StoredTensor {
                        name: name.clone(),
                        shape: source.tensor_shape(&shape),
                        weight,
                        first,
                        one: if *transform == Transform::AddOne {
                            0.0
                        } else {
                            1.0
                        },
                    });
                }
                first += if is_stacked { shape[axis] } else { 0 };
            }
        }
        tensors
    }
}
