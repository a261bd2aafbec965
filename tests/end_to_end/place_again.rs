//! A bundle that is placed again: what changes, what stays, and what is refused.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use powerinfer_artifact::{Digest, document::Document, plan::Plan};
use powerinfer_bundle::{FORMAT, Manifest, VERSION};
use serde_json::Value;

use crate::sandbox::{QUICK, Run, Sandbox, golden_model};

/// Where a copy of the prepared demo has its bundle.
const BUNDLE: &str = "demo.powerinfer/bundle";

/// A sandbox with the prepared demo in it.
fn demo() -> (Sandbox, PathBuf) {
    let sandbox = Sandbox::new();
    let bundle = sandbox.copy_demo().join("bundle");
    (sandbox, bundle)
}

fn place(sandbox: &Sandbox, more: &[&str]) -> Run {
    sandbox.run(&[&["place", BUNDLE], more].concat())
}

/// The bytes of every file in `folder`.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap();
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    };
    entries.map(file).collect()
}

fn plan(bundle: &Path) -> Plan {
    let path = bundle.join("plan.json");
    Document::read(&path, "powerinfer-plan", 3).unwrap().body
}

/// The plan without its words.
fn wordless(mut plan: Plan) -> Plan {
    for layer in &mut plan.layers {
        layer.reason.clear();
    }
    plan
}

/// Changes the manifest of `bundle` and makes its digests right, as a person who edits it could.
fn reseal(bundle: &Path, edit: impl FnOnce(&mut Document<Manifest>)) {
    let path = bundle.join("manifest.json");
    let mut document: Document<Manifest> = Document::read(&path, FORMAT, VERSION).unwrap();
    edit(&mut document);
    for (name, digest) in &mut document.body.files {
        *digest = Digest::of_file(&bundle.join(name)).unwrap();
    }
    document.body.seal = None;
    document.body.seal = Some(Digest::of(&document.to_bytes()));
    document.write(&path).unwrap();
}

#[test]
fn only_the_plan_changes_and_the_text_does_not() {
    let (sandbox, bundle) = demo();
    let run = || {
        let arguments = ["run", "demo", "--prompt", "def f(xs):", "--json"];
        sandbox.run(&arguments).good().json()["completion"].clone()
    };
    let (before, first, text) = (files(&bundle), plan(&bundle), run());

    let placed = place(&sandbox, &["--vram", "517M", "--json"]).good().json();
    let less = plan(&bundle);
    assert_eq!(
        placed["plan"],
        serde_json::to_value(&less).unwrap(),
        "what is printed is what is written"
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
    assert!(after.keys().eq(before.keys()), "no file is new or gone");
    for (name, bytes) in &after {
        let may_change = ["plan.json", "manifest.json"].contains(&name.as_str());
        assert!(may_change || *bytes == before[name], "{name}");
    }
    let inspect = sandbox.run(&["inspect", BUNDLE, "--verify"]).good().text();
    assert!(
        inspect.contains("the certificate is of these weights, this plan"),
        "{inspect}"
    );
    assert_eq!(run(), text);

    // Asked for once more, by the folder it is in, it is the same; and the way back leads back.
    sandbox
        .run(&["place", "demo.powerinfer", "--vram", "517M"])
        .good();
    assert_eq!(files(&bundle), after, "the same again gives the same bytes");
    place(&sandbox, &["--vram", "24G"]).good();
    assert_eq!(wordless(plan(&bundle)), wordless(first));
    assert_eq!(run(), text);
}

#[test]
fn budgets_of_every_kind_can_change() {
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
        &[
            "--vram",
            "1G",
            "--ram",
            "100M",
            "--hardware",
            "pc-low",
            "--context",
            "512",
        ],
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
        "what is not said stays as it is"
    );
    sandbox.run(&measured).good();
}

#[test]
fn what_would_change_more_than_the_plan_is_refused() {
    let (sandbox, bundle) = demo();
    let before = files(&bundle);
    for option in [
        ["--quant", "q4_0"],
        ["--policy", "dense"],
        ["--max-ppl-increase", "1%"],
        ["--input-sparsity", "20%"],
        ["--certify-tokens", "100"],
        ["--profile", "demo.powerinfer/profile"],
        ["--predictors", "demo.powerinfer/predictors"],
        ["--out", "elsewhere"],
    ] {
        let arguments = [&["--vram", "1G"], &option[..]].concat();
        let parts = ["is a bundle", option[0], "the model that it was made from"];
        place(&sandbox, &arguments).bad(1, &parts);
    }
    place(&sandbox, &["--vram", "1G", "--context", "100000"])
        .bad(1, &["no room for 100000 tokens of context"]);
    place(&sandbox, &["--vram", "1G", "--context", "0"])
        .bad(1, &["no room for 0 tokens of context"]);
    place(&sandbox, &["--vram", "0G", "--ram", "1M"]).bad(1, &["allow `"]);
    place(&sandbox, &["--vram", "1G", "--hardware", "cpu-only"]).bad(1, &["cpu-only"]);
    place(&sandbox, &["--vram", "1G", "--hardware", "abacus"]).bad(1, &["abacus"]);
    place(&sandbox, &[]).bad(2, &["--vram"]);
    place(&sandbox, &["--vram", "517M", "--dry-run"]).good();
    assert_eq!(files(&bundle), before);
}

