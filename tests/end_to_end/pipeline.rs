//! The pipeline from a checkpoint to tokens.

use std::{
    fs,
    io::{BufRead, BufReader},
};

use crate::sandbox::{QUICK, Sandbox, can_judge, prepared_demo, words};

#[test]
fn the_four_commands_work_in_an_empty_folder() {
    let sandbox = Sandbox::new();
    let profile = sandbox
        .run(&["profile", "--tokens", "2500", "--trace-tokens", "800"])
        .good();
    assert!(
        profile.text().contains("zeros") && profile.text().contains('█'),
        "{}",
        profile.text()
    );
    let predictors = sandbox.run(&["train-predictors", "--steps", "15"]).good();
    predictors.stdout_contains(&["recall"]);
    let place = sandbox.run(&["place", "--vram", "24G"]).good();
    place.stdout_contains(&["4608 of 4608 neurons", "in 6 layers"]);
    assert!(place.text().lines().count() <= 20, "{}", place.text());
    let run = sandbox.run(&["run"]).good();
    assert!(
        run.text().starts_with("def "),
        "the demo without a prompt shows an example: {}",
        run.text()
    );
    run.stderr_contains(&["tokens/s", "FFN neurons"]);
    for file in [
        "profile/neurons.parquet",
        "profile/traces/layer-005.safetensors",
        "bundle/plan.json",
    ] {
        assert!(
            sandbox.path("demo.powerinfer").join(file).exists(),
            "{file}"
        );
    }
}

#[test]
fn a_quick_preparation_calculates_predictors_and_says_what_more_would_do() {
    let sandbox = Sandbox::new();
    let quick = ["prepare", "demo", "--quick", "--tokens", "3000"];
    let made = sandbox.run(&quick).good();
    made.stderr_contains(&[
        "calculated 6 predictors",
        "tokens: perplexity",
        "without `--quick`, `prepare` profiles up to 131072 tokens",
        "certifies on 8192 tokens",
    ]);
    // The next run is a full one.
    let plan = sandbox.run(&["prepare", "demo", "--steps", "5", "--certify", "none"]);
    let full = plan.good();
    full.stderr_contains(&["as in earlier runs: --tokens 3000", "trained 6 predictors"]);
    assert!(!full.stderr.contains("--quick"), "{}", full.stderr);
    // A quick run does not keep these predictors, although a new format alone would keep them.
    let quick = ["prepare", "demo", "--quick", "--quant", "q8_0"];
    let again = sandbox.run(&quick).good();
    again.stderr_contains(&["calculated 6 predictors"]);
    assert!(!again.stderr.contains("are kept"), "{}", again.stderr);
}

#[test]
fn prepare_repeats_only_the_steps_whose_inputs_changed() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let again = |vram: &str, tokens: &str| {
        let mut arguments = vec!["prepare", "demo", "--vram", vram];
        arguments.extend(QUICK);
        let position = arguments
            .iter()
            .position(|argument| *argument == "5000")
            .unwrap();
        arguments[position] = tokens;
        sandbox.run(&arguments).good().stderr
    };
    assert_eq!(again("24G", "5000").matches("up to date").count(), 3);
    assert_eq!(
        again("0G", "5000").matches("up to date").count(),
        2,
        "only the bundle is made again"
    );
    assert_eq!(again("0G", "5200").matches("up to date").count(), 0);
}

#[test]
fn a_bundle_is_packed_again_when_a_tokenizer_file_of_the_model_changes() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-relu-gqa");
    fs::write(
        sandbox.path("text.txt"),
        "some words to calibrate on ".repeat(40),
    )
    .unwrap();
    let prepare = || {
        let arguments = ["prepare", "./llama-relu-gqa", "--data", "text.txt"];
        let options = words("--out out --vram 0G --steps 5 --certify none");
        let run = sandbox
            .run(&[arguments.as_slice(), &options].concat())
            .good();
        run.stderr.contains("bundle: `out/bundle` is up to date")
    };
    assert!(!prepare());
    assert!(prepare());
    let template = model.join("chat_template.jinja");
    fs::write(&template, "{{ messages[0]['content'] }}").unwrap();
    assert!(!prepare());
    let packed = sandbox.path("out/bundle/chat_template.jinja");
    assert_eq!(fs::read(&packed).unwrap(), fs::read(&template).unwrap());
    assert!(prepare());
    fs::remove_file(&template).unwrap();
    assert!(!prepare());
    assert!(!packed.exists());
}

