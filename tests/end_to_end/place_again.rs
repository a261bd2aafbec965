//! `place` on a bundle: another plan for the same weights.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use powerinfer_artifact::{
    Digest,
    document::Document,
    plan::{BudgetLine, Plan},
};
use powerinfer_bundle::{DENSE_VERSION, FORMAT, Manifest};
use powerinfer_model::{ModelConfig, Positions};
use serde_json::Value;

use crate::sandbox::{QUICK, Run, Sandbox, assert_contains, golden_model, words};

/// Path of the demo's bundle in its sandbox.
pub(crate) const BUNDLE: &str = "demo.powerinfer/bundle";

/// A sandbox with the prepared demo, and the path of its bundle.
pub(crate) fn demo() -> (Sandbox, PathBuf) {
    let sandbox = Sandbox::new();
    let bundle = sandbox.copy_demo().join("bundle");
    (sandbox, bundle)
}

/// Runs `place` on the bundle with these options.
pub(crate) fn place(sandbox: &Sandbox, more: &[&str]) -> Run {
    sandbox.run(&[&["place", BUNDLE], more].concat())
}

/// The contents of every file in `folder`, by name.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap();
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    };
    entries.map(file).collect()
}

/// The plan of a bundle.
fn plan(bundle: &Path) -> Plan {
    let path = bundle.join("plan.json");
    Document::read(&path, "powerinfer-plan", 3).unwrap().body
}

/// The plan without the reasons of its policies.
fn without_reasons(mut plan: Plan) -> Plan {
    for layer in &mut plan.layers {
        layer.reason.clear();
    }
    plan
}

/// Edits the manifest of `bundle` and updates its digests.
fn reseal(bundle: &Path, edit: impl FnOnce(&mut Document<Manifest>)) {
    let path = bundle.join("manifest.json");
    let mut document: Document<Manifest> = Document::read(&path, FORMAT, DENSE_VERSION).unwrap();
    edit(&mut document);
    for (name, digest) in &mut document.body.files {
        *digest = Digest::of_file(&bundle.join(name)).unwrap();
    }
    document.body.seal = None;
    document.body.seal = Some(Digest::from_content(&document.to_bytes()));
    document.write(&path).unwrap();
}

#[test]
fn placing_again_changes_only_the_plan_and_keeps_the_text() {
    let (sandbox, bundle) = demo();
    place(
        &sandbox,
        &["--vram", "24G", "--hardware", sandbox.slow_host()],
    )
    .good();
    let run = || {
        let arguments = ["run", "demo", "--prompt", "def f(xs):", "--json"];
        sandbox.run(&arguments).good().json()["completion"].clone()
    };
    let (before, first, text) = (files(&bundle), plan(&bundle), run());

    let placed = place(&sandbox, &["--vram", "70M", "--json"]).good().json();
    let less = plan(&bundle);
    assert_eq!(
        placed["plan"],
        serde_json::to_value(&less).unwrap(),
        "the printed plan is the written one"
    );
    let certificate: Value = serde_json::from_slice(&before["certificate.json"]).unwrap();
    assert_eq!(placed["certificate"]["scoring"], certificate["scoring"]);
    assert!(0 < less.totals.hot_count && less.totals.hot_count < first.totals.hot_count);
    for (before, now) in first.layers.iter().zip(&less.layers) {
        assert_eq!(
            (before.policy, before.threshold, before.input_thresholds),
            (now.policy, now.threshold, now.input_thresholds)
        );
    }
    let after = files(&bundle);
    assert!(
        after.keys().eq(before.keys()),
        "the files have the same names"
    );
    for (name, bytes) in &after {
        let may_change = ["plan.json", "manifest.json"].contains(&name.as_str());
        assert!(may_change || *bytes == before[name], "{name}");
    }
    let inspect = sandbox.run(&["inspect", BUNDLE, "--verify"]).good().text();
    assert_contains(
        &inspect,
        &["the certificate is of these weights, this plan"],
    );
    assert_eq!(run(), text);

    // Placing with the same budget changes nothing; the first budget restores the first plan.
    sandbox
        .run(&["place", "demo.powerinfer", "--vram", "70M"])
        .good();
    assert_eq!(
        files(&bundle),
        after,
        "the same budget gives the same bytes"
    );
    place(&sandbox, &["--vram", "24G"]).good();
    assert_eq!(without_reasons(plan(&bundle)), without_reasons(first));
    assert_eq!(run(), text);
}

