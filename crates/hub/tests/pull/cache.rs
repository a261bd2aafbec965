//! Files in the cache: layout, selection, and use without a network.

use std::{collections::BTreeMap, fs};

use powerinfer_artifact::progress::Silent;
use powerinfer_hub::Snapshot;

use crate::{
    Listener, MODEL, TestHub, assert_parts,
    hub_server::{COMMIT, git_sha1, sha256},
    model, name, noise, weights,
};

fn file_names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.files.iter().map(|file| &file.name[..]).collect()
}

#[test]
fn a_model_arrives_in_the_layout_of_the_python_client() {
    let test = TestHub::behaving(|server| server.redirects_small_files = true);
    let listener = Listener::default();
    let snapshot = test.hub().pull(&name(MODEL), &listener).unwrap();
    let folder = test.folder().join("snapshots").join(COMMIT);
    assert_eq!(snapshot.folder, folder);
    assert_eq!(snapshot.path, folder);
    assert_eq!(snapshot.commit, COMMIT);
    let expected = ["config.json", "tokenizer.json", "model.safetensors"];
    assert_eq!(file_names(&snapshot), expected);
    for file in &snapshot.files {
        let contents = fs::read(folder.join(&file.name)).unwrap();
        assert_eq!(contents, model()[&file.name]);
        assert_eq!(file.bytes, contents.len() as u64);
        assert!(file.fetched);
        if cfg!(unix) {
            let link = fs::read_link(folder.join(&file.name)).unwrap();
            assert!(link.starts_with("../../blobs"), "{}", link.display());
        }
    }
    let [config, tokenizer] = [&b"{}"[..], b"{\"a\": 1}"].map(git_sha1);
    let mut blobs = [config, tokenizer, sha256(&weights())];
    blobs.sort();
    assert_eq!(test.blobs(), blobs);
    let reference = fs::read_to_string(test.folder().join("refs/main")).unwrap();
    assert_eq!(reference, COMMIT);
    assert_eq!(*listener.announced.lock().unwrap(), 400_010);
    assert_eq!(*listener.received.lock().unwrap(), 400_010);

    let requests = test.server.log().len();
    let again = test.pull().unwrap();
    assert!(again.files.iter().all(|file| !file.fetched));
    let log = &test.server.log()[requests..];
    assert_eq!(log.len(), 1, "only whether the branch has moved: {log:?}");
}

#[test]
fn a_revision_is_remembered_under_its_name() {
    let test = TestHub::new(model());
    test.pull_named("org/tiny@refs/pr/3").unwrap();
    let reference = test.folder().join("refs/refs/pr/3");
    assert_eq!(fs::read_to_string(reference).unwrap(), COMMIT);
    assert!(!test.folder().join("refs/main").exists());
    let by_commit = test.pull_named(&format!("org/tiny@{COMMIT}")).unwrap();
    assert!(by_commit.files.iter().all(|file| !file.fetched));
}

#[test]
fn shards_are_those_of_the_index() {
    let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let mut files = BTreeMap::from([
        ("config.json".to_owned(), b"{}".to_vec()),
        ("model.safetensors.index.json".to_owned(), index.into()),
        ("model-1.safetensors".to_owned(), noise(3000)),
        ("model-2.safetensors".to_owned(), noise(5000)),
        ("model-3.safetensors".to_owned(), noise(7000)),
    ]);
    let mut test = TestHub::new(files.clone());
    let snapshot = test.pull().unwrap();
    let expected = [
        "config.json",
        "model.safetensors.index.json",
        "model-1.safetensors",
        "model-2.safetensors",
    ];
    assert_eq!(file_names(&snapshot), expected);
    test.settings.offline = true;
    assert_eq!(test.pull().unwrap().files.len(), 4);
    fs::remove_file(snapshot.folder.join("model-2.safetensors")).unwrap();
    test.refused(&["org/tiny", "HF_HUB_OFFLINE"]);

    files.remove("model-2.safetensors");
    TestHub::new(files).refused(&["index.json", "model-2.safetensors", "not there"]);
}

#[test]
fn a_single_gguf_file_is_the_model_and_one_of_several_is_named() {
    let gguf = |names: &[&str]| {
        let files = names.iter().map(|name| ((*name).to_owned(), noise(3000)));
        TestHub::new(files.collect())
    };
    let test = gguf(&["README.md", "config.json", "a.gguf"]);
    let snapshot = test.pull().unwrap();
    assert_eq!(snapshot.path, snapshot.folder.join("a.gguf"));
    assert_eq!(snapshot.files.len(), 1);

    let mut test = gguf(&["a.gguf", "q4/b c.gguf"]);
    test.refused(&["a.gguf, q4/b c.gguf"]);
    let pull = |test: &TestHub, file: &str| test.hub().pull_file(&name(MODEL), file, &Silent);
    let refused = |test: &TestHub, file: &str, part: &str| {
        assert_parts(&pull(test, file).unwrap_err().to_string(), &[part]);
    };
    let snapshot = pull(&test, "q4/b c.gguf").unwrap();
    assert_eq!(fs::read(&snapshot.path).unwrap(), noise(3000));
    assert!(snapshot.path.ends_with("q4/b c.gguf"));
    refused(&test, "c.gguf", "it has a.gguf, q4/b c.gguf");
    refused(&test, "../c.gguf", "refusing");
    test.settings.offline = true;
    assert!(pull(&test, "q4/b c.gguf").is_ok());
    refused(&test, "a.gguf", "org/tiny/a.gguf");
}

#[test]
fn without_a_network_the_cache_is_used() {
    let mut test = TestHub::new(model());
    test.settings.offline = true;
    test.refused(&["org/tiny", "not completely in", "HF_HUB_OFFLINE"]);
    assert!(test.server.log().is_empty());
    test.settings.offline = false;
    let online = test.pull().unwrap();
    test.server.stop();

    let check = |test: &TestHub, parts: &[&str]| {
        let listener = Listener::default();
        let snapshot = test.hub().pull(&name(MODEL), &listener).unwrap();
        assert_eq!(snapshot.folder, online.folder);
        assert_eq!(snapshot.files.len(), 3);
        assert_parts(&listener.notes.lock().unwrap().join("\n"), parts);
    };
    check(&test, &["cannot reach", "from the cache", COMMIT]);
    test.settings.offline = true;
    check(&test, &["HF_HUB_OFFLINE", "from the cache"]);

    // The snapshot's link leads nowhere.
    fs::remove_file(test.folder().join("blobs").join(sha256(&weights()))).unwrap();
    test.refused(&["not completely in"]);
    test.settings.offline = false;
    test.refused(&["cannot reach", "127.0.0.1"]);
}
