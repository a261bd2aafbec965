//! `sweep`: grids, rows and pages, interruption and resumption, and invalid input.

use std::{fs, path::Path};

use serde_json::Value;

use crate::sandbox::{Run, Sandbox, can_judge, golden_model, words};

/// Options of a short sweep.
const SMALL: [&str; 18] = [
    "--tokens",
    "600",
    "--audit-tokens",
    "300",
    "--layer-tokens",
    "100",
    "--tasks",
    "4",
    "-n",
    "6",
    "--repeats",
    "2",
    "--context",
    "32",
    "--probe",
    "4MiB",
    "--threads",
    "1",
];

fn sweep(sandbox: &Sandbox, more: &[&str]) -> Run {
    sandbox.run(&[&["sweep", "demo"], &SMALL[..], more].concat())
}

fn rows(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
    rows.collect()
}

fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn a_grid_is_measured_resumed_and_drawn() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let hardware = ["--hardware", sandbox.slow_host()];
    let grid = words(
        "--policy dense,exact,predicted,predicted:+3 --vram 0G,70M --verbose --html page.html",
    );
    let grid = [&grid[..], &hardware].concat();
    let first = sweep(&sandbox, &grid).good();
    first.stderr_contains(&["every logit is the same"]);
    let out = sandbox.path("demo.powerinfer/sweep.jsonl");
    let found = rows(&out);
    assert_eq!(found.len(), 8);
    for row in &found {
        let level = row["axes"]["setting"].as_str().unwrap();
        let [sparsity, quality] = [&row["sparsity"], &row["quality"]];
        let [measured, planned] = [&row["speed"]["measured"], &row["speed"]["planned"]];
        assert_eq!(planned["simulated"], true);
        assert!(number(&planned["tokens_per_second"]) > 0.0);
        assert_eq!(measured["placement_ran"], false);
        let steps = &measured["decode_microseconds"];
        assert_eq!(steps["steps"], 12);
        assert!(number(&steps["median"]) <= number(&steps["p95"]));
        assert!(number(&measured["first_token_milliseconds"]["median"]) > 0.0);
        assert!(number(&measured["measured_over_predicted"]) > 0.0);
        assert!(number(&sparsity["true_share"]) > 0.5, "the demo is sparse");
        let rise = &quality["perplexity_rise"];
        assert!(number(&rise["low"]) <= number(&rise["value"]));
        assert_eq!(quality["functions"][0]["items"], 4);
        let layers = sparsity["layers"].as_array().unwrap();
        let alone = |layer: &Value| layer.get("perplexity_rise_alone").is_some();
        assert_eq!(layers.iter().all(alone), level.starts_with("predicted"));
        assert_eq!(row["predictor"].is_null(), !level.starts_with("predicted"));
        match level {
            "dense" => {
                assert_eq!(number(&sparsity["computed_share"]), 1.0);
                assert_eq!(quality["largest_logit_difference"], 0.0);
            }
            "exact" => {
                let [fired, computed] = [
                    1.0 - number(&sparsity["true_share"]),
                    number(&sparsity["computed_share"]),
                ];
                assert!((fired - computed).abs() < 1e-9, "{fired} {computed}");
            }
            _ => {
                let predictor = &row["predictor"];
                for share in [
                    "count_recall",
                    "contribution_recall",
                    "precision",
                    "time_share",
                ] {
                    let share = number(&predictor[share]);
                    assert!(share > 0.0 && share <= 1.0, "{predictor}");
                }
                assert!(number(&quality["largest_logit_difference"]) > 0.0);
            }
        }
    }
    let of = |level: &str| {
        found
            .iter()
            .find(|row| row["axes"]["setting"] == level)
            .unwrap()
    };
    let [usual, raised] = ["predicted", "predicted:+3"].map(of);
    let figure = |row: &Value, of: &str, name: &str| number(&row[of][name]);
    assert!(
        figure(raised, "predictor", "count_recall") < figure(usual, "predictor", "count_recall")
    );
    assert!(
        figure(raised, "sparsity", "computed_share") < figure(usual, "sparsity", "computed_share")
    );
    // More hot neurons are predicted to be faster, and nothing else changes.
    let [none, all] = [&found[2], &found[3]];
    assert_eq!(none["quality"], all["quality"]);
    assert_eq!(none["placement"]["hot_neurons"], 0);
    assert!(figure(all, "placement", "neuron_share") > 0.2);

    // Repeating the sweep measures nothing.
    let before = fs::read(&out).unwrap();
    let json = sweep(&sandbox, &[&grid[..], &["--json"]].concat())
        .good()
        .json();
    assert_eq!(fs::read(&out).unwrap(), before);
    assert_eq!(json["rows"].as_array().unwrap().len(), 8);
    let json_file: Value =
        serde_json::from_slice(&fs::read(sandbox.path("page.json")).unwrap()).unwrap();
    assert_eq!(json_file, json);
    let csv = fs::read_to_string(sandbox.path("page.csv")).unwrap();
    let widths: Vec<usize> = csv.lines().map(|line| line.split(',').count()).collect();
    assert_eq!(widths.len(), 9);
    assert!(widths.iter().all(|width| *width == widths[0]), "{csv}");
    let page = fs::read_to_string(sandbox.path("page.html")).unwrap();
    for part in ["<svg", "class=\"cell\"", "table class=\"sortable wide\""] {
        assert!(page.contains(part), "{part}");
    }
    for foreign in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.contains(foreign), "{foreign}");
    }

    // A sweep that was interrupted within a line is resumed; columns without times are the same.
    let text = String::from_utf8(before).unwrap();
    let kept: usize = text.split_inclusive('\n').take(3).map(str::len).sum();
    fs::write(&out, &text[..kept + 40]).unwrap();
    let again = sweep(&sandbox, &grid).good();
    again.stderr_contains(&["3 of 8 points are measured already"]);
    let again = rows(&out);
    assert_eq!(again.len(), 8);
    for (before, now) in found.iter().zip(&again) {
        for part in [
            "axes",
            "placement",
            "sparsity",
            "quality",
            "identity",
            "run",
        ] {
            assert_eq!(before[part], now[part], "{part}");
        }
    }
    // Another grid is added to the same file, other measurements get a file of their own.
    let more = [&["--policy", "exact", "--vram", "69M"], &hardware[..]].concat();
    sweep(&sandbox, &more).good();
    assert_eq!(rows(&out).len(), 9);
    let other = words("--policy exact --vram 0G --seed 7");
    let other = [&other[..], &hardware].concat();
    let given = [&other[..], &["--out", "demo.powerinfer/sweep.jsonl"]].concat();
    sweep(&sandbox, &given).bad(1, &["line 1", "other settings", "`--out`"]);
    let kept = fs::read(&out).unwrap();
    sweep(&sandbox, &other)
        .good()
        .stderr_contains(&["writing results to `demo.powerinfer/sweep-2.jsonl`"]);
    assert_eq!(fs::read(&out).unwrap(), kept);
    assert_eq!(
        rows(&sandbox.path("demo.powerinfer/sweep-2.jsonl")).len(),
        1
    );
}

