//! Cached results are reused only if nothing that they depend on has changed.

use std::fs;

use powerinfer_artifact::{
    Digest,
    certificate::{self, Certificate},
    document::Document,
};
use powerinfer_bundle::{DENSE_VERSION, FORMAT, Manifest};

use crate::sandbox::{QUICK, Sandbox};

/// Changes the manifest of the bundle in the sandbox's copy of the demo.
fn edit_manifest(sandbox: &Sandbox, edit: impl FnOnce(&mut Document<Manifest>)) {
    let path = sandbox.path("demo.powerinfer/bundle/manifest.json");
    let mut manifest = Document::<Manifest>::read(&path, FORMAT, DENSE_VERSION).unwrap();
    edit(&mut manifest);
    manifest.sealed().write(&path).unwrap();
}

/// Sets the error bounds of the bundle's certificate.
pub(crate) fn set_error_bounds(sandbox: &Sandbox, bound: f64) {
    let path = sandbox.path("demo.powerinfer/bundle/certificate.json");
    let (format, version) = (certificate::FORMAT, certificate::VERSION);
    let mut document = Document::<Certificate>::read(&path, format, version).unwrap();
    for layer in &mut document.body.layers {
        layer.error_bound = bound;
    }
    document.write(&path).unwrap();
    let digest = Digest::from_content(&fs::read(&path).unwrap());
    edit_manifest(sandbox, |manifest| {
        let files = &mut manifest.body.files;
        files.insert(certificate::FILE.to_owned(), digest);
    });
}

#[test]
fn a_bundle_of_another_version_of_the_program_is_made_again() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let prepare = [&["prepare", "demo", "--vram", "24G"][..], &QUICK].concat();
    let run = sandbox.run(&prepare).good();
    run.stderr_contains(&["bundle: `demo.powerinfer/bundle` is up to date"]);
    edit_manifest(&sandbox, |manifest| {
        manifest.header.tool = "powerinfer 0.0.1".to_owned();
    });
    let run = sandbox.run(&prepare).good();
    run.stderr_contains(&["bundle written to `demo.powerinfer/bundle`"]);
}

#[test]
fn a_certificate_is_of_a_format_of_the_kv_cache() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let bundle = "demo.powerinfer/bundle";
    sandbox.run(&["inspect", bundle, "--verify"]).good();
    let place = ["place", bundle, "--vram", "0G", "--kv-cache"];
    let run = sandbox.run(&[&place[..], &["q8_0"]].concat()).good();
    let lost = "the certificate is of another format of the KV cache";
    run.stderr_contains(&[lost]);
    let of_another = "is for another plan or another text";
    sandbox
        .run(&["inspect", bundle, "--verify"])
        .bad(1, &[of_another]);
    sandbox
        .run(&["eval", "fidelity", "demo", "--certificate"])
        .bad(1, &[of_another]);
    let run = sandbox.run(&[&place[..], &["f16"]].concat()).good();
    assert!(!run.stderr.contains(lost), "{}", run.stderr);
    sandbox.run(&["inspect", bundle, "--verify"]).good();
}

#[test]
fn a_machine_is_measured_again_if_other_gpus_are_visible() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let measures = |visible: &str| {
        let mut command = sandbox.command(&["place", "demo", "--dry-run"]);
        command
            .env("POWERINFER_CACHE", sandbox.path("cache"))
            .env("CUDA_VISIBLE_DEVICES", visible);
        let run = crate::sandbox::run_command(command, b"").good();
        run.stderr.contains("measuring this machine, once")
    };
    assert_eq!(["0", "0", "1"].map(measures), [true, false, true]);
}
