//! Pulling models from a server that speaks the hub's protocol, well or badly.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/hub_server.rs"]
#[expect(dead_code, reason = "shared by several tests")]
mod hub_server;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use hub_server::{Behaviour, COMMIT, HubServer, git_sha1, sha256};
use powerinfer_artifact::progress::{Interrupted, Progress, Silent};
use powerinfer_hub::{Hub, HubError, ModelName, Settings, Snapshot, Token};

const MODEL: &str = "org/tiny";

/// Bytes that look like nothing in particular.
fn noise(length: usize) -> Vec<u8> {
    (0..length as u32)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

/// A model with small files and one large one.
fn model() -> BTreeMap<String, Vec<u8>> {
    BTreeMap::from([
        ("README.md".to_owned(), b"# a model".to_vec()),
        ("config.json".to_owned(), b"{}".to_vec()),
        ("tokenizer.json".to_owned(), b"{\"a\": 1}".to_vec()),
        ("model.safetensors".to_owned(), noise(400_000)),
        ("pytorch_model.bin".to_owned(), noise(300_000)),
    ])
}

/// A server, a cache, and a hub that knows both.
struct Place {
    server: HubServer,
    cache: tempfile::TempDir,
    settings: Settings,
}

impl Place {
    fn new(files: BTreeMap<String, Vec<u8>>) -> Self {
        let server = HubServer::start(MODEL, files);
        let cache = tempfile::tempdir().unwrap();
        let mut settings = Settings::new(&server.endpoint, cache.path());
        settings.retry_pause = Duration::from_millis(1);
        Self {
            server,
            cache,
            settings,
        }
    }

    fn behaving(behaviour: Behaviour) -> Self {
        let place = Self::new(model());
        place.server.behave(behaviour);
        place
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings.clone())
    }

    fn pull(&self) -> Result<Snapshot, HubError> {
        self.hub().pull(&name(MODEL), &Silent)
    }

    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        let error = self.pull().unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }

    fn folder(&self) -> PathBuf {
        self.cache.path().join("models--org--tiny")
    }

    /// What is among the blobs.
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

    /// Where the weights are while they arrive.
    fn partial(&self) -> PathBuf {
        let name = format!("{}.incomplete", sha256(&noise(400_000)));
        self.folder().join("blobs").join(name)
    }
}

fn name(text: &str) -> ModelName {
    ModelName::parse(text).unwrap()
}

/// Remembers what is said, and interrupts after so many bytes.
struct Listener {
    notes: Mutex<Vec<String>>,
    announced: Mutex<u64>,
    seen: Mutex<u64>,
    limit: u64,
}

impl Listener {
    fn new(limit: u64) -> Self {
        Self {
            notes: Mutex::default(),
            announced: Mutex::default(),
            seen: Mutex::default(),
            limit,
        }
    }
}

impl Progress for Listener {
    fn begin(&self, _title: &str, total: u64, unit: &'static str) {
        assert_eq!(unit, "bytes");
        *self.announced.lock().unwrap() += total;
    }

    fn advance(&self, count: u64) -> Result<(), Interrupted> {
        let mut seen = self.seen.lock().unwrap();
        *seen += count;
        if *seen > self.limit {
            Err(Interrupted)
        } else {
            Ok(())
        }
    }

    fn note(&self, line: &str) {
        self.notes.lock().unwrap().push(line.to_owned());
    }

    fn end(&self) {}
}

