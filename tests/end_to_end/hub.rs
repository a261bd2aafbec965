//! Models of the hub in place of folders: downloaded once, then read from the cache.

use std::{fs, path::Path};

use crate::{
    hub_server::{Behaviour, COMMIT, HubServer, sha256},
    sandbox::{QUICK, Run, Sandbox, assert_contains, copy_folder, golden_model, run_command},
};

/// Runs the program with the hub at `endpoint`.
fn run(sandbox: &Sandbox, endpoint: &str, arguments: &[&str]) -> Run {
    let mut command = sandbox.command(arguments);
    command
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HUB_OFFLINE", "0")
        .env("NO_PROXY", "127.0.0.1")
        .env("HF_TOKEN", "hf_secret");
    run_command(command, b"def area(r):")
}

/// The logits of `model`, as the bytes of the file they are written to.
fn logits(run: impl Fn(&[&str]) -> Run, sandbox: &Sandbox, model: &str) -> Vec<u8> {
    let out = ["--out", "@logits.safetensors"];
    run(&[&["logits", model, "--ids", "1,2,3"][..], &out].concat()).good();
    fs::read(sandbox.path("logits.safetensors")).unwrap()
}

#[test]
fn a_model_of_the_hub_computes_the_logits_of_its_folder_online_and_offline() {
    let sandbox = Sandbox::new();
    let folder = golden_model("llama-silu");
    let local = folder.to_str().unwrap();
    let here = |arguments: &[&str]| sandbox.run_with(arguments, b"def area(r):");
    let expected = (
        here(&["tokenize", local]).good().text(),
        logits(here, &sandbox, local),
    );

    let mut server = HubServer::of_folder("tiny/llama-silu", &folder);
    server.behave(Behaviour {
        token: Some("hf_secret".to_owned()),
        cuts: vec![10_000],
        ..Behaviour::default()
    });
    let endpoint = server.endpoint.clone();
    let online = |arguments: &[&str]| run(&sandbox, &endpoint, arguments);
    let first = online(&["tokenize", "tiny/llama-silu"]).good();
    assert_eq!(first.text(), expected.0);
    first.stderr_contains(&["fetched `tiny/llama-silu`"]);
    let model = "tiny/llama-silu@main";
    assert_eq!(logits(online, &sandbox, model), expected.1);
    assert!(server.bodies("expected").is_empty(), "only what is needed");
    let bodies = server.bodies("/blobs/");
    let resumed = |range: &Option<String>| range.as_deref() == Some("bytes=10000-");
    assert!(
        bodies.iter().any(|body| resumed(&body.range)),
        "the cut transfer went on"
    );

    server.stop();
    for (run, said) in [
        (&here as &dyn Fn(&[&str]) -> Run, "HF_HUB_OFFLINE"),
        (&online, "cannot reach"),
    ] {
        let tokens = run(&["tokenize", "tiny/llama-silu"]).good();
        assert_eq!(tokens.text(), expected.0);
        tokens.stderr_contains(&[said]);
        tokens.stderr_contains(&["from the cache"]);
        assert_eq!(logits(run, &sandbox, "tiny/llama-silu"), expected.1);
    }
}

#[test]
fn pull_prints_the_path_of_the_model() {
    let sandbox = Sandbox::new();
    let server = HubServer::of_folder("tiny/opt", &golden_model("opt-preln"));
    let pull = run(&sandbox, &server.endpoint, &["pull", "tiny/opt"]).good();
    let folder = sandbox.path("hub/models--tiny--opt/snapshots").join(COMMIT);
    assert_eq!(pull.text(), format!("{}\n", folder.display()));
    assert!(folder.join("model.safetensors").exists());
    assert!(!folder.join("expected.json").exists());
    pull.stderr_contains(&["fetched `tiny/opt`"]);

    let arguments = ["pull", "tiny/opt", "--file", "expected.json", "--json"];
    let json = run(&sandbox, &server.endpoint, &arguments).good().json();
    let file = folder.join("expected.json");
    assert_eq!(json["path"], file.to_str().unwrap());
    assert_eq!(json["files"][0]["fetched"], true);
    assert_eq!(
        fs::read(&file).unwrap(),
        fs::read(golden_model("opt-preln").join("expected.json")).unwrap()
    );
}