#[test]
fn the_placement_changes_no_token() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let grid =
        words("--policy exact --hot-threshold 0.5,1%,0 --run-placements --activations f32 --json");
    let found = sweep(&sandbox, &grid).good().json();
    let rows = found["rows"].as_array().unwrap();
    let hot: Vec<u64> = rows
        .iter()
        .map(|row| row["placement"]["hot_neurons"].as_u64().unwrap())
        .collect();
    assert!(hot.is_sorted() && hot[0] < hot[2], "{hot:?}");
    assert_eq!(rows[2]["placement"]["neurons"], hot[2]);
    for row in rows {
        assert_eq!(row["speed"]["measured"]["placement_ran"], true);
        let quality = &row["quality"];
        assert_eq!(
            quality["functions"][0]["completions"],
            rows[0]["quality"]["functions"][0]["completions"]
        );
        assert!(
            number(&quality["largest_logit_difference"]) < 0.05,
            "{quality}"
        );
        assert_eq!(number(&quality["top1_agreement"]), 1.0);
    }
}

/// Rows of a sweep of the demo on `text`.
fn rows_on(sandbox: &Sandbox, text: &str, more: &[&str]) -> Vec<Value> {
    fs::write(sandbox.path("text.txt"), text).unwrap();
    let line = words("--data text.txt --policy exact,predicted --json");
    let found = sweep(sandbox, &[&line[..], more].concat()).good().json();
    found["rows"].as_array().unwrap().clone()
}

