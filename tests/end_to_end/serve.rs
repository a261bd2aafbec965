//! `serve`: the API as a client sees it, alone, in a crowd, and under attack.

mod batches;
mod bombs;
mod chat;
#[cfg(target_os = "linux")]
mod held;
mod parameters;
mod requests;
mod robustness;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::sandbox::Sandbox;

/// A server of the demo, stopped when dropped.
struct Server {
    child: Child,
    address: String,
    sandbox: Sandbox,
}

/// Status, head and body of a response.
struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("{}", self.body))
    }

    /// The status and the error's code.
    fn error(&self) -> (u16, String) {
        let code = &self.json()["error"]["code"];
        (self.status, code.as_str().unwrap_or_default().to_owned())
    }
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let sandbox = Sandbox::new();
        sandbox.copy_demo();
        Self::start_in(sandbox, arguments)
    }

    /// Serves the demo that `sandbox` has.
    fn start_in(sandbox: Sandbox, arguments: &[&str]) -> Self {
        let mut command = sandbox.command(&["serve", "demo"]);
        command.args(arguments);
        Self::start_command(sandbox, command)
    }

    /// Starts `command`, a `serve` without a port, in `sandbox`.
    fn start_command(sandbox: Sandbox, mut command: Command) -> Self {
        let mut child = command
            .args(["--port", "0", "--threads", "2"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://");
        let address = address.expect("the address is the first line").to_owned();
        Self {
            child,
            address,
            sandbox,
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).unwrap();
        stream
    }

    /// Sends `request` as it is and reads the response to its end.
    fn raw(&self, request: &[u8]) -> Response {
        let mut stream = self.connect();
        // A server that refuses a request closes the connection before all of it is written.
        let _ = stream.write_all(request);
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok());
        Response {
            status: status.unwrap_or(0),
            head: head.to_ascii_lowercase(),
            body: body.to_owned(),
        }
    }

    fn get(&self, path: &str) -> Response {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        self.raw(request.as_bytes())
    }

    fn post_with(&self, path: &str, headers: &str, body: &[u8]) -> Response {
        self.raw(&post(path, headers, body))
    }

    fn post(&self, path: &str, body: &Value) -> Response {
        self.post_with(path, "", body.to_string().as_bytes())
    }

    fn complete(&self, body: &Value) -> Value {
        let response = self.post("/v1/completions", body);
        assert_eq!(response.status, 200, "{}", response.body);
        response.json()
    }

    /// The time that `/health` takes on a new connection.
    fn health_time(&self) -> Duration {
        let started = Instant::now();
        assert_eq!(self.get("/health").status, 200);
        started.elapsed()
    }

    /// Asserts that `/health` answers `times` times, each time soon: far below a second on an idle machine, and far below
    /// the minutes that a blocked server takes on a busy one.
    fn assert_healthy(&self, times: usize) {
        for _ in 0..times {
            let time = self.health_time();
            assert!(time < Duration::from_secs(2), "{time:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn metric(&self, name: &str) -> u64 {
        let metrics = self.get("/metrics").body;
        let line = metrics.lines().find(|line| line.starts_with(name));
        let value = line.unwrap_or_else(|| panic!("{name} in {metrics}"));
        value.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until the metric `name` is `value`.
    fn wait_for(&self, name: &str, value: u64) {
        for _ in 0..600 {
            if self.metric(name) == value {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("`{name}` is {}", self.metric(name));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// The data of server-sent events.
fn events(body: &str) -> Vec<&str> {
    body.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .collect()
}

/// A request whose text takes long: it ends with the context.
fn long_request() -> Value {
    json!({ "prompt": "def f(x):", "max_tokens": 400, "ignore_eos": true, "stream": true, "temperature": 0 })
}

/// The body of a response in chunked encoding.
fn unchunked(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        whole.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    whole
}