#[test]
fn what_is_no_bundle_of_ours_or_a_damaged_one_is_refused() {
    let (sandbox, bundle) = demo();
    let again = || place(&sandbox, &["--vram", "1G"]);
    fs::create_dir(sandbox.path("web")).unwrap();
    fs::write(sandbox.path("web/manifest.json"), "{\"name\": \"app\"}").unwrap();
    sandbox
        .run(&["place", "web", "--vram", "1G"])
        .bad(1, &["manifest.json", "without a header of ours"]);

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
    // Right digests, but figures that cannot be.
    let path = bundle.join("frequencies.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    reseal(&bundle, |_| {});
    again().bad(1, &["cannot place", "neuron 767"]);
}

#[test]
fn bundles_of_other_versions_are_refused() {
    let (sandbox, bundle) = demo();
    let relabel = |from: u32, to: u32| {
        let path = bundle.join("manifest.json");
        let text = fs::read_to_string(&path).unwrap();
        let (from, to) = (format!("\"version\": {from}"), format!("\"version\": {to}"));
        fs::write(&path, text.replacen(&from, &to, 1)).unwrap();
    };
    relabel(VERSION, VERSION - 1);
    let older = format!("version {}", VERSION - 1);
    for arguments in [&["run", "demo"][..], &["place", "demo", "--vram", "1G"]] {
        sandbox.run(arguments).bad(1, &[&older, "make it again"]);
    }
    relabel(VERSION - 1, 99);
    sandbox.run(&["run", "demo"]).bad(1, &["version 99"]);
}

#[test]
fn a_plan_that_claims_other_memory_than_running_takes_is_refused() {
    let (sandbox, bundle) = demo();
    place(&sandbox, &["--vram", "517M", "--context", "64"]).good();
    let (path, whole) = (bundle.join("plan.json"), plan(&bundle));
    let mut document: Document<Plan> = Document::read(&path, "powerinfer-plan", 3).unwrap();
    let mut refused = |edit: &dyn Fn(&mut Plan), parts: &[&str]| {
        document.body = whole.clone();
        edit(&mut document.body);
        document.write(&path).unwrap();
        let damaged = ["plan.json", "damaged"];
        sandbox
            .run(&["run", "demo", "--prompt", "x"])
            .bad(1, &damaged);
        reseal(&bundle, |_| {});
        sandbox.run(&["run", "demo", "--prompt", "x"]).bad(1, parts);
    };
    for name in [
        "attention",
        "predictors",
        "KV cache",
        "scratch",
        "embeddings",
    ] {
        let edit = |plan: &mut Plan| {
            let line = plan.lines.iter_mut().find(|line| line.name == name);
            let line = line.unwrap();
            line.bytes -= 4;
            match line.device {
                powerinfer_artifact::plan::Device::Gpu => plan.totals.gpu_bytes -= 4,
                powerinfer_artifact::plan::Device::Cpu => plan.totals.cpu_bytes -= 4,
            }
            // The layers are not to be more than the lines.
            for layer in &mut plan.layers {
                (layer.gpu_bytes, layer.cpu_bytes) = (0, 0);
            }
        };
        let told = format!("bytes for `{name}`, but running takes");
        refused(&edit, &[&told, "hint: run `powerinfer place` again"]);
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
        &["two lines `CUDA context and reserve`"],
    );
    refused(&|plan| plan.lines.clear(), &["totals."]);
}

/// A file of a bundle.
type NamedBytes<'a> = (&'a str, &'a Vec<u8>);

#[test]
fn killed_at_any_point_it_leaves_a_bundle() {
    let (sandbox, bundle) = demo();
    let old = files(&bundle);
    place(&sandbox, &["--vram", "517M"]).good();
    let new = files(&bundle);
    let put = |files: &[NamedBytes<'_>]| {
        for (name, bytes) in files {
            fs::write(bundle.join(name), bytes).unwrap();
        }
    };
    let hot = || {
        let json = sandbox.run(&["inspect", BUNDLE, "--json", "--verify"]);
        json.good().json()["plan"]["totals"]["hot_count"].clone()
    };
    let [old_hot, new_hot] = [&old, &new].map(|files| {
        let plan: Value = serde_json::from_slice(&files["plan.json"]).unwrap();
        plan["totals"]["hot_count"].clone()
    });
    let (plan, next) = ("plan.json", "plan.next.json");
    let half = b"{ \"header\": {".to_vec();
    let states: [(&[NamedBytes<'_>], &Value); 4] = [
        // While the next plan was written.
        (
            &[
                ("manifest.json", &old["manifest.json"]),
                (plan, &old[plan]),
                (".powerinfer-a.partial", &half),
            ],
            &old_hot,
        ),
        // Before the manifest was.
        (
            &[
                ("manifest.json", &old["manifest.json"]),
                (plan, &old[plan]),
                (next, &new[plan]),
            ],
            &old_hot,
        ),
        // After it was.
        (
            &[
                ("manifest.json", &new["manifest.json"]),
                (plan, &old[plan]),
                (next, &new[plan]),
            ],
            &new_hot,
        ),
        // In the end.
        (
            &[("manifest.json", &new["manifest.json"]), (plan, &new[plan])],
            &new_hot,
        ),
    ];
    for (state, expected) in states {
        put(state);
        assert_eq!(hot(), *expected);
        sandbox
            .run(&["run", "demo", "--prompt", "def f(xs):", "-n", "2"])
            .good();
        place(&sandbox, &["--vram", "517M"]).good();
        assert_eq!(
            files(&bundle),
            new,
            "what was left is gone, and nothing else"
        );
    }
    // A plan that nobody meant is not taken for the next one.
    put(&[(plan, &half), (next, &old[plan])]);
    place(&sandbox, &["--vram", "1G"]).bad(1, &["plan.json", "damaged"]);
}

#[cfg(unix)]
#[test]
fn killed_at_some_moment_it_leaves_a_bundle_and_one_run_works_at_a_time() {
    let (sandbox, bundle) = demo();
    for round in 0..24 {
        let vram = ["0G", "517M", "24G"][round % 3];
        let mut child = sandbox
            .command(&["place", BUNDLE, "--vram", vram])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(4 * round as u64));
        let _ = child.kill(); // it may have ended
        child.wait().unwrap();
        powerinfer_bundle::Bundle::open(&bundle, powerinfer_bundle::Verification::Full).unwrap();
    }
    // Whoever opens it meanwhile finds one or the other.
    for vram in ["0G", "517M", "24G", "0G"] {
        let mut child = sandbox
            .command(&["place", BUNDLE, "--vram", vram])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while child.try_wait().unwrap().is_none() {
            powerinfer_bundle::Bundle::open(&bundle, powerinfer_bundle::Verification::Quick)
                .unwrap();
        }
    }
    let lock = fs::File::open(&bundle).unwrap();
    lock.try_lock().unwrap();
    place(&sandbox, &["--vram", "0G"]).bad(1, &["another run"]);
    drop(lock);
    place(&sandbox, &["--vram", "0G"]).good();
}

#[test]
fn preparing_is_not_fooled_by_a_bundle_that_was_placed_again() {
    let (sandbox, bundle) = demo();
    let before = files(&bundle);
    let prepare = || {
        let arguments = [&["prepare", "demo", "--vram", "24G"][..], &QUICK].concat();
        let told = sandbox.run(&arguments).good().stderr;
        told.matches("up to date").count()
    };
    assert_eq!(prepare(), 3);
    place(&sandbox, &["--vram", "517M"]).good();
    assert_eq!(prepare(), 2, "its policies are those of another request");
    assert_eq!(files(&bundle), before);
    assert_eq!(prepare(), 3);
}

#[test]
fn a_plan_is_drawn_as_one_page() {
    let (sandbox, bundle) = demo();
    let before = files(&bundle);
    let draw = |model: &str, page: &str| {
        let arguments = [
            "place",
            model,
            "--vram",
            "517M",
            "--dry-run",
            "--html",
            page,
        ];
        let run = sandbox.run(&arguments).good();
        assert!(run.stderr.contains(&format!("drawn in `{page}`")));
        fs::read_to_string(sandbox.path(page)).unwrap()
    };
    for model in ["demo", BUNDLE] {
        let page = draw(model, "page.html");
        assert_eq!(page, draw(model, "pages/again.html"), "the same bytes");
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
            .bad(1, &["the bundle's own files"]);
    }
    assert_eq!(files(&bundle), before);
}

#[test]
fn models_of_other_kinds_hold_their_lines_wherever_they_are_placed() {
    let sandbox = Sandbox::new();
    let text = "a few words to calibrate on, again and again, until there are enough of them. ";
    fs::write(sandbox.path("text.txt"), text.repeat(120)).unwrap();
    // Tied heads and biases, thresholds, inputs left out, projections of the embeddings.
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
        let place = ["place", model, "--quant", quant, "--vram"];
        sandbox.run(&[&place[..], &["0G"], more].concat()).good();
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
        sandbox.run(&["place", &work, "--vram", "0G"]).good();
        assert_eq!(wordless(plan(&bundle)), wordless(before), "{name}");
        let measured = ["inspect", &work, "--verify"];
        sandbox.run(&measured).good();
    }
}
