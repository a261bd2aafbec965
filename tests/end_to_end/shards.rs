//! Shards of certificates, evaluations and sweeps, and `merge` of their rows.

use std::{fs, process::Stdio, time::Duration};

use serde_json::{Value, json};

use crate::sandbox::{Run, Sandbox, assert_contains, can_judge, words};

/// Rows of a file without the times that were measured.
fn rows(sandbox: &Sandbox, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(sandbox.path(name)).unwrap();
    let rows = text.lines().map(|line| {
        let mut row: Value = serde_json::from_str(line).unwrap();
        if let Some(result) = row.get_mut("result").and_then(Value::as_object_mut) {
            result.remove("decode_seconds");
        }
        row
    });
    rows.collect()
}

/// Runs `arguments` as a whole and in `count` shards; returns the whole report and that on the merged shards. The rows are
/// the same.
fn whole_and_merged(sandbox: &Sandbox, arguments: &[&str], count: usize) -> [Value; 2] {
    let run = |more: &[&str]| sandbox.run(&[arguments, &["--json"], more].concat());
    let whole = run(&["--out", "whole.jsonl"]).good().json();
    let mut merge = vec!["merge".to_owned()];
    for index in (1..=count).rev() {
        let shard = format!("{index}/{count}");
        run(&["--out", "rows.jsonl", "--shard", &shard]).good();
        merge.push(format!("rows-{index}-of-{count}.jsonl"));
    }
    merge.extend(["--out", "merged.jsonl"].map(str::to_owned));
    let merge: Vec<&str> = merge.iter().map(String::as_str).collect();
    sandbox.run(&merge).good();
    assert_eq!(rows(sandbox, "merged.jsonl"), rows(sandbox, "whole.jsonl"));
    let merged = run(&["--out", "merged.jsonl"]).good().json();
    [whole, merged]
}

fn problems(count: usize) -> String {
    let problem = |index: usize| {
        json!({
            "task_id": format!("Mine/{index}"),
            "prompt": format!("def add{index}(x):\n    \"\"\" Return x plus {index}. \"\"\"\n"),
            "entry_point": format!("add{index}"), "canonical_solution": "    return x\n",
            "test": format!("def check(candidate):\n    assert candidate(1) == {}\n", index + 1),
        })
    };
    (0..count)
        .map(|index| format!("{}\n", problem(index)))
        .collect()
}

#[test]
fn shards_of_completions_merge_to_the_bytes_of_one_run() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    fs::write(sandbox.path("problems.jsonl"), problems(5)).unwrap();
    // Samples at a temperature: each problem has random streams of its own, whatever its shard.
    let arguments =
        words("eval humaneval demo --data problems.jsonl -n 6 --samples 2 --temperature 1.5");
    let [whole, merged] = whole_and_merged(&sandbox, &arguments, 3);
    assert_eq!(whole, merged);
    let [whole, merged] =
        ["whole", "merged"].map(|name| fs::read(sandbox.path(&format!("{name}.jsonl"))).unwrap());
    assert_eq!(whole, merged, "the bytes");
}

#[test]
fn shards_of_answers_and_tasks_merge_to_the_rows_of_one_run() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let question = |index: usize| {
        let context = match index {
            2 => "long ".repeat(3000),
            _ => format!("def f(x):\n    return x + {index}"),
        };
        json!({ "context": context, "choices": ["\n", " banana"], "label": index % 2 })
    };
    let questions: String = (0..4)
        .map(|index| format!("{}\n", question(index)))
        .collect();
    fs::write(sandbox.path("questions.jsonl"), questions).unwrap();
    let arguments = words("eval multiple-choice demo --data questions.jsonl");
    let [whole, merged] = whole_and_merged(&sandbox, &arguments, 4);
    assert_eq!(whole, merged);

    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let arguments = words("eval tasks demo --count 5 -n 8 --policy predicted");
    let [whole, merged] = whole_and_merged(&sandbox, &arguments, 2);
    let figures = |report: &Value| {
        let mut policies = report["policies"].clone();
        policies[0]
            .as_object_mut()
            .unwrap()
            .remove("tokens_per_second");
        policies
    };
    assert_eq!(figures(&whole), figures(&merged));
}

/// Writes three shards of completions and returns a closure that merges the files named.
fn three_shards(sandbox: &Sandbox) -> impl Fn(&[&str]) -> Run {
    sandbox.copy_demo();
    fs::write(sandbox.path("problems.jsonl"), problems(6)).unwrap();
    for shard in ["1/3", "2/3", "3/3"] {
        complete(sandbox, &["--shard", shard]).good();
    }
    |names: &[&str]| sandbox.run(&[&["merge"], names, &["--out", "merged.jsonl"]].concat())
}

