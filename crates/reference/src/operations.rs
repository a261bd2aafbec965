//! Operations shared by embedding, layers and head.

use std::collections::HashMap;

use candle_core::{CpuStorage, D, Device, Result, Storage, Tensor, bail};
use powerinfer_model::{
    Activation, Checkpoint, LayerWeight, ModelConfig, ModelError, NormKind, Weight,
};

/// Converts an error of candle.
pub(crate) fn failed(error: candle_core::Error) -> ModelError {
    ModelError::Reference(error.to_string())
}

/// Loads a weight as an F32 tensor.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    weight: Weight,
) -> std::result::Result<Tensor, ModelError> {
    let values = checkpoint.read(weight)?;
    Tensor::from_vec(values, checkpoint.config().shape(weight), &Device::Cpu).map_err(failed)
}

/// Loads weights of layer `index`.
pub(crate) fn load_all(
    checkpoint: &Checkpoint,
    index: usize,
    weights: Vec<LayerWeight>,
) -> std::result::Result<HashMap<LayerWeight, Tensor>, ModelError> {
    let load = |weight| Ok((weight, load(checkpoint, Weight::Layer(index, weight))?));
    weights.into_iter().map(load).collect()
}

/// Loads a weight if the model has it.
pub(crate) fn load_if(
    present: bool,
    checkpoint: &Checkpoint,
    weight: Weight,
) -> std::result::Result<Option<Tensor>, ModelError> {
    present.then(|| load(checkpoint, weight)).transpose()
}

/// Calls `read` with the values of a float32 tensor in row-major order.
///
/// # Errors
///
/// The tensor has another type or is not on the CPU.
pub fn with_values<Output>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> Output) -> Result<Output> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) => {
            Ok(read(&values[start..end]))
        }
        _ => bail!("expected a float32 tensor on the CPU"),
    }
}

/// `x · Wᵀ + b`, with or without bias.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let product = x.matmul(&weight.t()?)?;
    match bias {
        None => Ok(product),
        Some(bias) => product.broadcast_add(bias),
    }
}

/// Applies the model's kind of norm over the last dimension.
pub(crate) fn norm(
    config: &ModelConfig,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let centred = match config.norm {
        NormKind::RootMeanSquare => x.clone(),
        NormKind::Layer => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
    };
    let mean_square = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let normed = centred
        .broadcast_div(&(mean_square + f64::from(config.norm_epsilon))?.sqrt()?)?
        .broadcast_mul(weight)?;
    match bias {
        None => Ok(normed),
        Some(bias) => normed.broadcast_add(bias),
    }
}

/// Applies a soft cap to all elements, if there is one.
pub(crate) fn soft_cap(cap: Option<f32>, x: Tensor) -> Result<Tensor> {
    match cap.map(f64::from) {
        None => Ok(x),
        Some(cap) => (x / cap)?.tanh()? * cap,
    }
}

/// Applies the activation function elementwise.
pub(crate) fn activate(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Relu => x.relu(),
        Activation::SquaredRelu => x.relu()?.sqr(),
        Activation::FatRelu { threshold } => {
            let passes = x.ge(threshold)?.to_dtype(x.dtype())?;
            x * passes
        }
        Activation::Silu => x.silu(),
        Activation::ClampedSwish { limit } => {
            let clamped = x.minimum(limit)?;
            let slope = f64::from(Activation::SWISH_SLOPE);
            clamped.clone() * candle_nn::ops::sigmoid(&(&clamped * slope)?)?
        }
        Activation::GeluErf => x.gelu_erf(),
        Activation::GeluTanh => x.gelu(),
    }
}
