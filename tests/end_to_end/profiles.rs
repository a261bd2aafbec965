//! `profile`, and `merge` of profiles and predictors: shards, convergence, resumption and pages.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::Stdio,
};

use serde_json::Value;

use crate::sandbox::{Run, Sandbox, assert_contains, golden_model, words};

const TOKENS: [&str; 4] = ["--tokens", "4000", "--trace-tokens", "900"];

fn profile(sandbox: &Sandbox, more: &[&str]) {
    let arguments = [&["profile", "demo"][..], &TOKENS, more].concat();
    sandbox.run(&arguments).good();
}

/// Folder in which a profile of the demo is built.
const PARTIAL: &str = "demo.powerinfer/profile.partial";

/// The document of a profile, with the digests of its files.
fn counted(sandbox: &Sandbox, folder: &str) -> Value {
    let report = sandbox
        .run(&["inspect", folder, "--json", "--verify"])
        .good();
    report.json()
}

#[test]
fn shards_merge_to_the_bytes_of_one_run() {
    let sandbox = Sandbox::new();
    profile(&sandbox, &["--out", "whole"]);
    for count in [2, 3] {
        let mut folders = Vec::new();
        for index in 1..=count {
            let (shard, out) = (format!("{index}/{count}"), format!("{index}-of-{count}"));
            profile(&sandbox, &["--shard", &shard, "--out", &out]);
            folders.insert(0, out); // the order of the folders does not matter
        }
        let mut arguments = vec!["merge", "--out", "merged"];
        arguments.extend(folders.iter().map(String::as_str));
        sandbox.run(&arguments).good();
        assert_eq!(counted(&sandbox, "merged"), counted(&sandbox, "whole"));
    }
}

#[test]
fn profiles_of_different_texts_merge_to_the_profile_of_all_texts() {
    let sandbox = Sandbox::new();
    for (name, text) in [
        ("code", "def f(x):\n    return x + 1\n"),
        ("prose", "It was night.\n"),
    ] {
        let file = format!("{name}.txt");
        fs::write(sandbox.path(&file), text.repeat(60)).unwrap();
        profile(&sandbox, &["--data", &file, "--out", name]);
    }
    sandbox
        .run(&["merge", "code", "prose", "--out", "both"])
        .good();
    let [code, prose, both] = ["code", "prose", "both"].map(|name| counted(&sandbox, name));
    let sources = both["profile"]["sources"].as_array().unwrap();
    assert_eq!(sources[0], code["profile"]["sources"][0]);
    assert_eq!(sources[1], prose["profile"]["sources"][0]);
    let sum = |key: &str| {
        let of = |report: &Value| report["profile"][key].as_u64().unwrap();
        assert_eq!(of(&both), of(&code) + of(&prose), "{key}");
    };
    sum("tokens");
    sum("training_tokens");
    sum("held_out_tokens");
    sum("first_half_tokens");
    let overlap = both["profile"]["source_overlap"][0][1].as_f64().unwrap();
    assert!((0.0..0.9).contains(&overlap), "{overlap}");
    // A merged profile can be merged again, and trained from.
    sandbox
        .run(&words("train-predictors demo --profile both --steps 5"))
        .good();
}

#[test]
fn profiles_that_cannot_be_merged_are_refused() {
    let sandbox = Sandbox::new();
    for shard in ["1/3", "2/3"] {
        profile(
            &sandbox,
            &["--shard", shard, "--out", &shard.replace('/', "-")],
        );
    }
    let merge = |profiles: &[&str], out: &str| {
        sandbox.run(&[&["merge", "--out", out][..], profiles].concat())
    };
    merge(&["1-3", "2-3"], "all").bad(1, &["`1-3`", "missing: 3/3", "; profile"]);
    merge(&["1-3", "1-3"], "all").bad(1, &["same text", "; name each one once"]);
    merge(&["1-3", "nowhere"], "all").bad(1, &["no profile in `nowhere`"]);
    merge(&["1-3", "2-3"], "2-3").bad(1, &["`2-3` is one of the folders", "hint: "]);
    merge(&[], "all").bad(2, &["PROFILE"]);
    let relu = golden_model("llama-relu-gqa");
    fs::write(sandbox.path("text.txt"), "one two three ".repeat(40)).unwrap();
    let relu = relu.to_str().unwrap();
    sandbox
        .run(&[
            "profile", relu, "--data", "text.txt", "--tokens", "200", "--out", "relu",
        ])
        .good();
    merge(&["1-3", "relu"], "all").bad(1, &["another model", "llama-relu-gqa"]);
    assert!(!sandbox.path("all").exists());
    sandbox
        .run(&["profile", "demo", "--shard", "1/3"])
        .bad(1, &["hint: give `--tokens N`"]);
    sandbox
        .run(&["profile", "demo", "--tokens", "100", "--shard", "4/3"])
        .bad(2, &["i/n"]);
    sandbox
        .run(&["profile", "demo", "--tokens", "100", "--shard", "1/900"])
        .bad(1, &["shard 1/900 has no text", "; "]);
}

