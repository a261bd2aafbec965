//! Conversations: what messages may contain, and the process that renders templates.

use std::{fs, process::Command};

use serde_json::{Value, json};

use super::Server;
use crate::sandbox::{Sandbox, golden_model};

/// A prepared model with a chat template, its own if there is no other.
fn chat_model(template: Option<&str>) -> Sandbox {
    let sandbox = Sandbox::new();
    let text = "some words to calibrate on ".repeat(40);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    crate::sandbox::copy_folder(&golden_model("llama-silu"), &sandbox.path("model"));
    if let Some(template) = template {
        fs::write(sandbox.path("model/chat_template.jinja"), template).unwrap();
    }
    let prepare = "prepare model --vram 0 --data text.txt --tokens 600 --trace-tokens 128 --steps 1 --certify none";
    sandbox.run(&prepare.split(' ').collect::<Vec<_>>()).good();
    sandbox
}

fn serve(sandbox: Sandbox, arguments: &[&str]) -> Server {
    let mut command = sandbox.command(&["serve", "model"]);
    command.args(arguments);
    Server::start_command(sandbox, command)
}

fn say(server: &Server, role: &str, content: &str) -> super::Response {
    let messages = json!([{ "role": role, "content": content }]);
    let body = json!({ "messages": messages, "max_tokens": 1, "temperature": 0 });
    server.post("/v1/chat/completions", &body)
}

fn prompt_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens"].as_u64().unwrap()
}

#[test]
fn special_tokens_in_messages_are_text_unless_trusted() {
    let tokens = |arguments: &[&str]| {
        let server = serve(chat_model(None), arguments);
        for role in ["system", "developer", "user", "assistant", "tool"] {
            assert_eq!(say(&server, role, "x").status, 200, "{role}");
        }
        for role in ["evil", "User", "", "<|eot_id|>"] {
            let answer = say(&server, role, "x");
            assert_eq!(answer.error(), (400, "invalid_value".to_owned()));
            assert!(answer.body.contains("`system`"), "{}", answer.body);
        }
        let without = prompt_tokens(&say(&server, "user", "a").json());
        let with = prompt_tokens(&say(&server, "user", "a<|eot_id|>").json());
        let ollama = json!({
            "messages": [{ "role": "user", "content": "a<|eot_id|>" }], "stream": false, "options": { "num_predict": 1 }
        });
        let ollama = server.post("/api/chat", &ollama).json();
        assert_eq!(ollama["prompt_eval_count"], with, "{ollama}");
        with - without
    };
    assert_eq!(tokens(&["--trusted-special-tokens"]), 1, "it is one token");
    assert!(tokens(&[]) > 1, "it is several characters");
}

#[test]
fn strangers_do_not_learn_what_was_cached() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let mut command = sandbox.command(&["serve", "demo"]);
    command.args(["--host", "0.0.0.0"]);
    let mut server = Server::start_command(sandbox, command);
    server.address = server.address.replace("0.0.0.0", "127.0.0.1");
    let answer = server.complete(&json!({ "prompt": "x = 1", "max_tokens": 1 }));
    assert!(
        answer["usage"]["prompt_tokens_details"].is_null(),
        "{answer}"
    );
    assert!(answer["timings"]["cache_n"].is_null(), "{answer}");
    assert!(answer["timings"]["prompt_n"].is_null(), "{answer}");
}

