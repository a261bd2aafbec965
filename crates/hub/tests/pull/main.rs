//! Pulling models from a server that speaks the hub's protocol, well or badly.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod cache;
mod published;
mod refusals;
mod transfer;

#[path = "../../../../tests/support/hub_server.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod hub_server;

use std::{collections::BTreeMap, fs, path::PathBuf, sync::Mutex, time::Duration};

use hub_server::{Behaviour, HubServer, sha256};
use powerinfer_artifact::progress::{Interrupted, Progress, Silent};
use powerinfer_hub::{Hub, HubError, ModelName, Settings, Snapshot};

const MODEL: &str = "org/tiny";

/// Pseudorandom bytes.
fn noise(length: usize) -> Vec<u8> {
    (0..length as u32)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

/// Contents of `model.safetensors`.
fn weights() -> Vec<u8> {
    noise(400_000)
}

/// A model with small files, and its weights in two formats.
fn model() -> BTreeMap<String, Vec<u8>> {
    BTreeMap::from([
        ("README.md".to_owned(), b"# a model".to_vec()),
        ("config.json".to_owned(), b"{}".to_vec()),
        ("tokenizer.json".to_owned(), b"{\"a\": 1}".to_vec()),
        ("model.safetensors".to_owned(), weights()),
        ("pytorch_model.bin".to_owned(), noise(300_000)),
    ])
}

fn name(text: &str) -> ModelName {
    ModelName::parse(text).unwrap()
}

/// A server with one model, an empty cache, and the settings of a hub with both.
struct TestHub {
    server: HubServer,
    cache: tempfile::TempDir,
    settings: Settings,
}

impl TestHub {
    fn new(files: BTreeMap<String, Vec<u8>>) -> Self {
        Self::serving(MODEL, files)
    }

    /// Serves `files` as the model `name`.
    fn serving(name: &str, files: BTreeMap<String, Vec<u8>>) -> Self {
        let server = HubServer::start(name, files);
        let cache = tempfile::tempdir().unwrap();
        let mut settings = Settings::new(&server.endpoint, cache.path());
        settings.retry_pause = Duration::from_millis(1);
        Self {
            server,
            cache,
            settings,
        }
    }

    /// Serves [`model`] with the behaviour that `change` sets.
    fn behaving(change: impl FnOnce(&mut Behaviour)) -> Self {
        let hub = Self::new(model());
        hub.behave(change);
        hub
    }

    /// Changes the default behaviour by `change`, for all further requests.
    fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        let mut behaviour = Behaviour::default();
        change(&mut behaviour);
        self.server.behave(behaviour);
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings.clone())
    }

    fn pull(&self) -> Result<Snapshot, HubError> {
        self.pull_named(MODEL)
    }

    fn pull_named(&self, text: &str) -> Result<Snapshot, HubError> {
        self.hub().pull(&name(text), &Silent)
    }

    fn pull_file(&self, file: &str) -> Result<Snapshot, HubError> {
        self.hub().pull_file(&name(MODEL), file, &Silent)
    }

    /// Pulls and fails unless the weights are complete.
    #[track_caller]
    fn pull_weights(&self) {
        let path = self.pull().unwrap().folder.join("model.safetensors");
        assert!(fs::read(path).unwrap() == weights());
    }

    /// Fails unless pulling gives an error whose message has all `parts`.
    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        assert_parts(&self.pull().unwrap_err().to_string(), parts);
    }

    fn folder(&self) -> PathBuf {
        self.cache.path().join("models--org--tiny")
    }

    /// Names of the files in `blobs`, sorted.
    fn blobs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder().join("blobs"));
        let mut names: Vec<String> = entries
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// The file of the weights while they are received.
    fn partial(&self) -> PathBuf {
        let name = format!("{}.incomplete", sha256(&weights()));
        self.folder().join("blobs").join(name)
    }

    /// Length of [`Self::partial`].
    fn partial_bytes(&self) -> u64 {
        fs::metadata(self.partial()).unwrap().len()
    }

    /// Bytes of large files that the server has sent.
    fn sent(&self) -> usize {
        let bodies = self.server.bodies("/blobs/");
        bodies.iter().map(|body| body.sent).sum()
    }
}

#[track_caller]
fn assert_parts(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

/// Records progress, and interrupts after `limit` bytes.
#[derive(Default)]
struct Listener {
    notes: Mutex<Vec<String>>,
    announced: Mutex<u64>,
    received: Mutex<u64>,
    limit: Option<u64>,
}

impl Progress for Listener {
    fn begin(&self, _title: &str, total: u64, unit: &'static str) {
        assert_eq!(unit, "bytes");
        *self.announced.lock().unwrap() += total;
    }

    fn advance(&self, count: u64) -> Result<(), Interrupted> {
        let mut received = self.received.lock().unwrap();
        *received += count;
        match self.limit {
            Some(limit) if *received > limit => Err(Interrupted),
            _ => Ok(()),
        }
    }

    fn note(&self, line: &str) {
        self.notes.lock().unwrap().push(line.to_owned());
    }

    fn end(&self) {}
}
