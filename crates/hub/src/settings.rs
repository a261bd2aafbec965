//! Address, cache and token, from the environment variables of the hub's Python client.

use std::{
    ffi::OsString,
    fmt, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use powerinfer_pool::environment;

use crate::{HubError, proxies::Proxies};

/// Address of the hub without `HF_ENDPOINT`.
const ENDPOINT: &str = "https://huggingface.co";
/// Default pause before the first retry.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// A token of an account; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A token from typed text or a file, with white space removed around it; none if empty.
    pub fn new(text: &str) -> Option<Self> {
        let token: String = text.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
        let token = token.trim();
        (!token.is_empty()).then(|| Self(token.to_owned()))
    }

    /// Value of the `Authorization` header.
    pub(crate) fn authorization(&self) -> Result<String, HubError> {
        if self.0.chars().all(|c| c.is_ascii_graphic()) {
            Ok(format!("Bearer {}", self.0))
        } else {
            Err(HubError::BadToken)
        }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(…)")
    }
}

/// Configuration of the hub and its cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Address of the hub, without a slash at its end.
    pub endpoint: String,
    /// Folder that holds `models--<organization>--<name>`.
    pub cache: PathBuf,
    /// Token of an account.
    pub token: Option<Token>,
    /// Whether the network is forbidden.
    pub offline: bool,
    /// Proxies for requests.
    pub(crate) proxies: Proxies,
    /// Pause before the first retry of a failed request; it doubles with each further one.
    pub retry_pause: Duration,
}