#[test]
fn every_budget_can_change() {
    let (sandbox, bundle) = demo();
    let before = plan(&bundle);
    place(&sandbox, &["--vram", "0G", "--context", "64"]).good();
    let short = plan(&bundle);
    assert_eq!(short.budget.context_tokens, 64);
    assert_eq!(short.budget.ram_bytes, before.budget.ram_bytes);
    assert_eq!(short.totals.gpu_bytes, 0);
    assert!(short.line("KV cache") < before.line("KV cache"));
    let long = "def f(xs):\n".repeat(40);
    sandbox
        .run(&["run", "demo", "--prompt", &long])
        .bad(1, &["64"]);
    let measured = ["eval", "fidelity", BUNDLE, "--certificate"];
    sandbox
        .run(&measured)
        .bad(1, &["windows of", "longer `--context`"]);
    place(
        &sandbox,
        &words("--vram 1G --ram 100M --hardware pc-low --context 512"),
    )
    .good();
    let other = plan(&bundle);
    assert_eq!(other.hardware.name, "pc-low");
    assert_eq!(other.budget.ram_bytes, 100 << 20);
    place(&sandbox, &["--vram", "2G"]).good();
    let kept = plan(&bundle);
    assert_eq!(
        (
            kept.hardware.name.as_str(),
            kept.budget.ram_bytes,
            kept.budget.context_tokens
        ),
        ("pc-low", 100 << 20, 512),
        "options that are not given keep their values"
    );
    sandbox.run(&measured).good();
    // A plan for a machine without a GPU says nothing about the memory of one, and the reverse.
    place(&sandbox, &words("--reset --hardware cpu-only")).good();
    assert_eq!(plan(&bundle).totals.gpu_bytes, 0);
    place(&sandbox, &words("--hardware rtx4090")).good();
    assert!(plan(&bundle).totals.gpu_bytes > 0);
}

#[test]
fn options_that_change_more_than_the_plan_are_refused() {
    let (sandbox, bundle) = demo();
    let before = files(&bundle);
    for option in [
        ["--quant", "q4_0"],
        ["--policy", "dense"],
        ["--max-ppl-increase", "1%"],
        ["--input-sparsity", "20%"],
        ["--certify", "100"],
        ["--profile", "demo.powerinfer/profile"],
        ["--predictors", "demo.powerinfer/predictors"],
        ["--out", "elsewhere"],
    ] {
        let arguments = [&["--vram", "1G"], &option[..]].concat();
        let parts = [
            "is a bundle",
            option[0],
            "requires the model, not the bundle",
        ];
        place(&sandbox, &arguments).bad(1, &parts);
    }
    place(&sandbox, &["--vram", "1G", "--context", "100000"]).bad(1, &["tokens, not 100000"]);
    place(&sandbox, &["--vram", "1G", "--context", "0"]).bad(1, &["tokens, not 0"]);
    place(&sandbox, &["--vram", "0G", "--ram", "1M"]).bad(1, &["raise `--ram`"]);
    place(&sandbox, &["--vram", "1G", "--hardware", "cpu-only"]).bad(1, &["cpu-only"]);
    place(&sandbox, &["--vram", "1G", "--hardware", "abacus"]).bad(1, &["abacus"]);
    place(&sandbox, &["--dry-run"]).good();
    place(&sandbox, &["--vram", "70M", "--dry-run"]).good();
    assert_eq!(files(&bundle), before);
}

