//! Numbers that go to the device beside its kernels: they arrive before whoever waits for them, and nothing is
//! overwritten on its way. On the emulator, which copies as late as it may, or on a card.

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
fn pieces_of_a_matrix_take_turns_on_two_lanes() {
    for format in Format::ALL {
        let (rows, columns, most) = (231, 130, 50);
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
            let mut lanes = [0, 1].map(|number| {
                let matrix = GpuMatrix::with_capacity(device, format, most, columns).unwrap();
                let bytes = matrix.bytes() + most * 4;
                let linear = GpuLinear {
                    matrix,
                    bias: Some(Buffer::new(device, most).unwrap()),
                };
                (
                    StagingStream::new(device, number, 4, bytes).unwrap(),
                    linear,
                )
            });
            let mut found = Vec::new();
            let mut outs = Vec::new();
            let pieces: Vec<usize> = (0..rows).step_by(most).collect();
            let send = |(lane, linear): &mut (StagingStream, GpuLinear), first: usize| {
                let range = first..rows.min(first + most);
                lane.begin().unwrap();
                let piece = view.rows_range(range.clone());
                linear.matrix.write_async(&piece, lane, &copy).unwrap();
                let to = linear.bias.as_mut().unwrap();
                to.write_async(&bias[range], lane, &copy).unwrap();
            };
            send(&mut lanes[0], 0);
            for (index, _) in pieces.iter().enumerate() {
                if let Some(next) = pieces.get(index + 1) {
                    send(&mut lanes[(index + 1) % 2], *next);
                }
                let (lane, linear) = &lanes[index % 2];
                lane.end().unwrap();
                let mut out = Buffer::new(device, linear.matrix.rows()).unwrap();
                gpu.project(&x, None, &mut [(linear, &mut out)], false)
                    .unwrap();
                // Read when all is on its way, for reading waits.
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
fn a_lane_takes_no_more_than_it_has_room_for() {
    on_every_device(|device| {
        let mut lane = StagingStream::new(device, 0, 1, 64).unwrap();
        let mut buffer = Buffer::<u8>::new(device, 64).unwrap();
        let copy = |to: &mut [u8], from: &[u8]| to.copy_from_slice(from);
        lane.begin().unwrap();
        buffer.write_async(&[1; 64], &mut lane, &copy).unwrap();
        let more = AssertUnwindSafe(|| buffer.write_async(&[2; 64], &mut lane, &copy));
        assert!(catch_unwind(more).is_err());
        lane.end().unwrap();
        assert_eq!(buffer.to_vec().unwrap(), [1; 64]);
        vec![]
    });
}
