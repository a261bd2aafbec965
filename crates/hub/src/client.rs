//! HTTP requests to the hub: authorization, proxies, redirects, retries.

use std::{io::Read, time::Duration};

use powerinfer_artifact::{ArtifactError, Progress, progress::Interrupted};
use ureq::{Agent, AgentBuilder, Proxy, Response};
use url::Url;

use crate::{HubError, ModelName, Settings};

/// Most redirects of one request.
const REDIRECTS: usize = 10;
/// Time limit for connecting.
const CONNECT: Duration = Duration::from_secs(15);
/// Time limit for each read and write.
const SILENCE: Duration = Duration::from_secs(60);
/// How often a request is repeated before giving up.
pub(crate) const RETRIES: u32 = 5;
/// Most characters of a server's message that are printed.
const MESSAGE_LENGTH: usize = 300;

/// Which redirects are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Follow {
    /// All of them; only the hub gets the token.
    Anywhere,
    /// Follow redirects within the hub; return one that leads elsewhere.
    OnHub,
}

/// Why a request gave no usable response.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Retrying may help.
    Passing(HubError),
    /// Retrying will not help.
    Lasting(HubError),
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Lasting(error)
    }
}

impl From<ArtifactError> for Failure {
    fn from(error: ArtifactError) -> Self {
        Self::Lasting(error.into())
    }
}

impl From<Interrupted> for Failure {
    fn from(interrupted: Interrupted) -> Self {
        Self::Lasting(interrupted.into())
    }
}

impl From<Failure> for HubError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Passing(error) | Failure::Lasting(error) => error,
        }
    }
}

/// HTTP client for one hub, with the token of an account.
#[derive(Debug)]
pub(crate) struct Client {
    settings: Settings,
    endpoint: Url,
    authorization: Option<String>,
    direct: Agent,
    http: Agent,
    https: Agent,
}

impl Client {
    /// A client for the hub in `settings`.
    pub(crate) fn new(settings: &Settings) -> Result<Self, HubError> {
        let bad = |reason: String| HubError::BadAddress {
            variable: "HF_ENDPOINT",
            value: settings.endpoint.clone(),
            reason,
        };
        let endpoint = Url::parse(&settings.endpoint).map_err(|error| bad(error.to_string()))?;
        if !["http", "https"].contains(&endpoint.scheme()) {
            return Err(bad("it is neither http nor https".to_owned()));
        }
        let token = settings.token.as_ref();
        let proxies = &settings.proxies;
        Ok(Self {
            authorization: token.map(|token| token.authorization()).transpose()?,
            direct: agent(None, "")?,
            http: agent(proxies.http.as_deref(), "HTTP_PROXY")?,
            https: agent(proxies.https.as_deref(), "HTTPS_PROXY")?,
            settings: settings.clone(),
            endpoint,
        })
    }