#[test]
fn the_same_inputs_give_the_same_bytes() {
    let digests = || {
        let sandbox = Sandbox::new();
        sandbox
            .run(&words(
                "prepare demo --vram 24G --tokens 1500 --steps 8 --trace-tokens 600",
            ))
            .good();
        let inspect = |path: &str| {
            sandbox
                .run(&["inspect", path, "--json", "--verify"])
                .good()
                .json()
        };
        (
            inspect("demo.powerinfer/profile"),
            inspect("demo.powerinfer/bundle"),
        )
    };
    assert_eq!(digests(), digests());
}

#[test]
fn placement_does_not_change_the_text() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let machine = sandbox.slow_host();
    let mut texts = Vec::new();
    let mut hot_counts = Vec::new();
    // No neurons, some, and all on the GPU, whose context alone takes 512 MiB.
    for vram in ["0G", "70M", "24G"] {
        let place = sandbox
            .run(&[
                "place",
                "demo",
                "--vram",
                vram,
                "--hardware",
                machine,
                "--certify",
                "none",
                "--json",
            ])
            .good();
        hot_counts.push(
            place.json()["plan"]["totals"]["hot_count"]
                .as_u64()
                .unwrap(),
        );
        for policy in ["exact", "predicted"] {
            let prompt = "def f(xs):\n    \"\"\"Return the sum of xs.\"\"\"";
            let run = sandbox
                .run(&[
                    "run", "demo", "--prompt", prompt, "--policy", policy, "--json",
                ])
                .good();
            texts.push((
                policy,
                run.json()["completion"].as_str().unwrap().to_owned(),
            ));
        }
    }
    assert!(
        hot_counts[0] == 0 && hot_counts[0] < hot_counts[1] && hot_counts[1] < hot_counts[2],
        "{hot_counts:?}"
    );
    assert_eq!(hot_counts[2], 6 * 768);
    for pair in texts.windows(3) {
        assert_eq!(pair[0], pair[2]);
    }
}

#[test]
fn speculation_does_not_change_the_text() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let prompt = "def f(xs):\n    \"\"\"Return the sum of xs.\"\"\"";
    let run = |options: &[&str]| {
        let arguments = ["run", "demo", "--prompt", prompt, "-n", "80", "--json"];
        sandbox
            .run(&[&arguments[..], options].concat())
            .good()
            .json()
    };
    for options in [&[][..], &["--temperature", "0.8", "--seed", "7"]] {
        let (plain, speculative) = (run(options), run(&[options, &["--speculate"]].concat()));
        for key in ["completion", "generated_tokens", "stop_reason"] {
            assert_eq!(plain[key], speculative[key]);
        }
        assert!(plain["speculation"].is_null());
        let counts = &speculative["speculation"];
        let of = |key: &str| counts[key].as_u64().unwrap();
        let generated = speculative["generated_tokens"].as_u64().unwrap();
        assert!(of("passes") > 0 && of("accepted_tokens") <= of("proposed_tokens"));
        assert!(of("passes") + of("accepted_tokens") <= generated);
    }
    sandbox
        .run(&["run", "demo", "--speculate", "--verify-every", "2"])
        .bad(2, &["--speculate", "--verify-every"]);
}

#[test]
fn exact_computes_the_text_of_dense_and_reads_less() {
    if !can_judge() {
        return;
    }
    let folder = prepared_demo().to_str().unwrap();
    let sandbox = Sandbox::new();
    let report = sandbox
        .run(&[
            "eval",
            "tasks",
            folder,
            "--count",
            "8",
            "--policy",
            "dense,exact",
            "--json",
        ])
        .good()
        .json();
    let rows = report["policies"].as_array().unwrap();
    assert_eq!(rows[1]["same_completions_as_first"], 8);
    assert_eq!(rows[0]["perplexity"], rows[1]["perplexity"]);
    let read = |row: usize| rows[row]["bytes_per_token"].as_f64().unwrap();
    assert!(read(1) < 0.75 * read(0), "{report}");
    assert_eq!(rows[0]["ffn_neurons_computed"], 1.0);
}

