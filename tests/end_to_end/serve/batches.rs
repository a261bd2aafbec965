//! Continuous batching: the tokens of a crowd, reused prefixes, places and the queue.

use std::{
    io::{Read, Write},
    thread,
};

use serde_json::{Value, json};

use super::{Server, long_request, post};
use crate::{cache_keys::set_error_bounds, sandbox::Sandbox};

#[test]
fn a_crowd_gets_the_tokens_that_each_gets_alone() {
    let prompts = [
        "def add(a, b):\n",
        "# Add the numbers of the list.\ndef add_all(xs):\n    total = 0\n",
        "x",
        "def longest(words):\n    \"\"\"Return the longest word.\"\"\"\n",
    ];
    for policy in ["predicted", "exact"] {
        let server = Server::start(&["--parallel", "32", "--policy", policy]);
        let alone: Vec<String> = (0..8)
            .map(|index| {
                let seed = index.to_string();
                let run = [
                    "run",
                    "demo",
                    "--json",
                    "-n",
                    "40",
                    "--policy",
                    policy,
                    "--temperature",
                    "0.9",
                    "--seed",
                    &seed,
                ];
                let run = server
                    .sandbox
                    .run(&[&run[..], &["--prompt", prompts[index % 4]]].concat());
                run.good().json()["completion"].as_str().unwrap().to_owned()
            })
            .collect();
        thread::scope(|scope| {
            for client in 0..32 {
                let (server, alone) = (&server, &alone);
                scope.spawn(move || {
                    let index = client % 8;
                    let body = json!({ "prompt": prompts[index % 4], "max_tokens": 40, "temperature": 0.9, "seed": index });
                    let text = &server.complete(&body)["choices"][0]["text"];
                    assert_eq!(text, &alone[index], "{policy}, prompt {index}");
                });
            }
        });
        assert!(
            server.metric("powerinfer_decode_batch_size_sum")
                > server.metric("powerinfer_decode_batch_size_count")
        );
    }
}

