//! `place` on a bundle, interrupted at any point.

use std::{collections::BTreeSet, fs, process::Stdio};

use powerinfer_artifact::document::Document;
use powerinfer_bundle::{Bundle, IntegrityCheck, Manifest};
use serde_json::Value;

use crate::place_again::{BUNDLE, demo, files, place};

/// Name and contents of a file of a bundle.
type NamedBytes<'a> = (&'a str, &'a Vec<u8>);

#[test]
fn every_state_of_an_interrupted_replacement_is_a_valid_bundle() {
    let (sandbox, bundle) = demo();
    let old = files(&bundle);
    place(&sandbox, &["--vram", "70M"]).good();
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
        // While the next plan is written.
        (
            &[
                ("manifest.json", &old["manifest.json"]),
                (plan, &old[plan]),
                (".powerinfer-a.partial", &half),
            ],
            &old_hot,
        ),
        // Before the manifest is written.
        (
            &[
                ("manifest.json", &old["manifest.json"]),
                (plan, &old[plan]),
                (next, &new[plan]),
            ],
            &old_hot,
        ),
        // After the manifest is written.
        (
            &[
                ("manifest.json", &new["manifest.json"]),
                (plan, &old[plan]),
                (next, &new[plan]),
            ],
            &new_hot,
        ),
        // Completed.
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
        place(&sandbox, &["--vram", "70M"]).good();
        assert_eq!(
            files(&bundle),
            new,
            "the temporary files are removed, and nothing else"
        );
    }
    // A damaged plan is not replaced by a next plan that the manifest does not name.
    put(&[(plan, &half), (next, &old[plan])]);
    place(&sandbox, &["--vram", "1G"]).bad(1, &["plan.json", "damaged"]);
}

#[cfg(unix)]
#[test]
fn a_killed_replacement_leaves_a_valid_bundle_and_replacements_exclude_each_other() {
    let (sandbox, bundle) = demo();
    let start = |vram: &str| {
        let mut command = sandbox.command(&["place", BUNDLE, "--vram", vram]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    };
    let names = || -> BTreeSet<_> {
        let entries = fs::read_dir(&bundle).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    // Killed after a number of changes to the names of the files, or at its end.
    for round in 0..24 {
        let mut child = start(["0G", "70M", "24G"][round % 3]);
        let (mut seen, mut changes) = (names(), round / 3);
        while changes > 0 && child.try_wait().unwrap().is_none() {
            let now = names();
            if now != seen {
                (seen, changes) = (now, changes - 1);
            }
        }
        let _ = child.kill(); // fails if it has ended
        child.wait().unwrap();
        Bundle::open(&bundle, IntegrityCheck::Full).unwrap();
    }
    // A bundle that is opened meanwhile has the old or the new plan.
    for vram in ["0G", "70M", "24G", "0G"] {
        let mut child = start(vram);
        while child.try_wait().unwrap().is_none() {
            Bundle::open(&bundle, IntegrityCheck::Quick).unwrap();
        }
    }
    let lock = fs::File::open(&bundle).unwrap();
    lock.try_lock().unwrap();
    place(&sandbox, &["--vram", "0G"]).bad(1, &["another run"]);
    drop(lock);
    place(&sandbox, &["--vram", "0G"]).good();
}

#[test]
fn a_bundle_whose_certification_was_interrupted_is_valid() {
    let (sandbox, bundle) = demo();
    let path = bundle.join("manifest.json");
    let bytes = fs::read(&path).unwrap();
    let mut manifest: Document<Manifest> = serde_json::from_slice(&bytes).unwrap();
    let files = ["certificate.json", "certificate-text.safetensors"];
    manifest.body.certificate = false;
    for file in files {
        manifest.body.files.remove(file);
        fs::write(bundle.join(file), "{").unwrap();
    }
    manifest.sealed().write(&path).unwrap();
    let inspect = ["inspect", BUNDLE, "--verify", "--json"];
    let found = sandbox.run(&inspect).good().json();
    assert!(found["certificate"].is_null());
    place(&sandbox, &["--vram", "70M"]).good();
}
