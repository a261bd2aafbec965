//! Mistakes planted in the shipped PTX, which the comparison with the source has to find.

use std::sync::Arc;

use powerinfer_emulator::{Order, PtxDevice, test_emulator};
use powerinfer_kernels::{
    Arithmetic,
    cuda::{Device, DeviceError, Gpu, GpuLinear, ptx_modules},
};
use powerinfer_tensor::{Format, NormKind, pack};

use crate::{Norm, noise::noise, upload, zeros};

/// Bits of a projection with a norm and of a norm in place.
fn results(device: Arc<dyn Device>) -> Result<Vec<u32>, DeviceError> {
    let (rows, columns) = (19, 300);
    let packed = pack(Format::Q8_0, rows, columns, &noise(1, rows * columns));
    let norm = Norm::new(NormKind::RootMeanSquare, columns).upload(&device);
    let gpu = Gpu::new(Arc::clone(&device), Arithmetic::Integer);
    let linear = GpuLinear::upload(&device, &packed.as_view(), None)?;
    let (mut x, mut out) = (upload(&device, &noise(2, columns)), zeros(&device, rows));
    gpu.project(&x, Some(&norm), &mut [(&linear, &mut out)], false)?;
    gpu.norm(&mut x, &norm)?;
    let found = [out.to_vec()?, x.to_vec()?].concat();
    Ok(found.into_iter().map(f32::to_bits).collect())
}

/// [`results`] of the PTX after `change`, which gets a kernel of `projection.ptx`.
fn results_after(kernel: &str, change: impl Fn(&str) -> String) -> Result<Vec<u32>, DeviceError> {
    let mut modules = ptx_modules();
    let (_, ptx) = modules.find(|(name, _)| *name == "projection").unwrap();
    let start = ptx.find(&format!(".entry {kernel}(")).unwrap();
    let end = start + ptx[start..].find("\n}\n").unwrap();
    let changed = [&ptx[..start], &change(&ptx[start..end]), &ptx[end..]].concat();
    let device = PtxDevice::with_module(2, "projection.ptx", &changed).unwrap();
    results(Arc::new(device))
}

#[test]
fn a_changed_instruction_is_found() {
    let Some(emulator) = test_emulator(2, Order::Forward) else {
        return;
    };
    let of_source = results(Arc::new(emulator)).unwrap();
    assert_eq!(
        results_after("norm_in_place", str::to_owned).unwrap(),
        of_source
    );
    for (kernel, from, to) in [
        ("norm_in_place", "sqrt.rn.f32 ", "rcp.rn.f32 "),
        ("norm_in_place", "fma.rn.f32 ", "fma.rm.f32 "),
        ("norm_in_place", "shfl.sync.bfly", "shfl.sync.up"),
        ("norm_in_place", "bar.sync 0;", ""),
        ("project_q8_0", "mul.rn.f32 ", "add.rn.f32 "),
        ("project_q8_0", "max.u32 ", "min.u32 "),
    ] {
        let found = results_after(kernel, |text| text.replace(from, to));
        assert!(
            found.is_ok_and(|found| found != of_source),
            "{kernel}: {from}"
        );
    }
    // One element too many.
    let one_more = |text: &str| text.replace("setp.ge.s32 ", "setp.gt.s32 ");
    let error = results_after("norm_in_place", one_more)
        .unwrap_err()
        .to_string();
    assert!(error.contains("outside of Shared memory"), "{error}");
}