#[test]
fn prefixes_are_reused_and_change_nothing() {
    let server = Server::start(&[]);
    let prompt = "# Add the numbers of the list.\ndef add_all(xs):\n    total = 0\n";
    let body = |prompt: &str| json!({ "prompt": prompt, "max_tokens": 30, "temperature": 0, "logprobs": 3 });
    let cached = |answer: &Value| {
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    let (first, again) = (
        server.complete(&body(prompt)),
        server.complete(&body(prompt)),
    );
    assert_eq!(first["choices"], again["choices"]);
    assert_eq!(cached(&first), 0);
    assert_eq!(
        cached(&again) + 1,
        again["usage"]["prompt_tokens"].as_u64().unwrap()
    );
    let longer = server.complete(&body(&format!("{prompt}    for x in xs:\n")));
    assert!(cached(&longer) > 10, "{longer}");
    let fresh = Server::start(&[]).complete(&body(&format!("{prompt}    for x in xs:\n")));
    assert_eq!(longer["choices"], fresh["choices"]);
    // Scores of the prompt are those of a prompt that is run.
    let mut echoed = body(prompt);
    echoed["echo"] = json!(true);
    let answer = server.complete(&echoed);
    assert_eq!(cached(&answer), 0);
}

#[test]
fn speculation_changes_no_answer() {
    let (plain, speculative) = (Server::start(&[]), Server::start(&["--speculate"]));
    let repeats =
        "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n".repeat(2);
    let bodies = [
        json!({ "max_tokens": 100, "temperature": 0, "logprobs": 2 }),
        json!({ "max_tokens": 100, "temperature": 0.7, "seed": 3 }),
        json!({ "max_tokens": 400, "temperature": 0.2, "seed": 4, "ignore_eos": true, "activity": true }),
        json!({ "max_tokens": 60, "temperature": 0, "stop": ["return"] }),
        json!({ "max_tokens": 1, "temperature": 0 }),
        json!({ "max_tokens": 80, "temperature": 1.0, "seed": 5, "response_format": { "type": "json_object" } }),
        json!({ "max_tokens": 30, "temperature": 0.8, "seed": 6, "n": 3, "frequency_penalty": 0.5 }),
    ];
    for mut body in bodies {
        // The second time from a sequence in which proposed tokens were.
        for prompt in [&repeats, &format!("{repeats}def mul(a, b):\n")] {
            body["prompt"] = json!(prompt);
            let [plain, speculative] = [&plain, &speculative].map(|server| server.complete(&body));
            assert_eq!(plain["choices"], speculative["choices"], "{body}");
            assert_eq!(plain["usage"], speculative["usage"], "{body}");
        }
    }
    // How many depends on times.
    assert!(speculative.metric("powerinfer_proposed_tokens_total") > 0);
    assert_eq!(plain.metric("powerinfer_proposed_tokens_total"), 0);
}

#[test]
fn a_client_that_goes_away_frees_its_place() {
    let server = Server::start(&["--parallel", "1", "--queue", "2", "--context", "512"]);
    let mut stream = server.connect();
    stream
        .write_all(&post(
            "/v1/completions",
            "",
            long_request().to_string().as_bytes(),
        ))
        .unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    drop(stream);
    server.complete(&json!({ "prompt": "x", "max_tokens": 1 }));
    // Either it was cancelled, or it had ended before.
    let ended = server.metric("powerinfer_texts_cancelled_total")
        + server.metric("powerinfer_texts_finished_total");
    assert_eq!(ended, 2);
    server.wait_for("powerinfer_texts_running", 0);
}

#[test]
fn a_full_queue_refuses_requests_with_a_time_to_retry() {
    let server = Server::start(&["--parallel", "1", "--queue", "1"]);
    let body = json!({ "prompt": vec!["x"; 64], "max_tokens": 40, "ignore_eos": true });
    thread::scope(|scope| {
        let waiting = scope.spawn(|| server.complete(&body));
        while server.metric("powerinfer_texts_waiting") == 0 && !waiting.is_finished() {
            thread::yield_now();
        }
        let refused = server.post("/v1/completions", &json!({ "prompt": "x" }));
        assert_eq!(refused.error(), (429, "rate_limit_exceeded".to_owned()));
        assert!(refused.head.contains("retry-after: "), "{}", refused.head);
        let answer = waiting.join().unwrap();
        assert_eq!(answer["choices"].as_array().unwrap().len(), 64);
    });
}

#[test]
fn prefixes_from_before_a_fallback_are_not_reused() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let place = ["place", "demo", "--vram", "0G", "--policy", "predicted"];
    let certify = ["--certify", "quick"];
    sandbox.run(&[&place[..], &certify].concat()).good();
    set_error_bounds(&sandbox, 1e-9);
    let server = Server::start_in(sandbox, &["--verify-every", "1"]);
    let prompt = "# Add the numbers of the list.\ndef add_all(xs):\n";
    let cached = |tokens: u64| {
        let body = json!({ "prompt": prompt, "max_tokens": tokens, "ignore_eos": true });
        let usage = &server.complete(&body)["usage"];
        usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(cached(2), 0);
    assert!(cached(2) > 0, "no layer has fallen back yet");
    // Layers fall back while this one is decoded.
    assert!(cached(60) > 0);
    assert_eq!(cached(2), 0);
    assert!(cached(2) > 0);
}

#[test]
fn drift_is_reported() {
    let server = Server::start(&["--policy", "predicted", "--verify-every", "4"]);
    server.complete(&json!({ "prompt": "def f(x):", "max_tokens": 40, "ignore_eos": true }));
    assert!(server.metric("powerinfer_verified_tokens") >= 9);
    let metrics = server.get("/metrics").body;
    assert!(
        metrics.contains("powerinfer_verified_ffn_error 0."),
        "{metrics}"
    );
}
