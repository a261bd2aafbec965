//! Transfers: resumed, repeated, damaged, at once.

use std::{fs, thread};

use powerinfer_hub::HubError;

use crate::{Listener, MODEL, TestHub, hub_server::COMMIT, model, name};

#[test]
fn a_cut_connection_is_resumed() {
    let test = TestHub::behaving(|server| server.cuts = vec![100_000, 150_000, 0]);
    test.pull_weights();
    let bodies = test.server.bodies("/blobs/");
    let ranges: Vec<Option<&str>> = bodies.iter().map(|body| body.range.as_deref()).collect();
    let expected = [
        None,
        Some("bytes=100000-"),
        Some("bytes=250000-"),
        Some("bytes=250000-"),
    ];
    assert_eq!(ranges, expected);
    assert_eq!(test.sent(), 400_000, "no byte was sent twice");
}

#[test]
fn after_too_many_cuts_the_next_run_resumes() {
    let test = TestHub::behaving(|server| server.cuts = vec![123_456, 0, 0, 0, 0, 0]);
    test.refused(&[
        "model.safetensors",
        "123456 of 400000 bytes",
        "run the same command again to resume",
    ]);
    assert_eq!(test.partial_bytes(), 123_456);
    assert!(!test.folder().join("refs/main").exists());
    test.pull_weights();
    let bodies = test.server.bodies("/blobs/");
    assert_eq!(bodies.len(), 7);
    assert_eq!(bodies[6].sent, 400_000 - 123_456);
    assert!(!test.partial().exists());
}

#[test]
fn an_interruption_keeps_the_bytes_received() {
    let test = TestHub::new(model());
    let listener = Listener {
        limit: Some(200_000),
        ..Listener::default()
    };
    let stopped = test.hub().pull(&name(MODEL), &listener);
    assert!(matches!(stopped, Err(HubError::Interrupted(_))));
    let kept = test.partial_bytes();
    assert!((100_000..400_000).contains(&kept), "{kept}");
    let listener = Listener::default();
    test.hub().pull(&name(MODEL), &listener).unwrap();
    assert_eq!(*listener.announced.lock().unwrap(), 400_000 - kept);
    let bodies = test.server.bodies("/blobs/");
    assert_eq!(bodies[1].range, Some(format!("bytes={kept}-")));
    assert_eq!(bodies[1].sent as u64, 400_000 - kept);
}

#[test]
fn a_server_that_cannot_resume_sends_it_all_again() {
    let test = TestHub::behaving(|server| {
        (server.cuts, server.ignores_ranges) = (vec![100_000], true);
    });
    test.pull_weights();
    assert_eq!(test.server.bodies("/blobs/")[1].sent, 400_000);
}

#[test]
fn a_part_that_was_not_requested_is_an_error() {
    let test = TestHub::behaving(|server| {
        (server.cuts, server.wrong_ranges) = (vec![100_000], true);
    });
    test.refused(&["another part of the file"]);
    let snapshot = test.folder().join("snapshots").join(COMMIT);
    assert!(!snapshot.join("model.safetensors").exists());
}

#[test]
fn damaged_bytes_are_found_and_removed() {
    let test = TestHub::behaving(|server| server.damages = true);
    test.refused(&["model.safetensors", "damaged", "SHA-256", "download it"]);
    assert!(!test.partial().exists());
    assert_eq!(test.blobs().len(), 2, "only the small files");
    test.behave(|_| {});
    test.pull().unwrap();

    // Another program left a part.
    let test = TestHub::new(model());
    fs::create_dir_all(test.folder().join("blobs")).unwrap();
    fs::write(test.partial(), [7; 1000]).unwrap();
    test.refused(&["model.safetensors", "damaged"]);
    fs::write(test.partial(), [7; 400_001]).unwrap();
    test.pull().unwrap();

    // A small file is named after git's digest.
    let test = TestHub::behaving(|server| server.etag = Some("0".repeat(40)));
    test.refused(&["config.json", "damaged", "git SHA-1"]);
}

#[test]
fn more_bytes_than_promised_are_not_kept() {
    let test = TestHub::behaving(|server| server.sends_too_much = true);
    test.refused(&["longer than it said"]);
    assert_eq!(test.partial_bytes(), 0);
}

#[test]
fn requests_to_a_busy_hub_are_retried() {
    let unavailable = vec!["/resolve/", "config.json", "/blobs/", "/blobs/"];
    let test = TestHub::behaving(|server| server.unavailable = unavailable);
    test.pull().unwrap();
    // The listing is requested once: there may be a copy in the cache.
    let test = TestHub::behaving(|server| server.unavailable = vec!["/api/"]);
    test.refused(&["cannot reach", "HTTP 503"]);
    test.pull().unwrap();
}

#[test]
fn pulls_at_once_fetch_each_byte_once() {
    let test = TestHub::new(model());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| test.pull_weights());
        }
    });
    assert_eq!(test.sent(), 400_000);
    assert_eq!(test.blobs().len(), 3);
}