#[test]
fn a_model_arrives_in_the_layout_of_the_python_client() {
    let place = Place::behaving(Behaviour {
        redirects_small_files: true,
        ..Behaviour::default()
    });
    let listener = Listener::new(u64::MAX);
    let snapshot = place.hub().pull(&name(MODEL), &listener).unwrap();
    assert_eq!(
        snapshot.folder,
        place.folder().join("snapshots").join(COMMIT)
    );
    assert_eq!(snapshot.path, snapshot.folder);
    assert_eq!(snapshot.commit, COMMIT);
    let files: Vec<&str> = snapshot.files.iter().map(|file| &file.name[..]).collect();
    assert_eq!(
        files,
        ["config.json", "tokenizer.json", "model.safetensors"]
    );
    for file in &snapshot.files {
        let contents = fs::read(snapshot.folder.join(&file.name)).unwrap();
        assert_eq!(contents, model()[&file.name]);
        assert_eq!(file.bytes, contents.len() as u64);
        assert!(file.fetched);
        if cfg!(unix) {
            let link = fs::read_link(snapshot.folder.join(&file.name)).unwrap();
            assert!(link.starts_with("../../blobs"), "{}", link.display());
        }
    }
    let mut blobs = [
        git_sha1(b"{}"),
        git_sha1(b"{\"a\": 1}"),
        sha256(&noise(400_000)),
    ];
    blobs.sort();
    assert_eq!(place.blobs(), blobs);
    let reference = fs::read_to_string(place.folder().join("refs/main")).unwrap();
    assert_eq!(reference, COMMIT);
    assert_eq!(*listener.announced.lock().unwrap(), 400_010);
    assert_eq!(*listener.seen.lock().unwrap(), 400_010);

    let requests = place.server.log().len();
    let again = place.pull().unwrap();
    assert!(again.files.iter().all(|file| !file.fetched));
    let log = &place.server.log()[requests..];
    assert_eq!(log.len(), 1, "only whether the branch has moved: {log:?}");
}

#[test]
fn a_revision_is_remembered_under_its_name() {
    let place = Place::new(model());
    let pull = |text: &str| place.hub().pull(&name(text), &Silent).unwrap();
    pull("org/tiny@refs/pr/3");
    let reference = place.folder().join("refs/refs/pr/3");
    assert_eq!(fs::read_to_string(reference).unwrap(), COMMIT);
    assert!(!place.folder().join("refs/main").exists());
    let by_commit = pull(&format!("org/tiny@{COMMIT}"));
    assert!(by_commit.files.iter().all(|file| !file.fetched));
}

#[test]
fn shards_are_those_of_the_index() {
    let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let files = BTreeMap::from([
        ("config.json".to_owned(), b"{}".to_vec()),
        ("model.safetensors.index.json".to_owned(), index.into()),
        ("model-1.safetensors".to_owned(), noise(3000)),
        ("model-2.safetensors".to_owned(), noise(5000)),
        ("model-3.safetensors".to_owned(), noise(7000)),
    ]);
    let mut place = Place::new(files.clone());
    let snapshot = place.pull().unwrap();
    let names: Vec<&str> = snapshot.files.iter().map(|file| &file.name[..]).collect();
    let expected = [
        "config.json",
        "model.safetensors.index.json",
        "model-1.safetensors",
        "model-2.safetensors",
    ];
    assert_eq!(names, expected);
    place.settings.offline = true;
    assert_eq!(place.pull().unwrap().files.len(), 4);
    fs::remove_file(snapshot.folder.join("model-2.safetensors")).unwrap();
    place.refused(&["org/tiny", "HF_HUB_OFFLINE"]);

    let mut files = files;
    files.remove("model-2.safetensors");
    Place::new(files).refused(&["index.json", "model-2.safetensors", "not there"]);
}

