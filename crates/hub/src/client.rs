//! Requests to the hub: who asks, through which proxy, and where a redirect may lead.

use std::{io::Read, time::Duration};

use powerinfer_artifact::{ArtifactError, Progress, progress::Interrupted};
use ureq::{Agent, AgentBuilder, Proxy, Response};
use url::Url;

use crate::{HubError, ModelName, Settings};

/// Most redirects of one request.
const REDIRECTS: usize = 10;
/// Longest time to wait for a connection.
const CONNECT: Duration = Duration::from_secs(15);
/// Longest silence of a server.
const SILENCE: Duration = Duration::from_secs(60);
/// How often a request is repeated before giving up.
pub(crate) const RETRIES: u32 = 5;
/// Most characters of a server's own words that are printed.
const WORDS: usize = 300;

/// How far redirects are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Follow {
    /// To wherever they lead; the token stays behind.
    Anywhere,
    /// On the hub alone; one that leads elsewhere is the answer.
    OnHub,
}

/// Why there is no answer to use.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Trying again may help.
    Passing(HubError),
    /// It will not.
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

/// Asks the hub, in the name of whoever owns the token.
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
    /// A client for the hub that `settings` name.
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

    /// The address of `path` on the hub, whose `components` are escaped where they need it.
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

    /// Asks for `address`, from byte `start` on where one is given. Answers with a status from 400
    /// on are answers too, except those that time may cure.
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
            _ if self.settings.proxies.spare(address) => &self.direct,
            "https" => &self.https,
            _ => &self.http,
        };
        let mut request = agent
            .request_url(method, address)
            .set(
                "User-Agent",
                concat!("powerinfer/", env!("CARGO_PKG_VERSION")),
            )
            // Lengths and ranges are those of the file, not of a packed form of it.
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
                // Its own words begin with the address, signatures and all.
                let mut reason = transport.kind().to_string();
                if let Some(source) = std::error::Error::source(&transport) {
                    reason = format!("{reason}: {source}");
                }
                Err(Failure::Passing(HubError::Unreachable {
                    address: shown(address),
                    reason: tamed(&reason),
                }))
            }
        }
    }

    /// Calls `ask` until it succeeds, fails for good, or has failed too often.
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

    /// Waits before the next attempt, longer each time; Ctrl-C ends it.
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

    /// What is meant by an answer with a status from 300 on to a request about `model`.
    pub(crate) fn refusal(&self, model: &ModelName, address: &Url, response: &Response) -> Failure {
        let status = response.status();
        let came_from = Url::parse(response.get_url()).unwrap_or_else(|_| address.clone());
        if came_from.origin() != self.endpoint.origin() {
            // Where large files lie; the next request to the hub gets another permit for it.
            return Failure::Passing(HubError::Status {
                address: shown(&came_from),
                status,
                reason: tamed(response.status_text()),
            });
        }
        let code = response
            .header("X-Error-Code")
            .unwrap_or_default()
            .to_owned();
        let words = response.header("X-Error-Message").map(tamed);
        let reason = words.unwrap_or_else(|| tamed(response.status_text()));
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
            // Whether a private model exists is told to nobody who may not read it.
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

/// An agent that leaves redirects to us.
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
            // What stands before the `@` is a password.
            value: proxy.rsplit('@').next().unwrap_or_default().to_owned(),
            reason: error.to_string(),
        })?);
    }
    Ok(builder.build())
}

/// An answer that cannot be used.
pub(crate) fn protocol(address: &Url, reason: impl Into<String>) -> HubError {
    HubError::Protocol {
        address: shown(address),
        reason: reason.into(),
    }
}

/// An address without what may be secret in it.
pub(crate) fn shown(address: &Url) -> String {
    let mut address = address.clone();
    address.set_query(None);
    address.set_fragment(None);
    let _ = address.set_password(None); // there is none where there cannot be one
    let _ = address.set_username("");
    address.to_string()
}

/// Somebody else's words, harmless to print.
fn tamed(words: &str) -> String {
    let words: String = words
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(WORDS)
        .collect();
    // A hint is what follows the last `; `, and this is none.
    words.trim().replace("; ", ", ")
}

/// The body of an answer that has at most `limit` bytes.
pub(crate) fn body(address: &Url, response: Response, limit: u64) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let mut reader = response.into_reader().take(limit + 1);
    reader.read_to_end(&mut bytes).map_err(|error| {
        Failure::Passing(HubError::Unreachable {
            address: shown(address),
            reason: tamed(&error.to_string()),
        })
    })?;
    if bytes.len() as u64 > limit {
        return Err(protocol(address, format!("it is longer than {limit} bytes")).into());
    }
    Ok(bytes)
}