#[test]
fn unusual_texts_and_machines_give_valid_rows() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    // The text is one word, whose perplexity overflows.
    let word = "def".repeat(400);
    let rows = rows_on(&sandbox, &word, &["--out", "word.jsonl", "--vram", "0G"]);
    assert!(
        rows.iter()
            .all(|row| row["quality"]["word_perplexity"].is_null()),
        "{rows:?}"
    );
    assert_eq!(
        rows_on(&sandbox, &word, &["--out", "word.jsonl", "--vram", "0G"]),
        rows
    );
    // A few tokens of one text are too few for significant differences.
    fs::write(sandbox.path("text.txt"), "def f(x):").unwrap();
    let few = words("--data text.txt --policy predicted:+6 --vram 0G --out few.jsonl");
    let few = sweep(&sandbox, &few).good();
    few.stderr_contains(&["too little text for an interval"]);
    // Without a GPU the default grid has one VRAM budget.
    let rows = rows_on(
        &sandbox,
        "def f(x):\n    return x\n",
        &["--hardware", "cpu-only", "--out", "cpu.jsonl"],
    );
    assert_eq!(rows.len(), 2);
    assert!(rows.iter().all(|row| row["axes"]["vram_bytes"] == 0));
    // Settings with raised thresholds run in half precision as well.
    let halves = words("--policy predicted:+2 --vram 70M --run-placements --json");
    let halves = [&halves[..], &["--hardware", sandbox.slow_host()]].concat();
    let found = sweep(&sandbox, &halves).good().json();
    assert_eq!(found["rows"][0]["speed"]["measured"]["placement_ran"], true);
    assert!(number(&found["rows"][0]["sparsity"]["computed_share"]) > 0.0);
}

#[test]
fn functions_of_a_task_file_are_generated_and_judged() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let problem = |number: usize, prompt: &str| {
        serde_json::json!({
            "task_id": format!("Mine/{number}"), "prompt": prompt, "entry_point": "f", "canonical_solution": "    return x\n",
            "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        })
    };
    let long = format!("# {}\ndef f(x):\n", "word ".repeat(900));
    let lines = [problem(0, "def f(x):\n"), problem(1, &long)];
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(sandbox.path("problems.jsonl"), text).unwrap();
    let line = words("--humaneval problems.jsonl --policy exact --vram 0G --json");
    let found = sweep(&sandbox, &line).good().json();
    let functions = found["rows"][0]["quality"]["functions"].as_array().unwrap();
    assert_eq!(functions.len(), 2);
    // One of the two is longer than the context, so its result is unknown.
    let [items, unjudged] = ["items", "unjudged"].map(|name| functions[1][name].as_u64().unwrap());
    assert_eq!(
        (functions[1]["name"].as_str(), items + unjudged),
        (Some("HumanEval"), 2)
    );
    assert!(unjudged >= 1, "{functions:?}");
    let alone = ["--problems", "0", "--tasks", "0"];
    sweep(
        &sandbox,
        &[&line[..], &alone, &["--out", "none.jsonl"]].concat(),
    )
    .bad(2, &["--tasks"]);
}

#[test]
fn batches_and_contexts_are_axes() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let mut line = vec!["sweep", "demo"];
    line.extend(SMALL);
    let context = line.iter().position(|part| *part == "--context").unwrap();
    line[context + 1] = "16,48";
    line.extend([
        "--policy", "exact", "--vram", "0G", "--batch", "1,3", "--json",
    ]);
    let found = sandbox.run(&line).good().json();
    let rows = found["rows"].as_array().unwrap();
    let axes: Vec<[u64; 2]> = rows
        .iter()
        .map(|row| ["batch", "context_tokens"].map(|axis| row["axes"][axis].as_u64().unwrap()))
        .collect();
    assert_eq!(axes, [[1, 16], [1, 48], [3, 16], [3, 48]]);
    for row in rows {
        assert_eq!(row["quality"], rows[0]["quality"]);
        let measured = &row["speed"]["measured"];
        assert_eq!(
            measured["prompt_tokens"].as_u64().unwrap() + 6,
            row["axes"]["context_tokens"].as_u64().unwrap()
        );
        assert!(number(&measured["tokens_per_second"]["median"]) > 0.0);
    }
}