fn complete(sandbox: &Sandbox, more: &[&str]) -> Run {
    let arguments = words("eval humaneval demo --data problems.jsonl -n 4 --out rows.jsonl");
    sandbox.run(&[&arguments[..], more].concat())
}

#[test]
fn shards_that_do_not_fit_are_named_and_nothing_is_written() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    let merge = three_shards(&sandbox);
    let all = [
        "rows-1-of-3.jsonl",
        "rows-2-of-3.jsonl",
        "rows-3-of-3.jsonl",
    ];
    let path = |name: &str| sandbox.path(name);
    let copy = |name: &str, change: &dyn Fn(String) -> String| {
        let text = fs::read_to_string(path(all[1])).unwrap();
        fs::write(path(name), change(text)).unwrap();
    };
    copy("cut.jsonl", &|text| text[..text.len() - 9].to_owned());
    copy("seed.jsonl", &|text| {
        text.replace("\"run\":\"", "\"run\":\"0")
    });
    copy("plain.jsonl", &|text| {
        text.split_once('\n').unwrap().1.to_owned()
    });
    copy("number.jsonl", &|text| text.replace("2/3", "2/4"));
    copy("garbage.jsonl", &|_| "not a row\n".to_owned());
    copy("nonsense.jsonl", &|text| text.replace("2/3", "9/3"));
    copy("empty.jsonl", &|_| String::new());
    for (names, words) in [
        (
            &[all[0], all[2]][..],
            &["shards is missing: 2/3", "run the missing"][..],
        ),
        (
            &[all[0], all[1], all[1], all[2]],
            &["`rows-2-of-3.jsonl`", "name each one once"],
        ),
        (
            &[all[0], "cut.jsonl", all[2]],
            &["`cut.jsonl`", "1 of its 2 rows"],
        ),
        (
            &[all[0], "seed.jsonl", all[2]],
            &["`seed.jsonl`", "another run than `rows-1-of-3.jsonl`"],
        ),
        (
            &[all[0], "plain.jsonl", all[2]],
            &["`plain.jsonl`", "not a shard"],
        ),
        (
            &[all[0], "number.jsonl", all[2]],
            &["`number.jsonl`", "different number of shards"],
        ),
        (&[all[0], "garbage.jsonl", all[2]], &["`garbage.jsonl`"]),
        (
            &[all[0], "nonsense.jsonl", all[2]],
            &["`nonsense.jsonl`", "i/n"],
        ),
        (
            &[all[0], "empty.jsonl", all[2]],
            &["`empty.jsonl`", "not a shard"],
        ),
        (&[all[0], "gone.jsonl", all[2]], &["gone.jsonl"]),
        (&[all[0], "demo.powerinfer", all[2]], &["demo.powerinfer"]),
    ] {
        merge(names).bad(1, words);
        assert!(!path("merged.jsonl").exists());
    }
    // What is there and is not of this run stays.
    fs::write(path("merged.jsonl"), "my thesis\n").unwrap();
    merge(&all).bad(1, &["merged.jsonl"]);
    assert_eq!(fs::read(path("merged.jsonl")).unwrap(), b"my thesis\n");
    fs::remove_file(path("merged.jsonl")).unwrap();
    merge(&all).good();
    merge(&all).good();
    // A shard is no whole run, and the other way round.
    complete(&sandbox, &["--shard", "1/7"]).bad(1, &["shard 1/7 has no items", "there are 6"]);
    complete(&sandbox, &["--shard", "0/2"]).bad(2, &["i/n"]);
    fs::rename(path(all[0]), path("rows.jsonl")).unwrap();
    complete(&sandbox, &[]).bad(1, &["it is shard 1/3", "powerinfer merge"]);
    fs::copy(path("merged.jsonl"), path(all[0])).unwrap();
    complete(&sandbox, &["--shard", "1/3"]).bad(1, &["it is not shard 1/3"]);
}

