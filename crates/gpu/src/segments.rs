//! Graph segments: the launches of a token between two synchronisations with the host, captured once and replayed for
//! every token.
//!
//! The launches of all tokens are equal, as position and step are in device memory. A segment costs one launch of the
//! driver instead of one per kernel. Without graph capture, kernels are launched one by one.
#![expect(unsafe_code, reason = "launches graphs whose memory the segment holds")]

use std::sync::Arc;

use powerinfer_kernels::cuda::{Device, DeviceError, Graph};

/// Sequences whose graphs are kept.
const MOST_SEQUENCES: usize = 64;

/// The graph segments of a token, for each sequence.
#[derive(Debug)]
pub(crate) struct GraphSegments {
    /// Sequences; that of the current token is the last.
    known: Vec<Known>,
    device: Arc<dyn Device>,
    /// Index of the open segment, or of the next one.
    next: usize,
    is_open: bool,
    /// Whether kernels are launched one by one.
    is_eager: bool,
    /// Whether graph capture has been tried.
    is_tried: bool,
    /// Whether kernels are launched one by one for now.
    is_paused: bool,
    /// Layer in which each segment of the current token ended; none where segments are not timed.
    ends: Option<Vec<usize>>,
}

/// The graphs of a sequence.
#[derive(Debug)]
struct Known {
    /// Addresses of its keys and values on the device.
    places: Vec<u64>,
    /// The segments of its tokens, in order.
    segments: Vec<Box<dyn Graph>>,
}

impl GraphSegments {
    /// No graphs yet.
    pub(crate) fn new(device: &Arc<dyn Device>) -> Self {
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

    /// Starts a token of the sequence whose keys and values are at `places`.
    pub(crate) fn start(&mut self, places: Vec<u64>) {
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

    /// The segments of the current sequence.
    fn segments(&mut self) -> &mut Vec<Box<dyn Graph>> {
        &mut self.known.last_mut().expect("a token has begun").segments
    }

    /// Whether launches are captured; tries it on the first call.
    pub(crate) fn are_recorded(&mut self) -> Result<bool, DeviceError> {
        if !std::mem::replace(&mut self.is_tried, true) && !self.is_eager {
            let records = self.device.begin_capture()? && self.device.end_capture().is_ok();
            self.is_eager = !records;
        }
        Ok(!self.is_eager && !self.is_paused)
    }

    /// Launches kernels one by one until the next call, or no longer.
    pub(crate) fn pause(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        (self.next, self.is_open) = (0, false);
        if let Some(ends) = &mut self.ends {
            ends.clear();
        }
    }

    /// Measures the device's time of every segment from now on, or no longer.
    pub(crate) fn set_timed(&mut self, is_timed: bool) {
        // Timed tokens end their segments at other launches.
        self.known.clear();
        self.ends = is_timed.then(Vec::new);
    }

    /// Layer in which each segment of the last token ended, and its seconds on the device, which is idle.
    pub(crate) fn take_times(&mut self) -> Result<Vec<(usize, f64)>, DeviceError> {
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

    /// Records an event at the start or the end of the next segment.
    fn mark(&self, is_end: bool) -> Result<(), DeviceError> {
        match self.ends {
            Some(_) => self
                .device
                .record_event(2 * self.next + usize::from(is_end)),
            None => Ok(()),
        }
    }

    /// Whether the caller is to launch what comes next; not so in a segment that was captured, which has been
    /// replayed.
    pub(crate) fn wants_launch(&mut self) -> Result<bool, DeviceError> {
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
                    // An earlier call has promised capture.
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

    /// Ends the segment, as the host is about to read its results or to change what follows. `layer` is that of the
    /// last launches.
    pub(crate) fn end(&mut self, layer: usize) -> Result<(), DeviceError> {
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

    /// Drops the capture of a failed token and the graphs of its sequence. Returns whether capture may be the cause;
    /// it is not tried again then.
    pub(crate) fn fail(&mut self) -> bool {
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
