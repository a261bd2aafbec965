//! Staging streams: copies finish before the kernels that wait for them, and staging memory is not overwritten before its copy
//! has finished. On the emulator, which copies as late as allowed, or on a GPU.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use powerinfer_kernels::{
    Arithmetic, Isa,
    cuda::{Buffer, Gpu, GpuLinear, GpuMatrix, StagingStream},
};
use powerinfer_tensor::{Format, pack};

#[path = "support/devices.rs"]
mod devices;
#[path = "support/noise.rs"]
mod noise;

use devices::{assert_near, on_every_device};
use noise::noise;

#[test]
fn pieces_of_a_matrix_alternate_on_two_staging_streams() {
    for format in Format::ALL {
        let (rows, columns, piece_rows) = (231, 130, 50);
        let packed = pack(format, rows, columns, &noise(1, rows * columns));
        let (x, bias) = (noise(2, columns), noise(3, rows));
        let view = packed.as_view();
        let mut want = vec![0.0; rows];
        Isa::SCALAR.gemv(&view, &x, &mut want);
        for (want, bias) in want.iter_mut().zip(&bias) {
            *want += bias;
        }
        on_every_device(|device| {
            let gpu = Gpu::new(Arc::clone(device), Arithmetic::Float);
            let x = Buffer::from_slice(device, &x).unwrap();
            let copied = Cell::new(0);
            let copy = |to: &mut [u8], from: &[u8]| {
                copied.set(copied.get() + from.len());
                to.copy_from_slice(from);
            };
            let mut streams = [0, 1].map(|number| {
                let matrix = GpuMatrix::with_capacity(device, format, piece_rows, columns).unwrap();
                let bytes = matrix.bytes() + piece_rows * 4;
                let linear = GpuLinear {
                    matrix,
                    bias: Some(Buffer::new(device, piece_rows).unwrap()),
                };
                (
                    StagingStream::new(device, number, 4, bytes).unwrap(),
                    linear,
                )
            });
            let mut found = Vec::new();
            let mut outs = Vec::new();
            let pieces: Vec<usize> = (0..rows).step_by(piece_rows).collect();
            let send = |(staging, linear): &mut (StagingStream, GpuLinear), first: usize| {
                let range = first..rows.min(first + piece_rows);
                staging.begin().unwrap();
                let piece = view.rows_range(range.clone());
                linear.matrix.write_async(&piece, staging, &copy).unwrap();
                let to = linear.bias.as_mut().unwrap();
                to.write_async(0, &bias[range], staging, &copy).unwrap();
            };
            send(&mut streams[0], 0);
            for (index, _) in pieces.iter().enumerate() {
                if let Some(next) = pieces.get(index + 1) {
                    send(&mut streams[(index + 1) % 2], *next);
                }
                let (staging, linear) = &streams[index % 2];
                staging.end().unwrap();
                let mut out = Buffer::new(device, linear.matrix.rows()).unwrap();
                gpu.project(&x, None, &mut [(linear, &mut out)], false)
                    .unwrap();
                // Read at the end, since reading synchronises.
                outs.push(out);
            }
            for out in outs {
                found.extend(out.to_vec().unwrap());
            }
            assert_near(&found, &want, 1e-4, &format!("{format}"));
            assert!(copied.get() >= rows * format.row_bytes(columns) + rows * 4);
            found
        });
    }
}

#[test]
fn a_round_beyond_the_staging_memory_panics() {
    on_every_device(|device| {
        let mut staging = StagingStream::new(device, 0, 1, 64).unwrap();
        let mut buffer = Buffer::<u8>::new(device, 64).unwrap();
        let copy = |to: &mut [u8], from: &[u8]| to.copy_from_slice(from);
        staging.begin().unwrap();
        buffer
            .write_async(0, &[1; 64], &mut staging, &copy)
            .unwrap();
        let more = AssertUnwindSafe(|| buffer.write_async(0, &[2; 64], &mut staging, &copy));
        assert!(catch_unwind(more).is_err());
        staging.end().unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [1; 64]);
        vec![]
    });
}
