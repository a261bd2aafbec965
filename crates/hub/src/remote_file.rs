//! The hub's description of one file.

use ureq::Response;
use url::Url;

use crate::{
    ModelName,
    checksum::Etag,
    client::{Client, Failure, Follow, protocol},
    file_name::FileName,
};

/// A file that can be downloaded.
#[derive(Debug)]
pub(crate) struct RemoteFile {
    pub(crate) name: FileName,
    pub(crate) address: Url,
    pub(crate) etag: Etag,
    pub(crate) size: u64,
}

impl RemoteFile {
    /// Requests length and digest of the file called `name` at `address`.
    ///
    /// Large files are stored elsewhere; the hub describes them in the headers of the redirect.
    pub(crate) fn describe(
        client: &Client,
        model: &ModelName,
        name: &FileName,
        address: Url,
    ) -> Result<Self, Failure> {
        let response = client.send("HEAD", &address, None, Follow::OnHub)?;
        if response.status() >= 400 {
            return Err(client.refusal(model, &address, &response));
        }
        let is_elsewhere = response.status() >= 300;
        let header = |linked: &str, plain: &str| {
            let plain = response.header(plain).filter(|_| !is_elsewhere);
            response.header(linked).or(plain).map(str::to_owned)
        };
        let etag = header("X-Linked-Etag", "ETag").and_then(|etag| Etag::parse(&etag));
        let size = header("X-Linked-Size", "Content-Length").and_then(|size| size.parse().ok());
        match (etag, size) {
            (Some(etag), Some(size)) => Ok(Self {
                name: name.clone(),
                address,
                etag,
                size,
            }),
            (None, _) => Err(protocol(&address, "it has no `ETag`").into()),
            (_, None) => Err(protocol(&address, "it has no length").into()),
        }
    }
}

/// First byte and, if known, total length of the range in a response.
pub(crate) fn content_range(response: &Response) -> Option<(u64, Option<u64>)> {
    let range = response.header("Content-Range")?.strip_prefix("bytes ")?;
    let (part, total) = range.split_once('/')?;
    let (start, end) = part.split_once('-')?;
    let (start, end): (u64, u64) = (start.parse().ok()?, end.parse().ok()?);
    let total = match total {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    (start <= end && total.is_none_or(|total| end < total)).then_some((start, total))
}
