//! `eval` with data of every kind, valid and invalid, interrupted and resumed.

use std::fs;

use serde_json::{Value, json};

use crate::sandbox::{Run, Sandbox, can_judge, words};

/// Two problems in the format of HumanEval.
fn problems() -> [Value; 2] {
    [
        json!({
            "task_id": "Mine/0", "prompt": "def double(x):\n    \"\"\" Twice x. \"\"\"\n", "entry_point": "double",
            "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(-1) == -2\n",
        }),
        json!({
            "task_id": "Mine/1", "prompt": "def last(xs):\n    \"\"\" The last one. \"\"\"\n", "entry_point": "last",
            "canonical_solution": "    return xs[-1]\n",
            "test": "def check(candidate):\n    assert candidate([1, 2]) == 2\n",
        }),
    ]
}

fn write_lines(sandbox: &Sandbox, name: &str, rows: &[Value]) {
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(sandbox.path(name), text).unwrap();
}

/// Judges completions of the two problems.
fn judge(sandbox: &Sandbox, completions: &[(&str, &str)], more: &[&str]) -> Run {
    write_lines(sandbox, "problems.jsonl", &problems());
    let rows: Vec<Value> = completions
        .iter()
        .map(|(task, text)| json!({ "task_id": task, "completion": text }))
        .collect();
    write_lines(sandbox, "completions.jsonl", &rows);
    let line = words("eval humaneval --data problems.jsonl --completions");
    sandbox.run(&[&line[..], &["completions.jsonl"], more].concat())
}

#[test]
fn completions_of_other_programs_are_judged() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    let right: Vec<(&str, &str)> = vec![
        ("Mine/0", "    return 2 * x\n"),
        ("Mine/0", "    return x + x\n\ndef more(): pass"),
        ("Mine/0", "    return x\n"),
        ("Mine/0", "    return (\n"),
        ("Mine/1", "    return xs[-1]\n"),
        // Operations within which Python does not notice the time.
        ("Mine/1", "    y = 3\n    while True: y = y * y\n"),
        ("Mine/1", "    return open('/etc/passwd').read()\n"),
        ("Mine/1", "    return [0] * 10 ** 12\n"),
    ];
    let found = judge(&sandbox, &right, &["-k", "1,2", "--json"])
        .good()
        .json();
    let row = &found["rows"][0];
    let counts = &row["verdicts"];
    assert_eq!(
        [&counts["passed"], &counts["failed"], &counts["timeout"]],
        [3, 1, 1]
    );
    assert_eq!([&counts["error"], &counts["unjudged"]], [3, 0]);
    // 2 of 4, and 1 of 4.
    let value = row["pass_at"]["1"]["value"].as_f64().unwrap();
    assert!((value - 0.375).abs() < 1e-9, "{value}");
    let two = row["pass_at"]["2"]["value"].as_f64().unwrap();
    assert!(two > value && two <= 1.0);
    judge(&sandbox, &[("Mine/7", "")], &[]).bad(1, &["line 1", "no problem is called `Mine/7`"]);
}

#[test]
fn data_of_another_shape_is_refused_with_line_and_field() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let line = |measure: &str| sandbox.run(&["eval", measure, "demo", "--data", "data.jsonl"]);
    let [good, _] = problems();
    let write = |text: &str| fs::write(sandbox.path("data.jsonl"), text).unwrap();
    for (measure, text, parts) in [
        ("humaneval", "", ["line 1", "no row in the file"]),
        ("humaneval", "\n\n{\n", ["line 3", "not JSON"]),
        ("humaneval", "[1]\n", ["line 1", "a list, not an object"]),
        (
            "humaneval",
            "{\"task_id\": \"a\"}\n",
            ["line 1", "no field `prompt`"],
        ),
        (
            "multiple-choice",
            "{\"context\": 1}\n",
            ["line 1", "`context` is a number"],
        ),
        (
            "multiple-choice",
            "{\"context\": \"a\", \"choices\": [1], \"label\": 0}\n",
            ["line 1", "not a list of texts"],
        ),
        (
            "multiple-choice",
            "{\"context\": \"a\", \"choices\": [\"b\"], \"label\": 1}\n",
            ["line 1", "`label` is 1"],
        ),
        (
            "multiple-choice",
            "{\"context\": \"a\", \"choices\": [\"b\"], \"label\": -1}\n",
            ["line 1", "whole number from 0 on"],
        ),
        (
            "gsm8k",
            "{\"question\": \"a\", \"answer\": \"b\"}\n",
            ["line 1", "`####`"],
        ),
    ] {
        write(text);
        line(measure).bad(1, &parts);
    }
    write(&format!("{good}\n{good}\n"));
    line("humaneval").bad(1, &["line 2", "`Mine/0` is there twice"]);
    fs::write(sandbox.path("data.jsonl"), [b'{', 0xff, b'\n']).unwrap();
    line("humaneval").bad(1, &["line 1", "not UTF-8"]);
    fs::write(sandbox.path("data.jsonl"), [0x1f, 0x8b, 1, 2, 3]).unwrap();
    line("humaneval").bad(1, &["cannot read"]);
    // The byte-order mark is not part of the first line.
    write("\u{feff}[1]\n");
    line("humaneval").bad(1, &["line 1", "a list, not an object"]);
}

