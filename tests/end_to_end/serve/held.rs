//! Connections that are held open, by clients that send or read nothing, or slowly.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{Server, long_request, post};
use crate::sandbox::Sandbox;

/// Lets this process open as many files as the system permits.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, raised).unwrap();
}

/// Opens connections whose clients say nothing, half of a head, half of a body, or ask without reading.
fn hold(server: &Server, count: usize) -> Vec<TcpStream> {
    let pipelined = b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n".repeat(2000);
    let hold = |index: usize| {
        let mut stream = server.connect();
        let sent: &[u8] = match index % 16 {
            0..5 => b"",
            5..10 => b"POST /v1/completions HTTP/1.1\r\nHost: loc",
            10..15 => {
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
            }
            _ => &pipelined,
        };
        stream.set_nonblocking(true).unwrap();
        let _ = stream.write(sent);
        stream
    };
    (0..count).map(hold).collect()
}

#[test]
fn health_answers_while_1024_connections_are_held() {
    raise_file_limit();
    for arguments in [&[][..], &["--api-key", "secret"]] {
        let server = Server::start(arguments);
        let held = hold(&server, 1024);
        server.assert_healthy(10);
        // So does everything else, once the clients have had some time.
        thread::sleep(Duration::from_secs(1));
        let key = "Authorization: Bearer secret\r\n";
        let body = br#"{"prompt": "x", "max_tokens": 1}"#;
        assert_eq!(server.post_with("/v1/completions", key, body).status, 200);
        drop(held);
        server.assert_healthy(1);
    }
}

#[test]
fn health_answers_while_all_connections_wait_for_an_answer() {
    raise_file_limit();
    let server = Server::start(&["--parallel", "1", "--queue", "2000"]);
    let request = post("/v1/completions", "", long_request().to_string().as_bytes());
    let mut waiting = Vec::new();
    for _ in 0..600 {
        let mut stream = server.connect();
        stream.write_all(&request).unwrap();
        waiting.push(stream);
    }
    server.assert_healthy(10);
    let is_refused = |stream: &mut TcpStream| {
        let mut status = [0; 12];
        matches!(stream.read_exact(&mut status), Ok(()) if status == *b"HTTP/1.1 503")
    };
    // Waiting connections were not pushed out; one address has half of the places.
    assert!(!is_refused(&mut waiting[0]));
    assert!(waiting[512..].iter_mut().any(is_refused));
}

#[test]
fn clients_that_do_not_read_do_not_keep_a_server_that_stops() {
    let mut server = Server::start(&[]);
    let held = hold(&server, 40);
    let mut stream = server.connect();
    let stream_request = post("/v1/completions", "", long_request().to_string().as_bytes());
    stream.write_all(&stream_request.repeat(50)).unwrap();
    thread::sleep(Duration::from_millis(300));
    let started = Instant::now();
    let kill = Command::new("kill")
        .arg(server.child.id().to_string())
        .status();
    assert!(kill.unwrap().success());
    while server.child.try_wait().unwrap().is_none() {
        assert!(
            started.elapsed() < Duration::from_secs(40),
            "it does not stop"
        );
        thread::sleep(Duration::from_millis(50));
    }
    drop((held, stream));
}

#[test]
fn bodies_that_nobody_reads_end_the_connection() {
    let server = Server::start(&["--api-key", "secret"]);
    let mut stream = server.connect();
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    // The answer comes at once, and the connection ends without the rest of the body.
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
}

#[test]
fn requests_have_one_host() {
    let server = Server::start(&[]);
    let status = |head: &str| {
        server
            .raw(format!("GET /health {head}Connection: close\r\n\r\n").as_bytes())
            .status
    };
    assert_eq!(status("HTTP/1.1\r\nHost: localhost\r\n"), 200);
    assert_eq!(status("HTTP/1.0\r\n"), 200);
    assert_eq!(status("HTTP/1.1\r\n"), 400);
    assert_eq!(
        status("HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n"),
        400
    );
    assert_eq!(
        status("HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n"),
        400
    );
}

#[test]
fn few_files_are_an_error_at_startup_or_fewer_connections() {
    let limited = |sandbox: &Sandbox, files: usize| {
        let program = sandbox.command(&[]).get_program().to_owned();
        let mut command = sandbox.command(&["serve", "demo"]);
        let script = format!("ulimit -n {files}; exec \"$0\" \"$@\"");
        let mut shell = Command::new("sh");
        shell
            .arg("-c")
            .arg(script)
            .arg(program)
            .args(command.get_args());
        shell.current_dir(command.get_current_dir().unwrap());
        let variables = command
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?)));
        shell.envs(variables);
        command.env_clear();
        shell
    };
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let output = limited(&sandbox, 100)
        .args(["--port", "0"])
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains("100 files") && message.contains("ulimit -n"),
        "{message}"
    );
    let command = limited(&sandbox, 320);
    let mut server = Server::start_command(sandbox, command);
    raise_file_limit();
    let held = hold(&server, 500);
    server.assert_healthy(5);
    drop(held);
    let kill = Command::new("kill")
        .arg(server.child.id().to_string())
        .status();
    assert!(kill.unwrap().success());
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn slow_clients_are_cut_off() {
    let server = Server::start(&["--api-key", "secret"]);
    let key = "Authorization: Bearer secret\r\n";
    let post = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";
    let pages = b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n".repeat(4000);
    let slow_body = format!("{post}{key}Content-Length: 1000\r\n\r\n{{");
    let (mut silent, mut slow_head, mut slow_body, mut no_reader) = {
        let open = |sent: &[u8]| {
            let mut stream = server.connect();
            stream.set_nonblocking(true).unwrap();
            let _ = stream.write(sent);
            Some(stream)
        };
        (
            open(b""),
            open(post.as_bytes()),
            open(slow_body.as_bytes()),
            open(&pages),
        )
    };
    let is_open = |result: std::io::Result<usize>| match result {
        Ok(bytes) => bytes > 0,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    };
    let started = Instant::now();
    while silent.is_some() || slow_head.is_some() || slow_body.is_some() || no_reader.is_some() {
        let open = [&silent, &slow_head, &slow_body, &no_reader].map(Option::is_some);
        assert!(started.elapsed() < Duration::from_secs(120), "{open:?}");
        silent = silent.filter(|mut stream| is_open(stream.read(&mut [0; 100])));
        // A byte a second looks like a slow network.
        let trickle = |mut stream: &TcpStream| {
            is_open(stream.write(b"x")) && is_open(stream.read(&mut [0; 4096]))
        };
        slow_head = slow_head.filter(trickle);
        slow_body = slow_body.filter(trickle);
        no_reader = no_reader.filter(|mut stream| is_open(stream.write(b"x")));
        thread::sleep(Duration::from_secs(1));
    }
}
