//! Requests whose size or cost would stop the other clients.

use std::{
    io::{Read, Write},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};

use super::{Server, post};

/// Peak resident memory of the server in MiB, so far.
#[cfg(target_os = "linux")]
fn peak_memory(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().strip_suffix(" kB").unwrap();
    kib.parse::<u64>().unwrap() >> 10
}

fn schema(properties: usize) -> Value {
    let properties: Map<String, Value> = (0..properties)
        .map(|index| {
            let value = json!({ "type": "string", "pattern": format!("^[a-z{index}]{{1,40}}$") });
            (format!("property_{index}"), value)
        })
        .collect();
    json!({ "type": "json_schema", "json_schema": { "schema": { "type": "object", "properties": properties } } })
}

#[test]
fn bombs_are_refused_before_they_are_queued() {
    let server = Server::start(&[]);
    server.complete(&json!({ "prompt": "x", "max_tokens": 1 }));
    #[cfg(target_os = "linux")]
    let before = peak_memory(&server);
    let biases: Map<String, Value> = (0..200_000).map(|id| (id.to_string(), json!(1))).collect();
    let long = |bytes: usize| "x".repeat(bytes);
    // Small, and 20 to the power of 12 combinations.
    let alternatives = |all: usize| {
        let of = |index: usize| json!({ "type": "object", "properties": { format!("p{all}_{index}"): {} } });
        json!({ "anyOf": (0..20).map(of).collect::<Vec<_>>() })
    };
    let schema_of_all = json!({ "allOf": (0..12).map(alternatives).collect::<Vec<_>>() });
    let combinations = json!({ "type": "json_schema", "json_schema": { "schema": schema_of_all } });
    for (path, body, parts) in [
        (
            "/v1/completions",
            json!({ "prompt": vec![""; 3_000_000] }),
            &["prompt", "2048 prompts"][..],
        ),
        (
            "/v1/completions",
            json!({ "prompt": vec!["x"; 2048], "n": 128 }),
            &["262144 texts"],
        ),
        (
            "/v1/completions",
            json!({ "prompt": vec![1; 2_000_000] }),
            &["1048576 tokens"],
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "n": 128, "logit_bias": biases }),
            &["logit_bias", "bytes"],
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "logit_bias": { "5000000": 1 } }),
            &["logit_bias", "5000000"],
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "stop": vec![long(300_000); 32] }),
            &["stop", "bytes"],
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "response_format": combinations }),
            &["response_format", "schema too large"],
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "response_format": schema(20_000) }),
            &["response_format", "bytes"],
        ),
        (
            "/v1/completions",
            json!({ "prompt": vec!["x"; 2048], "max_tokens": 400, "logprobs": 20 }),
            &["log probabilities"],
        ),
        (
            "/v1/completions",
            json!({ "prompt": vec![[7]; 1000], long(9 << 20): 1 }),
            &["unknown parameter"],
        ),
        (
            "/detokenize",
            json!({ "tokens": vec![1; 4_000_000] }),
            &["tokens", "1048576"],
        ),
        (
            "/tokenize",
            json!({ "prompt": long(9 << 20) }),
            &["prompt is"],
        ),
    ] {
        let started = Instant::now();
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{path} {parts:?}: {}", answer.body);
        assert!(answer.body.len() < 4096, "the message is short");
        for part in parts {
            assert!(answer.body.contains(part), "{part} in {}", answer.body);
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{parts:?}");
    }
    #[cfg(target_os = "linux")]
    {
        let growth = peak_memory(&server) - before;
        assert!(growth < 512, "the server grew by {growth} MiB");
    }
}

#[test]
fn texts_share_the_settings_of_their_request() {
    let server = Server::start(&["--parallel", "1"]);
    // Within the limits; separate copies for each text would take gigabytes.
    let vocabulary = 400;
    let biases: Map<String, Value> = (0..vocabulary)
        .map(|id| (id.to_string(), json!(0.5)))
        .collect();
    let stops: Vec<String> = (0..32)
        .map(|index| format!("{index}{}", "s".repeat(400)))
        .collect();
    let body = json!({
        "prompt": vec!["x"; 16], "n": 128, "max_tokens": 1, "logit_bias": biases, "stop": stops,
        "response_format": schema(100),
    });
    thread::scope(|scope| {
        let answer = scope.spawn(|| server.post("/v1/completions", &body));
        while !answer.is_finished() {
            server.assert_healthy(1);
        }
        let answer = answer.join().unwrap();
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 2048);
    });
    #[cfg(target_os = "linux")]
    assert!(peak_memory(&server) < 1024, "{} MiB", peak_memory(&server));
}

#[test]
fn health_answers_while_requests_are_prepared() {
    let server = Server::start(&["--parallel", "2"]);
    let text = "x y ".repeat(16_000);
    let long_stops = vec!["s".repeat(400); 32];
    let bodies = [
        json!({ "prompt": "x", "n": 128, "max_tokens": 4, "response_format": schema(400) }),
        json!({ "prompt": "x", "n": 128, "max_tokens": 50, "stop": long_stops, "ignore_eos": true }),
        json!({ "prompt": vec![text; 100] }),
        json!({ "prompt": vec![vec![9; 400]; 2000], "max_tokens": 0, "echo": true, "logprobs": 1, "stream": true }),
    ];
    thread::scope(|scope| {
        for body in bodies.iter().chain(&bodies) {
            scope.spawn(|| {
                let mut stream = server.connect();
                stream
                    .write_all(&post("/v1/completions", "", body.to_string().as_bytes()))
                    .unwrap();
                // The clients disconnect in the middle of long answers, even if these keep arriving in small parts.
                let (started, patience) = (Instant::now(), Duration::from_secs(5));
                stream.set_read_timeout(Some(patience)).unwrap();
                let mut part = [0; 4096];
                while started.elapsed() < patience
                    && stream.read(&mut part).is_ok_and(|bytes| bytes > 0)
                {}
            });
        }
        server.assert_healthy(100);
    });
    server.complete(&json!({ "prompt": "x", "max_tokens": 1 }));
}

#[test]
fn large_bodies_that_never_end_leave_room_for_small_ones() {
    let server = Server::start(&[]);
    let body = vec![b' '; 9 << 20];
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        body.len() + 1
    );
    let mut open = Vec::new();
    for _ in 0..8 {
        let mut stream = server.connect();
        stream.write_all(head.as_bytes()).unwrap();
        // The server closes those that it has no room for.
        let _ = stream.write_all(&body);
        open.push(stream);
    }
    server.complete(&json!({ "prompt": "x", "max_tokens": 1 }));
    server.assert_healthy(3);
    let refused = open.iter_mut().map(|stream| {
        stream
            .set_read_timeout(Some(Duration::from_millis(500)))
            .unwrap();
        let mut status = [0; 12];
        matches!(stream.read_exact(&mut status), Ok(()) if status == *b"HTTP/1.1 503")
    });
    let refused = refused.filter(|is_refused| *is_refused).count();
    assert_eq!(refused, 1, "64 MiB are 7 of them");
}
