//! The examples of README, guide and help run as printed, in order, in a fresh folder.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use flate2::{Compression, write::GzEncoder};
use powerinfer_model::Checkpoint;
use serde_json::json;

use crate::{
    command_lines::command_lines,
    hub_server::HubServer,
    sandbox::{Sandbox, can_judge, copy_folder, golden_model, words},
};

/// Parts of commands that are not run here, with the reason. Tests of the command line check that they are valid.
const NOT_RUN: [(&str, &str); 18] = [
    (
        "--device gpu",
        "needs a GPU; tests of the runtime use the emulated one",
    ),
    ("cluster kubernetes", "needs a cluster"),
    ("cluster slurm", "`scripts/check-slurm.sh` runs it"),
    (
        "powerinfer serve",
        "runs until it is stopped; tests of the server start it",
    ),
    ("synth --like llama-", "writes gigabytes"),
    (
        "Qwen3-30B-A3B",
        "needs a model of 17 GB; tests of mixtures run the commands",
    ),
    (
        "simulate --like qwen3-30b-a3b",
        "a test of mixtures runs it",
    ),
    (
        "eval prune",
        "takes minutes; a test runs it with fewer tasks",
    ),
    (
        "tasks demo --count 200",
        "takes half a minute; the README's has 10",
    ),
    ("like falcon-40b", "takes a minute"),
    ("/etc/", "writes outside the folder"),
    (
        "powerinfer doctor",
        "measures for a minute; a test runs `doctor --quick`",
    ),
    ("hardware.toml", "is written by `doctor`"),
    ("other.toml", "is written by `doctor`"),
    ("pc.toml", "is written by `doctor`"),
    ("org/name@refs", "the test hub serves one model"),
    (
        "powerinfer bench",
        "times for a minute; tests run it with fewer tokens",
    ),
    ("powerinfer sweep", "a test runs the README's"),
];

/// Settings under which all stages take seconds, as if an earlier run on `model` had been given them.
fn quick(model: &Path, certify: &str) -> String {
    let options = json!({
        "certify": [certify], "steps": ["10"], "tokens": ["4000"], "trace-tokens": ["900"],
    });
    let checkpoint = Checkpoint::open(model).unwrap();
    let header = json!({
        "format": "powerinfer-settings", "version": 1, "tool": "a test", "model": checkpoint.identity(),
        "inputs": {}, "seed": 0, "settings": {},
    });
    json!({ "header": header, "options": options }).to_string()
}

/// A folder with `./my-model`, which is the demo, and the files that examples name.
fn folder() -> Sandbox {
    let sandbox = Sandbox::new();
    let write = |name: &str, bytes: &[u8]| {
        let path = sandbox.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    for (name, bytes) in powerinfer_datasets::demo::FILES {
        write(&format!("my-model/{name}"), bytes);
    }
    let text =
        "def f(xs):\n    \"\"\"Return the sum of xs.\"\"\"\n    return sum(xs)\n\n\n".repeat(600);
    let sizes = [
        ("articles/a.txt", 15_000),
        ("text/a.txt", text.len()),
        ("text.txt", 15_000),
        ("held-out.txt", 3_000),
        ("prompt.txt", 40),
    ];
    for (name, size) in sizes {
        write(name, &text.as_bytes()[..size]);
    }
    write("article.txt", b"def f(x):\n    return x\n");
    let original = golden_model("..").join("gguf/tiny.powerinfer.f16.gguf");
    fs::copy(original, sandbox.path("model.powerinfer.gguf")).unwrap();
    let other = golden_model("..").join("gguf/llama-sp.q4_0.gguf");
    fs::copy(&other, sandbox.path("other-model.gguf")).unwrap();
    copy_folder(&golden_model("llama-silu"), &sandbox.path("other-model"));
    for (name, model) in [
        ("demo", sandbox.path("my-model")),
        ("my-model", sandbox.path("my-model")),
        ("other-model", other),
        ("prosparse-llama-2-7b", golden_model("llama-relu-gqa")),
    ] {
        write(
            &format!("{name}.powerinfer/settings.json"),
            quick(&model, "none").as_bytes(),
        );
    }
    let problem = |number: usize| {
        json!({
            "task_id": format!("Mine/{number}"), "prompt": "def double(x):\n    \"\"\" Twice x. \"\"\"\n",
            "entry_point": "double", "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(3) == 6\n",
        })
    };
    let problems = format!("{}\n{}\n", problem(0), problem(1));
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(problems.as_bytes()).unwrap();
    write("HumanEval.jsonl.gz", &packed.finish().unwrap());
    let samples = json!({ "task_id": "Mine/0", "completion": "    return x + x\n" });
    write(
        "samples-from-elsewhere.jsonl",
        format!("{samples}\n").as_bytes(),
    );
    let question =
        json!({ "context": "def f(x):\n    return x", "choices": [" + 1", " banana"], "label": 0 });
    write("questions.jsonl", format!("{question}\n").as_bytes());
    let sum = json!({ "question": "1 + 1?", "answer": "It is 2.\n#### 2" });
    write("test.jsonl", format!("{sum}\n").repeat(7).as_bytes());
    sandbox
}

/// A folder with bundles of `my-model` and of the demo.
fn prepared() -> &'static Sandbox {
    static PREPARED: OnceLock<Sandbox> = OnceLock::new();
    PREPARED.get_or_init(|| {
        let sandbox = folder();
        sandbox
            .run(&["prepare", "./my-model", "--data", "text.txt", "--vram", "0"])
            .good();
        sandbox
            .run(&words(
                "profile model.powerinfer.gguf --data text.txt --tokens 2000",
            ))
            .good();
        copy_folder(
            crate::sandbox::prepared_demo(),
            &sandbox.path("demo.powerinfer"),
        );
        let settings = sandbox.path("demo.powerinfer/settings.json");
        fs::write(settings, quick(&sandbox.path("my-model"), "none")).unwrap();
        sandbox
    })
}

