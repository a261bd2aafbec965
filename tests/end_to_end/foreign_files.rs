//! Files of others are never replaced or deleted, links are never followed into them, and names do not control a terminal.

use std::{fs, path::Path};

use crate::sandbox::{QUICK, Sandbox, words};

const PLACE: [&str; 6] = ["place", "demo", "--vram", "0G", "--certify", "none"];

fn place(out: &str) -> Vec<&str> {
    [&PLACE[..], &["--out", out]].concat()
}

/// Names in `folder`, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_manifest_that_mentions_powerinfer_is_not_ours() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let folder = sandbox.path("u");
    fs::create_dir(&folder).unwrap();
    let manifest = "{\"dependencies\":[\"powerinfer-client\"]}";
    fs::write(folder.join("manifest.json"), manifest).unwrap();
    fs::write(folder.join("index.html"), "x").unwrap();
    sandbox.run(&place("u")).bad(
        1,
        &[
            "`u` exists and was not made by this command: it has no `manifest.json` of powerinfer, but `index.html`, `manifest.json`",
            "hint: name another folder with `--out`, or remove what is there",
        ],
    );
    assert_eq!(names(&folder), ["index.html", "manifest.json"]);
    assert_eq!(names(&sandbox.path(".")), ["demo.powerinfer", "u"]);
}

#[test]
fn files_in_a_bundle_are_listed_and_kept() {
    let sandbox = Sandbox::new();
    let bundle = sandbox.copy_demo().join("bundle");
    fs::create_dir(bundle.join("old")).unwrap();
    fs::write(bundle.join("old/plan.json"), "mine").unwrap();
    fs::write(bundle.join("notes.txt"), "mine").unwrap();
    let before = names(&bundle);
    let prepare = [&["prepare"], &PLACE[1..], &QUICK].concat();
    for command in [&PLACE[..], &prepare] {
        sandbox.run(command).bad(
            1,
            &[
                "bundle` contains `notes.txt`, `old/`, which powerinfer did not write",
                "hint: move that elsewhere, or name another folder with `--out`",
            ],
        );
        assert_eq!(names(&bundle), before);
        assert_eq!(fs::read(bundle.join("old/plan.json")).unwrap(), b"mine");
    }
    fs::rename(bundle.join("old"), sandbox.path("old")).unwrap();
    fs::rename(bundle.join("notes.txt"), sandbox.path("notes.txt")).unwrap();
    sandbox.run(&PLACE).good();
    sandbox.run(&["inspect", "demo.powerinfer/bundle"]).good();
    assert_eq!(
        names(&sandbox.path("demo.powerinfer")),
        ["bundle", "predictors", "profile", "settings.json"]
    );
}

#[cfg(unix)]
#[test]
fn a_link_to_a_folder_stays_and_its_folder_is_written() {
    use std::os::unix::fs::symlink;
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    fs::create_dir(sandbox.path("disk")).unwrap();
    fs::create_dir(sandbox.path("photos")).unwrap();
    fs::write(sandbox.path("photos/cat"), "mew").unwrap();
    symlink("disk/bundle", sandbox.path("link")).unwrap();
    symlink("photos", sandbox.path("to-photos")).unwrap();
    for _ in 0..2 {
        sandbox.run(&place("link")).good();
        assert!(sandbox.path("link").is_symlink());
        assert_eq!(names(&sandbox.path("disk")), ["bundle"]);
        sandbox.run(&["inspect", "link"]).good();
    }
    sandbox.run(&place("to-photos")).bad(1, &["`cat`"]);
    assert_eq!(names(&sandbox.path("photos")), ["cat"]);
}

