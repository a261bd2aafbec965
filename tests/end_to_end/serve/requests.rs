//! Requests and responses, in the shapes of the references.

use serde_json::{Value, json};

use super::{Server, events, unchunked};
use crate::sandbox::{Sandbox, copy_folder, prepared_demo};

#[test]
fn echoed_prompts_have_the_log_probabilities_of_their_tokens() {
    let server = Server::start(&[]);
    let body = json!({ "prompt": ["def f(x):", "x = 1"], "max_tokens": 1, "echo": true, "logprobs": 1, "temperature": 0 });
    let answer = server.complete(&body);
    assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
    for choice in answer["choices"].as_array().unwrap() {
        let lists = &choice["logprobs"];
        let list = |name: &str| lists[name].as_array().unwrap().clone();
        let (tokens, scores, top) = (list("tokens"), list("token_logprobs"), list("top_logprobs"));
        assert_eq!((tokens.len(), top.len()), (scores.len(), scores.len()));
        assert!(scores[0].is_null() && top[0].is_null());
        for (score, top) in scores.iter().zip(&top).skip(1) {
            let largest = top
                .as_object()
                .unwrap()
                .values()
                .map(|value| value.as_f64().unwrap());
            assert!(score.as_f64().unwrap() <= largest.fold(f64::MIN, f64::max));
        }
        let text: String = tokens
            .iter()
            .skip(1)
            .map(|token| token.as_str().unwrap())
            .collect();
        assert_eq!(text, choice["text"], "the tokens are the text");
        // Greedy: the generated token is the largest.
        assert_eq!(
            scores.last().unwrap(),
            top.last()
                .unwrap()
                .as_object()
                .unwrap()
                .values()
                .next()
                .unwrap()
        );
    }
    let alone = json!({ "prompt": "def f(x):", "max_tokens": 0, "echo": true, "logprobs": 1 });
    let alone = server.complete(&alone);
    let scores = alone["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap();
    let both = answer["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap();
    assert_eq!(scores[..], both[..scores.len()]);
    assert_eq!(alone["usage"]["completion_tokens"], 0);
}

#[test]
fn streams_are_the_text_in_pieces() {
    let server = Server::start(&[]);
    let mut body = json!({ "prompt": "def add(a, b):\n", "max_tokens": 60, "temperature": 0, "n": 2, "stop": ["return"] });
    let whole = server.complete(&body);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert!(
        !whole["choices"][0]["text"]
            .as_str()
            .unwrap()
            .contains("return")
    );
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let streamed = server.post("/v1/completions", &body);
    assert!(
        streamed.head.contains("text/event-stream"),
        "{}",
        streamed.head
    );
    let body = unchunked(&streamed.body);
    let events = events(&body);
    assert_eq!(events.last(), Some(&"[DONE]"));
    let chunks = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str(event).unwrap());
    let chunks: Vec<Value> = chunks.collect();
    for index in 0..2 {
        let choices = chunks
            .iter()
            .flat_map(|chunk| chunk["choices"].as_array().unwrap());
        let own: Vec<_> = choices.filter(|choice| choice["index"] == index).collect();
        let text: String = own
            .iter()
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(text, whole["choices"][index]["text"]);
        assert_eq!(own.last().unwrap()["finish_reason"], "stop");
    }
    let last = chunks.last().unwrap();
    assert_eq!(
        last["usage"]["prompt_tokens"],
        whole["usage"]["prompt_tokens"]
    );
    // Of the prompt, not of the texts: all but its last token was cached by the request before.
    let cached = &last["usage"]["prompt_tokens_details"]["cached_tokens"];
    let prompt = whole["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(*cached, prompt - 1);
    assert_eq!(last["timings"]["prompt_n"], 1);
    assert!(last["timings"]["predicted_per_second"].as_f64().unwrap() > 0.0);
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let server = Server::start(&["--context", "100"]);
    let long = "x = 1\n".repeat(200);
    for (path, body, expected) in [
        (
            "/v1/completions",
            json!({ "prompt": "x", "foo": 1 }),
            (400, "unknown_parameter"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "suffix": "y" }),
            (400, "unsupported_parameter"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "temperature": -1 }),
            (400, "invalid_value"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "temperature": "hot" }),
            (400, "invalid_value"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "max_tokens": 0 }),
            (400, "invalid_value"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": [] }),
            (400, "invalid_value"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": [7_000_000] }),
            (400, "invalid_value"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "stop": [""] }),
            (400, "invalid_value"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "n": 0 }),
            (400, "invalid_value"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "logit_bias": { "a": 1 } }),
            (400, "invalid_value"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "model": "gpt-4" }),
            (404, "model_not_found"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": long }),
            (400, "context_length_exceeded"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": long.repeat(100) }),
            (400, "context_length_exceeded"),
        ),
        (
            "/v1/completions",
            json!({ "prompt": vec!["x"; 17], "n": 128 }),
            (400, ""),
        ),
        (
            "/v1/completions",
            json!({ "prompt": "x", "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": "nothing" } } } }),
            (400, "invalid_value"),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [] }),
            (400, "invalid_value"),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            (400, "invalid_value"),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": "x" }], "tools": [{}] }),
            (400, "unsupported_parameter"),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": "x" }] }),
            (400, ""),
        ),
        (
            "/detokenize",
            json!({ "tokens": [7_000_000] }),
            (400, "invalid_value"),
        ),
        ("/nothing", json!({}), (404, "")),
        ("/health", json!({}), (405, "")),
    ] {
        let (status, code) = server.post(path, &body).error();
        assert_eq!((status, code.as_str()), expected, "{path} {body}");
    }
    for body in [
        &b"{"[..],
        b"[]",
        b"\xff\xfe",
        b"{\"prompt\": \"x\", \"temperature\": NaN}",
        b"",
    ] {
        assert_eq!(server.post_with("/v1/completions", "", body).status, 400);
    }
    let remedy = |server: &Server| {
        let refused = server.post("/v1/completions", &json!({ "prompt": long }));
        let message = refused.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        message.split_once("; ").unwrap().1.to_owned()
    };
    assert_eq!(
        remedy(&server),
        "shorten it, or serve with a longer `--context`"
    );
    let whole = Server::start(&[]);
    assert_eq!(remedy(&whole), "shorten it", "the model supports no more");
    let deep = "[".repeat(100_000);
    assert_eq!(
        server
            .post_with("/v1/completions", "", deep.as_bytes())
            .status,
        400
    );
    let answer =
        server.complete(&json!({ "prompt": "x = 1", "max_tokens": 1000, "ignore_eos": true }));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(
        answer["usage"]["total_tokens"], 101,
        "the last token is not run"
    );
}