#[test]
fn artifacts_are_named_after_the_model_and_not_after_its_commit() {
    let sandbox = Sandbox::new();
    let server = HubServer::of_folder("tiny/relu", &golden_model("llama-relu-gqa"));
    let text = "def area(r):\n    return 3.14 * r ** 2\n\n".repeat(40);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    let run = |arguments: &[&str]| run(&sandbox, &server.endpoint, arguments).good();
    let arguments = ["prepare", "tiny/relu", "--data", "text.txt", "--vram", "0G"];
    run(&[&arguments[..], &QUICK].concat());
    assert!(sandbox.path("relu.powerinfer/bundle").is_dir());
    run(&["run", "tiny/relu", "--prompt", "def", "-n", "2"]).stderr_contains(&["decode: 2 tokens"]);
    let about = run(&["inspect", "tiny/relu"]).text();
    assert_contains(&about, &["model        relu\n"]);
    // A bundle is not used for a model of the same name from another organization or revision.
    let other = HubServer::of_folder("other/relu", &golden_model("opt-preln"));
    for (pulled, what) in [(false, "was not fetched"), (true, "not of `other/relu`")] {
        if pulled {
            self::run(&sandbox, &other.endpoint, &["pull", "other/relu"]).good();
        }
        for command in [
            &["run", "other/relu", "--prompt", "def"][..],
            &["show", "other/relu"],
        ] {
            let refused = self::run(&sandbox, &other.endpoint, command);
            refused.bad(
                1,
                &[
                    "is a bundle of relu @ ",
                    what,
                    "`powerinfer run relu.powerinfer`",
                ],
            );
        }
    }
    self::run(
        &sandbox,
        &server.endpoint,
        &["run", "tiny/relu@refs/pr/3", "--prompt", "def"],
    )
    .bad(1, &["was not fetched"]);
}

#[test]
fn a_gguf_file_alone_in_its_repository_is_a_model() {
    let sandbox = Sandbox::new();
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf/llama-sp.q4_k_m.gguf");
    let files = [("model.Q4_K_M.gguf".to_owned(), fs::read(&file).unwrap())];
    let server = HubServer::start("tiny/llama-GGUF", files.into());
    let about = run(&sandbox, &server.endpoint, &["inspect", "tiny/llama-GGUF"]).good();
    about.stdout_contains(&["model        llama-GGUF\n"]);
    let tokens = run(&sandbox, &server.endpoint, &["tokenize", "tiny/llama-GGUF"]).good();
    let expected = sandbox
        .run_with(&["tokenize", file.to_str().unwrap()], b"def area(r):")
        .good();
    assert_eq!(tokens.text(), expected.text());
}

#[test]
fn a_quantization_selects_a_gguf_file() {
    let sandbox = Sandbox::new();
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf/llama-sp.q4_k_m.gguf");
    let bytes = fs::read(&file).unwrap();
    let files = [("m-Q4_K_M.gguf", bytes), ("m-Q8_0.gguf", b"GGUF".to_vec())];
    let files = files.map(|(name, bytes)| (name.to_owned(), bytes));
    let server = HubServer::start("tiny/m-GGUF", files.into());
    let run = |arguments: &[&str]| run(&sandbox, &server.endpoint, arguments);
    let about = run(&["show", "hf.co/tiny/m-GGUF:q4_k_m"]).good();
    about.stdout_contains(&["model        m-GGUF\n"]);
    assert!(server.bodies("Q8_0").is_empty(), "only what is needed");
    run(&["show", "tiny/m-GGUF:Q2_K"]).bad(1, &["there: m-Q4_K_M.gguf, m-Q8_0.gguf"]);
    run(&["show", "tiny/m-GGUF"]).bad(
        1,
        &["several GGUF models", "hint: ", "`tiny/m-GGUF:Q4_K_M`"],
    );
    let command = "`powerinfer prepare hf.co/tiny/m-GGUF:Q4_K_M --data TEXT`";
    run(&["run", "hf.co/tiny/m-GGUF:Q4_K_M"]).bad(1, &["m-GGUF.powerinfer/bundle", command]);
}

