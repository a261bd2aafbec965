//! Mapping of weights to checkpoint tensors: which rows, and which transformation.

use rayon::prelude::*;

/// Origin of a weight's values in a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum WeightSource {
    /// All elements have this value; the checkpoint does not store the weight.
    Constant(f32),
    /// Rows of a tensor.
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Rows that belong to the weight.
        rows: Rows,
        /// Transformation of the rows.
        transform: Transform,
    },
    /// The experts' matrices, stacked by rows or side by side.
    Stacked {
        /// The matrices, in order.
        parts: Vec<Part>,
        /// Whether they are side by side.
        by_columns: bool,
    },
}

/// A matrix of a stack.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Part {
    /// Origin of its values.
    pub(crate) source: WeightSource,
    /// Number of its rows, or of its columns if the matrices are side by side.
    pub(crate) size: usize,
}

/// Selection of a tensor's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// All rows.
    All,
    /// Evenly spaced runs of rows: one projection of a fused matrix.
    Strided {
        /// First row of the first run.
        first: usize,
        /// Number of rows per run.
        length: usize,
        /// Distance between the starts of consecutive runs.
        step: usize,
        /// Number of rows of the tensor.
        total: usize,
    },
    /// The matrices of all heads, which the tensor stacks along an extra first dimension.
    Heads {
        /// Number of heads.
        count: usize,
    },
    /// One of several matrices that the tensor stacks along an extra first dimension.
    Slice {
        /// Index of the matrix.
        index: usize,
        /// Number of matrices.
        count: usize,
    },
    /// Every second row of one of several matrices that the tensor stacks along an extra first dimension.
    Alternate {
        /// First row: 0 or 1.
        first: usize,
        /// Index of the matrix.
        index: usize,
        /// Number of matrices.
        count: usize,
    },
}

impl Rows {
    /// Returns the index of the only matrix that is read, if the tensor stacks several.
    pub(crate) fn slice(self) -> Option<usize> {
        match self {
            Self::All | Self::Strided { .. } | Self::Heads { .. } => None,
            Self::Slice { index, .. } | Self::Alternate { index, .. } => Some(index),
        }
    }
}

/// Transformation of a tensor's rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Transform {
    /// None.
    None,
    /// Adds one: Gemma stores `weight − 1` for its norms.
    AddOne,
    /// Within each of `heads` heads, moves rows 2i and 2i+1 to rows i and i + size/2: from interleaved to
    /// split rotary pairs.
    Deinterleave {
        /// Number of heads in the tensor.
        heads: usize,
    },
    /// Within each of `heads` heads, moves the last `rotary` rows to the front and deinterleaves them: checkpoints with latent attention
    /// store the rotated rows of a head last, as interleaved pairs.
    RotaryFirst {
        /// Number of heads in the tensor.
        heads: usize,
        /// Rotated rows of a head.
        rotary: usize,
    },
    /// Transposes the matrix of each of `heads` heads after rows are selected.
    TransposedHeads {
        /// Number of heads.
        heads: usize,
    },
    /// Transposes the tensor before rows are selected.
    Transposed,
    /// Divides each row by its root mean square, `√(mean(x²) + ε)`: NanoChat normalises its embeddings.
    NormalisedRows {
        /// ε under the root.
        epsilon: f32,
    },
}

impl Part {
    /// Returns the index of the part's matrix in its tensor; 0 if the tensor has only one.
    pub(crate) fn slice(&self) -> usize {
        match &self.source {
            WeightSource::Tensor { rows, .. } => rows.slice().unwrap_or(0),
            WeightSource::Constant(_) | WeightSource::Stacked { .. } => 0,
        }
    }
}

impl WeightSource {
    /// Returns the name of the tensor, if the source is a single tensor.
    pub(crate) fn name(&self) -> Option<&str> {
        match self {
            Self::Tensor { name, .. } => Some(name),
            Self::Constant(_) | Self::Stacked { .. } => None,
        }
    }

    /// Creates the source of a weight that is the whole tensor called `name`.
    pub(crate) fn tensor(name: impl Into<String>) -> Self {
        Self::Tensor {
            name: name.into(),
            rows: Rows::All,
            transform: Transform::None,
        }
    }