#[cfg(unix)]
#[test]
fn links_in_a_partial_folder_are_not_followed() {
    use std::os::unix::fs::symlink;
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let partial = sandbox.path("out.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join(".powerinfer-run"), "").unwrap();
    // Followed, these lead around in more ways than there is time for.
    for name in ["a", "b", "c"] {
        symlink(".", partial.join(name)).unwrap();
    }
    sandbox
        .run(&place("out"))
        .bad(1, &["out.partial` contains `a`, `b`, `c`"]);
    fs::remove_dir_all(&partial).unwrap();
    fs::create_dir(sandbox.path("photos")).unwrap();
    for name in [".powerinfer-run", "manifest.json"] {
        fs::write(sandbox.path("photos").join(name), "mine").unwrap();
    }
    symlink("photos", &partial).unwrap();
    sandbox
        .run(&place("out"))
        .bad(1, &["`out.partial` is a link, not a folder"]);
    fs::remove_file(&partial).unwrap();
    fs::create_dir(&partial).unwrap();
    symlink("../photos/manifest.json", partial.join(".powerinfer-run")).unwrap();
    sandbox.run(&place("out")).bad(1, &["`.powerinfer-run`"]);
    for name in [".powerinfer-run", "manifest.json"] {
        let content = fs::read(sandbox.path("photos").join(name)).unwrap();
        assert_eq!(content, b"mine", "{name}");
    }
}

#[test]
fn pages_and_files_next_to_an_output_are_not_replaced() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let mine = "<!doctype html>\n<html lang=\"en\"><head><title>mine</title>";
    fs::write(sandbox.path("page.html"), mine).unwrap();
    let profile = "demo.powerinfer/profile";
    for command in [
        &["inspect", profile, "--html", "page.html"][..],
        &words("place demo --dry-run --vram 0G --html page.html"),
    ] {
        sandbox
            .run(command)
            .bad(1, &["`page.html` exists and is not a page of powerinfer"]);
    }
    assert_eq!(fs::read_to_string(sandbox.path("page.html")).unwrap(), mine);
    let inside = format!("{profile}/page.html");
    sandbox
        .run(&["inspect", profile, "--html", &inside])
        .bad(1, &["would be among the files of"]);
    for _ in 0..2 {
        sandbox
            .run(&["inspect", profile, "--html", "ours.html"])
            .good();
    }
    let index = sandbox.path("m.gguf.generated.gpuidx");
    fs::write(&index, "mine").unwrap();
    sandbox
        .run(&["export", "demo", "--to", "powerinfer", "m.gguf"])
        .bad(
            1,
            &["m.gguf.generated.gpuidx` exists and is not a GGUF file"],
        );
    assert_eq!(fs::read(index).unwrap(), b"mine");
    assert!(!sandbox.path("m.gguf").exists());
}

#[cfg(unix)]
#[test]
fn names_do_not_control_the_terminal() {
    let sandbox = Sandbox::new();
    let model = sandbox.copy_model("llama-relu-gqa");
    let name = "a\u{1b}]0;b\u{7}\u{1b}[2Jc\u{9b}1m\r";
    fs::rename(model, sandbox.path(name)).unwrap();
    let is_safe = |text: &str| !text.contains(|c: char| c.is_control() && c != '\n');
    let missing = format!("{name}/nothing");
    for command in [
        &["inspect", name][..],
        &["inspect", &missing],
        &["profile", &missing],
        &["inspect", "demo", name],
        &["-v", "profile", name, "--data", name],
    ] {
        let run = sandbox.run(command);
        assert!(is_safe(&run.stderr), "{command:?}: {:?}", run.stderr);
        assert!(is_safe(&run.text()), "{command:?}: {:?}", run.text());
        let all = run.stderr.clone() + &run.text();
        assert!(all.contains("c\\u{9b}1m\\r"), "{command:?}: {all}");
    }
    // Names in a file.
    let table = r#"{"\u001b[2Jt":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#.as_bytes();
    let file = [&(table.len() as u64).to_le_bytes(), table, &[0; 4]].concat();
    fs::write(sandbox.path("t.safetensors"), file).unwrap();
    let run = sandbox.run(&["inspect", "-v", "t.safetensors"]).good();
    assert!(is_safe(&run.text()), "{:?}", run.text());
    run.stdout_contains(&["\\u{1b}[2Jt"]);
    // Data stays as it is.
    let printed = sandbox.run_with(&["tokenize", name], "x\u{1b}[1m".as_bytes());
    let ids = printed.good().text();
    let back = sandbox.run_with(&["tokenize", name, "--decode"], ids.as_bytes());
    assert!(back.good().text().contains('\u{1b}'));
}