#[test]
fn results_with_another_tokenizer_are_not_resumed() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-relu-gqa");
    write_lines(&sandbox, "problems.jsonl", &problems());
    for engine in ["reference", "runtime"] {
        let out = format!("{engine}.jsonl");
        let line = ["eval", "humaneval", "llama-relu-gqa", "-n", "2"];
        let data = [
            "--data",
            "problems.jsonl",
            "--engine",
            engine,
            "--out",
            &out,
        ];
        let line = [&line[..], &data].concat();
        sandbox.run(&line).good();
        sandbox.run(&line).good();
        let path = model.join("tokenizer_config.json");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text + "\n").unwrap();
        sandbox
            .run(&line)
            .bad(1, &["line 1", "another file with `--out`"]);
    }
}

#[test]
fn an_interrupted_evaluation_under_policies_is_resumed() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    write_lines(&sandbox, "problems.jsonl", &problems());
    let line = words(
        "eval humaneval demo --data problems.jsonl --samples 3 --temperature 0.8 -k 1,3 -n 40 --policy dense,predicted --out samples.jsonl --json",
    );
    let whole = sandbox.run(&line).good();
    let samples = || fs::read_to_string(sandbox.path("samples-dense.jsonl")).unwrap();
    let all = samples();
    assert_eq!(all.lines().count(), 6);
    // A run that was interrupted within a line is resumed with the same result.
    let cut = all.lines().take(2).map(str::len).sum::<usize>() + 20;
    fs::write(sandbox.path("samples-dense.jsonl"), &all[..cut]).unwrap();
    let again = sandbox.run(&line).good();
    assert_eq!(again.stdout, whole.stdout);
    assert_eq!(samples(), all);
    let mut other = line.clone();
    other
        .iter_mut()
        .filter(|word| **word == "0.8")
        .for_each(|word| *word = "0.7");
    sandbox
        .run(&other)
        .bad(1, &["line 1", "another file with `--out`"]);
    let row = &whole.json()["rows"][1];
    assert_eq!(row["name"], "predicted");
    assert!(
        row["relative_to_first"]["minimum_detectable_effect"]
            .as_f64()
            .unwrap()
            > 0.0
    );
    // Empty completions do not pass.
    let none = sandbox.run(&words("eval humaneval demo --data problems.jsonl -n 0"));
    assert!(none.good().text().contains("0.0%"));
    for (flag, value, part) in [
        ("--samples", "3", "give `--temperature`"),
        ("-k", "2", "give `--samples` of 2"),
        ("--count", "0", "at least one problem"),
        ("--out", "no/such/folder.jsonl", "does not exist"),
    ] {
        let bad = [
            "eval",
            "humaneval",
            "demo",
            "--data",
            "problems.jsonl",
            flag,
            value,
        ];
        let code = if flag == "--out" { 2 } else { 1 };
        sandbox.run(&bad).bad(code, &[part]);
    }
}

#[test]
fn questions_are_answered_by_likelihood_and_by_number() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let question = |context: &str, choices: [&str; 2]| json!({ "context": context, "choices": choices, "label": 0 });
    let questions = [
        question(
            "def f(xs):\n    \"\"\"",
            ["Return the sum of xs.", "qqq ### zzz"],
        ),
        question("def f(x):\n    return x", [" + 1", " banana"]),
        question(&"long ".repeat(3000), ["a", "b"]),
    ];
    write_lines(&sandbox, "questions.jsonl", &questions);
    let line = words("eval multiple-choice demo --data questions.jsonl");
    let policies = ["--policy", "dense,exact", "--json"];
    let found = sandbox.run(&[&line[..], &policies].concat()).good().json();
    for row in found["rows"].as_array().unwrap() {
        assert_eq!(row["asked"], 2, "one does not fit");
        assert_eq!(row["right"]["acc_norm"]["value"], 1.0);
    }
    assert_eq!(found["rows"][1]["relative_to_first"]["p_value"], 1.0);
    let table = sandbox.run(&line).good();
    table.stdout_contains(&["too long"]);
    let problem = json!({ "question": "1 + 1?", "answer": "It is 2.\n#### 2" });
    write_lines(&sandbox, "problems.jsonl", &[problem.clone(), problem]);
    let line = words("eval gsm8k demo --data problems.jsonl -n 8");
    let table = sandbox.run(&[&line[..], &["--shots", "1"]].concat()).good();
    table.stdout_contains(&["exact_match"]);
    sandbox
        .run(&line)
        .bad(1, &["`--shots` is 5, and there are 2 problems"]);
}