    /// Replaces the transformation.
    pub(crate) fn with(self, transform: Transform) -> Self {
        match self {
            Self::Tensor { name, rows, .. } => Self::Tensor {
                name,
                rows,
                transform,
            },
            other => other,
        }
    }

    /// Returns the tensors that a weight of `shape` is read from, each with its source and the shape of its part of the weight.
    pub(crate) fn tensors(&self, shape: &[usize]) -> Vec<(&Self, Vec<usize>)> {
        match self {
            Self::Constant(_) => Vec::new(),
            Self::Tensor { .. } => vec![(self, shape.to_vec())],
            Self::Stacked { parts, by_columns } => parts
                .iter()
                .flat_map(|part| {
                    let mut shape = shape.to_vec();
                    shape[usize::from(*by_columns)] = part.size;
                    part.source.tensors(&shape)
                })
                .collect(),
        }
    }

    /// Returns the tensor's name if the weight is the whole tensor without transformation.
    pub(crate) fn stored_name(&self) -> Option<&str> {
        match self {
            Self::Tensor {
                name,
                rows: Rows::All,
                transform: Transform::None,
            } => Some(name),
            _ => None,
        }
    }

    /// Returns the tensor's name if each row of the weight comes from the tensor's row with the same index.
    pub(crate) fn row_wise_name(&self) -> Option<&str> {
        match self {
            Self::Tensor {
                name,
                rows: Rows::All,
                transform: Transform::None | Transform::NormalisedRows { .. },
            } => Some(name),
            _ => None,
        }
    }

    /// Returns the shape that the tensor must have for a weight of `shape`.
    pub(crate) fn tensor_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        if let Self::Tensor {
            rows, transform, ..
        } = self
        {
            if let Transform::TransposedHeads { heads } = *transform {
                shape = vec![heads * shape[1], shape[0] / heads];
            }
            match rows {
                Rows::Strided { total, .. } => shape[0] = *total,
                Rows::Alternate { .. } => shape[0] *= 2,
                Rows::Heads { count } => shape[0] /= *count,
                Rows::All | Rows::Slice { .. } => {}
            }
            if *transform == Transform::Transposed {
                shape.reverse();
            }
            if let Rows::Heads { count }
            | Rows::Slice { count, .. }
            | Rows::Alternate { count, .. } = rows
            {
                shape.insert(0, *count);
            }
        }
        shape
    }

    /// Returns the tensor rows that are the `count` rows of a matrix, in order; `None` if the transformation
    /// changes the content of rows.
    pub(crate) fn stored_rows(&self, count: usize) -> Option<Vec<usize>> {
        match self {
            Self::Tensor {
                rows: Rows::All | Rows::Strided { .. },
                transform:
                    Transform::None | Transform::Deinterleave { .. } | Transform::RotaryFirst { .. },
                ..
            } => {
                let total = self.tensor_shape(&[count])[0];
                // Integers below 2^24 are exact in f32; no matrix has that many rows.
                let numbered = (0..total).map(|row| row as f32).collect();
                let rows = self.apply(numbered, &[count, 1]);
                (total < 1 << 24).then(|| rows.into_iter().map(|row| row as usize).collect())
            }
            _ => None,
        }
    }

    /// Computes the weight of `shape` from the `values` of its tensor, row-major.
    pub(crate) fn apply(&self, values: Vec<f32>, shape: &[usize]) -> Vec<f32> {
        let Self::Tensor {
            rows, transform, ..
        } = self
        else {
            return values;
        };
        if let Transform::TransposedHeads { heads } = *transform {
            let (rows, columns) = (shape[1], shape[0] / heads);
            let selected = self.clone().with(Transform::None);
            let stored = selected.apply(values, &[heads * rows, columns]);
            let heads = stored.chunks_exact(rows * columns);
            return heads.flat_map(|head| transposed(head, columns)).collect();
        }
        let width: usize = shape[1..].iter().product();
        let values = match transform {
            Transform::Transposed => transposed(&values, values.len() / width),
            _ => values,
        };
        let strided = match *rows {
            // Only this matrix was read, or all rows are consecutive.
            Rows::All | Rows::Heads { .. } | Rows::Slice { .. } => None,
            Rows::Strided {
                first,
                length,
                step,
                ..
            } => Some([first, length, step]),
            Rows::Alternate { first, .. } => Some([first, 1, 2]),
        };
        let values = match strided {
            None => values,
            Some([first, length, step]) => {
                let runs = shape[0] / length;
                let mut out = Vec::with_capacity(shape[0] * width);
                for run in 0..runs {
                    out.extend(&values[(first + run * step) * width..][..length * width]);
                }
                out
            }
        };
        match *transform {
            Transform::None | Transform::Transposed | Transform::TransposedHeads { .. } => values,
            Transform::AddOne => values.into_iter().map(|value| value + 1.0).collect(),
            Transform::Deinterleave { heads } => {
                let size = shape[0] / heads;
                let half = size / 2;
                let mut out = Vec::with_capacity(values.len());
                for row in 0..shape[0] {
                    let (head, place) = (row / size, row % size);
                    let from = head * size + 2 * (place % half) + place / half;
                    out.extend(&values[from * width..][..width]);
                }
                out
            }
            Transform::RotaryFirst { heads, rotary } => {
                let size = shape[0] / heads;
                let rest = size - rotary;
                let mut out = Vec::with_capacity(values.len());
                for row in 0..shape[0] {
                    let (head, place) = (row / size, row % size);
                    let from = match place.checked_sub(rotary) {
                        Some(place) => place,
                        None => rest + 2 * (place % (rotary / 2)) + place / (rotary / 2),
                    };
                    out.extend(&values[(head * size + from) * width..][..width]);
                }
                out
            }
            Transform::NormalisedRows { epsilon } => {
                let mut values = values;
                for row in values.chunks_exact_mut(width) {
                    let mean_square = row.iter().map(|x| x * x).sum::<f32>() / width as f32;
                    let scale = 1.0 / (mean_square + epsilon).sqrt();
                    row.iter_mut().for_each(|x| *x *= scale);
                }
                values
            }
        }
    }
}

