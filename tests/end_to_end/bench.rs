//! `bench` on the demo model: its report, and invalid settings.

use serde_json::Value;

use crate::sandbox::{Sandbox, assert_contains, prepared_demo, words};

fn bench(more: &[&str]) -> crate::sandbox::Run {
    let sandbox = Sandbox::new();
    let demo = prepared_demo().to_str().unwrap();
    let usual = ["bench", demo, "--probe", "8MiB", "-r", "2"];
    sandbox.run(&[&usual[..], more].concat())
}

/// A measured value, which must be above 0.
#[track_caller]
fn positive(value: &Value) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{value}"));
    assert!(number > 0.0 && number.is_finite(), "{value}");
    number
}

#[track_caller]
fn check_spread(value: &Value, repeats: usize) {
    let (least, most) = (positive(&value["least"]), positive(&value["most"]));
    assert!((least..=most).contains(&positive(&value["median"])));
    assert_eq!(value["repeats"].as_array().unwrap().len(), repeats);
}

#[test]
fn stages_add_up_to_the_token_time_and_no_figure_is_missing() {
    let arguments = ["-p", "20,40", "-n", "8", "-d", "5", "--threads", "2"];
    for policy in ["dense", "exact", "predicted"] {
        let more = ["--policy", policy, "--json"];
        let report = bench(&[&arguments[..], &more].concat()).good().json();
        assert_eq!(report["policy"], policy);
        assert_eq!(report["machine"]["threads"], 2);
        assert!(report["bundle"]["files"]["weights.safetensors"].is_string());
        let prompts = report["prompt"].as_array().unwrap();
        assert_eq!(prompts.len(), 2);
        for (prompt, tokens) in prompts.iter().zip([20, 40]) {
            assert_eq!(prompt["tokens"], tokens);
            check_spread(&prompt["tokens_per_second"], 2);
        }
        let decode = &report["decode"][0];
        assert_eq!(
            (&decode["tokens"], &decode["depth"]),
            (&8.into(), &5.into())
        );
        check_spread(&decode["tokens_per_second"], 2);
        check_spread(&decode["bandwidth_share"], 2);
        check_spread(&decode["read_bandwidth"], 3);
        let total = positive(&decode["microseconds_per_token"]["median"]);
        let stages = decode["stages"].as_array().unwrap();
        assert_eq!(stages.len(), 12);
        // Predictors read rows of active hidden units, the head a stream.
        let ceiling = |name: &str| {
            let stage = stages.iter().find(|stage| stage["stage"] == name).unwrap();
            positive(&stage["ceiling_bytes_per_second"])
        };
        let is_mixed = ceiling("prediction") != ceiling("head");
        assert_eq!(is_mixed, policy == "predicted");
        // Within each repeat, since medians may come from different repeats.
        for repeat in 0..2 {
            let time = |value: &Value| value["repeats"][repeat].as_f64().unwrap();
            let sum: f64 = stages
                .iter()
                .map(|stage| time(&stage["microseconds"]))
                .sum();
            let whole = time(&decode["microseconds_per_token"]);
            assert!((0.9..=1.0001).contains(&(sum / whole)), "{sum} {whole}");
        }
        let unaccounted = decode["unaccounted_microseconds"]["median"]
            .as_f64()
            .unwrap();
        assert!((-1.0..0.1 * total).contains(&unaccounted), "{unaccounted}");
        let bytes = &decode["bytes_per_token"];
        let (weights, cache) = (positive(&bytes["weights"]), positive(&bytes["kv_cache"]));
        let predictors = bytes["predictors"].as_f64().unwrap();
        assert_eq!(predictors > 0.0, policy == "predicted");
        let sum = weights + cache + predictors;
        assert!((sum / positive(&bytes["total"]) - 1.0).abs() < 1e-9);
        positive(&report["sync_microseconds"]);
        let check = &report["check"];
        assert_eq!(check["tokens"], 12);
        assert_eq!(check["batch"]["equal"], true);
        assert_eq!(
            check["dense"]["equality_promised"],
            policy != "predicted",
            "{check}"
        );
        if policy != "predicted" {
            assert_eq!(check["dense"]["equal"], true);
        }
        positive(&check["dense"]["top1_agreement"]);
    }
}

