//! Predicts the active neurons of each token of a batch from the signs of the gate (SparseInfer, arXiv 2411.12692).

use powerinfer_tensor::{SignMatrix, pack_signs};

use crate::{
    Statistics, Threads,
    masks::{WORD, pack_decisions},
    predictor::PredictionBuffers,
};

/// Signs of a layer's gate, and the number of a row's signs that must agree with the input's signs.
#[derive(Clone, Copy)]
pub(crate) struct SignBits<'a> {
    pub(crate) signs: SignMatrix<'a>,
    pub(crate) agreements: u32,
}

impl SignBits<'_> {
    /// Sets the masks of all tokens of `x [tokens, hidden]`. A neuron is predicted if enough signs of its gate row agree with the
    /// input's signs.
    pub(crate) fn predict(
        &self,
        threads: &Threads,
        x: &[f32],
        buffers: &mut PredictionBuffers,
        statistics: &mut Statistics,
    ) {
        let size = self.signs.columns();
        let (rows, tokens) = (self.signs.rows(), x.len() / size);
        let PredictionBuffers { signs, masks, .. } = buffers;
        signs.clear();
        signs.extend(x.chunks_exact(size).flat_map(pack_signs));
        let signs = signs.chunks_exact(size.div_ceil(WORD));
        let words = masks.reset(rows, tokens);
        let bytes = WORD * SignMatrix::row_bytes(size) * tokens;
        threads.by_row_groups(words, tokens, 1, bytes, |part, words| {
            let mut agreements = [0; WORD];
            for (index, words) in part.zip(words.chunks_exact_mut(tokens)) {
                let rows = index * WORD..rows.min((index + 1) * WORD);
                let agreements = &mut agreements[..rows.len()];
                let group = self.signs.rows_range(rows);
                for (x, word) in signs.clone().zip(words) {
                    threads.isa().sign_agreements(&group, x, agreements);
                    *word = pack_decisions(agreements, |count| count >= self.agreements);
                }
            }
        });
        statistics.bytes_read += self.signs.bytes() as u64;
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::random::Random;
    use powerinfer_kernels::Isa;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn signs_are_counted_for_a_batch_as_for_its_tokens_alone(
            hidden in 1usize..200, neurons in 1usize..900, tokens in 1usize..20,
            threads in 1usize..4, seed: u64,
        ) {
            let mut random = Random::new(seed);
            let mut normal = |count: usize| -> Vec<f32> {
                (0..count).map(|_| random.normal() as f32).collect()
            };
            let (gate, x) = (normal(neurons * hidden), normal(tokens * hidden));
            let words = gate.chunks(hidden).flat_map(pack_signs);
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            let agreements = hidden as u32 / 2 + 1;
            let signs = SignMatrix::new(&bytes, neurons, hidden).unwrap();
            let signs = SignBits { signs, agreements };
            let threads = Threads::new(Isa::detect().unwrap(), threads).unwrap();
            let mut buffers = PredictionBuffers::default();
            let mut predict = |x: &[f32]| {
                let mut statistics = Statistics::default();
                signs.predict(&threads, x, &mut buffers, &mut statistics);
                assert_eq!(statistics.bytes_read, bytes.len() as u64);
                let tokens = 0..x.len() / hidden;
                tokens.map(|token| buffers.masks.listed(token, neurons)).collect::<Vec<_>>()
            };
            let together = predict(&x);
            for (x, found) in x.chunks_exact(hidden).zip(together) {
                let agree = |gate: &[f32]| {
                    let pairs = gate.iter().zip(x);
                    let agree = pairs.filter(|(w, x)| w.is_sign_negative() == x.is_sign_negative());
                    agree.count() as u32 >= agreements
                };
                let rows = (0..neurons as u32).zip(gate.chunks_exact(hidden));
                let want: Vec<u32> = rows.filter(|row| agree(row.1)).map(|row| row.0).collect();
                prop_assert_eq!(&found, &want);
                prop_assert_eq!(&predict(x)[0], &want);
            }
        }
    }
}
