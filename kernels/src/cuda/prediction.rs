//! Prediction of active neurons by a network or by sign bits: the predicting kernels of `feed_forward.cu`.

use powerinfer_tensor::BLOCK;

use super::{
    Buffer, DeviceError, Gpu, GpuLinear, GpuMatrix, GpuNorm, HostBuffer, KeptInput, arguments,
    gpu::{THREADS, WORD, input_bytes, kernel, width},
};

/// Neurons per thread block that predicts with a network.
const NEURONS: usize = 64;
/// Thread blocks per multiprocessor that predict by signs.
const SIGN_BLOCKS: usize = 3;

/// A layer's predictor on a device: `logits = B · relu(A · x) + bias`, or without ReLU.
#[derive(Debug)]
pub struct Predictor {
    /// `[rank, hidden]`.
    pub a: GpuLinear,
    /// B transposed, `[rank, neurons]`.
    pub b_transposed: GpuMatrix,
    /// `[⌈rank / 32⌉, neurons]`: scales of B's blocks of 32 hidden units, if it is scaled.
    pub b_scales: Option<Buffer<f32>>,
    /// `[neurons]`.
    pub bias: Buffer<f32>,
    /// Smallest logit of a predicted neuron.
    pub threshold: f32,
    /// Whether the predictor is linear, without ReLU.
    pub is_linear: bool,
}

/// Sign bits of a layer's gate on a device.
#[derive(Debug)]
pub struct SignBits {
    /// `[neurons, ⌈hidden / 64⌉]` words, as [`pack_signs`](powerinfer_tensor::pack_signs) makes them.
    pub signs: Buffer<u64>,
    /// Rows of the gate.
    pub neurons: usize,
    /// Columns of the gate.
    pub columns: usize,
    /// Columns in which gate and input must agree in sign for a neuron to be predicted.
    pub min_agreements: u32,
}

/// Outputs of a prediction: bit masks of the predicted neurons, 32 neurons per word.
#[derive(Debug)]
pub struct PredictedMask<'a> {
    /// `[tokens, ⌈neurons / 32⌉]` words on the device.
    pub mask: &'a mut Buffer<u32>,
    /// The same in mapped host memory, if the host has neurons of the layer.
    pub host_mask: Option<&'a HostBuffer>,
    /// `[tokens, hot_count]`: activations, which are cleared.
    pub activations: &'a mut Buffer<f32>,
    /// Number of hot neurons whose activations are cleared; 0 if they need not be.
    pub hot_count: usize,
}

impl Gpu {
    /// Predicts the active neurons of every token of `norm(x)`.
    ///
    /// `x` is `[tokens, hidden]`, `units` `[tokens, rank]`: scratch for the predictor's hidden layer. `kept` keeps the rounded
    /// input for [`gate_up`](Self::gate_up), and the host receives the normalised one in the given memory.
    ///
    /// # Errors
    ///
    /// A launch fails, or the input exceeds the shared memory of a thread block.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn predict(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        predictor: &Predictor,
        units: &mut Buffer<f32>,
        kept: Option<(&mut KeptInput, Option<&HostBuffer>)>,
        predicted: &mut PredictedMask<'_>,
    ) -> Result<(), DeviceError> {
        let hidden_layer = &mut [(&predictor.a, &mut *units)];
        self.project_keeping(x, norm, hidden_layer, false, kept)?;
        let b = &predictor.b_transposed;
        let neurons = b.columns();
        let tokens = units.len() / b.rows().max(1);
        assert!(predictor.bias.len() == neurons && units.len() == tokens * b.rows());
        let blocks = b.rows().div_ceil(BLOCK);
        assert!(
            predictor
                .b_scales
                .as_ref()
                .is_none_or(|scales| scales.len() == blocks * neurons)
        );
        let arguments = arguments::Predict {
            units: units.address(),
            b: b.argument(),
            b_scales: predictor.b_scales.as_ref().map_or(0, Buffer::address),
            bias: predictor.bias.address(),
            threshold: predictor.threshold,
            is_linear: i32::from(predictor.is_linear),
            masks: masks(predicted, neurons, tokens),
        };
        let grid = [neurons.div_ceil(NEURONS) as u32, tokens as u32, 1];
        let floats = |count: usize| (count * 4).next_multiple_of(16);
        let scales = predictor.b_scales.as_ref().map_or(0, |_| blocks * NEURONS);
        let shared = floats(width(b.format()) * (THREADS + 1))
            + floats(THREADS)
            + floats(blocks * BLOCK)
            + floats(scales);
        let name = kernel("predict", b.format());
        self.launch(&name, grid, THREADS, shared, "a predictor", &arguments)
    }

    /// Predicts the neurons whose gate row agrees in sign with `norm(x)` in enough columns (SparseInfer).
    ///
    /// `x` is `[tokens, columns]`.
    ///
    /// # Errors
    ///
    /// The launch fails, or the input exceeds the shared memory of a thread block.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn predict_by_signs(
        &self,
        x: &Buffer<f32>,
        norm: Option<&GpuNorm>,
        signs: &SignBits,
        predicted: &mut PredictedMask<'_>,
    ) -> Result<(), DeviceError> {
        let words = signs.columns.div_ceil(64);
        let tokens = x.len() / signs.columns.max(1);
        assert!(x.len() == tokens * signs.columns && signs.signs.len() == signs.neurons * words);
        let arguments = arguments::PredictBySigns {
            x: x.address(),
            norm: GpuNorm::argument(norm, signs.columns),
            signs: signs.signs.address(),
            neurons: signs.neurons as i32,
            columns: signs.columns as i32,
            min_agreements: signs.min_agreements as i32,
            padding: 0,
            masks: masks(predicted, signs.neurons, tokens),
        };
        // A block per word of the mask.
        let limit = SIGN_BLOCKS * self.device().info().multiprocessors;
        let blocks = signs.neurons.div_ceil(WORD).min(limit) as u32;
        let signs_bytes = (2 * words * 4).next_multiple_of(16);
        let shared = input_bytes(signs.columns, false, 1) + signs_bytes + WORD * 4;
        self.launch(
            "predict_by_signs",
            [blocks, tokens as u32, 1],
            THREADS,
            shared,
            "signs",
            &arguments,
        )
    }
}

pub(super) fn masks(
    predicted: &mut PredictedMask<'_>,
    neurons: usize,
    tokens: usize,
) -> arguments::Masks {
    let words = tokens * neurons.div_ceil(WORD);
    let cleared = tokens * predicted.hot_count;
    assert!(predicted.mask.len() >= words && predicted.activations.len() >= cleared);
    assert!(predicted.host_mask.is_none_or(|host| host.len() >= words));
    arguments::Masks {
        device: predicted.mask.address(),
        host: predicted.host_mask.map_or(0, |host| host.address(0)),
        activations: predicted.activations.address(),
        hot_count: predicted.hot_count as i32,
        padding: 0,
    }
}
