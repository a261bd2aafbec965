//! Prediction from sign bits, without training (SparseInfer, arXiv 2411.12692): the more columns in which a gate row and the
//! input agree in sign, the more likely the gate is positive.

use powerinfer_artifact::predictor_file::{PredictorInput, SignBitSummary};
use powerinfer_kernels::Isa;
use powerinfer_profile::Profile;
use powerinfer_tensor::{SignMatrix, pack_signs};

use crate::{
    PredictorError, Targets,
    calibrate::{Predicts, calibrate},
    verdict::is_far_short,
};

/// Sign bits of a layer's gate.
pub(crate) struct Signs {
    /// Rows in the layout of [`SignMatrix`].
    pub(crate) bytes: Vec<u8>,
    /// Number of neurons.
    pub(crate) rows: usize,
    hidden: usize,
}

impl Signs {
    fn view(&self) -> SignMatrix<'_> {
        SignMatrix::new(&self.bytes, self.rows, self.hidden)
            .expect("rows have the layout of a sign matrix")
    }
}

impl Predicts for Signs {
    fn input(&self) -> PredictorInput {
        PredictorInput::Normed
    }

    fn logits(&self, isa: Isa, x: &[f32], logits: &mut [f32]) {
        let mut agreements = vec![0; self.rows];
        isa.sign_agreements(
            &self.view(),
            &pack_signs(x).collect::<Vec<_>>(),
            &mut agreements,
        );
        for (logit, agreements) in logits.iter_mut().zip(agreements) {
            *logit = agreements as f32;
        }
    }
}

/// Sign bits of `layer`'s `gate [neurons, hidden]`, with their quality on held-out samples; `None` if they fall far short of
/// `targets`.
pub(crate) fn sign_bits(
    layer: usize,
    profile: &Profile,
    gate: &[f32],
    targets: Targets,
    isa: Isa,
) -> Result<Option<(Signs, SignBitSummary)>, PredictorError> {
    let held_out = profile.traces(layer)?.held_out;
    let hidden = held_out.hidden_size;
    let signs = Signs {
        bytes: gate
            .chunks(hidden)
            .flat_map(pack_signs)
            .flat_map(u64::to_le_bytes)
            .collect(),
        rows: gate.len() / hidden,
        hidden,
    };
    let quality = calibrate(&signs, &held_out, targets, isa);
    // At most all signs agree; one more means that no neuron is predicted.
    let agreements = quality.threshold.clamp(0.0, hidden as f32 + 1.0) as u32;
    if is_far_short(&quality, targets) {
        return Ok(None);
    }
    let summary = SignBitSummary {
        agreements,
        alpha: (hidden as f64 - f64::from(agreements)) / f64::from(agreements.max(1)),
        bytes: signs.bytes.len() as u64,
        recall: quality.recall,
        contribution_recall: quality.contribution_recall,
        precision: quality.precision,
        predicted_sparsity: 1.0 - quality.predicted_density,
    };
    Ok(Some((signs, summary)))
}