#[test]
fn perplexity_is_reported_per_token_word_and_byte() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let text = "def f(xs):\n    return sum(xs)\n\n\n".repeat(5);
    fs::write(sandbox.path("text.txt"), &text).unwrap();
    let line = words("eval perplexity demo --data text.txt --policy exact");
    let run = |bos: &str| sandbox.run(&[&line[..], &["--bos", bos, "--json"]].concat());
    let [always, never] = ["always", "never"].map(|bos| run(bos).good().json());
    let tokens = |found: &Value| found["tokens"].as_u64().unwrap();
    assert_eq!(
        tokens(&always),
        tokens(&never) + 1,
        "then the first is scored too"
    );
    assert!(always["bos_token"].is_string() && never["bos_token"].is_null());
    let figure = |name: &str| always[name].as_f64().unwrap();
    let nats = figure("dense_perplexity").ln() * tokens(&always) as f64;
    let [words, bytes] = ["words", "bytes"].map(figure);
    assert_eq!((words, bytes), (20.0, text.len() as f64));
    let per_word = (nats / words).exp();
    assert!((figure("dense_word_perplexity") / per_word - 1.0).abs() < 1e-9);
    let bits = nats / bytes / std::f64::consts::LN_2;
    assert!((figure("dense_bits_per_byte") - bits).abs() < 1e-9);
    assert_eq!(
        always["policies"][0]["perplexity"],
        always["dense_perplexity"]
    );
}

/// All of HumanEval, if its file is given: `POWERINFER_HUMANEVAL=HumanEval.jsonl.gz`.
#[test]
fn every_reference_solution_passes_and_every_wrong_one_fails() {
    if !can_judge() {
        return;
    }
    let Some(data) = std::env::var_os("POWERINFER_HUMANEVAL") else {
        println!("skipped: `POWERINFER_HUMANEVAL` is not set");
        return;
    };
    let data = data.to_str().unwrap();
    let sandbox = Sandbox::new();
    let run = |solution: &dyn Fn(&powerinfer_eval::human_eval::Problem) -> String| {
        let problems = powerinfer_eval::human_eval::read_problems(data.as_ref()).unwrap();
        let rows: Vec<Value> = problems
            .iter()
            .map(|problem| json!({ "task_id": problem.task_id, "completion": solution(problem) }))
            .collect();
        write_lines(&sandbox, "completions.jsonl", &rows);
        let line = [
            "eval",
            "humaneval",
            "--data",
            data,
            "--completions",
            "completions.jsonl",
            "--json",
        ];
        sandbox.run(&line).good().json()["rows"][0]["verdicts"].clone()
    };
    let right = run(&|problem| problem.canonical_solution.clone());
    let count = |verdicts: &Value, name: &str| verdicts[name].as_u64().unwrap();
    assert_eq!(count(&right, "passed"), 164, "{right}");
    let wrong = run(&|_| "    return None\n".to_owned());
    assert_eq!(count(&wrong, "passed"), 0, "{wrong}");
}

#[test]
fn pruning_cold_neurons_costs_less_than_pruning_random_ones_and_more_than_skipping() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let line = [
        "eval", "prune", "demo", "--tokens", "400", "--tasks", "4", "--keep", "1,0.3", "--raise",
        "0,1000", "--json",
    ];
    let found = sandbox.run(&line).good().json();
    let arms = found["arms"].as_array().unwrap();
    let figure = |arm: &str, parameter: &Value, name: &str| -> f64 {
        let row = arms
            .iter()
            .find(|row| row["arm"] == arm && row["parameter"] == *parameter);
        let row = row.unwrap_or_else(|| panic!("{arm} {parameter}"));
        let value = row
            .pointer(name)
            .unwrap_or_else(|| panic!("{name} of {row}"));
        value.as_f64().unwrap()
    };
    let rise = |arm: &str, parameter: Value| figure(arm, &parameter, "/perplexity_rise/value");
    let computed = |arm: &str, parameter: Value| figure(arm, &parameter, "/ffn_neurons_computed");
    assert_eq!(rise("dense", Value::Null), 0.0);
    // A model from which nothing is pruned is unchanged, bit for bit.
    for arm in ["drop cold", "drop random"] {
        let all = json!({ "kept": 1.0 });
        assert_eq!(rise(arm, all.clone()), 0.0);
        assert_eq!(figure(arm, &all, "/top1_agreement"), 1.0);
        let some = computed(arm, json!({ "kept": 0.3 }));
        assert!((some - 0.3).abs() < 0.001, "{some}");
    }
    let [cold, any] = ["drop cold", "drop random"].map(|arm| rise(arm, json!({ "kept": 0.3 })));
    let skipped = rise("skip predicted", json!({ "raised_logit": 0.0 }));
    assert!(skipped < cold && cold < any, "{skipped} {cold} {any}");
    assert!(computed("skip predicted", json!({ "raised_logit": 0.0 })) < 0.3);
    assert_eq!(
        computed("skip predicted", json!({ "raised_logit": 1000.0 })),
        0.0
    );
    let pass = figure("dense", &Value::Null, "/pass_at_1/value");
    assert!((0.0..=1.0).contains(&pass));
    let again = sandbox.run(&line).good().json();
    assert_eq!(again, found);
    let bad = ["eval", "prune", "demo", "--keep", "1.5"];
    sandbox.run(&bad).bad(1, &["`--keep` has 1.5"]);
}

