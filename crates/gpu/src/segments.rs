//! Graph segments: the launches of a token between two synchronisations with the host, captured once and replayed for
//! every token.
//!
//! A segment costs one launch of the driver instead of one per kernel. Without graph capture, kernels are launched one by one.
//!
//! A graph repeats everything that was captured, so nothing in it may depend on the token or its sequence:
//!
//! value | why it is the same for all tokens
//! :--|:--
//! kernels, grids, shared memory | follow from the model's shape, its number formats and the device; attention splits positions for the longest context of the plan
//! addresses of weights and buffers | belong to this executor, which allocates them when it is loaded
//! experts in rows that may be replaced | read from the router's table, which is written between passes; no kernel reads rows to which an expert is being copied
//! addresses and contexts of KV caches, position, rotations, step | read from buffers, which are written before the launch
//! policies, thresholds, filters | fixed when the layers are uploaded
//! number of tokens | always one: batches and prompts are not captured
//! whether `down` waits for the host | depends on whether the pass is launched ahead, which changes only when timing is switched on or off; this drops the segments
//!
//! Debug builds capture every token again and compare the operations, on devices that list them.
#![expect(unsafe_code, reason = "launches graphs whose memory the segment holds")]

use std::sync::Arc;

use powerinfer_kernels::cuda::{Device, DeviceError, Graph};

/// The graph segments of a token.
#[derive(Debug)]
pub(crate) struct GraphSegments {
    /// Captured segments, in order.
    segments: Vec<Box<dyn Graph>>,
    device: Arc<dyn Device>,
    /// Index of the open segment, or of the next one.
    next: usize,
    is_open: bool,
    /// Whether the open segment is being captured.
    is_capturing: bool,
    /// Why kernels are launched one by one; `None` if they are captured.
    failure: Option<DeviceError>,
    /// Whether graph capture has been tried.
    is_tried: bool,
    /// Whether kernels are launched one by one for now.
    is_paused: bool,
    /// Whether the current token began with graphs.
    uses_graphs: bool,
    /// Layer in which each segment of the current token ended; none if segments are not timed.
    ends: Option<Vec<usize>>,
}

impl GraphSegments {
    /// No graphs yet.
    pub(crate) fn new(device: &Arc<dyn Device>) -> Self {
        Self {
            device: Arc::clone(device),
            segments: Vec::new(),
            next: 0,
            is_open: false,
            is_capturing: false,
            failure: None,
            is_tried: false,
            is_paused: false,
            uses_graphs: false,
            ends: None,
        }
    }

    /// Whether launches are captured; tries it on the first call.
    pub(crate) fn are_recorded(&mut self) -> Result<bool, DeviceError> {
        if !std::mem::replace(&mut self.is_tried, true) && self.failure.is_none() {
            if self.device.begin_capture()? {
                self.failure = self.device.end_capture().err()
            } else {
                self.failure = Some(self.unsupported())
            }
        }
        Ok(self.captures())
    }

    /// Whether the launches of the current token are captured.
    fn captures(&self) -> bool {
        self.failure.is_none() && !self.is_paused
    }

    /// Why kernels are launched one by one, for good; `None` if they are captured.
    pub(crate) fn failure(&self) -> Option<&DeviceError> {
        self.failure.as_ref()
    }

    fn unsupported(&self) -> DeviceError {
        DeviceError::Failed {
            device: self.device.info().name.clone(),
            doing: "capturing a graph",
            reason: "it does not capture launches".to_owned(),
        }
    }

    /// Passes on the result of a capture or of a graph's launch. After a failure, kernels are launched one by one, unless a
    /// kernel or the device has failed before.
    fn noted<T>(&mut self, result: Result<T, DeviceError>) -> Result<T, DeviceError> {
        match &result {
            Ok(_) | Err(DeviceError::Kernel { .. }) => {}
            Err(_) if self.device.check().is_err() => {}
            Err(failure) => self.failure = Some(failure.clone()),
        }
        result
    }