/// The demo with a profile, and training of its predictors.
fn train(sandbox: &Sandbox, more: &[&str]) -> Run {
    let usual = ["train-predictors", "demo", "--steps", "8"];
    sandbox.run(&[&usual[..], more].concat())
}

fn predictors(sandbox: &Sandbox, folder: &str) -> Vec<u8> {
    fs::read(sandbox.path(folder).join("predictors.safetensors")).unwrap()
}

#[test]
fn shards_of_predictors_merge_to_the_bytes_of_one_run() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    train(&sandbox, &["--out", "whole"]).good();
    for count in [1, 4, 6] {
        let mut arguments = vec!["merge".to_owned(), "--out".to_owned(), "merged".to_owned()];
        for index in (1..=count).rev() {
            let (shard, out) = (format!("{index}/{count}"), format!("{index}-of-{count}"));
            train(&sandbox, &["--shard", &shard, "--out", &out]).good();
            arguments.push(out);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let merged = sandbox.run(&arguments).good();
        merged.stdout_contains(&["6 layers"]);
        assert_eq!(
            predictors(&sandbox, "merged"),
            predictors(&sandbox, "whole")
        );
    }
    // What is merged counts as trained.
    let again = train(&sandbox, &["--out", "merged"]).good();
    assert_contains(&again.stderr, &["is up to date"]);
}

#[test]
fn predictors_that_cannot_be_merged_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    for index in ["1", "2"] {
        train(&sandbox, &["--shard", &format!("{index}/3")]).good();
    }
    let [first, second] = [1, 2].map(|index| format!("demo.powerinfer/predictors-{index}-of-3"));
    let other = |more: &[&str]| {
        train(
            &sandbox,
            &[&["--force", "--out", "other"][..], more].concat(),
        )
        .good();
    };
    let merge = |third: &[&str]| {
        let arguments = ["merge", "--out", "all", &first, &second];
        sandbox.run(&[&arguments[..], third].concat())
    };
    merge(&[]).bad(1, &["missing: 3/3", "; train"]);
    merge(&[&second]).bad(1, &["same layers", "predictors-2-of-3", "; "]);
    merge(&["nowhere"]).bad(1, &["nowhere"]);
    merge(&["demo.powerinfer/profile"]).bad(1, &["demo.powerinfer/profile"]);
    for (settings, difference) in [
        (["--seed", "1"], "its seed"),
        (["--steps", "9"], "its setting `steps`"),
    ] {
        let usual = words("train-predictors demo --shard 3/3 --out other");
        sandbox.run(&[&usual[..], &settings].concat()).good();
        merge(&["other"]).bad(1, &["`other/", difference, "; merge shards of one run"]);
    }
    other(&["--shard", "3/4"]);
    merge(&["other"]).bad(1, &["different number of shards"]);
    other(&["--shard", "3/3"]);
    let path = sandbox.path("other/predictors.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    merge(&["other"]).bad(1, &["other/predictors.safetensors"]);
    fs::write(&path, &bytes).unwrap();
    assert!(!sandbox.path("all").exists());
    merge(&["other"]).good();

    train(&sandbox, &["--shard", "7/7"]).bad(1, &["shard 7/7 has no layers", "; "]);
    train(&sandbox, &["--shard", "0/7"]).bad(2, &["i/n"]);
    sandbox
        .run(&["place", "demo", "--predictors", &first])
        .bad(1, &["shard 1/3", "hint: ", "powerinfer merge"]);
}