/// Command lines of `text` that this program takes part in, and those that make folders for it.
fn our_lines(text: &str) -> Vec<String> {
    let is_ours = |line: &String| {
        let starts = ["powerinfer ", "cat ", "echo ", "printf "];
        let starts = starts.iter().any(|start| line.starts_with(start));
        line.starts_with("mkdir ") || starts && line.contains("powerinfer ")
    };
    command_lines(text).into_iter().filter(is_ours).collect()
}

/// Command lines in the blocks of a page.
fn page(name: &str) -> Vec<String> {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(name);
    let text = fs::read_to_string(path).unwrap();
    let blocks = text.split("```").skip(1).step_by(2);
    let shell = blocks.filter_map(|block| block.strip_prefix("sh\n"));
    shell.flat_map(our_lines).collect()
}

/// Runs `lines` in `folder`; a line with a shard is run for every shard.
fn run_all(folder: &Path, lines: &[String], hub: &str) {
    let program = Path::new(env!("CARGO_BIN_EXE_powerinfer"))
        .parent()
        .unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    for line in lines {
        // The model has 6 layers.
        let line = &line
            .replace("--shard 1/8", "--shard 1/6")
            .replace("-of-8", "-of-6");
        if NOT_RUN.iter().any(|(part, _)| line.contains(part))
            || line.contains("humaneval") && !can_judge()
        {
            continue;
        }
        let shards = line.split("shard 1/").nth(1).map(|rest| {
            let count = rest.split_whitespace().next().unwrap_or(rest);
            count.parse::<usize>().unwrap()
        });
        for shard in 1..=shards.unwrap_or(1) {
            let line = line.replace("shard 1/", &format!("shard {shard}/"));
            let output = Command::new("bash")
                .args(["-c", &line])
                .current_dir(folder)
                .env("PATH", &path)
                .env("HOME", folder.join("home"))
                .env("HF_HUB_CACHE", folder.join("hub"))
                .env("HF_ENDPOINT", hub)
                .env("NO_PROXY", "127.0.0.1")
                .env_remove("HF_HUB_OFFLINE")
                .env("POWERINFER_CACHE", folder.join("cache"))
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{line}\n{errors}");
        }
    }
}

#[test]
fn examples_of_the_pages_run_in_order() {
    let server = HubServer::of_folder(
        "SparseLLM/prosparse-llama-2-7b",
        &golden_model("llama-relu-gqa"),
    );
    let pages = [
        "evaluation",
        "gpu",
        "large-models",
        "models",
        "serving",
        "tuning",
    ];
    let pages = pages.map(|name| format!("docs/guide/{name}.md"));
    let mut count = 0;
    for name in ["README.md".to_owned()].iter().chain(&pages) {
        let lines = page(name);
        count += lines.len();
        let sandbox = folder();
        // Models that a page does not prepare were prepared on an earlier page.
        if !lines.iter().any(|line| line.contains("prepare ./my-model")) {
            copy_folder(&prepared().path(""), &sandbox.path(""));
        }
        if name.contains("large-models") {
            let settings = sandbox.path("my-model.powerinfer/settings.json");
            fs::write(settings, quick(&sandbox.path("my-model"), "quick")).unwrap();
        }
        run_all(&sandbox.path(""), &lines, &server.endpoint);
    }
    assert!(count > 30, "{count}");
}

#[test]
fn examples_of_the_help_run() {
    let snapshot = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/snapshots/powerinfer__help_test__help.snap");
    let help = fs::read_to_string(snapshot).unwrap();
    let commands: Vec<&str> = help.split("\n$ powerinfer").collect();
    assert!(commands.len() > 30, "{}", commands.len());
    for command in commands {
        let examples = command
            .split_once("\nExample")
            .map_or("", |(_, examples)| examples);
        let lines = our_lines(examples);
        let name = command.lines().next().unwrap_or_default();
        // Merging needs shards, which the guide's examples make.
        if lines.is_empty() || name.contains("merge") || name.contains("pull") {
            continue;
        }
        let sandbox = folder();
        copy_folder(&prepared().path(""), &sandbox.path(""));
        run_all(&sandbox.path(""), &lines, "");
    }
}