#[test]
fn an_existing_path_takes_precedence_over_the_hub() {
    let sandbox = Sandbox::new();
    copy_folder(&golden_model("llama-silu"), &sandbox.path("tiny/llama"));
    let server = HubServer::of_folder("tiny/llama", &golden_model("opt-preln"));
    let arguments = ["tokenize", "tiny/llama"];
    let tokens = run(&sandbox, &server.endpoint, &arguments).good();
    let expected = sandbox.run_with(&arguments, b"def area(r):").good();
    assert_eq!(tokens.text(), expected.text());
    assert!(server.log().is_empty());
}

#[test]
fn a_failed_download_is_an_error_with_a_hint() {
    let sandbox = Sandbox::new();
    let server = HubServer::of_folder("tiny/llama", &golden_model("llama-silu"));
    let run = |arguments: &[&str]| run(&sandbox, &server.endpoint, arguments);
    run(&["inspect", "tiny/lama"]).bad(1, &["no public model `tiny/lama`", "; check"]);
    run(&["tokenize", "tiny/llama@v2"]).bad(1, &["no revision `v2`", "; leave out `@v2`"]);
    run(&["pull", "demo"]).bad(
        1,
        &["`demo` is part of the program", "hint: ", "prepare demo"],
    );
    run(&["pull", "llama"]).bad(1, &["`llama`", "; write `organization/name`"]);
    run(&["pull", "tiny/llama", "--file", "../x"]).bad(1, &["../x", "refusing"]);
    run(&["run", "tiny/llama"]).bad(1, &["llama.powerinfer/bundle", "powerinfer prepare"]);
    // The sandbox is offline.
    sandbox
        .run(&["pull", "tiny/llama"])
        .bad(1, &["tiny/llama", "; unset it"]);
    sandbox
        .run(&["profile", "tiny llama"])
        .bad(1, &["there is no model", "`org/name` on the hub"]);
    server.behave(Behaviour {
        gated: true,
        ..Behaviour::default()
    });
    run(&["pull", "tiny/llama"]).bad(1, &["restricted", "; accept its terms", "HF_TOKEN"]);
    assert!(!sandbox.path("hub/models--tiny--llama/refs").exists());
}

#[test]
fn an_unsupported_model_is_refused_before_its_weights_are_downloaded() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-silu");
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let config = config.replacen(
        '{',
        r#"{"quantization_config": {"quant_method": "awq"},"#,
        1,
    );
    fs::write(model.join("config.json"), config).unwrap();
    let server = HubServer::of_folder("tiny/awq", &model);
    run(&sandbox, &server.endpoint, &["profile", "tiny/awq"])
        .bad(1, &["quantised by AWQ", "; use the original checkpoint"]);
    let blob = |file: &str| sha256(&fs::read(model.join(file)).unwrap());
    assert_eq!(server.bodies(&blob("tokenizer.json")).len(), 1);
    assert!(server.bodies(&blob("model.safetensors")).is_empty());
}

#[test]
fn predictors_are_imported_from_a_model_on_the_hub() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let server = HubServer::of_folder("tiny/silu", &golden_model("llama-silu"));
    let import = ["train-predictors", "demo", "--import", "tiny/silu"];
    run(&sandbox, &server.endpoint, &import).bad(
        1,
        &[
            "no predictors of the original PowerInfer at",
            COMMIT,
            "`model.layers.0.mlp.predictor.fc1.weight`",
        ],
    );
}