#[test]
fn a_killed_shard_of_predictors_resumes() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let arguments = ["--shard", "2/2", "--out"];
    train(&sandbox, &[&arguments[..], &["undisturbed"]].concat()).good();
    let all = ["train-predictors", "demo", "--steps", "8", "--shard", "2/2"];
    let mut child = sandbox
        .command(&[&all[..], &["--out", "killed"]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let layers = || {
        fs::read_dir(sandbox.path("killed.partial")).map_or(0, |files| {
            let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
            names
                .filter(|name| name.ends_with(".safetensors") && name.starts_with("layer-"))
                .count()
        })
    };
    while layers() == 0 {
        assert!(
            child.try_wait().unwrap().is_none(),
            "it ended before it was killed"
        );
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let resumed = train(&sandbox, &[&arguments[..], &["killed"]].concat()).good();
    assert_contains(&resumed.stderr, &["resuming after"]);
    assert_eq!(
        predictors(&sandbox, "killed"),
        predictors(&sandbox, "undisturbed")
    );
}

#[test]
fn auto_reads_until_the_ranking_is_stable() {
    let sandbox = Sandbox::new();
    let mut tokens = Vec::new();
    for (settled, trace_tokens) in [("0.5", "500"), ("0.5", "7000"), ("0.925", "500")] {
        let run = sandbox.run(&[
            "profile",
            "demo",
            "--settled",
            settled,
            "--trace-tokens",
            trace_tokens,
            "--json",
        ]);
        let run = run.good();
        let report = run.json();
        tokens.push(report["profile"]["tokens"].as_u64().unwrap());
        assert_eq!(
            run.stderr.contains("reading on"),
            *tokens.last().unwrap() > 10_000
        );
    }
    assert!((8192..8800).contains(&tokens[0]), "{tokens:?}");
    assert!(
        (16_384..17_000).contains(&tokens[1]),
        "more samples were asked for: {tokens:?}"
    );
    assert!(
        tokens[2] >= tokens[1] - 300,
        "the bound is higher: {tokens:?}"
    );
    let inspected = sandbox
        .run(&["inspect", "demo.powerinfer/profile", "-v"])
        .good();
    inspected.stdout_contains(&["halves overlap"]);
}

/// Runs `arguments` and kills the program when it prints `message`.
fn killed(arguments: &[&str], message: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    let mut child = sandbox
        .command(&[arguments, &["--verbose"]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap().contains(message)),
        "the program ended before it was killed"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!sandbox.path("demo.powerinfer/profile").exists());
    sandbox
}

/// A profile that was killed by [`killed`] and then resumed to its end.
fn killed_and_resumed(arguments: &[&str], message: &str) -> Sandbox {
    let sandbox = killed(arguments, message);
    let message = sandbox.run(arguments).good().stderr;
    assert_contains(&message, &["resuming after layer"]);
    assert!(!sandbox.path(PARTIAL).exists());
    sandbox
}

fn digests(sandbox: &Sandbox) -> Value {
    let inspect = ["inspect", "demo.powerinfer/profile", "--verify", "--json"];
    sandbox.run(&inspect).good().json()
}

#[test]
fn a_killed_profile_is_resumed() {
    let arguments = [&["profile", "demo"][..], &TOKENS].concat();
    let resumed = killed_and_resumed(&arguments, "layer 2:");
    let whole = Sandbox::new();
    whole.run(&arguments).good();
    assert_eq!(
        digests(&resumed),
        digests(&whole),
        "it has the bytes of one in one go"
    );
}

#[test]
fn a_profile_killed_between_rounds_is_resumed() {
    let arguments = words("profile demo --settled 0.5 --trace-tokens 7000");
    let resumed = killed_and_resumed(&arguments, "; reading on ");
    let whole = Sandbox::new();
    whole.run(&arguments).good();
    assert_eq!(digests(&resumed), digests(&whole));
}

#[test]
fn sources_are_compared_and_the_page_is_self_contained() {
    let sandbox = Sandbox::new();
    fs::write(
        sandbox.path("a<b>.txt"),
        "def f(x):\n    return x + 1\n".repeat(60),
    )
    .unwrap();
    fs::write(
        sandbox.path("prose.txt"),
        "It was a dark and stormy night.\n".repeat(60),
    )
    .unwrap();
    let data = words("--data a<b>.txt --data prose.txt --data a<b>.txt");
    profile(&sandbox, &data);
    let report = digests(&sandbox);
    let overlap = |a: usize, b: usize| report["profile"]["source_overlap"][a][b].as_f64().unwrap();
    assert_eq!(overlap(0, 0), 1.0);
    assert_eq!(overlap(0, 1), overlap(1, 0));
    assert!(
        overlap(0, 2) > overlap(0, 1) + 0.2,
        "like text is more alike: {report}"
    );
    let shown = sandbox
        .run(&["inspect", "demo.powerinfer/profile", "-v"])
        .good()
        .text();
    assert_contains(
        &shown,
        &["2 prose.txt", "overlap of the most frequently active"],
    );

    sandbox
        .run(&["inspect", "demo.powerinfer", "--html", "page.html"])
        .good();
    let page = fs::read_to_string(sandbox.path("page.html")).unwrap();
    for part in [
        "<svg",
        "Sparsity per layer",
        "Cumulative activations",
        "a&lt;b&gt;.txt",
    ] {
        assert!(page.contains(part), "{part}");
    }
    for foreign in [
        "<script", "http:", "https:", "src=", "@import", "url(", "a<b>",
    ] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    let opened = page.matches("<svg").count();
    assert_eq!(opened, page.matches("</svg>").count());
    sandbox
        .run(&["inspect", "page.html", "--html", "other.html"])
        .bad(1, &["no profile in `page.html`"]);
}

#[test]
fn files_of_other_origin_are_never_replaced() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    for command in [
        &["profile", "demo", "--tokens", "2000"][..],
        &["train-predictors", "demo", "--steps", "2"],
        &["place", "demo", "--vram", "0G"],
        &["merge", "demo.powerinfer/profile"],
    ] {
        for precious in ["precious", "precious.partial"] {
            let folder = sandbox.path(precious);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("thesis.txt"), "years").unwrap();
            let arguments = [command, &["--out", "precious"]].concat();
            sandbox.run(&arguments).bad(
                1,
                &["was not made by this command", "hint: name another folder"],
            );
            assert_eq!(fs::read(folder.join("thesis.txt")).unwrap(), b"years");
            fs::remove_dir_all(&folder).unwrap();
        }
    }
    // A profile of another model is not replaced either; models with the same folder name share a work folder.
    let relu = golden_model("llama-relu-gqa");
    fs::write(sandbox.path("text.txt"), "one two three ".repeat(40)).unwrap();
    let relu = relu.to_str().unwrap();
    sandbox
        .run(&[
            "profile",
            relu,
            "--data",
            "text.txt",
            "--tokens",
            "200",
            "--out",
            "demo.powerinfer/profile",
        ])
        .bad(1, &["profile of another model (demo", "hint: "]);
}

