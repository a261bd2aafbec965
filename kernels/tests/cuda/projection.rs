//! GEMV with a fused norm, norms in place, arg max, embedding.

use std::sync::{Arc, atomic::Ordering};

use powerinfer_emulator::{Order, test_emulator};
use powerinfer_kernels::{
    Arithmetic,
    cuda::{Device, EmbeddingTable, Gpu, GpuLinear, GpuMatrix, HostBuffer, HostMatrix},
};
use powerinfer_tensor::{Format, NormKind, pack};

use crate::{
    COLUMNS, Norm,
    devices::{assert_near, on_every_device},
    noise::noise,
    product, upload, zeros,
};

#[test]
fn projections_equal_those_of_the_cpu() {
    use Arithmetic::{Float, Integer};
    for format in Format::ALL {
        for columns in COLUMNS {
            for (rows, arithmetic) in [(1, Integer), (19, Float), (19, Integer), (70, Integer)] {
                let packed = pack(format, rows, columns, &noise(rows as u64, rows * columns));
                let x = noise(3, columns);
                let want = product(&packed.as_view(), &x, arithmetic);
                on_every_device(|device| {
                    let gpu = Gpu::new(Arc::clone(device), arithmetic);
                    let linear = GpuLinear::upload(device, &packed.as_view(), None).unwrap();
                    let mut out = zeros(device, rows);
                    gpu.project(&upload(device, &x), None, &mut [(&linear, &mut out)], false)
                        .unwrap();
                    let found = out.to_vec().unwrap();
                    assert_near(
                        &found,
                        &want,
                        1e-4,
                        &format!("{format} {rows} x {columns}, {arithmetic:?}"),
                    );
                    found
                });
            }
        }
    }
}

#[test]
fn a_projection_fuses_the_norm_and_three_matrices_for_several_tokens() {
    let (columns, tokens) = (100, 3);
    let rows = [40, 9, 1];
    for kind in [NormKind::RootMeanSquare, NormKind::Layer] {
        let norm = Norm::new(kind, columns);
        let x = noise(4, tokens * columns);
        let packed = rows.map(|rows| {
            pack(
                Format::Bf16,
                rows,
                columns,
                &noise(rows as u64, rows * columns),
            )
        });
        let bias = noise(5, rows[1]);
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let linears = [0, 1, 2].map(|index| {
                let bias = (index == 1).then_some(bias.as_slice());
                GpuLinear::upload(device, &packed[index].as_view(), bias).unwrap()
            });
            let [mut a, mut b, mut c] = rows.map(|rows| zeros::<f32>(device, tokens * rows));
            for accumulate in [false, true] {
                let mut parts = [
                    (&linears[0], &mut a),
                    (&linears[1], &mut b),
                    (&linears[2], &mut c),
                ];
                let norm = norm.upload(device);
                gpu.project(&upload(device, &x), Some(&norm), &mut parts, accumulate)
                    .unwrap();
            }
            let found = [a, b, c].map(|out| out.to_vec().unwrap());
            for (index, rows) in rows.into_iter().enumerate() {
                for (x, found) in x.chunks(columns).zip(found[index].chunks(rows)) {
                    let mut want =
                        product(&packed[index].as_view(), &norm.apply(x), Arithmetic::Float);
                    for (row, want) in want.iter_mut().enumerate() {
                        // The second launch accumulates.
                        *want = 2.0 * (*want + if index == 1 { bias[row] } else { 0.0 });
                    }
                    assert_near(found, &want, 1e-4, &format!("{kind:?}, matrix {index}"));
                }
            }
            found.concat()
        });
    }
}

#[test]
fn norms_in_place_and_arg_max_equal_their_formulas() {
    for size in [1, 33, 300, 5000] {
        for kind in [NormKind::RootMeanSquare, NormKind::Layer] {
            let norm = Norm::new(kind, size);
            let x = noise(6, 2 * size);
            on_every_device(|device| {
                let mut buffer = upload(device, &x);
                Gpu::new(Arc::clone(device), Arithmetic::Integer)
                    .norm(&mut buffer, &norm.upload(device))
                    .unwrap();
                let found = buffer.to_vec().unwrap();
                let want: Vec<f32> = x.chunks(size).flat_map(|x| norm.apply(x)).collect();
                assert_near(&found, &want, 1e-4, &format!("{kind:?} of {size}"));
                found
            });
        }
    }
    let mut x = noise(7, 9000);
    x[4321] = 7.0;
    x[8000] = 7.0;
    x[17] = f32::NAN;
    for (x, want) in [
        (&x[..], 4321),
        (
            &x[..17],
            (0..17).max_by(|a, b| x[*a].total_cmp(&x[*b])).unwrap(),
        ),
        (&x[17..18], 0),
    ] {
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let out = HostBuffer::new(device, 1).unwrap();
            let mut scratch = zeros(device, Gpu::ARG_MAX_WORDS);
            for _ in 0..2 {
                gpu.arg_max(&upload(device, x), &out, &mut scratch).unwrap();
                device.synchronise().unwrap();
                assert_eq!(out.words()[0].load(Ordering::Acquire), want as u32);
            }
            Vec::new()
        });
    }
}

#[test]
fn a_scaled_row_of_an_embedding_is_the_one_on_the_host() {
    for format in Format::ALL {
        let columns = COLUMNS[COLUMNS.len() - 1];
        let (rows, token, scale) = (7, 5, 1.7);
        let packed = pack(format, rows, columns, &noise(8, rows * columns));
        let mut want = vec![0.0; columns];
        packed.as_view().dequantise_row(token, &mut want);
        want.iter_mut().for_each(|x| *x *= scale);
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Integer);
            let found = HostBuffer::new(device, 1).unwrap();
            found.words()[0].store(token as u32, Ordering::Release);
            let there = GpuMatrix::upload(device, &packed.as_view()).unwrap();
            let here = HostMatrix::new(device, &packed.as_view()).unwrap();
            let tables = [EmbeddingTable::Device(&there), EmbeddingTable::Host(&here)];
            let [on_device, mapped] = tables.map(|table| {
                let mut out = zeros(device, columns);
                gpu.embed(table, &found, scale, &mut out).unwrap();
                out.to_vec().unwrap()
            });
            assert_eq!(on_device, want, "{format}");
            assert_eq!(mapped, want, "{format}");
            mapped
        });
    }
}

#[test]
fn an_input_that_exceeds_shared_memory_is_an_error() {
    let Some(emulator) = test_emulator(1, Order::Forward) else {
        return;
    };
    let device: Arc<dyn Device> = Arc::new(emulator);
    let packed = pack(Format::F32, 1, 40_000, &vec![0.0; 40_000]);
    let linear = GpuLinear::upload(&device, &packed.as_view(), None).unwrap();
    let (x, mut out) = (zeros(&device, 40_000), zeros(&device, 1));
    let gpu = Gpu::new(Arc::clone(&device), Arithmetic::Integer);
    let error = gpu
        .project(&x, None, &mut [(&linear, &mut out)], false)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the input of a projection needs 160128 bytes of shared memory, emulator has 101376; keep that layer on the CPU"
    );
}