#[test]
fn every_format_runs() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    for quant in ["f32", "bf16", "q8_0", "q4_k", "q4_0"] {
        let place = ["place", "demo", "--vram", "24G", "--certify", "none"];
        sandbox
            .run(&[&place[..], &["--quant", quant]].concat())
            .good();
        let run = sandbox
            .run(&["run", "--prompt", "def f(xs):", "-n", "5", "--json"])
            .good();
        assert!(run.json()["generated_tokens"].as_u64().unwrap() > 0);
        let info = sandbox
            .run(&["inspect", "demo.powerinfer/bundle", "--json"])
            .good()
            .json();
        assert_eq!(info["manifest"]["quant"], quant);
    }
}

#[test]
fn q4_k_is_closer_to_the_model_than_q4_0() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let [exact, k, zero] = ["f32", "q4_k", "q4_0"].map(|quant| {
        let place = words("place demo --vram 24G --policy dense --certify none --quant");
        sandbox.run(&[&place[..], &[quant]].concat()).good();
        let eval = words("eval perplexity demo.powerinfer --tokens 2000 --json");
        let report = sandbox.run(&eval).good().json();
        report["dense_perplexity"].as_f64().unwrap().ln()
    });
    assert!(
        (k - exact).abs() < 0.7 * (zero - exact).abs(),
        "{exact} {k} {zero}"
    );
}

#[test]
fn predictors_are_not_stored_with_minima() {
    let sandbox = Sandbox::new();
    let arguments = ["train-predictors", "demo", "--predictor-quant", "q4_k"];
    let run = sandbox.run(&arguments);
    run.stderr_contains(&["predictors are not stored in q4_k"]);
}

#[test]
fn a_policy_can_be_forced_where_it_is_possible() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let place = |more: &[&str]| {
        let arguments = ["place", "demo", "--vram", "0G", "--dry-run", "--json"];
        sandbox.run(&[&arguments[..], more].concat())
    };
    for policy in ["dense", "exact", "predicted", "sign-bit"] {
        let plan = place(&["--policy", policy]).good().json();
        for layer in plan["plan"]["layers"].as_array().unwrap() {
            assert_eq!(layer["policy"], policy);
            let reason = layer["reason"].as_str().unwrap();
            assert!(reason.starts_with("policy given"), "{reason}");
        }
    }
    std::fs::remove_dir_all(sandbox.path("demo.powerinfer/predictors")).unwrap();
    place(&["--policy", "predicted"]).bad(
        1,
        &[
            "layer 0 has no predictor",
            "hint: `powerinfer train-predictors demo`",
        ],
    );
    place(&["--policy", "sign-bit"]).bad(
        1,
        &[
            "layer 0 has no signs",
            "hint: `powerinfer train-predictors demo`",
        ],
    );
    place(&["--policy", "threshold"]).bad(1, &["layer 0 has no thresholds", "hint: give another"]);
}

#[test]
fn a_dry_run_writes_nothing() {
    let sandbox = Sandbox::new();
    let folder = sandbox.copy_demo();
    std::fs::remove_dir_all(folder.join("bundle")).unwrap();
    sandbox
        .run(&["place", "demo", "--vram", "1G", "--dry-run"])
        .good();
    assert!(!folder.join("bundle").exists());
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_no_partial_files() {
    let sandbox = Sandbox::new();
    let mut child = sandbox
        .command(&["profile", "demo", "--tokens", "200000", "--verbose"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut messages = BufReader::new(child.stderr.take().unwrap()).lines();
    // After the first layer.
    assert!(messages.any(|line| line.unwrap().starts_with("layer 0:")));
    assert!(sandbox.path("demo.powerinfer/profile.partial").exists());
    let kill = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    assert!(messages.any(|line| line.unwrap().contains("interrupted")));
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!sandbox.path("demo.powerinfer/profile").exists());
}