#[test]
fn the_table_lists_the_stages_and_accepts_a_prompt() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let text = "def answer(values):\n    return sum(values)\n".repeat(20);
    std::fs::write(sandbox.path("text.txt"), text).unwrap();
    let arguments = ["bench", "-p", "16", "-n", "4", "-r", "1", "--probe", "4M"];
    let run = sandbox
        .run(&[&arguments[..], &["--prompt", "text.txt"]].concat())
        .good();
    let text = run.text();
    for part in [
        "checked         12 tokens",
        "prompt of 16",
        "decoding 4",
        "query-key-value",
        "gate-up",
        "unaccounted",
        "read bandwidth",
        "µs per token at full context on",
        "kernel launch",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    std::fs::write(sandbox.path("text.txt"), "def").unwrap();
    sandbox
        .run(&[&arguments[..], &["--prompt", "text.txt"]].concat())
        .bad(1, &["text.txt", "16 are needed", "hint: "]);
    sandbox
        .run(&["bench", "--prompt", "missing.txt"])
        .bad(1, &["missing.txt"]);
}

#[test]
fn ffns_are_timed_with_a_share_of_their_neurons() {
    let arguments = ["-p", "0", "-n", "0", "--ffn-densities", "5,50"];
    let report = bench(&[&arguments[..], &["--json"]].concat()).good().json();
    assert_eq!(report["decode"].as_array().unwrap().len(), 0);
    let found = report["ffn"].as_array().unwrap();
    let shares: Vec<f64> = found
        .iter()
        .map(|time| {
            positive(&time["microseconds"]["median"]);
            positive(&time["neuron_share"])
        })
        .collect();
    assert_eq!(shares, [0.05, 0.5, 1.0]);
    assert_eq!(found[2]["time_share"], 1.0);
    let text = bench(&arguments).good().text();
    assert_contains(&text, &["of the time of all"]);
}

