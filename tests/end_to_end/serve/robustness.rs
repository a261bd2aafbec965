//! Keys, origins, attacks and signals.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::Command,
};

use serde_json::json;

use super::{Server, long_request, post};

#[test]
fn keys_and_origins_keep_others_out() {
    let server = Server::start(&[
        "--api-key",
        "secret",
        "--allow-origin",
        "https://example.org",
    ]);
    let body = br#"{"prompt": "x", "max_tokens": 1}"#;
    let status = |headers: &str| server.post_with("/v1/completions", headers, body).status;
    assert_eq!(status(""), 401);
    assert_eq!(status("Authorization: Bearer secre\r\n"), 401);
    let key = "Authorization: Bearer secret\r\n";
    assert_eq!(status(key), 200);
    assert_eq!(
        status(&format!("{key}Origin: https://example.com\r\n")),
        403
    );
    assert_eq!(
        status(&format!("{key}Origin: http://localhost\r\n")),
        200,
        "its own page"
    );
    let allowed = server.post_with(
        "/v1/completions",
        &format!("{key}Origin: https://example.org\r\n"),
        body,
    );
    assert_eq!(allowed.status, 200);
    assert!(
        allowed
            .head
            .contains("access-control-allow-origin: https://example.org")
    );
    let rebound = b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    assert_eq!(server.raw(rebound).status, 403);
    assert_eq!(server.get("/health").status, 200, "probes have no key");
    assert_eq!(server.get("/v1/models").status, 401);
}

#[test]
fn a_server_under_fire_answers_afterwards() {
    let server = Server::start(&["--parallel", "2"]);
    let headers = "X-Header: value\r\n".repeat(10_000);
    let refused = server.post_with("/v1/completions", &headers, b"{}");
    assert!(matches!(refused.status, 431 | 0), "{}", refused.status);
    let large = vec![b' '; 11 << 20];
    let refused = server.post_with("/v1/completions", "", &large);
    assert!(matches!(refused.status, 413 | 0), "{}", refused.status);
    let half_open: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut stream = server.connect();
            stream
                .write_all(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
                .unwrap();
            stream
        })
        .collect();
    for _ in 0..2000 {
        drop(TcpStream::connect(&server.address).unwrap());
    }
    for noise in [
        &b"\x00\x01\x02"[..],
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        &[0xff; 4096],
    ] {
        let status = server.raw(noise).status;
        assert!(matches!(status, 0 | 400..=505), "{status}");
    }
    assert_eq!(
        server.complete(&json!({ "prompt": "x", "max_tokens": 1 }))["usage"]["completion_tokens"],
        1
    );
    drop(half_open);
}

#[test]
#[cfg(unix)]
fn a_signal_lets_texts_finish() {
    let mut server = Server::start(&[]);
    let mut stream = server.connect();
    stream
        .write_all(&post(
            "/v1/completions",
            "",
            long_request().to_string().as_bytes(),
        ))
        .unwrap();
    let mut first = [0];
    stream.read_exact(&mut first).unwrap();
    let kill = Command::new("kill")
        .arg(server.child.id().to_string())
        .status()
        .unwrap();
    assert!(kill.success());
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(
        rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"),
        "{rest}"
    );
    assert!(server.child.wait().unwrap().success());
    assert!(TcpStream::connect(&server.address).is_err());
}