#[test]
fn schemas_constrain_the_text() {
    let server = Server::start(&[]);
    let schema = json!({
        "type": "object",
        "properties": { "name": { "type": "string", "maxLength": 5 }, "count": { "enum": [1, 2] } },
        "required": ["name", "count"],
    });
    for seed in 0..4 {
        let body = json!({
            "prompt": "x = ", "max_tokens": 200, "temperature": 1.5, "seed": seed,
            "response_format": { "type": "json_schema", "json_schema": { "schema": schema } },
        });
        let answer = server.complete(&body);
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{answer}");
        let value: Value = serde_json::from_str(choice["text"].as_str().unwrap()).unwrap();
        assert!(
            value["name"].as_str().unwrap().chars().count() <= 5,
            "{value}"
        );
        assert!(value["count"] == 1 || value["count"] == 2, "{value}");
        assert_eq!(value.as_object().unwrap().len(), 2, "no other keys");
    }
}

#[test]
fn clients_of_ollama_and_of_vllm_are_understood() {
    let server = Server::start(&["--alias", "coder"]);
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "coder");
    assert_eq!(server.get("/v1/models/coder").status, 200);
    assert_eq!(server.get("/v1/models/other").error().0, 404);
    for path in ["/api/tags", "/api/ps"] {
        let listed = server.get(path).json();
        let model = &listed["models"][0];
        assert_eq!(
            (&model["name"], &model["model"]),
            (&json!("coder"), &json!("coder"))
        );
        assert!(model["size"].as_u64() > Some(1 << 20), "{listed}");
        assert_eq!(model["digest"].as_str().map(str::len), Some(64), "{listed}");
        assert_eq!(model["details"]["parameter_size"], "3.5M");
    }
    // Ollama's clients ask for `/`; only a browser gets the page.
    assert!(server.get("/").body.starts_with("PowerInfer is running"));
    let page =
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAccept: text/html,*/*\r\n\r\n";
    assert!(server.raw(page).body.starts_with("<!doctype html>"));
    // Errors have the shape of the API that was called.
    assert!(server.get("/api/nothing").json()["error"].is_string());
    assert!(server.get("/api/chat").json()["error"].is_string());
    assert!(server.get("/v1/nothing").json()["error"]["message"].is_string());
    let body = json!({ "model": "coder:latest", "prompt": "def f(x):", "options": { "num_predict": 5, "temperature": 0 } });
    let lines = server.post("/api/generate", &body);
    let lines = unchunked(&lines.body);
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let text: String = lines
        .iter()
        .map(|line| line["response"].as_str().unwrap())
        .collect();
    let whole =
        server.complete(&json!({ "prompt": "def f(x):", "max_tokens": 5, "temperature": 0 }));
    assert_eq!(text, whole["choices"][0]["text"]);
    let last = lines.last().unwrap();
    assert_eq!(
        (&last["done"], &last["eval_count"]),
        (&json!(true), &json!(5))
    );
    let wrong = server.post("/api/generate", &json!({ "model": "other", "prompt": "x" }));
    assert!(wrong.json()["error"].is_string());
    let keep = |path: &str, value: Value| {
        let response = server.post(path, &json!({ "keep_alive": value }));
        (response.status, response.json()["error"].clone())
    };
    for path in ["/api/generate", "/api/chat"] {
        for value in [
            json!("5m"),
            json!("-1h30m0.5s"),
            json!(-1),
            json!(2.5),
            Value::Null,
        ] {
            assert_eq!(keep(path, value.clone()), (200, Value::Null), "{value}");
        }
        for value in [json!(0), json!(0.0), json!("0"), json!("0s")] {
            let (status, error) = keep(path, value);
            let error = error.as_str().unwrap();
            assert_eq!(status, 400, "{error}");
            assert!(error.contains("until the server is stopped"), "{error}");
        }
        for value in [
            json!("5"),
            json!(""),
            json!("m"),
            json!("5 m"),
            json!("5m3"),
            json!(true),
            json!([]),
        ] {
            let (status, error) = keep(path, value.clone());
            assert_eq!(status, 400, "{value}");
            assert!(
                error
                    .as_str()
                    .unwrap()
                    .starts_with("`keep_alive`: give seconds"),
                "{error}"
            );
        }
    }
    for (options, status) in [
        (json!({ "num_predict": 1, "typical_p": 1.0 }), 200),
        (json!({ "num_predict": 1, "typical_p": 0.5 }), 400),
    ] {
        let body = json!({ "prompt": "def f(x):", "options": options });
        assert_eq!(server.post("/api/generate", &body).status, status, "{body}");
    }
    let generate = |penalty: f32, last: Value| {
        let options = json!({ "num_predict": 60, "temperature": 0, "repeat_penalty": penalty, "repeat_last_n": last });
        let body =
            json!({ "prompt": "def f(x):", "stream": false, "keep_alive": 0, "options": options });
        server.post("/api/generate", &body).json()["response"].clone()
    };
    let plain = generate(1.0, Value::Null);
    assert_eq!(generate(9.0, json!(0)), plain);
    assert_ne!(generate(9.0, json!(64)), plain);
    let system = json!({ "prompt": "x", "system": "Be brief." });
    let refused = server.post("/api/generate", &system);
    let error = refused.json()["error"].clone();
    assert_eq!(refused.status, 400, "{error}");
    assert!(
        error.as_str().unwrap().contains("no chat template"),
        "{error}"
    );
    let ids = server
        .post("/tokenize", &json!({ "prompt": "def f(x):" }))
        .json()["tokens"]
        .clone();
    let bare = server
        .post("/tokenize", &json!({ "content": "def f(x):" }))
        .json()["tokens"]
        .clone();
    assert_eq!(
        ids.as_array().unwrap()[1..],
        bare.as_array().unwrap()[..],
        "the first is BOS"
    );
    let text = server
        .post("/detokenize", &json!({ "tokens": bare }))
        .json();
    assert_eq!(text["prompt"], "def f(x):");
    assert_eq!(server.get("/tokenizer_info").json()["eos_token"], "</s>");
    let health = server.get("/health").json();
    assert_eq!(
        (&health["status"], &health["batching"]),
        (&json!("ok"), &json!("continuous"))
    );
}

#[test]
fn a_model_has_the_name_of_its_folder() {
    for given in ["mine", "mine.powerinfer/bundle"] {
        let sandbox = Sandbox::new();
        copy_folder(prepared_demo(), &sandbox.path("mine.powerinfer"));
        let place = ["place", "mine", "--vram", "0", "--context", "64"];
        sandbox.run(&place).good();
        let plan = std::fs::File::open(sandbox.path("mine.powerinfer/bundle/plan.json")).unwrap();
        let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1 << 30);
        plan.set_modified(long_ago).unwrap();
        let command = sandbox.command(&["serve", given]);
        let server = Server::start_command(sandbox, command);
        let listed = &server.get("/api/tags").json()["models"][0];
        assert_eq!(listed["name"], "mine");
        assert_eq!(listed["modified_at"], "2004-01-10T13:37:04+00:00");
        for name in ["mine", "mine:latest", "mine.powerinfer:latest"] {
            let answer = server.complete(&json!({ "model": name, "prompt": "x", "max_tokens": 1 }));
            assert_eq!(answer["model"], "mine");
            assert_eq!(server.get(&format!("/v1/models/{name}")).status, 200);
        }
        let other = json!({ "model": "demo", "prompt": "x" });
        assert_eq!(server.post("/v1/completions", &other).status, 404);
        let long = json!({ "prompt": "x = 1\n".repeat(40) });
        let refused = server.post("/v1/completions", &long).body;
        assert!(refused.contains("re-plan the model"), "{refused}");
    }
}