#[test]
fn checkpoints_are_evaluated_by_either_engine() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_model("llama-silu");
    let text = "a few words to score, again and again; ".repeat(20);
    fs::write(sandbox.path("text.txt"), text).unwrap();
    let eval = |line: &[&str]| {
        let measures = ["--data", "text.txt", "--tokens", "200", "--json"];
        sandbox.run(&[&["eval"], line, &measures].concat())
    };
    let perplexity = |found: &Value| found["dense_perplexity"].as_f64().unwrap();
    let reference = eval(&["perplexity", "llama-silu"]).good().json();
    assert_eq!(reference["policies"], json!([]));
    let runtime = eval(&["perplexity", "llama-silu", "--engine", "runtime"])
        .good()
        .json();
    let [one, other] = [&reference, &runtime].map(perplexity);
    assert!((one / other - 1.0).abs() < 1e-4, "{one} {other}");
    let fidelity = eval(&["fidelity", "llama-silu"]).good().json();
    let row = &fidelity["policies"][0];
    assert_eq!(row["policy"], "runtime, float32");
    assert!(
        row["largest_logit_difference"].as_f64().unwrap() < 1e-2,
        "{row}"
    );
    assert_eq!(row["top1_agreement"], 1.0);
    eval(&["perplexity", "llama-silu", "--policy", "exact"])
        .bad(1, &["runs dense", "`--engine runtime`"]);
    eval(&["fidelity", "llama-silu", "--certificate"]).bad(2, &["--certificate"]);
    // Tasks of the demo, solved by its checkpoint in the reference and in this engine: the same text.
    sandbox.copy_demo();
    let tasks = |more: &[&str]| {
        let line = [
            "eval", "tasks", "demo", "--count", "2", "--json", "-n", "60",
        ];
        sandbox.run(&[&line[..], more].concat()).good().json()
    };
    let [one, other] = [
        tasks(&["--engine", "reference"]),
        tasks(&["--policy", "dense"]),
    ];
    assert_eq!(one["policies"].as_array().unwrap().len(), 1);
    assert_eq!(one["policies"][0]["ffn_neurons_computed"], 1.0);
    assert_eq!(one["policies"][0]["passed"], other["policies"][0]["passed"]);
    // A bundle compared with its checkpoint, which includes the effect of quantisation.
    let demo = |more: &[&str]| {
        let line = [
            "eval", "fidelity", "demo", "--tokens", "300", "--json", "--policy", "dense",
        ];
        sandbox.run(&[&line[..], more].concat())
    };
    let own = demo(&[]).good().json();
    assert_eq!(own["policies"][0]["largest_logit_difference"], 0.0);
    // Each policy is evaluated once, and no interval is shown for a short text.
    let repeated = sandbox.run(&words(
        "eval fidelity demo --policy dense,exact,exact --tokens 20",
    ));
    let table = repeated.good().text();
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(!table.contains(" to "), "{table}");
    let against = demo(&["--against", "demo"]).good().json();
    assert!(
        against["policies"][0]["largest_logit_difference"]
            .as_f64()
            .unwrap()
            > 0.0
    );
    demo(&["--against", "llama-silu"]).bad(1, &["`llama-silu` has", "made from"]);
    demo(&["--engine", "reference", "--against", "demo"])
        .bad(1, &["`--against` compares a bundle", "`eval fidelity`"]);
    sandbox
        .run(&words("eval perplexity demo.powerinfer --engine reference"))
        .bad(1, &["is not a model", "made from"]);
}
