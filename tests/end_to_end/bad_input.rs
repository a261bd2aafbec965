//! Invalid input is an error that names the file and a remedy; nothing panics and no file is lost.

use std::{fs, path::Path};

use powerinfer_artifact::document::Document;
use powerinfer_bundle::DENSE_VERSION;
use powerinfer_profile::ProfileDocument;

use crate::sandbox::{Sandbox, assert_contains, golden_model, words};

/// Replaces the bytes of a file.
fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Replaces text in a file.
fn replace(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} in {}", path.display());
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn folders_without_a_checkpoint_are_refused() {
    let sandbox = Sandbox::new();
    sandbox
        .run(&["profile", "./nowhere"])
        .bad(1, &["./nowhere", "a model is a folder"]);
    fs::create_dir(sandbox.path("empty")).unwrap();
    sandbox
        .run(&["profile", "empty"])
        .bad(1, &["empty", "config.json"]);
    fs::write(sandbox.path("empty/config.json"), "{").unwrap();
    sandbox
        .run(&["profile", "empty"])
        .bad(1, &["config.json", "JSON"]);
}

#[test]
fn missing_truncated_and_outside_shards_are_refused() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-sharded");
    let shard = model.join("model-00002-of-00002.safetensors");
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 100]).unwrap();
    sandbox.run(&["inspect", "llama-sharded"]).bad(
        1,
        &["model-00002-of-00002.safetensors", "fetch or make it again"],
    );
    fs::write(&shard, &whole[..20]).unwrap();
    sandbox
        .run(&["inspect", "llama-sharded"])
        .bad(1, &["model-00002-of-00002.safetensors"]);
    fs::remove_file(&shard).unwrap();
    sandbox.run(&["inspect", "llama-sharded"]).bad(
        1,
        &["model-00002-of-00002.safetensors", "download it again"],
    );
    fs::write(&shard, &whole).unwrap();
    sandbox.run(&["inspect", "llama-sharded"]).good();
    replace(
        &model.join("model.safetensors.index.json"),
        "model-00002-of-00002",
        "../model-00002-of-00002",
    );
    sandbox
        .run(&["inspect", "llama-sharded"])
        .bad(1, &["../model-00002-of-00002", "refusing"]);
}

#[test]
fn a_pickle_that_imports_other_modules_is_refused() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-bin-only");
    edit(&model.join("pytorch_model.bin"), |bytes| {
        // Of the same length, so that no offset changes.
        let module = b"torch._utils";
        let at = bytes
            .windows(module.len())
            .position(|window| window == module)
            .unwrap();
        bytes[at..at + module.len()].copy_from_slice(b"posix.system");
    });
    let parts = ["pytorch_model.bin", "posix.system", "only tensors are read"];
    sandbox.run(&["inspect", "llama-bin-only"]).bad(1, &parts);
}

#[test]
fn unknown_configuration_keys_and_tensors_are_refused() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-silu");
    let config = model.join("config.json");
    replace(
        &config,
        "\"hidden_act\"",
        "\"residual_multiplier\": 0.5, \"hidden_act\"",
    );
    // The class of transformers does not read it either.
    let ids = words("logits llama-silu --ids 1,2,3 --out logits -v");
    let run = sandbox.run(&ids);
    run.good().stderr_contains(&["residual_multiplier"]);
    replace(
        &config,
        "\"hidden_act\"",
        "\"auto_map\": {\"AutoConfig\": \"own.Config\"}, \"hidden_act\"",
    );
    let parts = [
        "config.json",
        "residual_multiplier",
        "may change what the model computes",
    ];
    sandbox.run(&["inspect", "llama-silu"]).bad(1, &parts);
    replace(&config, "\"residual_multiplier\": 0.5, ", "");
    replace(
        &config,
        "\"num_hidden_layers\": 2",
        "\"num_hidden_layers\": 1",
    );
    let parts = ["model.safetensors", "`model.layers.1.", "is not used"];
    sandbox.run(&["inspect", "llama-silu"]).bad(1, &parts);
}

#[test]
fn nan_weights_are_refused() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-bf16");
    // The last value of the last tensor.
    edit(&model.join("model.safetensors"), |bytes| {
        let end = bytes.len();
        bytes[end - 2..].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    });
    fs::write(
        sandbox.path("text.txt"),
        "some text to calibrate on ".repeat(50),
    )
    .unwrap();
    let arguments = words("prepare llama-bf16 --data text.txt --vram 0G");
    sandbox
        .run(&arguments)
        .bad(1, &["NaN", "model.safetensors", "tensor `model."]);
    assert!(!sandbox.path("llama-bf16.powerinfer/bundle").exists());
}

