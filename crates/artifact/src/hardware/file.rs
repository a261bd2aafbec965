//! Hardware files: TOML or JSON, by file extension.

use std::path::Path;

use super::{Hardware, HardwareError};
use crate::{ArtifactError, write::write_file};

/// File format of a hardware file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileFormat {
    Toml,
    Json,
}

impl FileFormat {
    fn new(path: &Path) -> Result<Self, HardwareError> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => Ok(Self::Toml),
            Some("json") => Ok(Self::Json),
            _ => Err(HardwareError::UnknownExtension {
                path: path.to_owned(),
            }),
        }
    }
}

impl Hardware {
    /// Checks that [`write`](Self::write) supports the extension of `path`.
    ///
    /// # Errors
    ///
    /// [`HardwareError::UnknownExtension`].
    pub fn check_file_name(path: &Path) -> Result<(), HardwareError> {
        FileFormat::new(path).map(drop)
    }

    /// Reads and validates the hardware file at `path`.
    ///
    /// # Errors
    ///
    /// The file cannot be read or parsed, or a value is out of range.
    pub fn read(path: &Path) -> Result<Self, HardwareError> {
        let text = std::fs::read_to_string(path).map_err(|source| HardwareError::Read {
            path: path.to_owned(),
            reason: source.to_string(),
        })?;
        Self::parse(&text, path)
    }

    /// Parses and validates a hardware file; an unknown extension is read as JSON.
    ///
    /// # Errors
    ///
    /// `text` cannot be parsed, or a value is out of range.
    pub fn parse(text: &str, path: &Path) -> Result<Self, HardwareError> {
        let hardware: Result<Self, String> = match FileFormat::new(path) {
            Ok(FileFormat::Toml) => toml::from_str(text).map_err(|error| error_line(text, &error)),
            _ => serde_json::from_str(text).map_err(|error| error.to_string()),
        };
        let hardware = hardware.map_err(|reason| HardwareError::NotHardware {
            path: path.to_owned(),
            reason,
        })?;
        hardware.validate()?;
        Ok(hardware)
    }

    /// Writes the hardware to `path` atomically, in the format of its extension.
    ///
    /// # Errors
    ///
    /// [`ArtifactError::Write`].
    ///
    /// # Panics
    ///
    /// If [`check_file_name`](Self::check_file_name) refuses the name.
    pub fn write(&self, path: &Path) -> Result<(), ArtifactError> {
        let text = match FileFormat::new(path).expect("the name was checked") {
            FileFormat::Toml => self.to_toml(),
            FileFormat::Json => {
                serde_json::to_string_pretty(self).expect("hardware is plain JSON") + "\n"
            }
        };
        write_file(path, text.as_bytes())
    }

    /// Serialises to TOML.
    pub(super) fn to_toml(&self) -> String {
        toml::to_string(self).expect("hardware is plain TOML")
    }
}

/// Formats a TOML error in one line: line number and message, without the quoted source line.
fn error_line(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().replace('\n', ", ");
    match error.span() {
        None => message,
        Some(span) => {
            let line = 1 + text[..span.start.min(text.len())].matches('\n').count();
            format!("line {line}: {message}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{NAMES, named, validate::tests::every_figure_set};
    use super::*;

    #[test]
    fn hardware_round_trips_in_both_formats() {
        let folder = tempfile::tempdir().unwrap();
        let named = NAMES.iter().map(|name| named(name).unwrap());
        for hardware in named.chain([every_figure_set()]) {
            for name in ["machine.toml", "machine.json"] {
                let path = folder.path().join(name);
                hardware.write(&path).unwrap();
                assert_eq!(Hardware::read(&path).unwrap(), hardware);
            }
        }
    }

    #[test]
    fn invalid_files_are_reported_with_their_location() {
        let error_of = |text: &str, name: &str| {
            Hardware::parse(text, Path::new(name))
                .unwrap_err()
                .to_string()
        };
        let good = named("cpu-only").unwrap().to_toml();
        for (text, words) in [
            (good.replace("threads = 8", "threads = \"many\""), "line "),
            (good.replace("threads = 8", "cores = 8"), "cores"),
            (good.replace("threads = 8", "threads = -8"), "-8"),
            (good.replace("[cpu]", "[cpu"), "line "),
            (String::new(), "missing field"),
        ] {
            let error = error_of(&text, "machine.toml");
            assert!(error.contains(words), "{error}");
            assert!(
                error.contains("`machine.toml` does not describe a machine"),
                "{error}"
            );
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(error_of("{}", "machine.json").contains("missing field"));
        assert!(error_of(&good, "machine").contains("does not describe"));
        let error = Hardware::check_file_name(Path::new("machine.yaml")).unwrap_err();
        assert!(error.to_string().contains("`.toml`"), "{error}");
        let error = Hardware::read(Path::new("nowhere.toml")).unwrap_err();
        assert!(error.to_string().contains("cannot read"), "{error}");
    }
}
