//! Options of calibration text.

use std::path::PathBuf;

use powerinfer_pipeline::{CalibrationText, Tokens};

/// Which text to use, and how much.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Calibration text")]
pub(crate) struct CalibrationArguments {
    /// Text to calibrate on: a file, a folder with its subfolders, or `-` for stdin. Text, source code, JSON, JSON Lines, CSV
    /// and Parquet, also with gzip or zstd; records have `text`, `content`, `messages`, `conversations`, or `prompt` with
    /// `completion`. If given several times, the report lists each separately, and the sources are interleaved in sequences
    /// of at most 512 tokens [default for `demo`: its own calibration tasks]
    #[arg(long, value_name = "FILE|DIR|-")]
    pub(crate) data: Vec<PathBuf>,
    /// Calibration tokens; `auto` reads until `--settled` holds and there are enough samples for training, 131072
    /// at most
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub(crate) tokens: Tokens,
    /// With `--tokens auto`: overlap that the most frequently active 20% of a layer must reach between two
    /// independent halves of the text (Jaccard, mean over layers)
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = share)]
    pub(crate) settled: f64,
}

/// A share above 0 and up to 1.
fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("give a share above 0 and up to 1, such as 0.9".to_owned()),
    }
}

impl CalibrationArguments {
    /// The text that is meant.
    pub(crate) fn text(&self) -> CalibrationText {
        CalibrationText {
            paths: self.data.clone(),
            tokens: self.tokens,
            settled: self.settled,
        }
    }
}
