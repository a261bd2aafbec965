//! Launch overhead, and synchronisation between host and device.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use powerinfer_kernels::cuda::{
    Buffer, ColdSum, Device, Ffn, Gpu, GpuLinear, GpuMatrix, HostBuffer, HostMirror,
};
use powerinfer_tensor::{Activation, FfnKind, Format, pack};

use crate::{Bench, Outcome, driver_syncs, median};

impl Bench {
    /// Launch overhead, eager and in a graph.
    pub(crate) fn launches(&mut self) -> Outcome<()> {
        const COUNT: usize = 200;
        let view = Flags::new(&self.device, 1)?;
        let launch_all = |gpu: &Gpu| -> Outcome<()> {
            for _ in 0..COUNT {
                gpu.signal_host(view.mirror(0))?;
            }
            Ok(())
        };
        let eager = self.seconds(launch_all)? / COUNT as f64;
        let mut host = Vec::new();
        for _ in 0..self.repeats {
            let started = Instant::now();
            launch_all(&self.gpu)?;
            host.push(started.elapsed().as_secs_f64() / COUNT as f64);
            self.device.synchronise()?;
        }
        println!("| launches of an empty kernel | µs each |\n| :-- | --: |");
        println!("| eager, host time | {:.2} |", median(host) * 1e6);
        println!("| eager, device time | {:.2} |", eager * 1e6);
        if self.device.begin_capture()? {
            launch_all(&self.gpu)?;
            let graph = self.device.end_capture()?;
            let replay = |_: &Gpu| -> Outcome<()> {
                // SAFETY: the buffers of the graph are alive.
                unsafe {
                    graph.launch()?;
                }
                Ok(())
            };
            let seconds = self.seconds(replay)? / COUNT as f64;
            println!("| graph, device time | {:.2} |", seconds * 1e6);
        }
        println!();
        Ok(())
    }

    /// Round trip between device and host.
    pub(crate) fn syncs(&mut self) -> Outcome<()> {
        println!("| round trip to the host, by | µs |\n| :-- | --: |");
        let flag = self.sync_by_flags()?;
        println!(
            "| flags in mapped memory that kernels write and poll | {:.2} |",
            flag * 1e6
        );
        if self.is_gpu {
            for (name, seconds) in driver_syncs::syncs(self.repeats)? {
                println!("| {name} | {:.2} |", seconds * 1e6);
            }
        }
        println!();
        Ok(())
    }

    /// Seconds per round trip within one graph, including its two kernels.
    fn sync_by_flags(&self) -> Outcome<f64> {
        const COUNT: usize = 50;
        let device = &self.device;
        let mut ready = Flags::new(device, COUNT)?;
        let done = HostBuffer::new(device, COUNT)?;
        let (sum, timed_out) = (HostBuffer::new(device, 32)?, HostBuffer::new(device, 1)?);
        let matrix = pack(Format::F32, 1, 32, &[0.0; 32]);
        let linear = || GpuLinear::upload(device, &matrix.as_view(), None);
        let ffn = Ffn {
            gate: linear()?,
            up: None,
            down: GpuMatrix::upload(device, &matrix.as_view())?,
            bias: None,
            kind: FfnKind::Plain,
            activation: Activation::Relu,
        };
        let products = Buffer::new(device, 1)?;
        let mut scratch = self.gpu.down_scratch([&ffn.down].into_iter())?;
        let mut hidden = Buffer::new(device, 32)?;
        let mut launch_all = |ready: &Flags| -> Outcome<()> {
            for index in 0..COUNT {
                self.gpu.signal_host(ready.mirror(index))?;
                let cold = ColdSum {
                    sum: &sum,
                    flag: Some((&done, index)),
                    step: &ready.step,
                    timed_out: &timed_out,
                    timeout_nanoseconds: 5_000_000_000,
                };
                let (ffn, hidden) = (&ffn, &mut hidden);
                self.gpu
                    .down(ffn, &products, None, Some(cold), &mut scratch, hidden)?;
            }
            Ok(())
        };
        if !self.device.begin_capture()? {
            return Ok(f64::NAN);
        }
        launch_all(&ready)?;
        let graph = self.device.end_capture()?;
        let mut all = Vec::new();
        for round in 1..=self.repeats as u32 + 1 {
            ready.step.write(&[round])?;
            device.synchronise()?;
            let started = Instant::now();
            // SAFETY: the buffers of the graph are alive.
            unsafe {
                graph.launch()?;
            }
            for index in 0..COUNT {
                let flag = &ready.ready.words()[index];
                while flag.load(Ordering::Acquire) != round {
                    std::hint::spin_loop();
                }
                done.words()[index].store(round, Ordering::Release);
            }
            device.synchronise()?;
            all.push(started.elapsed().as_secs_f64() / COUNT as f64);
        }
        if timed_out.words()[0].load(Ordering::Acquire) != 0 {
            return Err("a kernel timed out".into());
        }
        Ok(median(all))
    }
}

/// Flags that a kernel sets for the host.
struct Flags {
    ready: HostBuffer,
    input: HostBuffer,
    step: Buffer<u32>,
}

impl Flags {
    fn new(device: &Arc<dyn Device>, count: usize) -> Outcome<Self> {
        Ok(Self {
            ready: HostBuffer::new(device, count)?,
            input: HostBuffer::new(device, 1)?,
            step: Buffer::from_slice(device, &[1u32])?,
        })
    }

    fn mirror(&self, flag: usize) -> HostMirror<'_> {
        HostMirror {
            input: &self.input,
            flags: &self.ready,
            flag,
            step: &self.step,
        }
    }
}
