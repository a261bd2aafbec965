//! Where a checkpoint keeps a weight, and what has to be done to its values.

/// Where a weight's values come from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    /// Every value is this one; the checkpoint leaves such a weight out.
    Constant(f32),
    /// Rows of a tensor.
    Tensor {
        /// Its name.
        name: String,
        /// Which of its rows.
        rows: Rows,
        /// What is done to them.
        change: Change,
    },
}

/// Rows of a tensor that make a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// All of them.
    All,
    /// Runs of rows at even distances: a part of a fused matrix.
    Runs {
        /// Row that the first run begins at.
        first: usize,
        /// Rows of each run.
        length: usize,
        /// Rows from one run's beginning to the next one's.
        step: usize,
        /// Rows of the whole tensor.
        total: usize,
    },
}

/// What is done to the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing.
    None,
    /// One is added: Gemma stores its norms' distance from one.
    AddOne,
    /// Within each of so many heads, rows 2i and 2i+1 become rows i and i + half: from rotation
    /// of neighbours to rotation of halves.
    PairsToHalves {
        /// Heads in the tensor.
        heads: usize,
    },
    /// The tensor is stored transposed.
    Transposed,
}

impl Source {
    /// All of the tensor called `name`, as it is.
    pub(crate) fn whole(name: impl Into<String>) -> Self {
        Self::Tensor {
            name: name.into(),
            rows: Rows::All,
            change: Change::None,
        }
    }

    /// The same with `change`.
    pub(crate) fn changed(self, change: Change) -> Self {
        match self {
            Self::Tensor { name, rows, .. } => Self::Tensor { name, rows, change },
            constant => constant,
        }
    }

    /// The tensor's name, where the weight is all of it as it is.
    pub(crate) fn as_stored(&self) -> Option<&str> {
        match self {
            Self::Tensor {
                name,
                rows: Rows::All,
                change: Change::None,
            } => Some(name),
            _ => None,
        }
    }

    /// Shape that the tensor must have for a weight of shape `wanted`.
    pub(crate) fn tensor_shape(&self, wanted: &[usize]) -> Vec<usize> {
        let mut shape = wanted.to_vec();
        if let Self::Tensor { rows, change, .. } = self {
            if let Rows::Runs { total, .. } = rows {
                shape[0] = *total;
            }
            if *change == Change::Transposed {
                shape.reverse();
            }
        }
        shape
    }

    /// Which of the tensor's rows make the `count` rows of a matrix, in their order; none where a row
    /// is not one of the tensor's as it is.
    pub(crate) fn stored_rows(&self, count: usize) -> Option<Vec<usize>> {
        match self {
            Self::Tensor {
                change: Change::None | Change::PairsToHalves { .. },
                ..
            } => {
                let total = self.tensor_shape(&[count])[0];
                // Below 2^24 floats count exactly; no matrix has as many rows.
                let numbered = (0..total).map(|row| row as f32).collect();
                let rows = self.apply(numbered, &[count, 1]);
                (total < 1 << 24).then(|| rows.into_iter().map(|row| row as usize).collect())
            }
            _ => None,
        }
    }

    /// The weight of shape `wanted` from its tensor's `values`, row-major.
    pub(crate) fn apply(&self, values: Vec<f32>, wanted: &[usize]) -> Vec<f32> {
        let Self::Tensor { rows, change, .. } = self else {
            return values;
        };
        let width: usize = wanted[1..].iter().product();
        let values = match *rows {
            Rows::All => values,
            Rows::Runs {
                first,
                length,
                step,
                ..
            } => {
                let runs = wanted[0] / length;
                let mut out = Vec::with_capacity(wanted[0] * width);
                for run in 0..runs {
                    out.extend(&values[(first + run * step) * width..][..length * width]);
                }
                out
            }
        };
        match *change {
            Change::None => values,
            Change::AddOne => values.into_iter().map(|value| value + 1.0).collect(),
            Change::PairsToHalves { heads } => {
                let size = wanted[0] / heads;
                let half = size / 2;
                let mut out = Vec::with_capacity(values.len());
                for row in 0..wanted[0] {
                    let (head, place) = (row / size, row % size);
                    let from = head * size + 2 * (place % half) + place / half;
                    out.extend(&values[from * width..][..width]);
                }
                out
            }
            Change::Transposed => {
                let (rows, columns) = (wanted[0], width);
                let mut out = vec![0.0; values.len()];
                for (column, stored) in values.chunks_exact(rows).enumerate() {
                    for (row, value) in stored.iter().enumerate() {
                        out[row * columns + column] = *value;
                    }
                }
                out
            }
        }
    }
}

