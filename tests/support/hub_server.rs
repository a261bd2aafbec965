//! A small server of the hub's protocol, for models in memory, with configurable faults.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The commit of `main`.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files of at least this many bytes are on the storage server.
const LARGE: usize = 2048;

/// Faults and requirements of the server.
#[derive(Debug, Clone, Default)]
pub(crate) struct Behaviour {
    /// Token that all requests to the hub must have.
    pub(crate) token: Option<String>,
    /// Whether access to the model is gated.
    pub(crate) gated: bool,
    /// Lengths to which the next bodies of large files are truncated, one entry per body.
    pub(crate) cuts: Vec<usize>,
    /// Whether range requests are answered with the whole file.
    pub(crate) ignores_ranges: bool,
    /// Whether range requests are answered with another range.
    pub(crate) wrong_ranges: bool,
    /// Whether the first byte of large files is changed.
    pub(crate) damages: bool,
    /// Whether large files have additional bytes.
    pub(crate) sends_too_much: bool,
    /// Parts of paths for which one request is answered with HTTP 503.
    pub(crate) unavailable: Vec<&'static str>,
    /// `ETag` of every file.
    pub(crate) etag: Option<String>,
    /// Commit of the listing.
    pub(crate) commit: Option<String>,
    /// Additional names in the listing.
    pub(crate) also_listed: Vec<String>,
    /// Whether small files are redirected to a path on the hub.
    pub(crate) redirects_small_files: bool,
    /// Whether requests for the hub are redirected to the storage server.
    pub(crate) redirects_listing: bool,
}

/// A parsed request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
    pub(crate) range: Option<String>,
    /// Bytes of the body of the response.
    pub(crate) sent: usize,
    /// Whether the storage server received it.
    pub(crate) storage: bool,
}

struct State {
    repository: String,
    files: BTreeMap<String, Vec<u8>>,
    behaviour: Mutex<Behaviour>,
    log: Mutex<Vec<Request>>,
    stopped: AtomicBool,
    /// Address of the storage server.
    storage: SocketAddr,
}

/// A hub with one model, and the storage server of its large files.
pub(crate) struct HubServer {
    pub(crate) endpoint: String,
    addresses: [SocketAddr; 2],
    state: Arc<State>,
    threads: Vec<JoinHandle<()>>,
}