    /// Launches kernels one by one until the next call, or no longer.
    pub(crate) fn pause(&mut self, is_paused: bool) {
        self.end_capture();
        self.is_paused = is_paused;
        self.uses_graphs = self.captures();
        (self.next, self.is_open) = (0, false);
        if let Some(ends) = &mut self.ends {
            ends.clear();
        }
    }

    /// Measures the device's time of every segment from now on, or no longer.
    pub(crate) fn set_timed(&mut self, is_timed: bool) {
        // Timed tokens end their segments at other launches.
        self.segments.clear();
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
        if !self.captures() {
            if !std::mem::replace(&mut self.is_open, true) {
                self.mark(false)?;
            }
            return Ok(true);
        }
        if !self.is_open {
            let is_compared =
                |segment: &dyn Graph| cfg!(debug_assertions) && !segment.operations().is_empty();
            let segment = self.segments.get(self.next);
            let captures = segment.is_none_or(|segment| is_compared(&**segment));
            if captures {
                let begun = self.device.begin_capture();
                if !self.noted(begun)? {
                    self.failure = Some(self.unsupported());
                    self.uses_graphs = false;
                    return match self.is_tried {
                        // An earlier call has promised capture.
                        true => Err(self.unsupported()),
                        false => self.wants_launch(),
                    };
                }
            } else {
                self.launch_segment()?;
            }
            (self.is_open, self.is_capturing) = (true, captures);
        }
        Ok(self.is_capturing)
    }

    /// Launches the next segment.
    fn launch_segment(&mut self) -> Result<(), DeviceError> {
        self.mark(false)?;
        // SAFETY: it was captured with buffers and weights that this executor still has: new buffers come with new segments. Keys
        // and values are those of the sequence whose places are on the device, and the caller of `begin` keeps them until the
        // pass ends. `start` has checked that they contain the token's position. All other values are equal for all tokens, as
        // the table above explains. No other thread adds to a capture.
        let launched = unsafe { self.segments[self.next].launch() };
        self.noted(launched)
    }

    /// Ends the segment, as the host is about to read its results or to change what follows. `layer` is that of the
    /// last launches.
    pub(crate) fn end(&mut self, layer: usize) -> Result<(), DeviceError> {
        if !std::mem::replace(&mut self.is_open, false) {
            return Ok(());
        }
        if self.captures() && std::mem::take(&mut self.is_capturing) {
            let captured = self.device.end_capture();
            let captured = self.noted(captured)?;
            match self.segments.get(self.next) {
                // The graph that was captured first is launched, as in a release build.
                Some(segment) => assert_eq!(
                    segment.operations(),
                    captured.operations(),
                    "a graph repeats what this token would launch"
                ),
                None => self.segments.push(captured),
            }
            self.launch_segment()?;
        }
        self.mark(true)?;
        if let Some(ends) = &mut self.ends {
            ends.push(layer);
        }
        self.next += 1;
        Ok(())
    }

    /// Drops the capture of a token that failed with `error`. Returns whether graphs are the cause: the host was late for a kernel
    /// that waits for it, or a graph could not be captured or launched. Without graphs, kernels do not wait.
    pub(crate) fn fail(&mut self, error: Option<&DeviceError>) -> bool {
        self.end_capture();
        self.is_open = false;
        if let Some(ends) = &mut self.ends {
            ends.clear();
        }
        let is_late = matches!(error, Some(DeviceError::HostLate { .. }));
        self.uses_graphs && (is_late || self.failure.is_some())
    }

    /// Ends the capture of a failed pass. The capture fails if a launch could not be captured.
    fn end_capture(&mut self) {
        if std::mem::take(&mut self.is_capturing) {
            let captured = self.device.end_capture();
            drop(self.noted(captured));
        }
    }
}

/// Ends a capture that is still open after a panic, as other threads wait for it.
impl Drop for GraphSegments {
    fn drop(&mut self) {
        self.end_capture();
    }
}
