//! Every parameter with null and with values of wrong types. Errors name the parameter in plain words.

use serde_json::{Value, json};

use super::Server;

/// Parameters of `/v1/completions`, each with invalid values.
fn refused() -> Vec<(&'static str, Vec<Value>)> {
    let not_a_number = || vec![json!("x"), json!(true), json!([1]), json!({})];
    let not_whole = || [not_a_number(), vec![json!(1.5), json!(-3)]].concat();
    let not_a_flag = || vec![json!("true"), json!(1), json!([]), json!({})];
    vec![
        (
            "prompt",
            vec![
                json!(1),
                json!(true),
                json!({}),
                json!([1, "a"]),
                json!(["a", [1, 2]]),
                json!([[1], "a"]),
                json!([-1]),
                json!([1.5]),
                json!([null]),
            ],
        ),
        ("max_tokens", not_whole()),
        ("n", not_whole()),
        ("best_of", not_whole()),
        ("logprobs", not_whole()),
        ("top_k", not_whole()),
        (
            "seed",
            [not_a_number(), vec![json!(0.5), json!(1e300)]].concat(),
        ),
        ("temperature", [not_a_number(), vec![json!(-1)]].concat()),
        (
            "top_p",
            [not_a_number(), vec![json!(-1), json!(2)]].concat(),
        ),
        ("min_p", [not_a_number(), vec![json!(-1)]].concat()),
        (
            "presence_penalty",
            [not_a_number(), vec![json!(-3)]].concat(),
        ),
        (
            "frequency_penalty",
            [not_a_number(), vec![json!(3)]].concat(),
        ),
        (
            "repetition_penalty",
            [not_a_number(), vec![json!(-1)]].concat(),
        ),
        ("repeat_penalty", [not_a_number(), vec![json!(0)]].concat()),
        ("echo", not_a_flag()),
        ("stream", not_a_flag()),
        ("ignore_eos", not_a_flag()),
        ("activity", not_a_flag()),
        (
            "stop",
            vec![
                json!(1),
                json!({}),
                json!([1]),
                json!([""]),
                json!(["a", null]),
            ],
        ),
        (
            "logit_bias",
            vec![
                json!(1),
                json!([1]),
                json!({ "1": "x" }),
                json!({ "x": 1 }),
                json!({ "-1": 1 }),
                json!({ "1": null }),
            ],
        ),
        (
            "response_format",
            vec![
                json!("text"),
                json!({}),
                json!({ "type": "xml" }),
                json!({ "type": "json_schema" }),
                json!({ "type": "json_schema", "json_schema": 1 }),
                json!({ "type": 1 }),
            ],
        ),
        (
            "stream_options",
            vec![json!(1), json!({ "include_usage": 1 }), json!([])],
        ),
        ("model", vec![json!(1), json!(["demo"]), json!({})]),
        ("suffix", vec![json!("x"), json!(1)]),
    ]
}

fn assert_plain(message: &str) {
    for word in [
        "usize",
        "u32",
        "i64",
        "f32",
        "enum",
        "struct",
        "variant",
        "invalid type",
        "untagged",
        "sequence",
        "map",
        "boolean",
        "floating",
        "expected a string",
    ] {
        assert!(!message.contains(word), "{message}");
    }
}

