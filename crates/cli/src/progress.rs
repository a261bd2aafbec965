//! The progress bar, and Ctrl-C.

use std::sync::{
    OnceLock, PoisonError, RwLock,
    atomic::{AtomicBool, Ordering},
};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use powerinfer_artifact::{
    Hint,
    progress::{Interrupted, Progress},
};

use crate::{
    hint::sentence,
    output::{Output, escaped},
};

/// Set once, by Ctrl-C.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Set while the program waits for a person: nothing is half done then.
static WAITING: AtomicBool = AtomicBool::new(false);

/// Runs `wait`, which waits for input; during it, Ctrl-C ends the program at once.
pub(crate) fn while_waiting<Output>(wait: impl FnOnce() -> Output) -> Output {
    WAITING.store(true, Ordering::Relaxed);
    let output = wait();
    WAITING.store(false, Ordering::Relaxed);
    output
}

/// Whether the user asked to stop.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Goes on after Ctrl-C has stopped an answer.
pub(crate) fn resume_after_interrupt() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}

/// Lets the first Ctrl-C finish what is being written, and the second end the program at once.
/// While the program waits for input the first one does.
pub(crate) fn listen_for_interrupts() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        // Without a handler the program still ends on Ctrl-C; files are whole either way.
        let _ = ctrlc::set_handler(|| {
            if INTERRUPTED.swap(true, Ordering::Relaxed) || WAITING.load(Ordering::Relaxed) {
                std::process::exit(130);
            }
        });
    });
}

/// Draws a bar on a terminal; elsewhere only notes are shown.
pub(crate) struct Bar {
    output: Output,
    bar: RwLock<ProgressBar>,
    /// `[2/3] ` in the second of three stages.
    stage: RwLock<String>,
}

impl Bar {
    /// A bar that appears when work begins.
    pub(crate) fn new(output: Output) -> Self {
        Self {
            output,
            bar: RwLock::new(ProgressBar::hidden()),
            stage: RwLock::default(),
        }
    }

    fn with(&self, act: impl FnOnce(&ProgressBar)) {
        act(&self.bar.read().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Progress for Bar {
    fn begin(&self, title: &str, total: u64, unit: &'static str) {
        let target = if self.output.shows_progress() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let template = if unit == "bytes" {
            "{msg} {wide_bar} {binary_bytes} of {binary_total_bytes}  {binary_bytes_per_sec}  {left}"
                .to_owned()
        } else {
            format!("{{msg}} {{wide_bar}} {{human_pos}} of {{human_len}} {unit}  {{rate}}{{left}}")
        };
        let stage = self.stage.read().unwrap_or_else(PoisonError::into_inner);
        let message = format!("{stage}{}", escaped(title));
        let bar = ProgressBar::with_draw_target(Some(total), target).with_message(message);
        if let Ok(style) = ProgressStyle::with_template(&template) {
            let style = style.with_key(
                "rate",
                move |state: &indicatif::ProgressState, text: &mut dyn std::fmt::Write| {
                    // Of less than one a second, the time that is left says more.
                    if state.per_sec() >= 1.0 {
                        let _ = write!(text, "{:.0}/s  ", state.per_sec());
                    }
                },
            );
            // No time is known before the first step.
            let style = style.with_key(
                "left",
                |state: &indicatif::ProgressState, text: &mut dyn std::fmt::Write| {
                    if state.per_sec() > 0.0 {
                        let left = indicatif::HumanDuration(state.eta());
                        let _ = write!(text, "about {left:#} left");
                    }
                },
            );
            bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
        }
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        *self.bar.write().unwrap_or_else(PoisonError::into_inner) = bar;
    }

    fn advance(&self, count: u64) -> Result<(), Interrupted> {
        self.with(|bar| bar.inc(count));
        if interrupted() {
            self.with(ProgressBar::finish_and_clear);
            return Err(Interrupted);
        }
        Ok(())
    }

    fn skip(&self, count: u64) -> Result<(), Interrupted> {
        let result = self.advance(count);
        self.with(ProgressBar::reset_eta);
        result
    }

    fn stage(&self, number: usize, count: usize) {
        let mut stage = self.stage.write().unwrap_or_else(PoisonError::into_inner);
        *stage = format!("[{number}/{count}] ");
    }

    fn note(&self, line: &str) {
        self.with(|bar| bar.suspend(|| self.output.say(line)));
    }

    fn advise(&self, line: &str, hint: Hint) {
        self.note(&format!("{line}; {}", sentence(hint)));
    }

    fn detail(&self, line: &str) {
        self.output.detail(line);
    }

    fn end(&self) {
        self.with(ProgressBar::finish_and_clear);
    }
}
