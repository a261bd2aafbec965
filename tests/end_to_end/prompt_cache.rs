//! Prompt caches: the same text as without one, errors with a remedy, and the formats of the KV cache.

use std::fs;

use serde_json::Value;

use crate::sandbox::{Run, Sandbox};

const TASK: &str = "# Add the numbers of the list.\ndef add_all(xs):\n    total = 0\n";

fn demo() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    sandbox
}

fn run(sandbox: &Sandbox, prompt: &str, more: &[&str]) -> Run {
    let arguments = ["run", "demo", "--json", "-n", "24", "--prompt", prompt];
    sandbox.run(&[&arguments[..], more].concat())
}

/// The text, and the number of prompt tokens taken from the cache.
fn answer(run: Run) -> (Value, u64) {
    let json = run.good().json();
    let cached = json["cached_prompt_tokens"].as_u64().unwrap();
    (json["completion"].clone(), cached)
}

#[test]
fn text_from_a_prompt_cache_equals_text_without_one() {
    let sandbox = demo();
    let cache = ["--prompt-cache", "@p.cache"];
    for format in ["f16", "q8_0", "f32"] {
        let place = ["place", "demo.powerinfer/bundle", "--vram", "0G"];
        sandbox
            .run(&[&place[..], &["--kv-cache", format]].concat())
            .good();
        let inspected = sandbox.run(&["inspect", "demo.powerinfer/bundle"]).good();
        let stored = format!("KV cache in {format}");
        assert!(inspected.text().contains(&stored), "{}", inspected.text());
        let _ = fs::remove_file(sandbox.path("p.cache"));

        let (fresh, none) = answer(run(&sandbox, TASK, &[]));
        assert_eq!(none, 0);
        assert_eq!(answer(run(&sandbox, TASK, &cache)), (fresh.clone(), 0));
        let bytes = fs::read(sandbox.path("p.cache")).unwrap();
        let (text, cached) = answer(run(&sandbox, TASK, &cache));
        assert_eq!(text, fresh);
        assert!(cached > 10, "{cached}");
        assert_eq!(fs::read(sandbox.path("p.cache")).unwrap(), bytes);

        // Another prompt with a common prefix; a cache that is only read does not change.
        let other = format!("{TASK}    for x in xs:\n");
        let fresh = answer(run(&sandbox, &other, &[])).0;
        let read_only = [&cache[..], &["--prompt-cache-ro"]].concat();
        let (text, shared) = answer(run(&sandbox, &other, &read_only));
        assert_eq!(text, fresh);
        assert!(shared > 10 && shared <= cached + 1, "{shared}");
        assert_eq!(fs::read(sandbox.path("p.cache")).unwrap(), bytes);

        // If the cache includes the generated text, a prompt with that text is in the cache as well.
        let all = [&cache[..], &["--prompt-cache-all"]].concat();
        assert_eq!(answer(run(&sandbox, &other, &all)).0, fresh);
        assert_ne!(fs::read(sandbox.path("p.cache")).unwrap(), bytes);
        let longer = other + fresh.as_str().unwrap();
        let (text, known) = answer(run(&sandbox, &longer, &read_only));
        assert_eq!(text, answer(run(&sandbox, &longer, &[])).0);
        assert!(known > shared, "{known}");
    }
    let inspected = sandbox.run(&["inspect", "@p.cache", "--verify"]).good();
    for part in ["powerinfer-prompt-cache version 4", "tokens", "f32"] {
        inspected.stdout_contains(&[part]);
    }
}

#[test]
fn prompt_caches_of_another_model_or_format_are_refused() {
    let sandbox = demo();
    let cache = ["--prompt-cache", "@p.cache"];
    run(
        &sandbox,
        TASK,
        &[&cache[..], &["--prompt-cache-ro"]].concat(),
    )
    .bad(1, &["p.cache", "--prompt-cache-ro"]);
    run(&sandbox, TASK, &["--prompt-cache-all"]).bad(2, &["--prompt-cache"]);
    let arguments = ["run", "demo", "--interactive", "--prompt-cache", "@p.cache"];
    sandbox.run(&arguments).bad(2, &["--interactive"]);

    run(&sandbox, TASK, &cache).good();
    let instead = "delete it, or name another file";
    run(
        &sandbox,
        TASK,
        &[&cache[..], &["--policy", "dense"]].concat(),
    )
    .bad(1, &["p.cache", "policies", "dense", instead]);
    run(
        &sandbox,
        TASK,
        &[&cache[..], &["--activations", "f32"]].concat(),
    )
    .bad(
        1,
        &["p.cache", "other activations: int8; expected f32", instead],
    );
    let place = ["place", "demo.powerinfer/bundle", "--vram", "0G"];
    sandbox
        .run(&[&place[..], &["--kv-cache", "q8_0"]].concat())
        .good();
    run(&sandbox, TASK, &cache).bad(1, &["KV cache format", "f16", "q8_0", instead]);
    sandbox
        .run(&[&place[..], &["--kv-cache", "f8"]].concat())
        .bad(2, &["f8", "f16, q8_0"]);

    let whole = fs::read(sandbox.path("p.cache")).unwrap();
    let mut bytes = whole.clone();
    *bytes.last_mut().unwrap() ^= 4;
    for (bytes, message) in [
        (&bytes[..], "damaged"),
        (&whole[..whole.len() / 2], "p.cache"),
        (b"no cache", "p.cache"),
        (b"", "p.cache"),
    ] {
        fs::write(sandbox.path("p.cache"), bytes).unwrap();
        run(&sandbox, TASK, &cache).bad(1, &[message]);
        assert_eq!(fs::read(sandbox.path("p.cache")).unwrap(), bytes);
    }
}

#[test]
fn prompts_that_are_empty_or_too_long_are_refused_with_both_lengths() {
    let sandbox = demo();
    let long = "x = 1\n".repeat(400);
    let place = ["place", "demo.powerinfer/bundle", "--vram", "0G"];
    run(&sandbox, &long, &[]).bad(1, &["the context holds 512", "shorten it"]);
    sandbox
        .run(&[&place[..], &["--context", "40"]].concat())
        .good();
    run(&sandbox, &long, &[]).bad(1, &["the context holds 40", "512 tokens at most"]);
    sandbox
        .run(&[&place[..], &["--context", "513"]].concat())
        .bad(1, &["513", "512"]);
    sandbox
        .run(&[&place[..], &["--context", "0"]].concat())
        .bad(1, &["contexts of 1 to 512 tokens, not 0"]);
    // A full context ends the text.
    let arguments = ["run", "demo", "--json", "--prompt", "x = 1\n"];
    let json = sandbox.run(&arguments).good().json();
    let tokens = |name: &str| json[name].as_u64().unwrap();
    assert!(tokens("prompt_tokens") + tokens("generated_tokens") <= 41);
}
