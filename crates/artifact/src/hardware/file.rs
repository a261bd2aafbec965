//! Machines in files: TOML or JSON, as the file's name says.

use std::path::Path;

use super::{Hardware, HardwareError};
use crate::{ArtifactError, write::write_file};

/// The forms of a hardware file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Toml,
    Json,
}

impl Form {
    fn of(path: &Path) -> Result<Self, HardwareError> {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => Ok(Self::Toml),
            Some("json") => Ok(Self::Json),
            _ => Err(HardwareError::UnknownForm {
                path: path.to_owned(),
            }),
        }
    }
}

impl Hardware {
    /// Refuses a name under which [`write`](Self::write) could not write.
    pub fn check_file_name(path: &Path) -> Result<(), HardwareError> {
        Form::of(path).map(drop)
    }

    /// Reads and checks the machine in the file at `path`.
    pub fn read(path: &Path) -> Result<Self, HardwareError> {
        let text = std::fs::read_to_string(path).map_err(|source| HardwareError::Read {
            path: path.to_owned(),
            reason: source.to_string(),
        })?;
        Self::parse(&text, path)
    }

    /// [`read`](Self::read), from the text of the file; a name that says nothing counts as JSON.
    pub fn parse(text: &str, path: &Path) -> Result<Self, HardwareError> {
        let hardware: Result<Self, String> = match Form::of(path) {
            Ok(Form::Toml) => toml::from_str(text).map_err(|error| on_one_line(text, &error)),
            _ => serde_json::from_str(text).map_err(|error| error.to_string()),
        };
        let hardware = hardware.map_err(|reason| HardwareError::NotAMachine {
            path: path.to_owned(),
            reason,
        })?;
        hardware.validate()?;
        Ok(hardware)
    }

    /// Writes the machine to `path`, in the form that its name says, beside and renamed.
    ///
    /// # Panics
    ///
    /// Where [`check_file_name`](Self::check_file_name) refuses the name.
    pub fn write(&self, path: &Path) -> Result<(), ArtifactError> {
        let text = match Form::of(path).expect("the name was checked") {
            Form::Toml => self.to_toml(),
            Form::Json => {
                serde_json::to_string_pretty(self).expect("our structures are plain JSON") + "\n"
            }
        };
        write_file(path, text.as_bytes())
    }

    /// As TOML.
    pub(super) fn to_toml(&self) -> String {
        toml::to_string(self).expect("our structures are plain TOML")
    }
}

/// What is wrong with `text`, without the picture of the line that TOML's errors come with.
fn on_one_line(text: &str, error: &toml::de::Error) -> String {
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
    use super::super::{NAMES, named, tests::whole};
    use super::*;

    #[test]
    fn every_machine_comes_back_from_either_form() {
        let folder = tempfile::tempdir().unwrap();
        let named = NAMES.iter().map(|name| named(name).unwrap());
        for hardware in named.chain([whole()]) {
            for name in ["machine.toml", "machine.json"] {
                let path = folder.path().join(name);
                hardware.write(&path).unwrap();
                assert_eq!(Hardware::read(&path).unwrap(), hardware);
            }
        }
    }

    #[test]
    fn what_is_no_machine_is_told_with_its_place() {
        let told = |text: &str, name: &str| {
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
            let error = told(&text, "machine.toml");
            assert!(error.contains(words), "{error}");
            assert!(
                error.contains("`machine.toml` does not describe a machine"),
                "{error}"
            );
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(told("{}", "machine.json").contains("missing field"));
        assert!(told(&good, "machine").contains("does not describe"));
        let error = Hardware::check_file_name(Path::new("machine.yaml")).unwrap_err();
        assert!(error.to_string().contains("`.toml`"), "{error}");
        let error = Hardware::read(Path::new("nowhere.toml")).unwrap_err();
        assert!(error.to_string().contains("cannot read"), "{error}");
    }
}