impl Settings {
    /// Settings for the hub at `endpoint` and a cache, without a token or proxies.
    pub fn new(endpoint: &str, cache: &Path) -> Self {
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.to_owned(),
            token: None,
            offline: false,
            proxies: Proxies::default(),
            retry_pause: RETRY_PAUSE,
        }
    }

    /// Settings from the environment of this process.
    ///
    /// # Errors
    ///
    /// As [`Self::from_lookup`].
    pub fn from_environment() -> Result<Self, HubError> {
        Self::from_lookup(environment::variable)
    }

    /// Settings from the variables in `lookup`:
    ///
    /// * cache: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else in `huggingface` in
    ///   `XDG_CACHE_HOME`, else in `~/.cache/huggingface`. Relative paths in `XDG_CACHE_HOME` and `HOME` are ignored;
    /// * token: `HF_TOKEN`, else the file `HF_TOKEN_PATH`, else the file `token` in `HF_HOME` or
    ///   its default;
    /// * endpoint: `HF_ENDPOINT`;
    /// * offline: `HF_HUB_OFFLINE` is 1, on, yes or true;
    /// * proxies: `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`.
    ///
    /// # Errors
    ///
    /// If no variable leads to a cache folder.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        // A variable that is set to nothing is not set.
        let variable = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let text = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned());
        let user_folder = variable("HOME")
            .or_else(|| variable("USERPROFILE"))
            .map(PathBuf::from)
            .filter(|path| path.is_absolute());
        let folder = |name: &str| {
            let path = PathBuf::from(variable(name)?);
            Some(match (path.strip_prefix("~"), &user_folder) {
                (Ok(rest), Some(user_folder)) => user_folder.join(rest),
                _ => path,
            })
        };
        let hub_home = folder("HF_HOME")
            .or_else(|| {
                let cache = folder("XDG_CACHE_HOME").filter(|path| path.is_absolute())?;
                Some(cache.join("huggingface"))
            })
            .or_else(|| {
                user_folder
                    .as_ref()
                    .map(|home| home.join(".cache/huggingface"))
            });
        let cache = folder("HF_HUB_CACHE")
            .or_else(|| hub_home.as_ref().map(|home| home.join("hub")))
            .ok_or(HubError::NoCacheFolder)?;
        let token = text("HF_TOKEN").as_deref().and_then(Token::new);
        let token = token.or_else(|| {
            let file = folder("HF_TOKEN_PATH").or_else(|| Some(hub_home?.join("token")))?;
            Token::new(&fs::read_to_string(file).ok()?)
        });
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let offline = text("HF_HUB_OFFLINE").is_some_and(|value| {
            ["1", "ON", "YES", "TRUE"].contains(&value.to_ascii_uppercase().as_str())
        });
        Ok(Self {
            token,
            offline,
            proxies: Proxies::from_lookup(text),
            ..Self::new(&endpoint, &cache)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings in an environment of these variables.
    fn settings(variables: &[(&str, &str)]) -> Settings {
        let lookup = |name: &str| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| OsString::from(value))
        };
        Settings::from_lookup(lookup).unwrap()
    }

    #[test]
    fn the_more_specific_variable_wins() {
        let mut variables = vec![("HOME", "/home/p")];
        let cache = |variables: &[(&str, &str)]| settings(variables).cache;
        assert_eq!(
            cache(&variables),
            Path::new("/home/p/.cache/huggingface/hub")
        );
        variables.push(("XDG_CACHE_HOME", "/xdg"));
        assert_eq!(cache(&variables), Path::new("/xdg/huggingface/hub"));
        variables.push(("HF_HOME", "~/hf"));
        assert_eq!(cache(&variables), Path::new("/home/p/hf/hub"));
        variables.push(("HF_HUB_CACHE", "/hub"));
        assert_eq!(cache(&variables), Path::new("/hub"));
        assert_eq!(cache(&[("HF_HOME", "/hf")]), Path::new("/hf/hub"));
        let relative = [("HOME", "/home/p"), ("XDG_CACHE_HOME", "./xdg")];
        assert_eq!(
            cache(&relative),
            Path::new("/home/p/.cache/huggingface/hub")
        );
        let relative = |name: &str| (name == "HOME").then(|| OsString::from("p"));
        for none in [
            Settings::from_lookup(|_| None),
            Settings::from_lookup(relative),
        ] {
            assert!(matches!(none, Err(HubError::NoCacheFolder)));
        }
    }

    #[test]
    fn tokens_come_from_a_variable_a_named_file_or_the_usual_file() {
        let folder = tempfile::tempdir().unwrap();
        let named = folder.path().join("named");
        fs::write(&named, "from-named\n").unwrap();
        let home = folder.path().to_str().unwrap();
        let mut variables = vec![("HF_HOME", home)];
        assert_eq!(settings(&variables).token, None);
        fs::write(folder.path().join("token"), " from-home \n").unwrap();
        assert_eq!(settings(&variables).token, Token::new("from-home"));
        variables.push(("HF_TOKEN_PATH", named.to_str().unwrap()));
        assert_eq!(settings(&variables).token, Token::new("from-named"));
        variables.push(("HF_TOKEN", "from-variable"));
        let token = settings(&variables).token;
        assert_eq!(token, Token::new("from-variable"));
        assert!(!format!("{token:?}").contains("from-variable"));
        assert!(Token::new("a\u{7}b").unwrap().authorization().is_err());
    }

    #[test]
    fn endpoint_and_offline() {
        let with =
            |variables: &[(&str, &str)]| settings(&[&[("HOME", "/home/p")], variables].concat());
        assert_eq!(with(&[]).endpoint, "https://huggingface.co");
        assert_eq!(with(&[("HF_ENDPOINT", "")]).endpoint, ENDPOINT);
        assert_eq!(
            with(&[("HF_ENDPOINT", "http://mirror:80/hf/")]).endpoint,
            "http://mirror:80/hf"
        );
        for (value, offline) in [
            ("1", true),
            ("on", true),
            ("Yes", true),
            ("TRUE", true),
            ("0", false),
            ("", false),
            ("off", false),
        ] {
            assert_eq!(with(&[("HF_HUB_OFFLINE", value)]).offline, offline);
        }
        assert!(!with(&[]).offline);
    }
}
