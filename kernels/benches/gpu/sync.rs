//! Launch overhead, and synchronisation between host and device.

use std::time::Instant;

use powerinfer_kernels::cuda::Gpu;

use crate::{Bench, Outcome, driver_syncs, median};

impl Bench {
    /// Launch overhead, eager and in a graph.
    pub(crate) fn launches(&mut self) -> Outcome<()> {
        const COUNT: usize = 200;
        let launch_all = |gpu: &Gpu| -> Outcome<()> {
            for _ in 0..COUNT {
                gpu.launch_empty()?;
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
        let flags = self.gpu.sync_seconds(self.repeats)?;
        for percent in [50, 99] {
            if let Some(seconds) = flags.get(flags.len() * percent / 100) {
                println!(
                    "| flags in mapped memory that kernels write and poll, p{percent} | {:.2} |",
                    seconds * 1e6
                );
            }
        }
        if self.is_gpu {
            for (name, seconds) in driver_syncs::syncs(self.repeats)? {
                println!("| {name} | {:.2} |", seconds * 1e6);
            }
        }
        println!();
        Ok(())
    }
}