#[test]
fn models_without_zeros_have_their_own_settings() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    let line = |number| format!("{number} and a few words more to read; ");
    let text: String = (0..400).map(line).collect();
    fs::write(sandbox.path("text.txt"), text).unwrap();
    let model = golden_model("llama-silu").to_str().unwrap().to_owned();
    sandbox
        .run(&["profile", &model, "--data", "text.txt", "--tokens", "3000"])
        .good();
    sandbox.run(&["train-predictors", &model]).good();
    sandbox.run(&["place", &model, "--vram", "0G"]).good();
    let run = |levels: &str| {
        let mut line = vec![
            "sweep",
            "llama-silu.powerinfer",
            "--policy",
            levels,
            "--json",
        ];
        line.extend(["--vram", "0G", "--data", "text.txt"]);
        line.extend(&SMALL[..6]);
        line.extend(words("-n 4 --repeats 1 --context 12 --probe 4MiB"));
        sandbox.run(&line)
    };
    let found = run("dense,error:5%,error:20%,gate:40%").good().json();
    let rows = found["rows"].as_array().unwrap();
    let share = |row: usize| number(&rows[row]["sparsity"]["computed_share"]);
    assert_eq!(share(0), 1.0);
    assert!(
        share(1) < 1.0 && share(2) < share(1),
        "{} {}",
        share(1),
        share(2)
    );
    assert!((share(3) - 0.6).abs() < 0.12, "{}", share(3));
    let error = number(&rows[2]["sparsity"]["relative_error"]);
    assert!((0.1..0.4).contains(&error), "{error}");
    run("gate:99.9%").bad(
        1,
        &[
            "thresholds of layer 0",
            "are calibrated from",
            "give a setting between",
        ],
    );
    run("predicted").bad(1, &["no predictor"]);
}

#[test]
fn invalid_sweeps_are_refused_before_any_measurement() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let sweep = |more: &[&str]| sandbox.run(&[&["sweep", "demo"], more].concat());
    sweep(&["--policy", "warm"]).bad(2, &["`dense`", "`error:10%`"]);
    sweep(&["--policy", "exact,exact"]).bad(1, &["a point twice", "`exact`"]);
    sweep(&["--policy", "error:10%"]).bad(1, &["no thresholds", "`exact` or `predicted`"]);
    sweep(&["--policy", "sign-bit"]).bad(1, &["signs of its gate"]);
    sweep(&["--context", "20", "-n", "20"])
        .bad(1, &["a context of 20 tokens", "21 to", "`--context`"]);
    sweep(&["--context", "100000"]).bad(1, &["a context of 100000 tokens"]);
    sweep(&["--hot-threshold", "2"]).bad(2, &["from 0 to 1"]);
    sweep(&["--vram", "1G", "--hot-threshold", "0.1"]).bad(2, &["cannot be used with"]);
    sweep(&["--tokens", "1"]).bad(1, &["no tokens to score"]);
    sweep(&["--data", "nowhere.txt"]).bad(1, &["`nowhere.txt` does not exist"]);
    sweep(&["--device", "gpu"]).bad(1, &["no GPU can be used"]);
    fs::write(sandbox.path("mine.jsonl"), "{\"mine\": 1}\n").unwrap();
    sweep(&["--out", "mine.jsonl"]).bad(1, &["line 1"]);
    assert_eq!(
        fs::read(sandbox.path("mine.jsonl")).unwrap(),
        b"{\"mine\": 1}\n"
    );
    fs::write(sandbox.path("mine.html"), "my own").unwrap();
    sweep(&["--html", "mine.html"]).bad(1, &["not a page of powerinfer"]);
    sweep(&["--html", "demo.powerinfer/bundle/page.html"]).bad(1, &["would be among the files of"]);
    sweep(&["--html", "a.json"]).bad(1, &["`a.json`", "name another file"]);
    sweep(&["--html", "a.html", "--out", "a.html"]).bad(1, &["`a.html`", "is another output"]);
    sweep(&["--html", "./a.html", "--out", "a.json"]).bad(1, &["a.json`", "is another output"]);
    sweep(&["--out", "demo.powerinfer/../demo.powerinfer/bundle/x"])
        .bad(1, &["bundle's own files", "`--out`"]);
    fs::write(sandbox.path("b.csv"), "my,own").unwrap();
    sweep(&["--html", "b.html"]).bad(1, &["`b.csv`", "not a file of a sweep"]);
    sweep(&["--vram", "0G,0G"]).bad(1, &["a point twice"]);
    fs::write(sandbox.path("bad.jsonl"), "{\"task_id\": \"a\"}\n").unwrap();
    sweep(&["--humaneval", "bad.jsonl"]).bad(1, &["line 1", "no field `prompt`"]);
    sandbox
        .run(&["sweep", "nobody"])
        .bad(1, &["nobody.powerinfer"]);
}