#[test]
fn wrong_values_are_refused_by_name_in_plain_words() {
    let server = Server::start(&[]);
    for (name, values) in refused() {
        for value in values {
            let mut body = json!({ "prompt": "x", "max_tokens": 1 });
            body[name] = value;
            let answer = server.post("/v1/completions", &body);
            assert_eq!(answer.status, 400, "{body}: {}", answer.body);
            let error = &answer.json()["error"];
            let message = error["message"].as_str().unwrap();
            assert_eq!(error["param"], name, "{body}: {message}");
            assert!(message.contains(&format!("`{name}`")), "{message}");
            assert_plain(message);
        }
    }
    let message = |name: &str, value: Value| {
        let mut body = json!({ "prompt": "x" });
        body[name] = value;
        let answer = server.post("/v1/completions", &body).json();
        answer["error"]["message"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        message("top_p", json!("x")),
        "`top_p`: expected a number, found \"x\""
    );
    assert_eq!(message("n", json!(-1)), "`n`: -1 is not between 1 and 128");
    assert_eq!(
        message("n", json!(1.5)),
        "`n`: expected a whole number, found `1.5`"
    );
    assert_eq!(
        message("prompt", json!(["a", [1, 2]])),
        "`prompt`: texts, ids and lists of ids cannot be mixed"
    );
    assert_eq!(
        message("max_tokens", json!(-2)),
        "`max_tokens`: -2 is invalid: give at least 0, or -1 for no limit"
    );
    assert_eq!(
        message("stop", json!(1)),
        "`stop`: expected a text or a list of texts, found `1`"
    );
}

#[test]
fn nulls_and_unusual_ways_to_write_numbers_are_accepted() {
    let server = Server::start(&[]);
    let plain = json!({ "prompt": "x = ", "max_tokens": 3, "temperature": 0 });
    let expected = &server.complete(&plain)["choices"];
    // Known and unknown parameters.
    let mut nulls = plain.clone();
    let names = refused().into_iter().map(|(name, _)| name);
    for name in names.chain(["guided_json", "truncate_prompt_tokens", "tools", "user"]) {
        if plain.get(name).is_none() {
            nulls[name] = Value::Null;
        }
    }
    assert_eq!(server.complete(&nulls)["choices"], *expected);
    let whole = json!({ "prompt": "x = ", "max_tokens": 3.0, "temperature": 0.0, "n": 1.0, "top_k": 50.0, "seed": 1.0 });
    assert_eq!(server.complete(&whole)["choices"], *expected);
    // As many tokens as there is room for, as in llama.cpp and Ollama.
    for limit in [json!(-1), Value::Null] {
        let body =
            json!({ "prompt": "x = ", "max_tokens": limit, "temperature": 0, "ignore_eos": true });
        let answer = server.complete(&body);
        assert!(
            answer["usage"]["completion_tokens"].as_u64().unwrap() > 400,
            "{answer}"
        );
    }
    // A body with a byte-order mark.
    let body = [b"\xef\xbb\xbf", plain.to_string().as_bytes()].concat();
    let answer = server.post_with("/v1/completions", "", &body);
    assert_eq!(answer.json()["choices"], *expected, "{}", answer.body);
    for (path, body) in [
        ("/v1/chat/completions", json!({ "messages": 1 })),
        ("/v1/chat/completions", json!({ "messages": [1] })),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "content": "x" }] }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": 1, "content": "x" }] }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": 1 }] }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": [1] }] }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": [{ "role": "user", "content": "x" }], "modalities": [1] }),
        ),
        ("/api/generate", json!({ "prompt": 1 })),
        ("/api/generate", json!({ "prompt": "x", "options": [] })),
        (
            "/api/generate",
            json!({ "prompt": "x", "options": { "num_predict": "x" } }),
        ),
        ("/tokenize", json!({ "prompt": 1 })),
        ("/detokenize", json!({ "tokens": ["x"] })),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{path} {body}");
        assert_plain(&answer.body);
    }
    // A parameter that belongs elsewhere.
    for (path, body, said) in [
        (
            "/api/generate",
            json!({ "prompt": "x", "temperature": 0 }),
            "in `options`",
        ),
        (
            "/api/generate",
            json!({ "prompt": "x", "max_tokens": 3 }),
            "`num_predict`",
        ),
        (
            "/api/generate",
            json!({ "prompt": "x", "options": { "max_tokens": 3 } }),
            "`num_predict`",
        ),
        ("/api/generate", json!({ "messages": [] }), "`/api/chat`"),
        (
            "/api/chat",
            json!({ "messages": [], "prompt": "x" }),
            "`/api/generate`",
        ),
    ] {
        let answer = server.post(path, &body);
        let body = answer.body.to_string();
        assert!(answer.status == 400 && body.contains(said), "{path} {body}");
    }
}