#[test]
fn a_single_gguf_file_is_the_model_and_one_of_several_is_named() {
    let gguf = |names: &[&str]| {
        let files = names.iter().map(|name| ((*name).to_owned(), noise(3000)));
        Place::new(files.collect())
    };
    let place = gguf(&["README.md", "config.json", "a.gguf"]);
    let snapshot = place.pull().unwrap();
    assert_eq!(snapshot.path, snapshot.folder.join("a.gguf"));
    assert_eq!(snapshot.files.len(), 1);

    let mut place = gguf(&["a.gguf", "q4/b c.gguf"]);
    place.refused(&["a.gguf, q4/b c.gguf"]);
    let pull = |place: &Place, file: &str| place.hub().pull_file(&name(MODEL), file, &Silent);
    let snapshot = pull(&place, "q4/b c.gguf").unwrap();
    assert_eq!(fs::read(&snapshot.path).unwrap(), noise(3000));
    assert!(snapshot.path.ends_with("q4/b c.gguf"));
    let error = pull(&place, "c.gguf").unwrap_err().to_string();
    assert!(error.contains("it has a.gguf, q4/b c.gguf"), "{error}");
    let error = pull(&place, "../c.gguf").unwrap_err().to_string();
    assert!(error.contains("refusing"), "{error}");
    place.settings.offline = true;
    assert!(pull(&place, "q4/b c.gguf").is_ok());
    let error = pull(&place, "a.gguf").unwrap_err().to_string();
    assert!(error.contains("org/tiny/a.gguf"), "{error}");
}

#[test]
fn only_the_hub_gets_the_token() {
    let mut place = Place::behaving(Behaviour {
        token: Some("hf_secret".to_owned()),
        ..Behaviour::default()
    });
    place.refused(&["no public model `org/tiny`", "set `HF_TOKEN`"]);
    place.settings.token = Token::new("hf_other");
    place.refused(&["no public model `org/tiny`", "account of the token"]);
    place.settings.token = Token::new("hf_secret");
    place.pull().unwrap();
    let (storage, hub): (Vec<_>, Vec<_>) = place
        .server
        .log()
        .into_iter()
        .skip(2)
        .partition(|request| request.storage);
    assert!(hub.len() > 4 && storage.len() == 1, "{hub:?}");
    let token = Some("Bearer hf_secret");
    assert!(hub.iter().all(|one| one.authorization.as_deref() == token));
    assert!(storage.iter().all(|one| one.authorization.is_none()));
    // Nobody else lists the hub's models.
    place.server.behave(Behaviour {
        redirects_listing: true,
        ..Behaviour::default()
    });
    place.refused(&["HTTP 302"]);
}

#[test]
fn refusals_of_the_hub_have_different_errors() {
    let gated = Behaviour {
        gated: true,
        ..Behaviour::default()
    };
    let place = Place::behaving(gated);
    let terms = format!("accept its terms at {}/org/tiny", place.server.endpoint);
    place.refused(&["org/tiny", "not in the authorized list", "HF_TOKEN", &terms]);
    place.server.behave(Behaviour::default());
    let error = |text: &str| place.hub().pull(&name(text), &Silent).unwrap_err();
    let unknown = error("org/other");
    assert!(matches!(unknown, HubError::NoSuchModel { .. }), "{unknown}");
    let revision = error("org/tiny@v9");
    assert!(
        matches!(&revision, HubError::NoSuchRevision { revision, .. } if revision == "v9"),
        "{revision}"
    );
}

#[test]
fn a_cut_connection_is_resumed() {
    let place = Place::behaving(Behaviour {
        cuts: vec![100_000, 150_000, 0],
        ..Behaviour::default()
    });
    let snapshot = place.pull().unwrap();
    let contents = fs::read(snapshot.folder.join("model.safetensors")).unwrap();
    assert!(contents == noise(400_000));
    let bodies = place.server.bodies("/blobs/");
    let ranges: Vec<Option<&str>> = bodies.iter().map(|body| body.range.as_deref()).collect();
    let expected = [
        None,
        Some("bytes=100000-"),
        Some("bytes=250000-"),
        Some("bytes=250000-"),
    ];
    assert_eq!(ranges, expected);
    let sent: usize = bodies.iter().map(|body| body.sent).sum();
    assert_eq!(sent, 400_000, "no byte was sent twice");
}