/// Transposes a matrix whose rows have `width` values.
pub(crate) fn transposed(values: &[f32], width: usize) -> Vec<f32> {
    // Columns that one thread transposes, about a cache line.
    const COLUMNS: usize = 16;
    let rows = values.len() / width.max(1);
    let mut out = vec![0.0; values.len()];
    let parts = out.par_chunks_mut(COLUMNS * rows.max(1)).enumerate();
    parts.for_each(|(part, out)| {
        for (row, stored) in values.chunks_exact(width).enumerate() {
            let columns = stored[part * COLUMNS..].iter().take(COLUMNS);
            for (column, value) in columns.enumerate() {
                out[column * rows + row] = *value;
            }
        }
    });
    out
}

impl WeightSource {
    /// Writes `values`, a weight of `shape`, to their place in a `tensor`: the inverse of [`apply`](Self::apply).
    ///
    /// # Panics
    ///
    /// If the transformation changes elements; GGUF has no such.
    pub(crate) fn store(&self, values: &[f32], shape: &[usize], tensor: &mut [f32]) {
        let width: usize = shape[1..].iter().product();
        if matches!(
            self,
            Self::Tensor {
                rows: Rows::Heads { .. },
                ..
            }
        ) {
            return tensor.copy_from_slice(values);
        }
        if let Some(rows) = self.stored_rows(shape[0]) {
            for (row, values) in rows.iter().zip(values.chunks_exact(width)) {
                tensor[row * width..][..width].copy_from_slice(values);
            }
            return;
        }
        assert!(
            self.transform() == Transform::Transposed,
            "elements are kept"
        );
        tensor.copy_from_slice(&transposed(values, width));
    }

    fn transform(&self) -> Transform {
        match self {
            Self::Tensor { transform, .. } => *transform,
            Self::Constant(_) | Self::Stacked { .. } => Transform::None,
        }
    }
}

/// Projection within a fused query, key and value matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fused {
    Query,
    Key,
    Value,
}

