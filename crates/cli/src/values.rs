//! Values of options: what shell completion offers, and files to write.

use std::path::{Path, PathBuf};

use clap::{
    Arg, Command, Error,
    builder::{PossibleValue, TypedValueParser},
};

/// Names of the formats of weights.
pub(crate) const FORMATS: &[&str] = &["f32", "f16", "bf16", "q8_0", "q4_k", "q4_0"];

/// A parser whose values are offered by shell completion; it may take others too.
#[derive(Clone)]
pub(crate) struct Offered<P>(pub(crate) P, pub(crate) &'static [&'static str]);

impl<P: TypedValueParser> TypedValueParser for Offered<P> {
    type Value = P::Value;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<Self::Value, Error> {
        self.0.parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.1.iter().map(PossibleValue::new)))
    }
}

/// The path of a file to write, whose folder must exist.
pub(crate) fn new_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.parent() {
        Some(folder) if folder != Path::new("") && !folder.is_dir() => Err(format!(
            "the folder `{}` does not exist; create it first",
            folder.display()
        )),
        _ => Ok(path),
    }
}