#[test]
fn after_too_many_cuts_the_next_run_resumes() {
    let place = Place::behaving(Behaviour {
        cuts: [&[123_456][..], &[0; 5]].concat(),
        ..Behaviour::default()
    });
    place.refused(&[
        "model.safetensors",
        "123456 of 400000 bytes",
        "run the same command again to go on",
    ]);
    assert_eq!(fs::metadata(place.partial()).unwrap().len(), 123_456);
    assert!(!place.folder().join("refs/main").exists());
    let snapshot = place.pull().unwrap();
    let contents = fs::read(snapshot.folder.join("model.safetensors")).unwrap();
    assert!(contents == noise(400_000));
    let bodies = place.server.bodies("/blobs/");
    assert_eq!(bodies.len(), 7);
    assert_eq!(bodies[6].sent, 400_000 - 123_456);
    assert!(!place.partial().exists());
}

#[test]
fn an_interruption_keeps_the_bytes_received() {
    let place = Place::new(model());
    let stopped = place.hub().pull(&name(MODEL), &Listener::new(200_000));
    assert!(matches!(stopped, Err(HubError::Interrupted(_))));
    let kept = fs::metadata(place.partial()).unwrap().len();
    assert!((100_000..400_000).contains(&kept), "{kept}");
    let listener = Listener::new(u64::MAX);
    place.hub().pull(&name(MODEL), &listener).unwrap();
    assert_eq!(*listener.announced.lock().unwrap(), 400_000 - kept);
    let bodies = place.server.bodies("/blobs/");
    assert_eq!(bodies[1].range, Some(format!("bytes={kept}-")));
    assert_eq!(bodies[1].sent as u64, 400_000 - kept);
}

#[test]
fn a_server_that_cannot_resume_sends_it_all_again() {
    let place = Place::behaving(Behaviour {
        cuts: vec![100_000],
        ignores_ranges: true,
        ..Behaviour::default()
    });
    let snapshot = place.pull().unwrap();
    let contents = fs::read(snapshot.folder.join("model.safetensors")).unwrap();
    assert!(contents == noise(400_000));
    assert_eq!(place.server.bodies("/blobs/")[1].sent, 400_000);
}

#[test]
fn a_part_that_was_not_requested_is_an_error() {
    let place = Place::behaving(Behaviour {
        cuts: vec![100_000],
        wrong_ranges: true,
        ..Behaviour::default()
    });
    place.refused(&["another part of the file"]);
    assert!(
        !place
            .folder()
            .join("snapshots")
            .join(COMMIT)
            .join("model.safetensors")
            .exists()
    );
}

#[test]
fn damaged_bytes_are_found_and_removed() {
    let place = Place::behaving(Behaviour {
        damages: true,
        ..Behaviour::default()
    });
    place.refused(&["model.safetensors", "damaged", "SHA-256", "fetch it anew"]);
    assert!(!place.partial().exists());
    assert_eq!(place.blobs().len(), 2, "only the small files");
    place.server.behave(Behaviour::default());
    place.pull().unwrap();

    // What an earlier, other program left.
    let place = Place::new(model());
    fs::create_dir_all(place.folder().join("blobs")).unwrap();
    fs::write(place.partial(), [7; 1000]).unwrap();
    place.refused(&["model.safetensors", "damaged"]);
    fs::write(place.partial(), [7; 400_001]).unwrap();
    place.pull().unwrap();

    // A small file is named after git's digest.
    let place = Place::behaving(Behaviour {
        etag: Some("0".repeat(40)),
        ..Behaviour::default()
    });
    place.refused(&["config.json", "damaged", "git SHA-1"]);
}

#[test]
fn more_bytes_than_promised_are_not_kept() {
    let place = Place::behaving(Behaviour {
        sends_too_much: true,
        ..Behaviour::default()
    });
    place.refused(&["longer than it said"]);
    assert_eq!(fs::metadata(place.partial()).unwrap().len(), 0);
}