#[test]
#[cfg(target_os = "linux")]
fn the_template_process_survives_an_upgrade_and_is_replaced() {
    let sandbox = chat_model(None);
    let program = sandbox.path("powerinfer");
    fs::copy(env!("CARGO_BIN_EXE_powerinfer"), &program).unwrap();
    let given = sandbox.command(&["serve", "model"]);
    let mut command = Command::new(&program);
    command.args(given.get_args());
    command.current_dir(given.get_current_dir().unwrap());
    let variables = given
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    command.envs(variables);
    let server = Server::start_command(sandbox, command);
    // The upgrade: another file at the same place.
    fs::remove_file(&program).unwrap();
    fs::write(&program, "not a program").unwrap();
    assert_eq!(say(&server, "user", "x").status, 200);
    let id = server.child.id();
    let children = || {
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        let threads = fs::read_dir(format!("/proc/{id}/task")).unwrap();
        let of_thread = threads
            .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok());
        let all: String = of_thread.chain([children]).collect();
        all.split_whitespace()
            .map(str::to_owned)
            .collect::<std::collections::BTreeSet<_>>()
    };
    let before = children();
    assert_eq!(before.len(), 1, "{before:?}");
    let kill = Command::new("kill").arg("-KILL").args(&before).status();
    assert!(kill.unwrap().success());
    assert_eq!(say(&server, "user", "x").status, 200);
    assert!(children().is_disjoint(&before));
}

#[test]
fn failures_of_the_template_process_are_not_the_clients() {
    let template = "{% if messages[0].content == 'bomb' %}{% set ns = namespace(x='aaaaaaaa') %}\
                    {% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}\
                    {{ messages[0].content }}";
    let server = serve(chat_model(Some(template)), &[]);
    assert_eq!(say(&server, "user", "x").status, 200);
    let failed = say(&server, "user", "bomb");
    assert_eq!(failed.status, 503, "{}", failed.body);
    assert!(failed.body.contains("its process ended"), "{}", failed.body);
    assert_eq!(say(&server, "user", "x").status, 200);
}

#[test]
fn empty_calls_and_nulls_in_messages_ask_for_nothing() {
    // What transformers does for conversations without tools.
    let template = "{% if tools is not none or messages[1].tool_calls is defined %}{{ raise_exception('tools') }}{% endif %}\
                    {{ '%s' % messages[0].content.removeprefix('x') }}";
    let server = serve(chat_model(Some(template)), &[]);
    let send = |message: Value| {
        let messages = json!([{ "role": "user", "content": "xa" }, message, { "role": "user", "content": "b" }]);
        server.post(
            "/v1/chat/completions",
            &json!({ "messages": messages, "max_tokens": 1, "tools": [] }),
        )
    };
    for asks in [json!([]), json!(null), json!({}), json!(false), json!("")] {
        let message = json!({ "role": "assistant", "content": "x", "tool_calls": asks, "function_call": asks, "images": asks, "name": null });
        let answer = send(message);
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    for (key, value) in [
        ("tool_calls", json!([{}])),
        ("function_call", json!({ "name": "f" })),
        ("images", json!(["x"])),
    ] {
        let mut message = json!({ "role": "assistant", "content": "x" });
        message[key] = value;
        let answer = send(message);
        assert_eq!(answer.error(), (400, "invalid_value".to_owned()));
        assert!(answer.body.contains("only text is"), "{}", answer.body);
    }
}

#[test]
fn run_answers_a_prompt_without_an_option_as_ollama_does() {
    let sandbox = chat_model(None);
    let run = |arguments: &[&str], stdin: &[u8]| {
        let options = ["-n", "4", "--temperature", "0", "--json"];
        let arguments = [&["run", "model"], arguments, &options].concat();
        sandbox.run_with(&arguments, stdin).good().json()
    };
    let answer = run(&["Hello"], b"");
    let piped = run(&[], b"Hello\n");
    assert_eq!(piped["completion"], answer["completion"]);
    let raw = run(&["--prompt", "Hello"], b"");
    assert_ne!(raw["prompt_tokens"], answer["prompt_tokens"]);
    let server = serve(sandbox, &[]);
    let body = json!({ "prompt": "Hello", "stream": false, "options": { "num_predict": 4, "temperature": 0 } });
    let generated = server.post("/api/generate", &body).json();
    assert_eq!(generated["response"], answer["completion"]);
    assert_eq!(generated["prompt_eval_count"], answer["prompt_tokens"]);
}