/// The part of a fused query, key and value matrix that one of the three is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fused {
    Query,
    Key,
    Value,
}

/// Rows of `part` in a matrix that lists, for every key and value head, its query heads, its key
/// and its value.
///
/// With one key and value head that is all queries, then key, then value; with as many as there
/// are query heads, it is query, key and value of each head in turn.
pub(crate) fn fused_by_group(part: Fused, heads: usize, kv_heads: usize, head_size: usize) -> Rows {
    let group = heads / kv_heads;
    let (first, length) = match part {
        Fused::Query => (0, group),
        Fused::Key => (group, 1),
        Fused::Value => (group + 1, 1),
    };
    Rows::Runs {
        first: first * head_size,
        length: length * head_size,
        step: (group + 2) * head_size,
        total: kv_heads * (group + 2) * head_size,
    }
}

/// Rows of `part` in a matrix that lists all queries, then all keys, then all values.
pub(crate) fn fused_in_turn(part: Fused, heads: usize, kv_heads: usize, head_size: usize) -> Rows {
    let (first, count) = match part {
        Fused::Query => (0, heads),
        Fused::Key => (heads, kv_heads),
        Fused::Value => (heads + kv_heads, kv_heads),
    };
    let length = count * head_size;
    Rows::Runs {
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
        let source = Source::Tensor {
            name: String::new(),
            rows,
            change: Change::None,
        };
        let total = source.tensor_shape(&[count])[0];
        source
            .apply((0..total).map(|row| row as f32).collect(), &[count])
            .into_iter()
            .map(|row| row as usize)
            .collect()
    }

    #[test]
    fn fused_rows_are_taken_once_each() {
        for (heads, kv_heads) in [(4, 4), (4, 2), (6, 1), (8, 2)] {
            for layout in [fused_by_group, fused_in_turn] {
                let mut all: Vec<usize> = [
                    (Fused::Query, heads),
                    (Fused::Key, kv_heads),
                    (Fused::Value, kv_heads),
                ]
                .into_iter()
                .flat_map(|(part, count)| taken(layout(part, heads, kv_heads, 3), count * 3))
                .collect();
                all.sort_unstable();
                let expected: Vec<usize> = (0..(heads + 2 * kv_heads) * 3).collect();
                assert_eq!(all, expected, "{heads} {kv_heads}");
            }
        }
    }

    #[test]
    fn groups_list_queries_then_key_then_value() {
        assert_eq!(
            taken(fused_by_group(Fused::Query, 4, 2, 1), 4),
            [0, 1, 4, 5]
        );
        assert_eq!(taken(fused_by_group(Fused::Key, 4, 2, 1), 2), [2, 6]);
        assert_eq!(taken(fused_by_group(Fused::Value, 4, 2, 1), 2), [3, 7]);
    }

    #[test]
    fn changes_move_rows_as_they_say() {
        let rows: Vec<f32> = (0..8).map(|row| row as f32).collect();
        let halves = Source::whole("q").changed(Change::PairsToHalves { heads: 2 });
        assert_eq!(
            halves.apply(rows, &[8, 1]),
            [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
        );
        assert_eq!(halves.stored_rows(4), Some(vec![0, 1, 2, 3]));
        let halves = Source::whole("q").changed(Change::PairsToHalves { heads: 1 });
        assert_eq!(halves.stored_rows(4), Some(vec![0, 2, 1, 3]));
        let turned = Source::whole("t").changed(Change::Transposed);
        assert_eq!(turned.tensor_shape(&[2, 3]), [3, 2]);
        assert_eq!(
            turned.apply(vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0], &[2, 3]),
            [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        );
        assert_eq!(turned.stored_rows(2), None);
        let norm = Source::whole("n").changed(Change::AddOne);
        assert_eq!(norm.apply(vec![0.5], &[1]), [1.5]);
    }
}