#[test]
fn hostile_names_are_refused() {
    for file in [
        "../../../evil.gguf",
        "/evil.gguf",
        "a\\..\\evil.gguf",
        "C:evil.gguf",
    ] {
        let server = Place::new(BTreeMap::new());
        server.server.behave(Behaviour {
            also_listed: vec![file.to_owned()],
            ..Behaviour::default()
        });
        server.refused(&["evil.gguf", "refusing"]);
    }
    // Files that nobody asks for do not matter.
    let place = Place::behaving(Behaviour {
        also_listed: vec!["../../../evil".to_owned()],
        ..Behaviour::default()
    });
    place.pull().unwrap();
    for (etag, commit) in [
        (Some("../../../evil"), None),
        (Some(""), None),
        (None, Some("../../../evil")),
        (None, Some("0123")),
    ] {
        let place = Place::behaving(Behaviour {
            etag: etag.map(str::to_owned),
            commit: commit.map(str::to_owned),
            ..Behaviour::default()
        });
        place.refused(&["cannot be used"]);
        assert!(!place.cache.path().join("../evil").exists());
    }
}

#[test]
fn requests_to_a_busy_hub_are_retried() {
    let place = Place::behaving(Behaviour {
        unavailable: vec!["/resolve/", "config.json", "/blobs/", "/blobs/"],
        ..Behaviour::default()
    });
    place.pull().unwrap();
    // The listing is asked for once: there may be a copy in the cache.
    let place = Place::behaving(Behaviour {
        unavailable: vec!["/api/"],
        ..Behaviour::default()
    });
    place.refused(&["cannot reach", "HTTP 503"]);
    place.pull().unwrap();
}

#[test]
fn without_a_network_the_cache_is_used() {
    let mut place = Place::new(model());
    place.settings.offline = true;
    place.refused(&["org/tiny", "not completely in", "HF_HUB_OFFLINE"]);
    assert!(place.server.log().is_empty());
    place.settings.offline = false;
    let online = place.pull().unwrap();
    place.server.stop();

    let check = |place: &Place, parts: &[&str]| {
        let listener = Listener::new(u64::MAX);
        let snapshot = place.hub().pull(&name(MODEL), &listener).unwrap();
        assert_eq!(snapshot.folder, online.folder);
        assert_eq!(snapshot.files.len(), 3);
        let notes = listener.notes.lock().unwrap().join("\n");
        for part in parts {
            assert!(notes.contains(part), "`{part}` is not in: {notes}");
        }
    };
    check(&place, &["cannot reach", "taken from the cache", COMMIT]);
    place.settings.offline = true;
    check(&place, &["HF_HUB_OFFLINE", "taken from the cache"]);

    // A file is missing: a link that leads nowhere.
    fs::remove_file(place.folder().join("blobs").join(sha256(&noise(400_000)))).unwrap();
    place.refused(&["not completely in"]);
    place.settings.offline = false;
    place.refused(&["cannot reach", "HF_ENDPOINT"]);
}

#[test]
fn two_at_once_fetch_each_byte_once() {
    let place = Place::new(model());
    std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| place.pull().unwrap()))
            .collect();
        for pull in pulls {
            let snapshot = pull.join().unwrap();
            let contents = fs::read(snapshot.folder.join("model.safetensors")).unwrap();
            assert!(contents == noise(400_000));
        }
    });
    let sent: usize = place
        .server
        .bodies("/blobs/")
        .iter()
        .map(|body| body.sent)
        .sum();
    assert_eq!(sent, 400_000);
    assert_eq!(place.blobs().len(), 3);
}

#[test]
fn invalid_addresses_are_errors() {
    for endpoint in ["huggingface.co", "ftp://huggingface.co", ""] {
        let settings = Settings::new(endpoint, Path::new("unused"));
        let error = Hub::new(settings).pull(&name(MODEL), &Silent).unwrap_err();
        assert!(matches!(error, HubError::BadAddress { .. }), "{error}");
    }
}
