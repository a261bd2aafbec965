//! Name and revision of a model on the hub.

use std::fmt;

use crate::HubError;

/// The default revision.
const MAIN: &str = "main";
/// Most characters of an organisation or a name.
const LONGEST_NAME: usize = 96;
/// Most characters of a revision.
const LONGEST_REVISION: usize = 255;

/// `organization/name:quantization@revision`, in characters that the hub allows; safe in a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    organization: String,
    name: String,
    quantization: Option<String>,
    revision: String,
}

impl ModelName {
    /// Reads `organization/name` or `organization/name@revision`; a revision is a branch, a tag,
    /// a commit, or a reference such as `refs/pr/3`. As in Ollama and llama.cpp, `organization/name:Q4_K_M` is the GGUF file
    /// of that quantization. The address of a model at `huggingface.co` or `hf.co` is also accepted.
    ///
    /// # Errors
    ///
    /// If the text is not such a name.
    pub fn parse(text: &str) -> Result<Self, HubError> {
        let address = without_host(text);
        let (repository, revision) = match address.split_once("/tree/").or(address.split_once('@'))
        {
            Some((repository, revision)) => (repository, revision),
            None => (address, MAIN),
        };
        let bad = |reason: &'static str| HubError::BadName {
            text: text.to_owned(),
            reason,
        };
        let (organization, name) = repository
            .split_once('/')
            .ok_or_else(|| bad("it has no organization"))?;
        let (name, quantization) = match name.split_once(':') {
            Some((name, quantization)) => (name, Some(quantization)),
            None => (name, None),
        };
        for part in [organization, name].into_iter().chain(quantization) {
            check_part(part).map_err(bad)?;
        }
        check_revision(revision).map_err(bad)?;
        Ok(Self {
            organization: organization.to_owned(),
            name: name.to_owned(),
            quantization: quantization.map(str::to_owned),
            revision: revision.to_owned(),
        })
    }

    /// `organization/name`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.organization, self.name)
    }

    /// The requested quantization, which the name of the GGUF file must contain, such as `Q4_K_M`.
    pub fn quantization(&self) -> Option<&str> {
        self.quantization.as_deref()
    }

    /// The name without organisation, quantization and revision.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Branch, tag, commit or reference; `main` by default.
    pub fn revision(&self) -> &str {
        &self.revision
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.organization, self.name)?;
        if let Some(quantization) = &self.quantization {
            write!(formatter, ":{quantization}")?;
        }
        if self.revision != MAIN {
            write!(formatter, "@{}", self.revision)?;
        }
        Ok(())
    }
}

/// `text` without the scheme and the hub's host name, and without a final slash.
fn without_host(text: &str) -> &str {
    let scheme = ["https://", "http://"];
    let scheme = scheme.iter().find_map(|scheme| text.strip_prefix(scheme));
    let rest = scheme.unwrap_or(text);
    let hosts = ["huggingface.co/", "www.huggingface.co/", "hf.co/"];
    match hosts.iter().find_map(|host| rest.strip_prefix(host)) {
        Some(model) => model.trim_end_matches('/'),
        None => text,
    }
}

/// Checks the hub's rules for organisations and names.
fn check_part(part: &str) -> Result<(), &'static str> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if part.is_empty() || part.len() > LONGEST_NAME {
        Err("organization and name have 1 to 96 characters each")
    } else if part.contains('/') {
        Err("it has more than one slash")
    } else if !part.chars().all(allowed) {
        Err("only letters, digits, `-`, `_` and `.` are allowed")
    } else if part.starts_with(['-', '.']) || part.ends_with(['-', '.']) {
        Err("no part of it begins or ends in `-` or `.`")
    } else if part.contains("--") || part.contains("..") {
        // The cache joins the parts with `--`.
        Err("`--` and `..` are not allowed")
    } else if part.ends_with(".git") {
        Err("no name ends in `.git`")
    } else {
        Ok(())
    }
}

/// Checks that a revision is valid for git and for a file system.
fn check_revision(revision: &str) -> Result<(), &'static str> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let good_part = |part: &str| {
        !part.is_empty()
            && part.chars().all(allowed)
            && !part.starts_with(['-', '.'])
            && !part.ends_with('.')
            && !part.contains("..")
    };
    if revision.len() <= LONGEST_REVISION && revision.split('/').all(good_part) {
        Ok(())
    } else {
        Err("a revision is a branch, a tag or a commit")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_read_and_written_alike() {
        for text in [
            "org/name",
            "SparseLLM/ReluLLaMA-7B",
            "PowerInfer/Bamboo-base-v0_1",
            "org/name@v1.0",
            "org/name@refs/pr/3",
            "_o/n@0123456789abcdef0123456789abcdef01234567",
            "org/name-GGUF:Q4_K_M",
            "org/name:Q8_0@v1.0",
        ] {
            assert_eq!(ModelName::parse(text).unwrap().to_string(), text);
        }
        let name = ModelName::parse("org/name@refs/pr/3").unwrap();
        assert_eq!(name.repository(), "org/name");
        assert_eq!(
            (name.name(), name.revision()),
            ("name", "refs/pr/3"),
            "the revision keeps its slashes"
        );
        for address in [
            "https://huggingface.co/org/name@refs/pr/3",
            "https://huggingface.co/org/name/tree/refs/pr/3",
            "http://www.huggingface.co/org/name@refs/pr/3",
            "hf.co/org/name/tree/refs/pr/3/",
        ] {
            assert_eq!(ModelName::parse(address).unwrap(), name);
        }
        let plain = ModelName::parse("org/name@main").unwrap();
        assert_eq!(plain, ModelName::parse("org/name").unwrap());
        assert_eq!(plain.to_string(), "org/name");
    }

    #[test]
    fn paths_and_addresses_are_not_names() {
        let long = format!("org/{}", "n".repeat(97));
        for text in [
            "",
            "demo",
            "/",
            "org/",
            "/name",
            "./name",
            "../name",
            "org/..",
            "org/.hidden",
            "-org/name",
            "org/name-",
            "org/name.",
            "org/a--b",
            "org/a..b",
            "org/name.git",
            "a/b/c",
            "org\\name",
            "C:/name",
            "org/na me",
            "org/näme",
            "~/model",
            "https://huggingface.co/org",
            "https://example.com/org/name",
            "https://huggingface.co/org/name/blob/main/a.gguf",
            "org/name@",
            "org/name@../x",
            "org/name@/x",
            "org/name@a//b",
            "org/name@a/",
            "org/name@a/.b",
            "org/name@-x",
            "org/name@a@b",
            "org/name:",
            "org/name:a/b",
            "org/name:a:b",
            "org:a/name",
            "org/name@a\nb",
            &long,
        ] {
            let error = ModelName::parse(text).unwrap_err().to_string();
            assert!(error.contains("organization/name"), "{text}: {error}");
        }
    }
}
