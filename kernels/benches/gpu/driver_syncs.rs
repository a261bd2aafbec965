//! Synchronisations by driver functions, for comparison with flags in kernels.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use cudarc::driver::{CudaContext, sys};

use crate::{Outcome, median};

const COUNT: usize = 50;
/// How long the host waits for the stream.
const TIMEOUT: Duration = Duration::from_secs(1);

unsafe extern "C" fn count(word: *mut c_void) {
    // SAFETY: the argument is the atomic word passed at the launch, which is alive.
    let word = unsafe { &*word.cast::<AtomicU32>() };
    word.fetch_add(1, Ordering::Release);
}

/// Name and seconds per round trip of each method.
pub(crate) fn syncs(repeats: usize) -> Outcome<Vec<(&'static str, f64)>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let raw = stream.cu_stream();
    let mut found = Vec::new();
    // SAFETY: flags and words live until the stream has finished.
    unsafe {
        let mut host = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        sys::cuMemHostAlloc(&mut host, 2 * 4 * COUNT, flags).result()?;
        let mut address = 0;
        sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0).result()?;
        let words = std::slice::from_raw_parts(host.cast::<AtomicU32>(), 2 * COUNT);
        for word in words {
            word.store(0, Ordering::Relaxed);
        }
        let word = |index: usize| address + 4 * index as u64;
        let mut all = Vec::new();
        for round in 1..=repeats as u32 + 1 {
            let started = Instant::now();
            for index in 0..COUNT {
                sys::cuStreamWriteValue32_v2(raw, word(index), round, 0).result()?;
                // 1: wait until equal.
                sys::cuStreamWaitValue32_v2(raw, word(COUNT + index), round, 1).result()?;
            }
            for index in 0..COUNT {
                while words[index].load(Ordering::Acquire) != round {
                    if started.elapsed() > TIMEOUT {
                        // Releases what still waits in the stream, so that it can be freed.
                        for word in &words[COUNT..] {
                            word.store(round, Ordering::Release);
                        }
                        return Err("the stream's memory operations do not come".into());
                    }
                    std::hint::spin_loop();
                }
                words[COUNT + index].store(round, Ordering::Release);
            }
            stream.synchronize()?;
            all.push(started.elapsed().as_secs_f64() / COUNT as f64);
        }
        found.push(("stream memory operations of the driver", median(all)));
        sys::cuMemFreeHost(host).result()?;

        let counted = AtomicU32::new(0);
        let mut all = Vec::new();
        for _ in 0..=repeats {
            let started = Instant::now();
            for _ in 0..COUNT {
                let to = std::ptr::from_ref(&counted).cast_mut().cast();
                sys::cuLaunchHostFunc(raw, Some(count), to).result()?;
            }
            stream.synchronize()?;
            all.push(started.elapsed().as_secs_f64() / COUNT as f64);
        }
        if counted.load(Ordering::Acquire) as usize != (repeats + 1) * COUNT {
            return Err("not all host functions were called".into());
        }
        found.push(("host functions in the stream", median(all)));
    }
    Ok(found)
}