    /// Address of `path` on the hub followed by `components`, which are percent-encoded.
    pub(crate) fn address<'a>(
        &self,
        path: &str,
        components: impl Iterator<Item = &'a str>,
    ) -> Result<Url, HubError> {
        let bad = |reason: &str| HubError::BadAddress {
            variable: "HF_ENDPOINT",
            value: self.settings.endpoint.clone(),
            reason: reason.to_owned(),
        };
        let text = format!("{}/{path}", self.settings.endpoint);
        let mut address = Url::parse(&text).map_err(|error| bad(&error.to_string()))?;
        address
            .path_segments_mut()
            .map_err(|()| bad("nothing can follow it"))?
            .extend(components);
        Ok(address)
    }

    /// Sends a request for `address`, from byte `start` on if given. Responses with a status of 400
    /// and above are returned too, except temporary failures.
    pub(crate) fn send(
        &self,
        method: &str,
        address: &Url,
        start: Option<u64>,
        follow: Follow,
    ) -> Result<Response, Failure> {
        let mut address = address.clone();
        for _ in 0..=REDIRECTS {
            let response = self.send_once(method, &address, start)?;
            let location = match response.header("Location") {
                Some(location) if (300..400).contains(&response.status()) => location,
                _ => return Ok(response),
            };
            let next = address
                .join(location)
                .map_err(|error| protocol(&address, format!("it redirects to nowhere: {error}")))?;
            if follow == Follow::OnHub && next.origin() != self.endpoint.origin() {
                return Ok(response);
            }
            let downgrade = address.scheme() == "https" && next.scheme() != "https";
            if downgrade || !["http", "https"].contains(&next.scheme()) {
                let reason = format!("it redirects to {}", shown(&next));
                return Err(protocol(&address, reason).into());
            }
            address = next;
        }
        Err(protocol(
            &address,
            format!("it redirects more than {REDIRECTS} times"),
        )
        .into())
    }

    fn send_once(
        &self,
        method: &str,
        address: &Url,
        start: Option<u64>,
    ) -> Result<Response, Failure> {
        let agent = match address.scheme() {
            _ if self.settings.proxies.bypass(address) => &self.direct,
            "https" => &self.https,
            _ => &self.http,
        };
        let mut request = agent
            .request_url(method, address)
            .set(
                "User-Agent",
                concat!("powerinfer/", env!("CARGO_PKG_VERSION")),
            )
            // Lengths and ranges are those of the file, not of a compressed form.
            .set("Accept-Encoding", "identity");
        if let Some(authorization) = &self.authorization
            && address.origin() == self.endpoint.origin()
        {
            request = request.set("Authorization", authorization);
        }
        if let Some(start) = start {
            request = request.set("Range", &format!("bytes={start}-"));
        }
        match request.call() {
            Ok(response) => Ok(response),
            Err(ureq::Error::Status(status, response)) => match status {
                408 | 500 | 502 | 503 | 504 => Err(Failure::Passing(HubError::Unreachable {
                    address: shown(address),
                    reason: format!("HTTP {status}"),
                })),
                _ => Ok(response),
            },
            Err(ureq::Error::Transport(transport)) => {
                // The message of the error begins with the address and its signature.
                let mut reason = transport.kind().to_string();
                if let Some(source) = std::error::Error::source(&transport) {
                    reason = format!("{reason}: {source}");
                }
                Err(Failure::Passing(HubError::Unreachable {
                    address: shown(address),
                    reason: printable(&reason),
                }))
            }
        }
    }

    /// Retries `ask` after temporary failures, up to [`RETRIES`] times.
    pub(crate) fn persist<Answer>(
        &self,
        progress: &dyn Progress,
        mut ask: impl FnMut() -> Result<Answer, Failure>,
    ) -> Result<Answer, HubError> {
        let mut failed = 0;
        loop {
            match ask() {
                Err(Failure::Passing(_)) if failed < RETRIES => self.pause(failed, progress)?,
                result => return Ok(result?),
            }
            failed += 1;
        }
    }

    /// Waits before the next attempt, twice as long each time; Ctrl-C interrupts.
    pub(crate) fn pause(&self, failed: u32, progress: &dyn Progress) -> Result<(), HubError> {
        const STEP: Duration = Duration::from_millis(100);
        let mut left = self.settings.retry_pause * 2u32.pow(failed.min(RETRIES));
        while !left.is_zero() {
            progress.advance(0)?;
            std::thread::sleep(left.min(STEP));
            left = left.saturating_sub(STEP);
        }
        Ok(())
    }

    /// The error behind a response with a status of 300 and above to a request for `model`.
    pub(crate) fn refusal(&self, model: &ModelName, address: &Url, response: &Response) -> Failure {
        let status = response.status();
        let came_from = Url::parse(response.get_url()).unwrap_or_else(|_| address.clone());
        if came_from.origin() != self.endpoint.origin() {
            // The storage of large files; the next request to the hub gets a new signed address.
            return Failure::Passing(HubError::Status {
                address: shown(&came_from),
                status,
                reason: printable(response.status_text()),
            });
        }
        let code = response
            .header("X-Error-Code")
            .unwrap_or_default()
            .to_owned();
        let message = response.header("X-Error-Message").map(printable);
        let reason = message.unwrap_or_else(|| printable(response.status_text()));
        let endpoint = self.settings.endpoint.clone();
        let asks_with_token = self.authorization.is_some();
        Failure::Lasting(match (status, code.as_str()) {
            (_, "EntryNotFound") => protocol(address, "it lacks a file that the hub lists"),
            (_, "GatedRepo") => HubError::Gated {
                model: model.repository(),
                reason,
                address: format!("{endpoint}/{}", model.repository()),
            },
            (_, "RevisionNotFound") => HubError::NoSuchRevision {
                model: model.repository(),
                revision: model.revision().to_owned(),
            },
            // The hub hides private models from accounts that may not read them.
            (404, _) | (401, "RepoNotFound") => self.no_such_model(model),
            (401, _) if !asks_with_token => self.no_such_model(model),
            (401 | 403, _) => HubError::Refused {
                endpoint,
                model: model.repository(),
                status,
                reason,
            },
            _ => HubError::Status {
                address: shown(address),
                status,
                reason,
            },
        })
    }

    fn no_such_model(&self, model: &ModelName) -> HubError {
        HubError::NoSuchModel {
            endpoint: self.settings.endpoint.clone(),
            model: model.repository(),
            hint: if self.authorization.is_some() {
                "check its spelling, and whether the account of the token may read it"
            } else {
                "check its spelling; if it is private, set `HF_TOKEN`"
            },
        }
    }
}

/// An agent that does not follow redirects.
fn agent(proxy: Option<&str>, variable: &'static str) -> Result<Agent, HubError> {
    let mut builder = AgentBuilder::new()
        .redirects(0)
        .try_proxy_from_env(false)
        .timeout_connect(CONNECT)
        .timeout_read(SILENCE)
        .timeout_write(SILENCE);
    if let Some(proxy) = proxy {
        builder = builder.proxy(Proxy::new(proxy).map_err(|error| HubError::BadAddress {
            variable,
            // The part before the `@` is a password.
            value: proxy.rsplit('@').next().unwrap_or_default().to_owned(),
            reason: error.to_string(),
        })?);
    }
    Ok(builder.build())
}

/// An error for a response that cannot be used.
pub(crate) fn protocol(address: &Url, reason: impl Into<String>) -> HubError {
    HubError::Protocol {
        address: shown(address),
        reason: reason.into(),
    }
}

/// An address without query, fragment, user and password, which may be secret.
pub(crate) fn shown(address: &Url) -> String {
    let mut address = address.clone();
    address.set_query(None);
    address.set_fragment(None);
    let _ = address.set_password(None); // fails only where there can be none
    let _ = address.set_username("");
    address.to_string()
}

/// A server's message, shortened and without control characters.
fn printable(message: &str) -> String {
    let message: String = message
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MESSAGE_LENGTH)
        .collect();
    message.trim().to_owned()
}

/// The body of a response, at most `limit` bytes.
pub(crate) fn body(address: &Url, response: Response, limit: u64) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let mut reader = response.into_reader().take(limit + 1);
    reader.read_to_end(&mut bytes).map_err(|error| {
        Failure::Passing(HubError::Unreachable {
            address: shown(address),
            reason: printable(&error.to_string()),
        })
    })?;
    if bytes.len() as u64 > limit {
        return Err(protocol(address, format!("it is longer than {limit} bytes")).into());
    }
    Ok(bytes)
}
