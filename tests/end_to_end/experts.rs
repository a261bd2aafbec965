//! Mixtures of experts in the whole pipeline.

use std::fs;

use powerinfer_artifact::predictor_file::PredictorFile;
use serde_json::{Value, json};

use crate::sandbox::{QUICK, Sandbox, words};

/// Writes a small configuration of the family to `NAME-shape`.
fn shape(sandbox: &Sandbox, name: &str) {
    let common = json!({
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 600, "max_position_embeddings": 512,
        "num_experts_per_tok": 2, "tie_word_embeddings": false,
    });
    let own = match name {
        "mixtral" => json!({
            "architectures": ["MixtralForCausalLM"], "intermediate_size": 96,
            "num_local_experts": 4, "hidden_act": "relu", "sliding_window": null,
        }),
        "qwen2moe" => json!({
            "architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": 64,
            "num_experts": 8, "shared_expert_intermediate_size": 32, "hidden_act": "silu",
        }),
        "smallthinker" => json!({
            "architectures": ["SmallThinkerForCausalLM"], "moe_ffn_hidden_size": 96,
            "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2,
            "rope_layout": [0, 1],
        }),
        other => panic!("{other}"),
    };
    let mut config = common;
    let entries = own.as_object().unwrap();
    entries
        .iter()
        .for_each(|(key, value)| config[key] = value.clone());
    if name == "smallthinker" {
        config
            .as_object_mut()
            .unwrap()
            .remove("num_experts_per_tok");
    }
    let folder = sandbox.path(&format!("{name}-shape"));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn mixtures_are_made_prepared_and_run() {
    let sandbox = Sandbox::new();
    let text = "def area(radius):\n    return 3.14 * radius ** 2\n\n".repeat(80);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    // The share of neurons that belong to a token's experts.
    for (name, experts, share) in [
        ("mixtral", "4 experts of 96, 2 per token", 0.5),
        (
            "qwen2moe",
            "8 experts of 64 and a shared one of 32, 2 per token",
            160.0 / 544.0,
        ),
        ("smallthinker", "4 experts of 96, 2 per token", 0.5),
    ] {
        shape(&sandbox, name);
        let like = format!("{name}-shape");
        sandbox
            .run(&["synth", "--like", &like, "--out", name, "--sparsity", "0.8"])
            .good();
        sandbox
            .run(&["inspect", name])
            .good()
            .stdout_contains(&[experts]);
        let prepare = [
            "prepare", name, "--data", "text.txt", "--vram", "1G", "--quant", "f32",
        ];
        sandbox
            .run(&[&prepare[..], &QUICK].concat())
            .good()
            .stderr_contains(&["on the CPU"]);
        let run = |policy: &str| {
            let line = format!("run {name} -n 12 --temperature 0 --policy {policy} --prompt abc");
            sandbox.run(&words(&line)).good()
        };
        let (dense, exact) = (run("dense"), run("exact"));
        assert_eq!(dense.stdout, exact.stdout, "{name}");
        let percent = format!("{:.1}% of FFN neurons", 100.0 * share);
        dense.stderr_contains(&[&percent]);
        if name == "qwen2moe" {
            // Neurons of experts that the router selects have a centre of 0, unlike those of the shared expert, which every token computes.
            let predictors = sandbox.path(&format!("{name}.powerinfer/predictors"));
            let file = PredictorFile::open(&predictors).unwrap();
            let scores = file.scores(0, 64, 544).unwrap().unwrap();
            let (routed, shared) = scores.centre.split_at(8 * 64);
            assert!(routed.iter().all(|centre| *centre == 0.0));
            assert!(shared.iter().any(|centre| *centre != 0.0));
            // Scales are means over the tokens that compute a neuron, so rarely selected experts do not have smaller scales.
            let largest = |scales: &[f32]| scales.iter().copied().fold(0.0, f32::max);
            let scales = scores.gate_scale[..8 * 64].chunks(64).map(largest);
            let scales: Vec<f32> = scales.filter(|scale| *scale > 0.0).collect();
            let least = scales.iter().copied().fold(f32::MAX, f32::min);
            assert!(least > 0.5 * largest(&scales), "{scales:?}");
            // There is only one default budget if the model is so small that the GPU gets nothing.
            let sweep = "sweep qwen2moe --data text.txt --tokens 300 --audit-tokens 100 -n 4 --repeats 1 --probe 4MiB \
                         --context 16 --policy dense,error:10% --hardware rtx4090 --json";
            let found = sandbox.run(&words(sweep)).good().json();
            let rows = found["rows"].as_array().unwrap();
            let computed = |row: &Value| row["sparsity"]["computed_share"].as_f64().unwrap();
            let (dense, skipping) = (&rows[0], &rows[rows.len() - 1]);
            assert!((computed(dense) - share).abs() < 1e-3, "{found}");
            assert!(computed(skipping) < share, "{found}");
            for row in rows {
                assert!(row["speed"]["planned"]["tokens_per_second"].as_f64() > Some(0.0));
                assert!(
                    row["speed"]["measured"]["tokens_per_second"]["median"].as_f64() > Some(0.0)
                );
            }
        } else {
            assert_ne!(dense.stderr, exact.stderr);
            assert!(!exact.stderr.contains(&percent), "{}", exact.stderr);
        }
        let shown: Value = sandbox
            .run(&["inspect", &format!("{name}.powerinfer/bundle"), "--json"])
            .good()
            .json();
        assert!(shown.to_string().contains("per_token"), "{shown}");
    }
    sandbox
        .run(&words(
            "export mixtral --to gguf x.gguf --quant f16 --any-activation",
        ))
        .good();
    let shown = sandbox
        .run(&words("inspect x.gguf --json"))
        .good()
        .json()
        .to_string();
    assert!(shown.contains("experts"), "{shown}");
    // A plan for a machine with a GPU, and the closest one of llama.cpp.
    let place = "place mixtral --vram 4G --hardware rtx4090 --quant f32 --out placed --json \
                 --pin layers:0=cpu --pin layers:1=gpu --pin head=gpu";
    let plan = sandbox.run(&words(place)).good().json().to_string();
    for baseline in [
        "all experts on the CPU",
        "experts of the last layers on the GPU",
    ] {
        assert!(plan.contains(baseline), "{plan}");
    }
    sandbox
        .run(&words("export placed --to ot args.txt"))
        .good()
        .stderr_contains(&["the experts of 1 of 2 layers on the GPU", "50.0%"]);
    let arguments = fs::read_to_string(sandbox.path("args.txt")).unwrap();
    let lines: Vec<&str> = arguments.lines().collect();
    assert_eq!(
        lines,
        [
            "--n-gpu-layers 2 --n-cpu-moe 1",
            r"--n-gpu-layers 2 --override-tensor blk\.(0)\.ffn_(gate|up|down)_exps\.weight=CPU",
        ]
    );
    sandbox
        .run(&words("export placed --to ot args.txt --quant f16"))
        .bad(1, &["`--quant`"]);
    sandbox
        .run(&words("export placed --to ot text.txt"))
        .bad(1, &["`text.txt` exists"]);
}

#[test]
fn mixtures_are_simulated() {
    let sandbox = Sandbox::new();
    let answer = |more: &str| -> Value {
        let line = format!("simulate --quant q4_0 --context 4096 --json {more}");
        sandbox.run(&words(&line)).good().json()
    };
    let speed = |answer: &Value, engine: usize| {
        let decode = &answer["engines"][engine]["decode"][0];
        decode["tokens_per_second"].as_f64().unwrap()
    };
    let qwen = "--like qwen3-30b-a3b --hardware rtx3060-12g";
    let even = answer(qwen);
    let skewed = answer(&format!("{qwen} --skew 0.3"));
    for found in [&even, &skewed] {
        let baselines = found["plan"]["forecast"]["baselines"].as_array().unwrap();
        let time = |baseline: &Value| baseline["microseconds_per_token"].as_f64().unwrap();
        let own = found["plan"]["totals"]["microseconds_per_token"].as_f64();
        let names: Vec<&str> = baselines[..2]
            .iter()
            .map(|baseline| baseline["name"].as_str().unwrap())
            .collect();
        assert_eq!(
            names,
            [
                "all experts on the CPU",
                "experts of the last layers on the GPU"
            ]
        );
        // Neurons at random need not be whole groups.
        assert!(
            baselines
                .iter()
                .all(|baseline| own <= Some(1.001 * time(baseline)))
        );
        let placement = found["engines"][1]["placement"].as_str().unwrap();
        assert!(placement.starts_with("experts of "), "{placement}");
    }
    // The frequently selected experts are on the GPU; llama.cpp places them by layer.
    assert!(speed(&skewed, 0) > 1.05 * speed(&even, 0));
    assert!((speed(&skewed, 1) / speed(&even, 1) - 1.0).abs() < 1e-6);
    let without = answer("--like qwen3-30b-a3b --hardware rtx3060-12g --vram 0");
    assert!(speed(&without, 0) < speed(&even, 0));
    sandbox
        .run(&words(&format!("simulate {qwen} --quant q4_0 --skew 0.3")))
        .good()
        .stdout_contains(&["all experts on the CPU", "the router selects experts"]);
    sandbox
        .run(&words(
            "simulate --like mixtral-8x7b --hardware rtx3060-12g --quant q4_0 --skew 0.01",
        ))
        .bad(1, &["1.0%"]);
}

#[test]
fn profiles_count_selections_of_experts() {
    let sandbox = Sandbox::new();
    let text = "def area(radius):\n    return 3.14 * radius ** 2\n\n".repeat(80);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    for (name, experts) in [("qwen2moe", 8), ("mixtral", 4)] {
        shape(&sandbox, name);
        let synth = format!("synth --like {name}-shape --out {name} --sparsity 0.8");
        sandbox.run(&words(&synth)).good();
        let profile = |more: &str, out: &str| {
            let line = format!(
                "profile {name} --data text.txt --tokens 600 --trace-tokens 200 --out {out}{more}"
            );
            sandbox.run(&words(&line)).good()
        };
        let whole = format!("{name}-whole");
        let run = profile("", &whole);
        run.stdout_contains(&[
            &format!("a token selects 2 of {experts} per layer"),
            "experts per layer",
            "fixed set",
        ]);
        profile(" --shard 1/2", &format!("{name}-1"));
        profile(" --shard 2/2", &format!("{name}-2"));
        let merge = format!("merge {name}-1 {name}-2 --out {name}-merged");
        sandbox.run(&words(&merge)).good();
        let shown = |folder: &str| -> Value {
            let inspect = ["inspect", folder, "--json", "--verify"];
            sandbox.run(&inspect).good().json()
        };
        let found = shown(&whole);
        assert_eq!(found, shown(&format!("{name}-merged")));
        for layer in found["profile"]["layers"].as_array().unwrap() {
            let selections = &layer["experts"];
            let held = selections["held"].as_array().unwrap();
            let last = held.last().unwrap();
            assert_eq!(
                (&last["experts"], &last["fixed"]),
                (&json!(experts), &json!(1.0))
            );
            // A cache that holds all experts misses only their first selections.
            assert!(last["cached"].as_f64().unwrap() > 0.9, "{last}");
            let active = selections["active"].as_f64().unwrap();
            assert_eq!(active == 1.0, name == "qwen2moe", "{active}");
        }
        let html = format!("inspect {whole} --html {name}.html");
        sandbox.run(&words(&html)).good();
        let page = fs::read_to_string(sandbox.path(&format!("{name}.html"))).unwrap();
        let cells = page.matches("fill-opacity").count();
        assert_eq!(cells, 2 * experts, "one cell per layer and expert");
        let path = sandbox.path(&format!("{whole}/experts.safetensors"));
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        sandbox
            .run(&["inspect", &whole])
            .bad(1, &["experts.safetensors", "damaged"]);
    }
}

#[test]
fn impossible_experts_are_errors() {
    let sandbox = Sandbox::new();
    for (key, value, parts) in [
        (
            "num_experts_per_tok",
            json!(5),
            &["5 of 4 experts per token"][..],
        ),
        ("num_experts_per_tok", json!(0), &["0"]),
        ("num_local_experts", json!(40_000), &["40000 experts"]),
        ("num_local_experts", json!(u64::MAX), &["num_local_experts"]),
        (
            "intermediate_size",
            json!(1u64 << 30),
            &["the number of FFN neurons is 4294967296"],
        ),
        ("router_type", json!("x"), &["router_type"]),
    ] {
        shape(&sandbox, "mixtral");
        let path = sandbox.path("mixtral-shape/config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        fs::write(&path, config.to_string()).unwrap();
        sandbox
            .run(&words("synth --like mixtral-shape --out x"))
            .bad(1, parts);
    }
}
