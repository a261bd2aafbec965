//! A small server that speaks the hub's protocol, for models in memory, and misbehaves as told.

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

/// The commit that `main` is at.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files at least this long lie elsewhere.
const LARGE: usize = 2048;

/// What the server does wrong, or asks for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Behaviour {
    /// The token that all requests to the hub must carry.
    pub(crate) token: Option<String>,
    /// The model's terms have not been accepted.
    pub(crate) gated: bool,
    /// Bytes after which the next bodies of large files are cut, one entry a body.
    pub(crate) cuts: Vec<usize>,
    /// A request for a part of a file is answered with all of it.
    pub(crate) ignores_ranges: bool,
    /// A request for a part of a file is answered with another part.
    pub(crate) wrong_ranges: bool,
    /// The first byte of large files is another.
    pub(crate) damages: bool,
    /// Large files go on after their end.
    pub(crate) sends_too_much: bool,
    /// Parts of paths; a request for each is answered with HTTP 503 once.
    pub(crate) unavailable: Vec<&'static str>,
    /// The tag of every file.
    pub(crate) etag: Option<String>,
    /// The commit of the listing.
    pub(crate) commit: Option<String>,
    /// Names that are listed beside those of the files.
    pub(crate) also_listed: Vec<String>,
    /// Small files are found by a redirect to a path on the hub.
    pub(crate) redirects_small_files: bool,
    /// Requests for the hub are redirected to the other server.
    pub(crate) redirects_listing: bool,
}

/// A request as the server understood it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
    pub(crate) range: Option<String>,
    /// Bytes of the body that was sent in answer.
    pub(crate) sent: usize,
    /// Asked of the place where large files lie.
    pub(crate) elsewhere: bool,
}

struct State {
    repository: String,
    files: BTreeMap<String, Vec<u8>>,
    behaviour: Mutex<Behaviour>,
    log: Mutex<Vec<Request>>,
    stopped: AtomicBool,
    /// Of the place where large files lie.
    elsewhere: SocketAddr,
}

/// A hub with one model, and the place where its large files lie.
pub(crate) struct HubServer {
    pub(crate) endpoint: String,
    addresses: [SocketAddr; 2],
    state: Arc<State>,
    threads: Vec<JoinHandle<()>>,
}

impl HubServer {
    /// Serves `files` as the model called `repository`.
    pub(crate) fn start(repository: &str, files: BTreeMap<String, Vec<u8>>) -> Self {
        let [hub, elsewhere] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [hub.local_addr().unwrap(), elsewhere.local_addr().unwrap()];
        let state = Arc::new(State {
            repository: repository.to_owned(),
            files,
            behaviour: Mutex::default(),
            log: Mutex::default(),
            stopped: AtomicBool::new(false),
            elsewhere: addresses[1],
        });
        let threads = [(hub, false), (elsewhere, true)].map(|(listener, is_elsewhere)| {
            let state = Arc::clone(&state);
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    if state.stopped.load(Ordering::SeqCst) {
                        break;
                    }
                    let state = Arc::clone(&state);
                    let stream = stream.unwrap();
                    // Somebody who stops reading is nobody's concern.
                    std::thread::spawn(move || drop(state.answer(stream, is_elsewhere)));
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

    /// Serves the files of a folder.
    pub(crate) fn of_folder(repository: &str, folder: &Path) -> Self {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read(path).unwrap())
        });
        Self::start(repository, files.collect())
    }

    /// From now on the server behaves so.
    pub(crate) fn behave(&self, behaviour: Behaviour) {
        *self.state.behaviour.lock().unwrap() = behaviour;
    }

    /// Every request so far.
    pub(crate) fn log(&self) -> Vec<Request> {
        self.state.log.lock().unwrap().clone()
    }

    /// Requests so far for bodies of a path that contains `part`.
    pub(crate) fn bodies(&self, part: &str) -> Vec<Request> {
        let mut log = self.log();
        log.retain(|request| request.method == "GET" && request.path.contains(part));
        log
    }

    /// Stops and frees the addresses.
    pub(crate) fn stop(&mut self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        for address in self.addresses {
            drop(TcpStream::connect(address)); // wakes the thread that waits for one
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

/// What git calls a file.
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
    /// Bytes of the body that are sent before the connection is cut.
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
    fn answer(&self, stream: TcpStream, elsewhere: bool) -> std::io::Result<()> {
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
            elsewhere,
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
        if request.elsewhere {
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
                let address = format!("http://{}/stolen", self.elsewhere);
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
            let address = format!("http://{}/blobs/{sha}?signature=secret", self.elsewhere);
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

/// A large file or a part of it.
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