impl HubServer {
    /// Serves `files` as the model `repository`.
    pub(crate) fn start(repository: &str, files: BTreeMap<String, Vec<u8>>) -> Self {
        let [hub, storage] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [hub.local_addr().unwrap(), storage.local_addr().unwrap()];
        let state = Arc::new(State {
            repository: repository.to_owned(),
            files,
            behaviour: Mutex::default(),
            log: Mutex::default(),
            stopped: AtomicBool::new(false),
            storage: addresses[1],
        });
        let threads = [(hub, false), (storage, true)].map(|(listener, is_storage)| {
            let state = Arc::clone(&state);
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    if state.stopped.load(Ordering::SeqCst) {
                        break;
                    }
                    let state = Arc::clone(&state);
                    let stream = stream.unwrap();
                    // A client that disconnects is not an error of the server.
                    std::thread::spawn(move || drop(state.answer(stream, is_storage)));
                }
            })
        });
        Self {
            endpoint: format!("http://{}", addresses[0]),
            addresses,
            state,
            threads: threads.into(),
        }
    }

    /// Serves the files of a folder as the model `repository`.
    pub(crate) fn of_folder(repository: &str, folder: &Path) -> Self {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read(path).unwrap())
        });
        Self::start(repository, files.collect())
    }

    /// Sets the behaviour for all further requests.
    pub(crate) fn behave(&self, behaviour: Behaviour) {
        *self.state.behaviour.lock().unwrap() = behaviour;
    }

    /// All requests so far.
    pub(crate) fn log(&self) -> Vec<Request> {
        self.state.log.lock().unwrap().clone()
    }

    /// Requests so far for bodies of a path that contains `part`.
    pub(crate) fn bodies(&self, part: &str) -> Vec<Request> {
        let mut log = self.log();
        log.retain(|request| request.method == "GET" && request.path.contains(part));
        log
    }

    /// Stops both servers and frees their addresses.
    pub(crate) fn stop(&mut self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        for address in self.addresses {
            drop(TcpStream::connect(address)); // ends the wait for a connection
        }
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

impl Drop for HubServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Git's object id of a file.
pub(crate) fn git_sha1(bytes: &[u8]) -> String {
    let hasher = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
    hex(&hasher.chain_update(bytes).finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Status line, headers and body.
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Bytes of the body after which the connection is closed.
    cut: Option<usize>,
}

impl Answer {
    fn new(status: u16, body: &[u8]) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.to_vec(),
            cut: None,
        }
    }

    fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

impl State {
    fn answer(&self, stream: TcpStream, storage: bool) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        let (Some(method), Some(path)) = (words.next(), words.next()) else {
            return Ok(());
        };
        let mut request = Request {
            method: method.to_owned(),
            path: path.to_owned(),
            authorization: None,
            range: None,
            sent: 0,
            storage,
        };
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                break;
            };
            match name.to_ascii_lowercase().as_str() {
                "authorization" => request.authorization = Some(value.to_owned()),
                "range" => request.range = Some(value.to_owned()),
                _ => {}
            }
        }
        let answer = self.respond(&request);
        let is_head = request.method == "HEAD";
        let end = answer.cut.unwrap_or(answer.body.len());
        let body = &answer.body[..end.min(answer.body.len())];
        request.sent = if is_head { 0 } else { body.len() };
        self.log.lock().unwrap().push(request);
        let mut head = format!(
            "HTTP/1.1 {} Whatever\r\nConnection: close\r\n",
            answer.status
        );
        for (name, value) in &answer.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("Content-Length: {}\r\n\r\n", answer.body.len()));
        let mut stream = stream;
        stream.write_all(head.as_bytes())?;
        if !is_head {
            stream.write_all(body)?;
        }
        stream.shutdown(Shutdown::Both)
    }

    fn respond(&self, request: &Request) -> Answer {
        let mut behaviour = self.behaviour.lock().unwrap();
        let busy = &mut behaviour.unavailable;
        if let Some(index) = busy.iter().position(|part| request.path.contains(part)) {
            busy.remove(index);
            return Answer::new(503, b"");
        }
        if request.storage {
            let sha = request.path.trim_start_matches("/blobs/");
            let sha = sha.split('?').next().unwrap();
            let file = self.files.values().find(|bytes| sha256(bytes) == sha);
            return large_file(file.unwrap(), request, &mut behaviour);
        }
        let expected = behaviour.token.as_ref();
        if expected.is_some_and(|token| {
            request.authorization.as_deref() != Some(&format!("Bearer {token}"))
        }) {
            return Answer::new(401, b"").with("X-Error-Code", "RepoNotFound");
        }
        let path = request.path.trim_start_matches('/').replace("%20", " ");
        let api = format!("api/models/{}/revision/", self.repository);
        let resolve = format!("{}/resolve/{COMMIT}/", self.repository);
        if let Some(revision) = path.strip_prefix(&api) {
            if !["main", COMMIT, "refs%2Fpr%2F3"].contains(&revision) {
                return Answer::new(404, b"").with("X-Error-Code", "RevisionNotFound");
            }
            if behaviour.redirects_listing {
                let address = format!("http://{}/stolen", self.storage);
                return Answer::new(302, b"").with("Location", address);
            }
            return self.listing(&behaviour);
        }
        if behaviour.gated {
            return Answer::new(403, b"")
                .with("X-Error-Code", "GatedRepo")
                .with("X-Error-Message", "you are not in the authorized list");
        }
        let direct = path.strip_prefix("direct/");
        let Some(name) = direct.or_else(|| path.strip_prefix(&resolve)) else {
            return Answer::new(404, b"").with("X-Error-Code", "RepoNotFound");
        };
        let Some(bytes) = self.files.get(name) else {
            return Answer::new(404, b"").with("X-Error-Code", "EntryNotFound");
        };
        let tag = |otherwise: String| {
            let tag = behaviour.etag.clone().unwrap_or(otherwise);
            format!("\"{tag}\"")
        };
        if bytes.len() >= LARGE {
            let sha = sha256(bytes);
            let address = format!("http://{}/blobs/{sha}?signature=secret", self.storage);
            return Answer::new(302, b"moved")
                .with("Location", address)
                .with("X-Repo-Commit", COMMIT)
                .with("X-Linked-Etag", tag(sha))
                .with("X-Linked-Size", bytes.len().to_string())
                .with("ETag", "\"of the redirect\"");
        }
        if behaviour.redirects_small_files && direct.is_none() {
            return Answer::new(307, b"moved").with("Location", format!("/direct/{name}"));
        }
        Answer::new(200, bytes)
            .with("X-Repo-Commit", COMMIT)
            .with("ETag", tag(git_sha1(bytes)))
    }

    fn listing(&self, behaviour: &Behaviour) -> Answer {
        let mut names: BTreeSet<&String> = self.files.keys().collect();
        names.extend(&behaviour.also_listed);
        let files: Vec<String> = names
            .iter()
            .map(|name| format!("{{\"rfilename\": {name:?}}}"))
            .collect();
        let commit = behaviour.commit.as_deref().unwrap_or(COMMIT);
        let body = format!(
            "{{\"id\": {:?}, \"sha\": {commit:?}, \"siblings\": [{}]}}",
            self.repository,
            files.join(", ")
        );
        Answer::new(200, body.as_bytes())
    }
}

/// Response with a large file or a range of it.
fn large_file(bytes: &[u8], request: &Request, behaviour: &mut Behaviour) -> Answer {
    let mut bytes = bytes.to_vec();
    if behaviour.damages {
        bytes[0] ^= 1;
    }
    let total = bytes.len();
    let range = request
        .range
        .as_deref()
        .filter(|_| !behaviour.ignores_ranges);
    let mut answer = match range {
        Some(range) => {
            let start = range.trim_start_matches("bytes=").trim_end_matches('-');
            let mut start: usize = start.parse().unwrap();
            if behaviour.wrong_ranges {
                start -= 1;
            }
            let range = format!("bytes {start}-{}/{total}", total - 1);
            Answer::new(206, &bytes[start..]).with("Content-Range", range)
        }
        None => Answer::new(200, &bytes),
    };
    if behaviour.sends_too_much {
        answer.body.extend([0; 100]);
    }
    if !behaviour.cuts.is_empty() {
        answer.cut = Some(behaviour.cuts.remove(0));
    }
    answer
}