#[test]
fn other_files_and_damaged_bundles_are_refused() {
    let (sandbox, bundle) = demo();
    let again = || place(&sandbox, &["--vram", "1G"]);
    fs::create_dir(sandbox.path("web")).unwrap();
    fs::write(sandbox.path("web/manifest.json"), "{\"name\": \"app\"}").unwrap();
    sandbox
        .run(&["place", "web", "--vram", "1G"])
        .bad(1, &["manifest.json", "without a PowerInfer header"]);

    for name in [
        "plan.json",
        "frequencies.safetensors",
        "weights.safetensors",
    ] {
        let whole = fs::read(bundle.join(name)).unwrap();
        let mut spoilt = whole.clone();
        let last = spoilt.len() - 3;
        spoilt[last] ^= 1;
        fs::write(bundle.join(name), spoilt).unwrap();
        again().bad(1, &[name, "damaged"]);
        fs::remove_file(bundle.join(name)).unwrap();
        again().bad(1, &[name]);
        fs::write(bundle.join(name), whole).unwrap();
    }
    again().good();
    // Valid digests, but an invalid frequency.
    let path = bundle.join("frequencies.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    reseal(&bundle, |_| {});
    again().bad(1, &["cannot re-plan", "neuron 767"]);
}

#[test]
fn a_manifest_whose_configuration_contradicts_itself_is_refused() {
    let (sandbox, bundle) = demo();
    let path = bundle.join("manifest.json");
    let whole = fs::read(&path).unwrap();
    let contradictions: [fn(&mut ModelConfig); 9] = [
        |config| config.attention_windows.truncate(1),
        |config| config.attention_windows[0] = Some(0),
        |config| config.kv_head_count = 0,
        |config| config.head_size = 0,
        |config| config.head_size = 1 << 40,
        |config| config.context_length = 0,
        |config| config.norm_epsilon = 0.0,
        |config| config.vocabulary_size = usize::MAX,
        |config| {
            if let Positions::Rotary(rotary) = &mut config.positions {
                rotary.frequencies.resize(1000, 1.0);
            }
        },
    ];
    for contradict in contradictions {
        reseal(&bundle, |document| contradict(&mut document.body.config));
        sandbox
            .run(&["run", "demo", "--prompt", "x"])
            .bad(1, &["manifest.json", "the configuration in"]);
        fs::write(&path, &whole).unwrap();
    }
    sandbox
        .run(&["run", "demo", "--prompt", "x", "--max-tokens", "1"])
        .good();
}

#[test]
fn bundles_of_older_versions_are_refused() {
    let (sandbox, bundle) = demo();
    let path = bundle.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let older = DENSE_VERSION - 1;
    let changed = text.replacen(
        &format!("\"version\": {DENSE_VERSION}"),
        &format!("\"version\": {older}"),
        1,
    );
    assert_ne!(changed, text);
    fs::write(&path, changed).unwrap();
    let older = format!("version {older}");
    for arguments in [&["run", "demo"][..], &["place", BUNDLE, "--vram", "1G"]] {
        sandbox.run(arguments).bad(1, &[&older, "make it again"]);
    }
}

#[test]
fn a_plan_with_another_memory_account_than_the_bundle_is_refused() {
    let (sandbox, bundle) = demo();
    let options = [
        "--vram",
        "70M",
        "--context",
        "64",
        "--hardware",
        sandbox.slow_host(),
    ];
    place(&sandbox, &options).good();
    let (path, whole) = (bundle.join("plan.json"), plan(&bundle));
    let mut document: Document<Plan> = Document::read(&path, "powerinfer-plan", 3).unwrap();
    let mut refused = |edit: &dyn Fn(&mut Plan), parts: &[&str]| {
        document.body = whole.clone();
        edit(&mut document.body);
        document.write(&path).unwrap();
        let damaged = ["plan.json", "damaged"];
        let run = ["run", "demo", "--prompt", "x", "--device", "cpu"];
        sandbox.run(&run).bad(1, &damaged);
        reseal(&bundle, |_| {});
        sandbox.run(&run).bad(1, parts);
    };
    for name in [
        "attention",
        "predictors",
        "KV cache",
        "scratch",
        "embeddings",
    ] {
        let edit = |plan: &mut Plan| {
            // Only the CPU's scratch has a fixed size. It also has room for copies, which make prompts faster.
            let of_cpu = |line: &BudgetLine| line.device == powerinfer_artifact::plan::Device::Cpu;
            let mut lines = plan.lines.iter_mut().filter(|line| line.name == name);
            let line = lines
                .find(|line| name != "scratch" || of_cpu(line))
                .unwrap();
            let less = if name == "scratch" { 2 << 20 } else { 4 };
            line.bytes -= less;
            match line.device {
                powerinfer_artifact::plan::Device::Gpu => plan.totals.gpu_bytes -= less,
                powerinfer_artifact::plan::Device::Cpu => plan.totals.cpu_bytes -= less,
            }
            // The layers may not take more than the lines.
            for layer in &mut plan.layers {
                (layer.gpu_bytes, layer.cpu_bytes) = (0, 0);
            }
        };
        let message = format!("bytes for `{name}`, but running takes");
        refused(
            &edit,
            &[&message, "hint: run `powerinfer place demo` again"],
        );
    }
    refused(&|plan| plan.lines[0].bytes -= 4, &["totals.gpu_bytes"]);
    refused(
        &|plan| plan.budget.vram_bytes = 1 << 20,
        &["its budget is 1.0 MiB"],
    );
    refused(
        &|plan| plan.budget.context_tokens += 1,
        &["but running takes"],
    );
    refused(
        &|plan| plan.lines.push(plan.lines[0].clone()),
        &["two lines `reserve`"],
    );
    refused(&|plan| plan.lines.clear(), &["totals."]);
}

#[test]
fn prepare_detects_a_bundle_that_was_placed_again() {
    let (sandbox, bundle) = demo();
    let before = files(&bundle);
    let prepare = || {
        let arguments = [&["prepare", "demo", "--vram", "24G"][..], &QUICK].concat();
        let message = sandbox.run(&arguments).good().stderr;
        message.matches("up to date").count()
    };
    assert_eq!(prepare(), 3);
    place(&sandbox, &["--vram", "70M"]).good();
    assert_eq!(prepare(), 2, "the plan has another budget");
    assert_eq!(files(&bundle), before);
    assert_eq!(prepare(), 3);
}

#[test]
fn a_plan_is_drawn_on_one_page() {
    let (sandbox, bundle) = demo();
    let before = files(&bundle);
    fs::create_dir(sandbox.path("pages")).unwrap();
    let draw = |model: &str, page: &str| {
        let arguments = ["place", model, "--vram", "70M", "--dry-run", "--html", page];
        let run = sandbox.run(&arguments).good();
        run.stderr_contains(&[&format!("drawn in `{page}`")]);
        fs::read_to_string(sandbox.path(page)).unwrap()
    };
    for model in ["demo", BUNDLE] {
        let page = draw(model, "page.html");
        assert_eq!(
            page,
            draw(model, "pages/again.html"),
            "pages are reproducible"
        );
        for part in [
            "<!doctype html>",
            "layer 5",
            "hot neurons",
            "KV cache",
            "</html>",
        ] {
            assert!(page.contains(part), "{part}");
        }
        for part in ["<script", "src=", "href=", "http", "NaN"] {
            assert!(!page.contains(part), "{part}");
        }
    }
    let inside = format!("{BUNDLE}/page.html");
    for model in ["demo", BUNDLE] {
        sandbox
            .run(&["place", model, "--vram", "1G", "--html", &inside])
            .bad(1, &["would be among the files of"]);
    }
    assert_eq!(files(&bundle), before);
}

#[test]
fn memory_accounts_of_all_kinds_of_models_stay_valid_after_placing_again() {
    let sandbox = Sandbox::new();
    let machine = sandbox.slow_host();
    let text = "a few words to calibrate on, again and again, until there are enough of them. ";
    fs::write(sandbox.path("text.txt"), text.repeat(120)).unwrap();
    // Tied heads and biases, input sparsity, thresholds, projections of the embeddings.
    for (name, quant, more) in [
        ("qwen2-bias-tied", "q4_0", &[][..]),
        ("llama-silu", "q8_0", &["--input-sparsity", "30%"]),
        ("gemma", "bf16", &["--max-ppl-increase", "5%"]),
        ("opt-postln-proj", "f32", &[]),
    ] {
        let model = golden_model(name);
        let model = model.to_str().unwrap();
        sandbox
            .run(&[
                "profile",
                model,
                "--data",
                "text.txt",
                "--trace-tokens",
                "800",
            ])
            .good();
        sandbox
            .run(&["train-predictors", model, "--steps", "5"])
            .good();
        let place = ["place", model, "--quant", quant, "--hardware", machine];
        sandbox
            .run(&[&place[..], &["--vram", "0"], more].concat())
            .good();
        let work = format!("{name}.powerinfer");
        let bundle = sandbox.path(&work).join("bundle");
        let run = || {
            let run = ["run", &work, "--prompt", "words", "-n", "4", "--json"];
            sandbox.run(&run).good().json()["completion"].clone()
        };
        let (before, text) = (plan(&bundle), run());
        sandbox.run(&["place", &work, "--vram", "24G"]).good();
        let after = plan(&bundle);
        let neurons = after.totals.neuron_count;
        assert_eq!(
            (before.totals.hot_count, after.totals.hot_count),
            (0, neurons)
        );
        let kept = |plan: &Plan| {
            let layers = plan.layers.iter();
            let kept = layers.map(|l| (l.policy, l.threshold, l.input_thresholds));
            kept.collect::<Vec<_>>()
        };
        assert_eq!(kept(&before), kept(&after), "{name}");
        assert_eq!(run(), text, "{name}");
        let back = ["place", &work, "--vram", "0", "--hardware", machine];
        sandbox.run(&back).good();
        assert_eq!(
            without_reasons(plan(&bundle)),
            without_reasons(before),
            "{name}"
        );
        let measured = ["inspect", &work, "--verify"];
        sandbox.run(&measured).good();
    }
}