#[test]
fn a_bundle_is_not_replaced_by_one_that_overflows() {
    let sandbox = Sandbox::new();
    let text = "some text to calibrate on, and some more ".repeat(100);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    // Sets columns 2 and following of row 0 of a tensor.
    let model_with = |name: &str, tensor: &str, numbers: &[f32]| {
        let model = sandbox.path(name);
        fs::rename(sandbox.copy_model("llama-relu-gqa"), &model).unwrap();
        edit(&model.join("model.safetensors"), |bytes| {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let table: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            let found = &table[tensor];
            assert_eq!(found["dtype"], "F32");
            let start = found["data_offsets"][0].as_u64().unwrap() as usize;
            let numbers: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            bytes[8 + length + start + 8..][..numbers.len()].copy_from_slice(&numbers);
        });
        sandbox.run(&["profile", name, "--data", "text.txt"]).good();
        model
    };
    let place = |model: &str, quant: &str| {
        let fixed = [
            "--vram=0",
            "--policy=dense",
            "--certify=none",
            "--out=bundle",
        ];
        sandbox.run(&[&["place", model, "--quant", quant][..], &fixed].concat())
    };
    let large = model_with("large", "model.layers.1.self_attn.v_proj.weight", &[1e7]);
    place("large", "f32").good();
    let manifest = || fs::read(sandbox.path("bundle/manifest.json")).unwrap();
    let before = manifest();
    let parts = [
        "`layers.1.value`",
        "1e7",
        "row 0, column 2",
        "`q8_0`",
        "--quant f32",
    ];
    place("large", "q8_0").bad(1, &parts);
    model_with("infinite", "lm_head.weight", &[f32::MAX; 32]);
    place("infinite", "f32").bad(1, &["the logits are not finite"]);
    assert_eq!(manifest(), before);
    sandbox
        .run(&["run", "bundle", "--prompt", "a", "--max-tokens", "4"])
        .good();
    // A setting beyond 32 bits.
    let config = large.join("config.json");
    replace(
        &config,
        "\"rms_norm_eps\": ",
        "\"rms_norm_eps\": 1e300, \"_\": ",
    );
    sandbox
        .run(&["inspect", "large"])
        .bad(1, &["rms_norm_eps", "1e300"]);
}

#[test]
fn a_file_that_the_manifest_does_not_name_is_refused() {
    let sandbox = Sandbox::new();
    let folder = sandbox.copy_demo().join("bundle");
    let template = folder.join("chat_template.jinja");
    fs::write(&template, "{{ messages[0].content }}").unwrap();
    for command in [
        &["run", "demo"][..],
        &["inspect", "--verify", "demo.powerinfer"],
    ] {
        sandbox
            .run(command)
            .bad(1, &["chat_template.jinja", "manifest", "remove it"]);
    }
    fs::remove_file(template).unwrap();
    sandbox
        .run(&["inspect", "--verify", "demo.powerinfer"])
        .good();
}

#[test]
fn a_chat_template_without_end_is_stopped() {
    let prepare = "prepare llama-relu-gqa --vram 0 --data text.txt --tokens 600 --trace-tokens 128 --steps 1 --certify none";
    let prepare: Vec<&str> = prepare.split(' ').collect();
    for (template, reason) in [
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "fuel",
        ),
        (
            "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "1024 MiB of memory",
        ),
    ] {
        let sandbox = Sandbox::new();
        let model = sandbox.copy_model("llama-relu-gqa");
        let text = "Once upon a time. ".repeat(200);
        fs::write(sandbox.path("text.txt"), text).unwrap();
        fs::write(model.join("chat_template.jinja"), template).unwrap();
        sandbox.run(&prepare).good();
        sandbox
            .run_with(&["run", "llama-relu-gqa", "-i", "-n", "3"], b"Hello\n")
            .bad(1, &["chat_template.jinja` failed", reason]);
    }
}

