//! What the device does between two looks of the host, recorded once and run again for every token.
//!
//! A token's launches are the same ones each time: where it stands, and what step it is, lies in memory of
//! the device. So a segment of them, from one synchronisation to the next, costs the driver one launch instead of
//! one for each kernel. Where recording is not to be had, kernels are launched one by one.
#![expect(unsafe_code, reason = "launches graphs whose memory the segment holds")]

use std::sync::Arc;

use powerinfer_kernels::cuda::{Device, DeviceError, Graph};

/// Sequences whose recordings are kept, the latest ones.
const MOST_SEQUENCES: usize = 64;

/// The segments of a token, sequence by sequence.
#[derive(Debug)]
pub(super) struct GraphSegments {
    /// The sequence whose token runs comes last.
    known: Vec<Known>,
    device: Arc<dyn Device>,
    /// Which segment is open, or comes next.
    next: usize,
    is_open: bool,
    /// Whether kernels are launched one by one.
    is_eager: bool,
    /// Whether it was tried out whether launches are recorded.
    is_tried: bool,
    /// The same as eager, for a while.
    is_paused: bool,
    /// Of each segment of the token that runs, the layer in which it ended; where segments are timed.
    ends: Option<Vec<usize>>,
}

/// What is known of a sequence.
#[derive(Debug)]
struct Known {
    /// Where it keeps its keys and values on the device.
    places: Vec<u64>,
    /// The segments of its tokens, in order.
    segments: Vec<Box<dyn Graph>>,
}

impl GraphSegments {
    /// None yet.
    pub(super) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: Arc::clone(device),
            known: Vec::new(),
            next: 0,
            is_open: false,
            is_eager: false,
            is_tried: false,
            is_paused: false,
            ends: None,
        }
    }

    /// A token of the sequence begins that keeps its keys and values at `places`.
    pub(super) fn start(&mut self, places: Vec<u64>) {
        self.next = 0;
        let found = self.known.iter().position(|known| known.places == places);
        let entry = match found {
            Some(index) => self.known.remove(index),
            None => Known {
                places,
                segments: Vec::new(),
            },
        };
        if self.known.len() == MOST_SEQUENCES {
            self.known.remove(0);
        }
        self.known.push(entry);
    }

    /// GraphSegments of the sequence whose token runs.
    fn segments(&mut self) -> &mut Vec<Box<dyn Graph>> {
        &mut self.known.last_mut().expect("a token has begun").segments
    }

    /// Whether launches are recorded; tried out when that is not known yet.
    pub(super) fn are_recorded(&mut self) -> Result<bool, DeviceError> {
        if !std::mem::replace(&mut self.is_tried, true) && !self.is_eager {
            let records = self.device.begin_capture()? && self.device.end_capture().is_ok();
            self.is_eager = !records;
        }
        Ok(!self.is_eager && !self.is_paused)
    }

    /// Whether kernels are launched one by one until this is called again.
    pub(super) fn pause(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        (self.next, self.is_open) = (0, false);
        if let Some(ends) = &mut self.ends {
            ends.clear();
        }
    }

    /// Whether the device's time for every segment is taken from now on.
    pub(super) fn set_timed(&mut self, is_timed: bool) {
        // Timed tokens end their segments where others may not.
        self.known.clear();
        self.ends = is_timed.then(Vec::new);
    }

    /// The layers in which the segments of the last token ended, and what the device took for each; all of
    /// it is done.
    pub(super) fn take_times(&mut self) -> Result<Vec<(usize, f64)>, DeviceError> {
        let Some(ends) = &mut self.ends else {
            return Ok(Vec::new());
        };
        let ends = std::mem::take(ends).into_iter().enumerate();
        ends.map(|(segment, layer)| {
            let seconds = self.device.elapsed_seconds(2 * segment, 2 * segment + 1)?;
            Ok((layer, seconds))
        })
        .collect()
    }

    /// Marks the beginning of the segment that comes next, or its end.
    fn mark(&self, is_end: bool) -> Result<(), DeviceError> {
        match self.ends {
            Some(_) => self
                .device
                .record_event(2 * self.next + usize::from(is_end)),
            None => Ok(()),
        }
    }

    /// Whether the caller is to launch what comes next. Where it is in a segment that is known, it is on its
    /// way already.
    pub(super) fn wants_launch(&mut self) -> Result<bool, DeviceError> {
        if self.is_eager || self.is_paused {
            if !std::mem::replace(&mut self.is_open, true) {
                self.mark(false)?;
            }
            return Ok(true);
        }
        let next = self.next;
        if !self.is_open {
            if next < self.segments().len() {
                self.mark(false)?;
            }
            if let Some(segment) = self.segments().get(next) {
                // SAFETY: it was recorded with the vectors and weights that this executor still has, and with
                // keys and values at the same places, of a sequence that the caller holds.
                unsafe {
                    segment.launch()?;
                }
            } else if !self.device.begin_capture()? {
                if self.is_tried {
                    // Whoever has asked before counts on it.
                    return Err(DeviceError::Failed {
                        device: self.device.info().name.clone(),
                        doing: "recording",
                        reason: "it does not record any more".to_owned(),
                    });
                }
                self.is_eager = true;
                return self.wants_launch();
            }
            self.is_open = true;
        }
        Ok(next >= self.segments().len())
    }

    /// Ends the segment, for the host is going to look at what it gives, or to change what comes.
    ///
    /// `layer` is the one whose launches come last.
    pub(super) fn end(&mut self, layer: usize) -> Result<(), DeviceError> {
        if !std::mem::replace(&mut self.is_open, false) {
            return Ok(());
        }
        let is_recorded = !self.is_eager && !self.is_paused;
        if is_recorded && self.next == self.segments().len() {
            let segment = self.device.end_capture()?;
            self.mark(false)?;
            // SAFETY: as above; all of it was just borrowed for launches.
            unsafe {
                segment.launch()?;
            }
            self.segments().push(segment);
        }
        self.mark(true)?;
        if let Some(ends) = &mut self.ends {
            ends.push(layer);
        }
        self.next += 1;
        Ok(())
    }

    /// A token has failed: what was being recorded is dropped, with all that is known of its sequence.
    /// Returns whether recording may have been why; it is not tried again then.
    pub(super) fn fail(&mut self) -> bool {
        let was_recorded = self
            .known
            .pop()
            .is_some_and(|known| known.segments.len() <= self.next);
        if std::mem::replace(&mut self.is_open, false) && was_recorded && !self.is_eager {
            drop(self.device.end_capture());
        }
        if let Some(ends) = &mut self.ends {
            ends.clear();
        }
        was_recorded && !std::mem::replace(&mut self.is_eager, true)
    }
}