#[test]
fn a_shard_of_a_sweep_has_the_points_of_the_whole_grid() {
    if !can_judge() {
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let arguments = words(
        "sweep demo --policy dense,exact,predicted --vram 0G --tokens 200 --audit-tokens 100 --layer-tokens 50 --tasks 2 -n 4 --repeats 2 --context 16 --probe 4MiB",
    );
    let run = |more: &[&str]| sandbox.run(&[&arguments[..], more].concat());
    run(&["--out", "whole.jsonl"]).good();
    for shard in ["1/2", "2/2"] {
        run(&["--out", "rows.jsonl", "--shard", shard]).good();
    }
    let merge = words("merge rows-2-of-2.jsonl rows-1-of-2.jsonl --out merged.jsonl");
    sandbox.run(&merge).good();
    // Speed is measured, so it differs.
    let figures = |name: &str| -> Vec<Value> {
        let of_row =
            |row: Value| json!([row["point"], row["axes"], row["quality"], row["sparsity"]]);
        rows(&sandbox, name).into_iter().map(of_row).collect()
    };
    assert_eq!(figures("merged.jsonl"), figures("whole.jsonl"));
    let before = fs::read(sandbox.path("merged.jsonl")).unwrap();
    run(&["--out", "merged.jsonl"])
        .good()
        .stdout_contains(&["predicted"]);
    assert_eq!(fs::read(sandbox.path("merged.jsonl")).unwrap(), before);
    run(&["--shard", "5/5"]).good();
    run(&["--shard", "1/5"]).bad(1, &["shard 1/5 has no points", "the grid has 3"]);
}

const PLACE: [&str; 8] = [
    "place",
    "demo",
    "--hardware",
    "pc-low",
    "--vram",
    "1M",
    "--certify",
    "600",
];

fn place(sandbox: &Sandbox, more: &[&str]) -> Run {
    sandbox.run(&[&PLACE[..], more].concat())
}

#[test]
fn shards_of_a_certificate_make_the_bytes_of_one_run() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    place(&sandbox, &[]).good();
    let bundle = sandbox.path("demo.powerinfer/bundle");
    let contents = || -> Vec<(String, Vec<u8>)> {
        let files = fs::read_dir(&bundle).unwrap().map(|file| file.unwrap());
        let mut files: Vec<_> = files
            .map(|file| {
                (
                    file.file_name().into_string().unwrap(),
                    fs::read(file.path()).unwrap(),
                )
            })
            .collect();
        files.sort();
        files
    };
    let whole = contents();
    assert!(whole.iter().any(|(name, _)| name == "certificate.json"));
    place(&sandbox, &["--certify-later", "--force"]).good();
    assert!(
        !contents()
            .iter()
            .any(|(name, _)| name == "certificate.json")
    );
    for shard in ["3/3", "1/3", "2/3"] {
        let measured = place(&sandbox, &["--certify-shard", shard]).good();
        measured.stderr_contains(&[
            "windows measured",
            &format!("-certificate-{}-of-3.jsonl", &shard[..1]),
        ]);
    }
    let file = |name: &str| format!("demo.powerinfer/bundle-certificate{name}.jsonl");
    let shards = ["-1-of-3", "-2-of-3", "-3-of-3"].map(file);
    let merge = |names: &[&str]| sandbox.run(&[&["merge"], names, &["--out", &file("")]].concat());
    merge(&[&shards[0], &shards[2]]).bad(1, &["missing: 2/3"]);
    merge(&[&shards[0], &shards[1], &shards[2]]).good();
    let completed = place(&sandbox, &[]).good();
    completed.stderr_contains(&["is up to date"]);
    assert!(contents() == whole, "other bytes");
    assert!(!sandbox.path(&file("")).exists());
    // Shards of another bundle are measured again, not merged with others.
    let other =
        |more: &[&str]| sandbox.run(&[&PLACE[..5], &["2M", "--certify", "600"], more].concat());
    other(&["--certify-shard", "1/3"]).bad(1, &["--certify-later"]);
    other(&["--certify-later"]).good();
    other(&["--certify-shard", "1/3"]).good();
    merge(&[&shards[0], &shards[1], &shards[2]]).bad(1, &["another run than"]);
    other(&["--certify-shard", "1/99"]).bad(1, &["shard 1/99 has no text", "use fewer shards"]);
    sandbox
        .run(&["place", "demo.powerinfer/bundle", "--certify-later"])
        .bad(1, &["`--certify-later` requires the model"]);
}

#[test]
fn a_killed_shard_of_a_certificate_resumes() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    place(&sandbox, &["--certify-later"]).good();
    place(&sandbox, &["--certify-shard", "1/2"]).good();
    let file = sandbox.path("demo.powerinfer/bundle-certificate-1-of-2.jsonl");
    let undisturbed = fs::read(&file).unwrap();
    // As after a kill: some windows, and half of one.
    let lines: Vec<&[u8]> = undisturbed.split_inclusive(|byte| *byte == b'\n').collect();
    fs::write(&file, [lines[0], lines[1], &lines[2][..20]].concat()).unwrap();
    place(&sandbox, &["--certify-shard", "1/2"]).good();
    assert_eq!(fs::read(&file).unwrap(), undisturbed);
    // And killed while it runs.
    fs::remove_file(&file).unwrap();
    let mut child = sandbox
        .command(&[&PLACE[..], &["--certify-shard", "1/2"]].concat())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while child.try_wait().unwrap().is_none() {
        if fs::metadata(&file).is_ok_and(|about| about.len() > lines[0].len() as u64) {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let resumed = place(&sandbox, &["--certify-shard", "1/2"]).good();
    assert_contains(&resumed.stderr, &["windows measured"]);
    assert_eq!(fs::read(&file).unwrap(), undisturbed);
}
