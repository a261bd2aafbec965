//! What a checkpoint stores, for whoever writes one.

use std::collections::BTreeSet;

use crate::{
    ModelConfig, Weight, families,
    source::{Change, Source},
};

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// Rows first.
    pub shape: Vec<usize>,
    /// The weight in it; the first one, where several are fused.
    pub weight: Weight,
    /// What is stored for a one: zero where the family stores the distance from one.
    pub one: f32,
}

impl ModelConfig {
    /// The tensors that a checkpoint of this model has, in the order of the forward pass.
    pub fn stored_tensors(&self) -> Vec<StoredTensor> {
        let family = families::named(&self.family).expect("a configuration names its family");
        let mut seen = BTreeSet::new();
        let mut tensors = Vec::new();
        for weight in self.weights() {
            let source = (family.source)(self, weight);
            let shape = source.tensor_shape(&self.shape(weight));
            let Source::Tensor { name, change, .. } = source else {
                continue;
            };
            if seen.insert(name.clone()) {
                tensors.push(StoredTensor {
                    name,
                    shape,
                    weight,
                    one: if change == Change::AddOne { 0.0 } else { 1.0 },
                });
            }
        }
        tensors
    }
}
