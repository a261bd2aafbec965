//! Requests to a server within this process.

use std::{
    fs,
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    sync::OnceLock,
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use powerinfer_artifact::progress::Silent;
use powerinfer_bundle::{Bundle, IntegrityCheck};
use powerinfer_runtime::{Execution, SingleSession};
use powerinfer_server::{Server, ServerSettings};
use powerinfer_text::{MessageTokens, Tokenizer};

/// Valid requests: file name, in which `-` stands for `/`, and body.
const REQUESTS: [(&str, &str); 12] = [
    (
        "v1-completions.1.json",
        r#"{"model": "m", "prompt": "Hello", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["x"], "n": 2, "logprobs": 2, "echo": true, "logit_bias": {"5": -100}, "presence_penalty": 0.5, "frequency_penalty": 0.5, "suffix": null, "best_of": 2}"#,
    ),
    (
        "v1-completions.2.json",
        r#"{"prompt": [[1, 2, 3], [4]], "max_tokens": 3, "stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true, "activity": true}"#,
    ),
    (
        "v1-chat-completions.1.json",
        r#"{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}], "max_completion_tokens": 4, "logprobs": true, "top_logprobs": 3, "response_format": {"type": "json_object"}}"#,
    ),
    (
        "v1-chat-completions.2.json",
        r#"{"messages": [{"role": "user", "content": "b"}], "max_tokens": 5, "stream": true, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "$defs": {"x": {"type": "string", "pattern": "^a+$"}}}}}}"#,
    ),
    (
        "tokenize.1.json",
        r#"{"content": "Hello", "add_special": true, "with_pieces": true}"#,
    ),
    (
        "tokenize.2.json",
        r#"{"prompt": "Hello", "messages": [{"role": "user", "content": "b"}]}"#,
    ),
    ("detokenize.1.json", r#"{"tokens": [1, 2, 3]}"#),
    ("api-show.1.json", r#"{"model": "m", "verbose": true}"#),
    (
        "api-generate.1.json",
        r#"{"model": "m", "prompt": "Hello", "stream": false, "raw": true, "system": "", "format": "json", "options": {"num_predict": 4, "temperature": 0, "seed": 1, "top_k": 3, "repeat_penalty": 1.1, "stop": ["a"]}, "keep_alive": "5m"}"#,
    ),
    (
        "api-chat.1.json",
        r#"{"model": "m", "messages": [{"role": "user", "content": "b", "images": []}], "stream": true, "options": {"num_predict": 4, "num_ctx": 64}}"#,
    ),
    (
        "raw.1.http",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 33\r\nConnection: close\r\n\r\n{\"prompt\": \"a\", \"max_tokens\": 1 }",
    ),
    (
        "raw.2.http",
        "GET /v1/models/m?x=%41 HTTP/1.1\r\nHost: [::1]:80\r\nAuthorization: Bearer k\r\nOrigin: http://a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ),
];

/// Time for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The bundle that is served, unchanged.
pub(crate) static BUNDLE: OnceLock<PathBuf> = OnceLock::new();

/// Path of the bundle that is served.
pub(crate) fn bundle() -> &'static Path {
    BUNDLE.get().expect("an arena names the bundle")
}

/// Writes the valid requests to `folder`.
pub(crate) fn write(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for (name, body) in REQUESTS {
        fs::write(folder.join(name), body)?;
    }
    Ok(())
}

/// Sends a request whose file is called `name`.
///
/// # Panics
///
/// The server fails, or does not answer.
pub(crate) fn send(name: &str, body: &[u8]) -> Result<()> {
    let mut stream = TcpStream::connect(server())?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let is_raw = name.starts_with("raw");
    let mut request = Vec::new();
    if !is_raw {
        let path = name.split('.').next().unwrap_or_default().replace('-', "/");
        let length = body.len();
        let head = format!(
            "POST /{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        request.extend(head.bytes());
    }
    request.extend(body);
    // A server may refuse a request before it has read all of it.
    let _ = stream.write_all(&request);
    if is_raw {
        let _ = stream.shutdown(Shutdown::Write);
    }
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).unwrap_or_default();
    let is_reset = read
        .as_ref()
        .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset);
    assert!(
        read.is_ok() || is_reset,
        "no answer within {PATIENCE:?}: {read:?}"
    );
    assert!(is_raw || is_reset || !status.is_empty(), "an empty answer");
    assert!(
        !status.starts_with('5') || is_raw,
        "status {status}: {answer}"
    );
    ensure!(status.starts_with('2'), "status {status}");
    Ok(())
}

/// The address of the server, which is started by the first call.
fn server() -> SocketAddr {
    static ADDRESS: OnceLock<SocketAddr> = OnceLock::new();
    *ADDRESS.get_or_init(|| {
        let folder = bundle();
        let model = open_model(folder).expect("the bundle is valid");
        let tokenizer = Tokenizer::from_directory(folder).expect("the bundle has a tokenizer");
        let settings = ServerSettings {
            alias: Some("m".to_owned()),
            parallel: Some(4),
            queue: 64,
            context: None,
            speculates: true,
            api_key: None,
            allow_origin: None,
            message_tokens: MessageTokens::Plain,
        };
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let server = Server::bind(model.engine, tokenizer, settings, any).expect("a free port");
        let address = server.address().expect("the address is known");
        thread::spawn(move || server.run(|_| false).expect("the server runs"));
        address
    })
}

pub(crate) fn open_model(folder: &Path) -> Result<SingleSession> {
    let bundle = Bundle::open(folder, IntegrityCheck::Full)?;
    Ok(SingleSession::open(
        bundle,
        None,
        &Execution::on_cpu(1),
        &Silent,
    )?)
}
