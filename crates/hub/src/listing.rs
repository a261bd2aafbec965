//! The list of files of a revision.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::{
    ModelName,
    cache::Commit,
    client::{Client, Failure, Follow, body, protocol},
};

/// Most bytes of a listing.
const LONGEST: u64 = 32 << 20;

/// The hub's description of a revision.
#[derive(Deserialize)]
struct Revision {
    sha: String,
    siblings: Vec<Sibling>,
}

/// A file of a revision.
#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// Commit of a revision and the names of its files, not validated.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) commit: Commit,
    pub(crate) names: BTreeSet<String>,
}

impl Listing {
    /// Requests the list.
    pub(crate) fn ask(client: &Client, model: &ModelName) -> Result<Self, Failure> {
        let revision = model.revision().replace('/', "%2F");
        let path = format!("api/models/{}/revision/{revision}", model.repository());
        let address = client.address(&path, std::iter::empty())?;
        let response = client.send("GET", &address, None, Follow::OnHub)?;
        match response.status() {
            200 => {}
            400.. => return Err(client.refusal(model, &address, &response)),
            status => return Err(protocol(&address, format!("it is HTTP {status}")).into()),
        }
        let bytes = body(&address, response, LONGEST)?;
        let info: Revision = serde_json::from_slice(&bytes)
            .map_err(|error| protocol(&address, format!("it is not a listing: {error}")))?;
        let commit = Commit::parse(&info.sha)
            .ok_or_else(|| protocol(&address, "it names no commit of 40 digits"))?;
        Ok(Self {
            commit,
            names: info
                .siblings
                .into_iter()
                .map(|file| file.rfilename)
                .collect(),
        })
    }
}