#[test]
fn a_merge_keeps_its_inputs_and_counts_no_text_twice() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("all")).unwrap();
    for shard in ["1", "2"] {
        let (of, out) = (format!("{shard}/2"), format!("all/{shard}"));
        profile(&sandbox, &["--shard", &of, "--out", &out]);
    }
    for out in ["all", "./all/1", "all/2/inside", "all/../all/2"] {
        sandbox
            .run(&["merge", "all/1", "all/2", "--out", out])
            .bad(1, &["is one of the folders to be merged", "hint: "]);
        assert!(sandbox.path("all/1/profile.json").exists());
        assert!(sandbox.path("all/2/profile.json").exists());
    }
    fs::write(
        sandbox.path("other.txt"),
        "def f(x):\n    return x\n".repeat(80),
    )
    .unwrap();
    profile(&sandbox, &["--data", "other.txt", "--out", "other"]);
    sandbox
        .run(&["merge", "all/1", "all/2", "--out", "whole"])
        .good();
    sandbox
        .run(&["merge", "whole", "other", "--out", "both"])
        .good();
    for again in ["whole", "other"] {
        sandbox
            .run(&["merge", "both", again, "--out", "twice"])
            .bad(1, &["shares a text with `both`", "; merge each text once"]);
    }
}

#[test]
fn damaged_intermediate_results_are_computed_again() {
    let arguments = [&["profile", "demo"][..], &TOKENS].concat();
    let whole = Sandbox::new();
    whole.run(&arguments).good();
    type Damage = (&'static str, fn(&std::path::Path));
    let damage: [Damage; 3] = [
        ("a state with a changed byte", |partial| {
            let entries = partial.read_dir().unwrap().flatten();
            let mut states =
                entries.filter(|e| e.file_name().to_string_lossy().starts_with("state-"));
            let path = states.next().unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            fs::write(path, bytes).unwrap();
        }),
        ("samples that are gone", |partial| {
            fs::remove_dir_all(partial.join("rounds")).unwrap();
        }),
        ("a temporary file of a killed run", |partial| {
            fs::write(partial.join(".powerinfer-x.partial"), "half").unwrap();
        }),
    ];
    for (what, damage) in damage {
        let sandbox = killed(&arguments, "layer 3:");
        damage(&sandbox.path(PARTIAL));
        sandbox.run(&arguments).good();
        assert_eq!(digests(&sandbox), digests(&whole), "{what}");
        let files = sandbox.path("demo.powerinfer/profile").read_dir().unwrap();
        let mut names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(
            names,
            [
                "neurons.parquet",
                "profile.json",
                "reserved.safetensors",
                "traces"
            ],
            "{what}"
        );
    }
}