/// Rows of `projection` in a fused matrix with groups of the query heads of a key/value head, its key and
/// its value.
///
/// With one key/value head that is all queries, the key, the value; with as many as query heads, query, key
/// and value of each head.
pub(crate) fn fused_by_group(
    projection: Fused,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
) -> Rows {
    let group = heads / kv_heads;
    let (first, length) = match projection {
        Fused::Query => (0, group),
        Fused::Key => (group, 1),
        Fused::Value => (group + 1, 1),
    };
    Rows::Strided {
        first: first * head_size,
        length: length * head_size,
        step: (group + 2) * head_size,
        total: kv_heads * (group + 2) * head_size,
    }
}

/// Rows of `projection` in a fused matrix with all queries, then all keys, then all values.
pub(crate) fn fused_concatenated(
    projection: Fused,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
) -> Rows {
    let (first, count) = match projection {
        Fused::Query => (0, heads),
        Fused::Key => (heads, kv_heads),
        Fused::Value => (heads + kv_heads, kv_heads),
    };
    let length = count * head_size;
    Rows::Strided {
        first: first * head_size,
        length,
        step: length,
        total: (heads + 2 * kv_heads) * head_size,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(rows: Rows, count: usize) -> Vec<usize> {
        let source = WeightSource::Tensor {
            name: String::new(),
            rows,
            transform: Transform::None,
        };
        let total = source.tensor_shape(&[count])[0];
        source
            .apply((0..total).map(|row| row as f32).collect(), &[count])
            .into_iter()
            .map(|row| row as usize)
            .collect()
    }

    #[test]
    fn fused_layouts_cover_every_row_once() {
        for (heads, kv_heads) in [(4, 4), (4, 2), (6, 1), (8, 2)] {
            for layout in [fused_by_group, fused_concatenated] {
                let mut all: Vec<usize> = [
                    (Fused::Query, heads),
                    (Fused::Key, kv_heads),
                    (Fused::Value, kv_heads),
                ]
                .into_iter()
                .flat_map(|(projection, count)| {
                    taken(layout(projection, heads, kv_heads, 3), count * 3)
                })
                .collect();
                all.sort_unstable();
                let expected: Vec<usize> = (0..(heads + 2 * kv_heads) * 3).collect();
                assert_eq!(all, expected, "{heads} {kv_heads}");
            }
        }
    }

    #[test]
    fn groups_are_queries_then_key_then_value() {
        assert_eq!(
            taken(fused_by_group(Fused::Query, 4, 2, 1), 4),
            [0, 1, 4, 5]
        );
        assert_eq!(taken(fused_by_group(Fused::Key, 4, 2, 1), 2), [2, 6]);
        assert_eq!(taken(fused_by_group(Fused::Value, 4, 2, 1), 2), [3, 7]);
    }

    #[test]
    fn storing_is_the_inverse_of_reading() {
        let tensor: Vec<f32> = (0..48).map(|index| index as f32).collect();
        let [deinterleave, transposed] =
            [Transform::Deinterleave { heads: 2 }, Transform::Transposed]
                .map(|transform| WeightSource::tensor("t").with(transform));
        let rotary = Transform::RotaryFirst {
            heads: 2,
            rotary: 2,
        };
        let rotary = WeightSource::tensor("t").with(rotary);
        let heads = WeightSource::Tensor {
            name: "t".to_owned(),
            rows: Rows::Heads { count: 2 },
            transform: Transform::None,
        };
        assert_eq!(heads.tensor_shape(&[8, 6]), [2, 4, 6]);
        for source in [deinterleave, transposed, rotary, heads] {
            let shape = [8, 6];
            let mut back = vec![0.0; 48];
            source.store(&source.apply(tensor.clone(), &shape), &shape, &mut back);
            assert_eq!(back, tensor, "{source:?}");
        }
        // Of fused projections each stores its own rows.
        for layout in [fused_by_group, fused_concatenated] {
            let mut back = vec![-1.0; 48];
            for (part, count) in [(Fused::Query, 4), (Fused::Key, 2), (Fused::Value, 2)] {
                let source = WeightSource::Tensor {
                    name: String::new(),
                    rows: layout(part, 4, 2, 2),
                    transform: Transform::None,
                };
                let shape = [count * 2, 3];
                source.store(&source.apply(tensor.clone(), &shape), &shape, &mut back);
            }
            assert_eq!(back, tensor);
        }
    }

    #[test]
    fn transforms_move_rows() {
        let rows: Vec<f32> = (0..8).map(|row| row as f32).collect();
        let halves = WeightSource::tensor("q").with(Transform::Deinterleave { heads: 2 });
        assert_eq!(
            halves.apply(rows, &[8, 1]),
            [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
        );
        assert_eq!(halves.stored_rows(4), Some(vec![0, 1, 2, 3]));
        let halves = WeightSource::tensor("q").with(Transform::Deinterleave { heads: 1 });
        assert_eq!(halves.stored_rows(4), Some(vec![0, 2, 1, 3]));
        // One head of six rows, of which the last four (two pairs) are rotated.
        let rotary = Transform::RotaryFirst {
            heads: 1,
            rotary: 4,
        };
        let rotary = WeightSource::tensor("q").with(rotary);
        assert_eq!(rotary.stored_rows(6), Some(vec![2, 4, 3, 5, 0, 1]));
        // Two heads, each with two rows of keys and one of values; the keys are selected and transposed.
        let keys = WeightSource::Tensor {
            name: "kv".to_owned(),
            rows: Rows::Strided {
                first: 0,
                length: 2,
                step: 3,
                total: 6,
            },
            transform: Transform::TransposedHeads { heads: 2 },
        };
        assert_eq!(keys.tensor_shape(&[6, 2]), [6, 3]);
        let stored = (0..18).map(|value| value as f32).collect();
        assert_eq!(
            keys.apply(stored, &[6, 2]),
            [
                0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 9.0, 12.0, 10.0, 13.0, 11.0, 14.0
            ]
        );
        let alternate = |first: usize, transform: Transform| WeightSource::Tensor {
            name: "a".to_owned(),
            rows: Rows::Alternate {
                first,
                index: 1,
                count: 3,
            },
            transform,
        };
        let second = alternate(1, Transform::Transposed);
        assert_eq!(second.tensor_shape(&[2, 3]), [3, 3, 4]);
        // Columns 1 and 3 of the stored [3, 4] become the rows.
        let stored = (0..12).map(|value| value as f32).collect();
        assert_eq!(
            second.apply(stored, &[2, 3]),
            [1.0, 5.0, 9.0, 3.0, 7.0, 11.0]
        );
        let bias = alternate(0, Transform::None);
        assert_eq!(bias.tensor_shape(&[2]), [3, 4]);
        assert_eq!(bias.apply(vec![1.0, 2.0, 3.0, 4.0], &[2]), [1.0, 3.0]);
        let transposed = WeightSource::tensor("t").with(Transform::Transposed);
        assert_eq!(transposed.tensor_shape(&[2, 3]), [3, 2]);
        assert_eq!(
            transposed.apply(vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0], &[2, 3]),
            [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        );
        assert_eq!(transposed.stored_rows(2), None);
        // Rows of a fused tensor are selected after it is transposed: rows 1 and 2 of three.
        let fused = WeightSource::Tensor {
            name: "f".to_owned(),
            rows: Rows::Strided {
                first: 1,
                length: 2,
                step: 2,
                total: 3,
            },
            transform: Transform::Transposed,
        };
        assert_eq!(fused.tensor_shape(&[2, 2]), [2, 3]);
        assert_eq!(
            fused.apply(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 2]),
            [2.0, 5.0, 3.0, 6.0]
        );
        let normalised = WeightSource::tensor("e").with(Transform::NormalisedRows { epsilon: 0.0 });
        assert_eq!(normalised.apply(vec![3.0, -3.0], &[1, 2]), [1.0, -1.0]);
        let norm = WeightSource::tensor("n").with(Transform::AddOne);
        assert_eq!(norm.apply(vec![0.5], &[1]), [1.5]);
    }
}
