//! The differentiable operations of the model, each with its gradient written out: fused, they
//! touch memory once where a chain of elementary operations would touch it ten times.

pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod gated;
pub(crate) mod rms_norm;

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};

/// The contiguous float32 values behind a storage.
pub(crate) fn values<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let CpuStorage::F32(values) = storage else {
        bail!("float32 expected")
    };
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&values[start..end]),
        None => bail!("contiguous tensor expected"),
    }
}

/// Calls `read` with the values of a tensor.
pub(crate) fn with_values<Output>(
    tensor: &Tensor,
    read: impl FnOnce(&[f32]) -> Result<Output>,
) -> Result<Output> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => read(values(storage, layout)?),
        _ => bail!("a tensor on the CPU expected"),
    }
}

/// Compares an operation's gradient with finite differences of `loss`.
#[cfg(test)]
pub(crate) fn check_gradient(shape: (usize, usize), loss: impl Fn(&Tensor) -> Result<Tensor>) {
    use candle_core::{Device, Var};
    let count = shape.0 * shape.1;
    let start: Vec<f32> = (0..count)
        .map(|index| ((index * 37 % 101) as f32 / 50.0 - 1.0) * 0.9 + 0.013)
        .collect();
    let evaluate = |values: &[f32]| -> f32 {
        let tensor = Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
        loss(&tensor).unwrap().to_scalar().unwrap()
    };
    let variable = Var::from_slice(&start, shape, &Device::Cpu).unwrap();
    let gradients = loss(variable.as_tensor()).unwrap().backward().unwrap();
    let gradient = gradients
        .get(variable.as_tensor())
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    for index in 0..count {
        let step = 3e-3;
        let mut moved = start.clone();
        moved[index] += step;
        let above = evaluate(&moved);
        moved[index] -= 2.0 * step;
        let below = evaluate(&moved);
        let expected = (above - below) / (2.0 * step);
        assert!(
            (gradient[index] - expected).abs() < 2e-3 + 0.03 * expected.abs(),
            "element {index}: {} but finite differences say {expected}",
            gradient[index]
        );
    }
}