#[test]
fn unsupported_configurations_are_refused() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-silu");
    let config = model.join("config.json");
    let good = fs::read(&config).unwrap();
    for (from, to, parts) in [
        (
            "LlamaForCausalLM",
            "RwkvForCausalLM",
            ["RwkvForCausalLM", "supported"],
        ),
        ("\"silu\"", "\"mish\"", ["hidden_act", "mish"]),
        (
            "\"intermediate_size\": 172",
            "\"intermediate_size\": 173",
            ["[173, 64]", "[172, 64]"],
        ),
        (
            "\"vocab_size\": 640",
            "\"vocab_size\": 99999999999",
            ["vocab_size", "larger than supported"],
        ),
        (
            "\"num_hidden_layers\": 2",
            "\"num_hidden_layers\": 3",
            ["model.layers.2", "incomplete"],
        ),
        (
            "\"rope_scaling\": null",
            "\"rope_scaling\": {\"rope_type\": \"mrope\"}",
            ["rope_scaling", "mrope"],
        ),
    ] {
        fs::write(&config, &good).unwrap();
        replace(&config, from, to);
        sandbox.run(&["inspect", "llama-silu"]).bad(1, &parts);
    }
}

#[test]
fn unreadable_text_is_refused() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("empty.txt"), " \n").unwrap();
    fs::write(sandbox.path("latin1.txt"), b"caf\xe9").unwrap();
    fs::create_dir(sandbox.path("folder")).unwrap();
    sandbox
        .run(&["profile", "demo", "--data", "empty.txt"])
        .bad(1, &["empty.txt", "empty"]);
    sandbox
        .run(&["profile", "demo", "--data", "latin1.txt"])
        .bad(1, &["latin1.txt", "UTF-8"]);
    sandbox
        .run(&["profile", "demo", "--data", "missing.txt"])
        .bad(1, &["missing.txt", "does not exist"]);
    sandbox
        .run(&["profile", "demo", "--data", "folder"])
        .bad(1, &["no text in `folder`", "`--data FILE`"]);
    sandbox
        .run(&["profile", "demo", "--tokens", "3"])
        .bad(1, &["--tokens"]);
    sandbox
        .run(&["profile", "demo", "--tokens", "0"])
        .bad(1, &["no tokens"]);
    let silu = golden_model("llama-silu");
    sandbox
        .run(&["profile", silu.to_str().unwrap()])
        .bad(1, &["--data"]);
    sandbox
        .run_with(&["tokenize", "demo"], b"\xff")
        .bad(1, &["UTF-8"]);
    sandbox
        .run_with(&["tokenize", "demo", "--decode"], b"[1, 99999]")
        .bad(1, &["99999"]);
    sandbox
        .run_with(&["tokenize", "demo", "--decode"], b"one")
        .bad(1, &["JSON array"]);
}

#[test]
fn artifacts_of_another_model_are_refused() {
    let sandbox = Sandbox::new();
    let folder = sandbox.copy_demo();
    let profile = folder.join("profile");
    let relu = golden_model("llama-relu-gqa");
    let (relu, profile) = (relu.to_str().unwrap(), profile.to_str().unwrap());
    for command in ["train-predictors", "place"] {
        let vram: &[&str] = if command == "place" {
            &["--vram", "1G"]
        } else {
            &[]
        };
        let arguments = [&[command, relu, "--profile", profile][..], vram].concat();
        sandbox
            .run(&arguments)
            .bad(1, &["another model", "demo @ b3:", "llama-relu-gqa @ b3:"]);
    }
}

#[test]
fn a_flipped_byte_in_a_bundle_is_detected() {
    let sandbox = Sandbox::new();
    let folder = sandbox.copy_demo();
    let files = [
        "weights.safetensors",
        "predictors.safetensors",
        "plan.json",
        "tokenizer.json",
        "manifest.json",
    ];
    for name in files {
        let path = folder.join("bundle").join(name);
        let good = fs::read(&path).unwrap();
        for position in [good.len() / 3, good.len() / 2, good.len() * 9 / 10] {
            edit(&path, |bytes| bytes[position] ^= 1);
            let run = sandbox.run(&["run", "demo", "--prompt", "def", "-n", "1"]);
            run.bad(1, &[name]);
            fs::write(&path, &good).unwrap();
        }
    }
    sandbox
        .run(&["run", "demo", "--prompt", "def", "-n", "1"])
        .good();
    edit(&folder.join("profile/neurons.parquet"), |bytes| {
        bytes[100] ^= 1
    });
    sandbox
        .run(&["inspect", "demo.powerinfer", "--verify"])
        .bad(1, &["neurons.parquet", "damaged"]);
}