#[test]
fn batches_are_compared_with_dense() {
    let more = words("--batch 3,1,2 -n 3 -d 2 --policy predicted");
    let report = bench(&[&more[..], &["--json"]].concat()).good().json();
    // Batches of one, two and three sequences.
    assert_eq!(report["check"]["sequences"], 6);
    assert_eq!(report["prompt"].as_array().unwrap().len(), 0);
    assert_eq!(report["decode"].as_array().unwrap().len(), 0);
    let batches = report["batches"].as_array().unwrap();
    assert_eq!(batches.len(), 3);
    for (batch, sequences) in batches.iter().zip(1..) {
        assert_eq!(batch["sequences"], sequences);
        for way in [&batch["policy"], &batch["dense"]] {
            assert_eq!(way["sequences"], sequences);
            assert_eq!((&way["tokens"], &way["depth"]), (&3.into(), &2.into()));
            check_spread(&way["tokens_per_second"], 2);
            check_spread(&way["bandwidth_share"], 2);
            positive(&way["bytes_per_token"]["total"]);
        }
        let each = positive(&batch["sequence_tokens_per_second"]);
        let all = positive(&batch["policy"]["tokens_per_second"]["median"]);
        assert!((each * f64::from(sequences) / all - 1.0).abs() < 1e-9);
        let united = positive(&batch["union_share"]);
        let computed = positive(&batch["policy"]["ffn_neurons_computed"]);
        assert!(computed <= united && united <= 1.0, "{computed} {united}");
        positive(&batch["times_dense"]);
    }
    let read = |index: usize| positive(&batches[index]["dense"]["bytes_per_token"]["weights"]);
    assert!(read(1) < 0.6 * read(0), "weights are read once for all");
    let text = bench(&more).good().text();
    for part in ["6 sequences together with each alone: equal", "times dense"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let dense = ["--batch", "2", "-n", "1", "--policy", "dense", "--json"];
    let report = bench(&dense).good().json();
    assert!(report["batches"][0]["dense"].is_null());
}

#[test]
fn completions_are_timed_with_and_without_proposals() {
    let sandbox = Sandbox::new();
    let texts = sandbox.path("texts.jsonl");
    let demo = prepared_demo().to_str().unwrap();
    let function = "def f(xs):\n    return [x + 1 for x in xs]\n";
    let row = serde_json::json!({ "prompt": function, "completion": function.repeat(2) });
    std::fs::write(&texts, format!("{row}\n")).unwrap();
    let more = words("-p 0 -n 0 -r 2 --completions texts.jsonl");
    let arguments = [&["bench", demo, "--probe", "8MiB"], &more[..]].concat();
    let report = sandbox
        .run(&[&arguments[..], &["--json"]].concat())
        .good()
        .json();
    let found = &report["speculation"];
    for speed in ["plain", "speculative", "speedup"] {
        check_spread(&found[speed], 2);
    }
    let passes = found["passes"].as_array().unwrap();
    assert_eq!(passes[0]["tokens"], 1);
    for pass in passes {
        positive(&pass["microseconds"]);
        let one = positive(&pass["neurons_of_a_token"]);
        assert!(one <= positive(&pass["neurons_of_any"]), "{pass}");
    }
    assert!(found["accepted"].as_u64() <= found["proposed"].as_u64());
    let text = sandbox.run(&arguments).good().text();
    assert_contains(
        &text,
        &["speculation     ", "1 completion; ", "tokens of a pass"],
    );
    for (row, reason) in [
        (r#"{"prompt": "a"}"#, "no field `completion`"),
        (
            r#"{"prompt": "a", "completion": ""}"#,
            "`completion` has no tokens",
        ),
        (
            r#"{"prompt": 1, "completion": "a"}"#,
            "`prompt` is a number",
        ),
        ("[", "line 1"),
        ("", "there is no row in the file"),
    ] {
        std::fs::write(&texts, row).unwrap();
        sandbox.run(&arguments).bad(1, &["texts.jsonl", reason]);
    }
    let long = serde_json::json!({ "prompt": "a", "completion": "b c ".repeat(5000) });
    std::fs::write(&texts, long.to_string()).unwrap();
    sandbox.run(&arguments).bad(1, &["texts.jsonl", "room for"]);
}

#[test]
fn parts_are_timed_for_more_threads_than_there_are() {
    let arguments = ["-p", "0", "-n", "4", "--parts", "3,16", "--threads", "1"];
    for policy in ["dense", "predicted"] {
        let more = ["--policy", policy, "--json"];
        let report = bench(&[&arguments[..], &more].concat()).good().json();
        let layers = report["bundle"]["layers"].as_u64().unwrap() as f64;
        let parts = report["parts"].as_array().unwrap();
        assert_eq!(parts.len(), 2);
        for (parts, threads) in parts.iter().zip([3, 16]) {
            assert_eq!(parts["threads"], threads);
            let mut jobs = 0.0;
            for stage in parts["stages"].as_array().unwrap() {
                let figure = |name: &str| stage[name].as_f64().unwrap();
                let (all, slowest) = (figure("part_microseconds"), figure("makespan_microseconds"));
                assert!(
                    slowest <= all && all <= slowest * threads as f64 * 1.001,
                    "{stage}"
                );
                assert_eq!(figure("jobs") == 0.0, all == 0.0, "{stage}");
                jobs += figure("jobs");
            }
            // Six jobs per layer, and one for the head.
            assert!(jobs <= 6.0 * layers + 1.0, "{policy}: {parts}");
        }
    }
    let printed = ["3 threads", "16 threads", "imbalance", "\nparts  "];
    bench(&arguments).good().stdout_contains(&printed);
}

#[test]
fn invalid_bench_settings_are_refused() {
    let sandbox = Sandbox::new();
    let demo = prepared_demo().to_str().unwrap();
    let refused = |code: i32, more: &[&str], parts: &[&str]| {
        sandbox
            .run(&[&["bench", demo], more].concat())
            .bad(code, parts);
    };
    refused(2, &["--repeats", "0"], &["--repeats", "0 is not in"]);
    let context = ["--prompt-tokens", "100000", "hint: ", "no more"];
    refused(1, &["-p", "100000"], &context);
    let context = ["--depth", "100001", "no more"];
    refused(1, &["-d", "100000", "-n", "1"], &context);
    refused(1, &["-p", "0", "-n", "0"], &["nothing to time"]);
    let density = ["--ffn-densities", "not above 0"];
    refused(2, &["--ffn-densities", "0"], &density);
    refused(2, &["--batch", "0"], &["--batch", "0 is not in"]);
    refused(2, &["--batch", "x"], &["--batch", "whole number"]);
    refused(2, &["--parts", "0"], &["--parts", "0 is not in"]);
    let no_tokens = ["--parts", "--decode-tokens"];
    refused(1, &["--parts", "4", "-n", "0", "-p", "8"], &no_tokens);
    refused(2, &["--batch", "1025"], &["--batch", "1025 is not in"]);
    refused(
        1,
        &["--batch", "2", "-n", "0", "-p", "8"],
        &["--batch", "--decode-tokens"],
    );
    let too_long = ["--batch", "2", "-n", "100000"];
    refused(1, &too_long, &["--decode-tokens", "no more"]);
    refused(1, &["-d", "1000"], &["--depth", "room for"]);
    refused(1, &["--probe", "1K"], &["--probe", "1MiB"]);
    refused(1, &["--probe", "9000G"], &["--probe", "give less"]);
    sandbox
        .run(&["bench", "./nowhere"])
        .bad(1, &["nowhere", "hint: "]);
}
