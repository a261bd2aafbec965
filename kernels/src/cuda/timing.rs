//! Cost of launches and synchronisations with the host.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use powerinfer_tensor::{Activation, FfnKind, Format, pack};

use super::{
    Buffer, ColdSum, DeviceError, Ffn, Gpu, GpuLinear, GpuMatrix, HostBuffer, HostMirror, gpu::WARP,
};

/// Synchronisations that are timed together.
const SYNCS: usize = 50;
/// How long each side waits for the other.
const TIMEOUT: Duration = Duration::from_secs(1);

impl Gpu {
    /// Launches a kernel that does nothing.
    ///
    /// # Errors
    ///
    /// The launch fails.
    pub fn launch_empty(&self) -> Result<(), DeviceError> {
        self.launch("empty", [1, 1, 1], WARP, 0, "nothing", &0u64)
    }

    /// Measures the seconds of synchronisations with the host as decoding has one in each layer: a kernel releases a flag
    /// in mapped memory, the host releases another, and [`Gpu::down`], which has no rows, waits for it. Returns those of
    /// `repeats` graphs, ascending, each with its two kernels; none if the device captures no graphs.
    ///
    /// # Errors
    ///
    /// The device fails, or one side waits for the other for a second.
    pub fn sync_seconds(&self, repeats: usize) -> Result<Vec<f64>, DeviceError> {
        let device = self.device();
        let flags = || HostBuffer::new(device, SYNCS);
        let (ready, done) = (flags()?, flags()?);
        let (input, sum) = (HostBuffer::new(device, 1)?, HostBuffer::new(device, 32)?);
        let timed_out = HostBuffer::new(device, 1)?;
        let mut step = Buffer::from_slice(device, &[0u32])?;
        let row = pack(Format::F32, 1, 32, &[0.0; 32]);
        let ffn = Ffn {
            gate: GpuLinear::upload(device, &row.as_view(), None)?,
            up: None,
            down: GpuMatrix::upload(device, &row.as_view())?,
            bias: None,
            kind: FfnKind::Plain,
            activation: Activation::Relu,
        };
        let products = Buffer::new(device, 1)?;
        let mut scratch = self.down_scratch([&ffn.down].into_iter(), 1)?;
        let mut hidden = Buffer::new(device, 32)?;
        if !device.begin_capture()? {
            return Ok(Vec::new());
        }
        for index in 0..SYNCS {
            self.signal_host(HostMirror {
                input: &input,
                flags: &ready,
                flag: index,
                step: &step,
            })?;
            let cold = ColdSum {
                sum: &sum,
                flag: Some((&done, index)),
                step: &step,
                timed_out: &timed_out,
                timeout_nanoseconds: TIMEOUT.as_nanos() as u64,
            };
            self.down(
                &ffn,
                &products,
                [None; 2],
                Some(cold),
                &mut scratch,
                &mut hidden,
            )?;
        }
        let graph = device.end_capture()?;
        let mut seconds = Vec::new();
        for round in 1..=repeats as u32 {
            step.write(&[round])?;
            device.synchronise()?;
            let started = Instant::now();
            // SAFETY: its buffers live until the device has finished.
            #[expect(unsafe_code, reason = "launches a graph")]
            unsafe {
                graph.launch()?;
            }
            let mut before = None;
            for (ready, done) in ready.words().iter().zip(done.words()) {
                while ready.load(Ordering::Acquire) != round && started.elapsed() < TIMEOUT {
                    std::hint::spin_loop();
                }
                done.store(round, Ordering::Release);
                let now = Instant::now();
                // The first one waits for the launch.
                let since = before.replace(now).map(|before| now - before);
                seconds.extend(since.map(|since| since.as_secs_f64()));
            }
            device.synchronise()?;
            if timed_out.words()[0].load(Ordering::Acquire) != 0 || started.elapsed() > TIMEOUT {
                return Err(DeviceError::Failed {
                    device: device.info().name.clone(),
                    doing: "measuring synchronisations",
                    reason: format!("one side waited for the other for {TIMEOUT:?}"),
                });
            }
        }
        seconds.sort_unstable_by(f64::total_cmp);
        Ok(seconds)
    }
}