#[test]
fn a_flipped_byte_in_a_profile_or_in_predictors_is_detected() {
    let sandbox = Sandbox::new();
    let folder = sandbox.copy_demo();
    for name in [
        "profile/profile.json",
        "profile/neurons.parquet",
        "predictors/predictors.safetensors",
    ] {
        let path = folder.join(name);
        let before = fs::read(&path).unwrap();
        edit(&path, |bytes| {
            // A digit of the second half, so that the file still parses.
            let half = bytes.len() / 2;
            let digit = bytes[half..].iter().position(u8::is_ascii_digit).unwrap();
            bytes[half + digit] ^= 1;
        });
        let file = name.rsplit('/').next().unwrap();
        sandbox
            .run(&["place", "demo", "--vram", "0", "--force"])
            .bad(1, &[file, "damaged"]);
        sandbox
            .run(&["inspect", "--verify", "demo.powerinfer"])
            .bad(1, &[file, "damaged"]);
        fs::write(&path, before).unwrap();
    }
}

#[test]
fn missing_newer_and_truncated_bundles_are_refused() {
    let sandbox = Sandbox::new();
    sandbox
        .run(&["run", "demo"])
        .bad(1, &["no bundle", "powerinfer prepare"]);
    let folder = sandbox.copy_demo();
    let manifest = folder.join("bundle/manifest.json");
    let version = |version: u32| format!("\"version\": {version}");
    replace(&manifest, &version(DENSE_VERSION), &version(99));
    replace(&manifest, "powerinfer 0.1.0", "powerinfer 9.9.9");
    let parts = [
        "manifest.json",
        "version 99",
        "update powerinfer",
        "powerinfer 9.9.9",
    ];
    sandbox.run(&["run", "demo"]).bad(1, &parts);
    let folder = sandbox.copy_demo();
    edit(&folder.join("bundle/weights.safetensors"), |bytes| {
        bytes.truncate(1000)
    });
    sandbox
        .run(&["run", "demo"])
        .bad(1, &["weights.safetensors"]);
    fs::remove_file(folder.join("bundle/plan.json")).unwrap();
    sandbox.run(&["run", "demo"]).bad(1, &["plan.json"]);
}

#[test]
fn sizes_and_settings_out_of_range_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    for (value, code) in [("24X", 2), ("-1G", 2), ("", 2), ("G", 2)] {
        sandbox
            .run(&["place", "demo", &format!("--vram={value}")])
            .bad(code, &["--vram"]);
    }
    sandbox
        .run(&["place", "demo", "--vram", "1G", "--quant", "q5_k"])
        .bad(2, &["q5_k"]);
    sandbox
        .run(&["place", "demo", "--vram", "1G", "--context", "100000"])
        .bad(1, &["contexts of 1 to 512 tokens, not 100000"]);
    sandbox
        .run(&["place", "demo", "--vram", "1G", "--hardware", "abacus"])
        .bad(1, &["abacus", "rtx4090"]);
    sandbox
        .run(&["place", "demo", "--vram", "0G", "--ram", "1K"])
        .bad(1, &["KiB"]);
    sandbox
        .run(&["prepare", "demo", "--out", "new", "--recall", "2"])
        .bad(1, &["invalid target recall 2"]);
    assert!(!sandbox.path("new").exists());
    sandbox
        .run(&["train-predictors", "demo", "--recall", "1.5"])
        .bad(1, &["1.5"]);
    sandbox
        .run(&["run", "demo", "--temperature", "-1"])
        .bad(1, &["`temperature` is -1", "0 or more"]);
    sandbox
        .run(&["run", "demo", "--top-p", "7", "--prompt", "x"])
        .bad(1, &["`top_p` is 7", "at most 1"]);
    sandbox
        .run(&["logits", "demo", "--ids", "1,99999", "--out", "@x"])
        .bad(1, &["99999", "1024"]);
    sandbox
        .run(&["logits", "demo", "--ids", "1,x", "--out", "@x"])
        .bad(2, &["--ids"]);
    sandbox
        .run(&["eval", "tasks", "demo", "--count", "0"])
        .bad(1, &["--count"]);
    sandbox.run(&["frobnicate"]).bad(2, &["frobnicate"]);
}

#[test]
fn a_prompt_longer_than_the_context_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let long = "def f(x): ".repeat(200);
    sandbox
        .run(&["run", "demo", "--prompt", &long])
        .bad(1, &["512", "shorten it"]);
    // An empty prompt still has the begin-of-text token.
    sandbox
        .run(&["run", "demo", "--prompt", "", "-n", "2"])
        .good();
}

#[cfg(unix)]
#[test]
fn a_failed_write_is_an_error_and_keeps_existing_files() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("file"), "not a folder").unwrap();
    sandbox
        .run(&words("profile demo --tokens 100 --out file/profile"))
        .bad(1, &["file", "cannot write"]);
    assert_eq!(fs::read(sandbox.path("file")).unwrap(), b"not a folder");
    // A device that is always full.
    if Path::new("/dev/full").exists() {
        sandbox.copy_demo();
        let run = sandbox
            .command(&["tokenize", "demo"])
            .stdout(fs::File::create("/dev/full").unwrap())
            .output()
            .unwrap();
        assert_eq!(
            run.status.code(),
            Some(1),
            "{}",
            String::from_utf8_lossy(&run.stderr)
        );
    }
}

#[cfg(unix)]
#[test]
fn a_closed_pipe_is_not_an_error() {
    use std::process::Stdio;
    let sandbox = Sandbox::new();
    let mut child = sandbox
        .command(&["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_layer_without_active_neurons_gets_no_predictor() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-relu-gqa");
    // With a gate of zeros no neuron is active.
    edit(&model.join("model.safetensors"), |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let table: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let gate = &table["model.layers.1.mlp.gate_proj.weight"]["data_offsets"];
        let offset = |index: usize| 8 + length + gate[index].as_u64().unwrap() as usize;
        bytes[offset(0)..offset(1)].fill(0);
    });
    let text = "some text to calibrate on, and some more ".repeat(100);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    let profile = ["profile", "llama-relu-gqa", "--data", "text.txt"];
    sandbox.run(&profile).good();
    let train = ["train-predictors", "llama-relu-gqa", "--steps", "5"];
    let train = sandbox.run(&train).good();
    for message in [
        "layer 1 gets no predictor: no neuron is active",
        "no predictor for layers 0–2",
    ] {
        train.stderr_contains(&[message]);
    }
    assert!(train.text().contains('–'), "{}", train.text());
}

#[test]
fn nan_samples_are_refused() {
    let sandbox = Sandbox::new();
    let folder = sandbox.copy_demo().join("profile");
    let samples = folder.join("traces/layer-002.safetensors");
    let digest = |path: &Path| {
        powerinfer_artifact::Digest::of_file(path)
            .unwrap()
            .to_string()
    };
    let before = digest(&samples);
    edit(&samples, |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let table: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let start = table["training.inputs"]["data_offsets"][0]
            .as_u64()
            .unwrap();
        let first = 8 + length + start as usize;
        bytes[first..first + 2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    });
    let path = folder.join("profile.json");
    let text = fs::read_to_string(&path).unwrap();
    let text = text.replace(&before, &digest(&samples));
    let document: Document<ProfileDocument> = serde_json::from_str(&text).unwrap();
    document.sealed().write(&path).unwrap();
    sandbox
        .run(&["train-predictors", "demo", "--steps", "5"])
        .bad(1, &["sample 0", "training", "layer 2", "NaN", "again"]);
}

#[test]
fn predictor_settings_that_cannot_be_met_are_reported() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let train = |arguments: &[&str]| {
        let all = [&["train-predictors", "demo", "--steps", "5"], arguments].concat();
        sandbox.run(&all).good().stderr
    };
    let narrow = train(&["--max-bytes", "20K"]);
    for message in [
        "layers 0–5 get no predictor",
        "rank 16",
        "the budget is",
        "3.3 KiB",
    ] {
        assert!(narrow.contains(message), "`{message}` is not in: {narrow}");
    }
    sandbox
        .run(&["train-predictors", "--sizing", "guess"])
        .bad(2, &["`evidence` or `paper`"]);
    for (arguments, code, message) in [
        (
            &["--method", "guess"][..],
            2,
            "`auto`, `closed-form` or `trained`",
        ),
        (&["--max-time", "0"], 2, "a number of minutes"),
        (
            &["--sizing", "paper", "--method", "closed-form"],
            1,
            "`--sizing paper` trains every network",
        ),
        (
            &["--max-time", "5", "--method", "trained"],
            1,
            "omit `--max-time`",
        ),
        (&["--min-saving", "3%"], 2, "a share from 0 to 1"),
        (
            &["--min-saving", "0.1", "--method", "closed-form"],
            1,
            "omit `--min-saving`",
        ),
    ] {
        let all = [&["train-predictors", "demo"], arguments].concat();
        sandbox.run(&all).bad(code, &[message]);
    }
    let paper = train(&["--sizing", "paper"]);
    assert_contains(&paper, &["trained"]);

    let few = ["profile", "--tokens", "1500", "--trace-tokens", "200"];
    sandbox.run(&few).good();
    let few = train(&["--reset"]);
    for message in [
        "held-out tokens the recall is known to",
        "95% confidence",
        "± 1% needs about",
    ] {
        assert!(few.contains(message), "`{message}` is not in: {few}");
    }
}
