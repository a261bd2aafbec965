//! What is kept from one run to the next is used again only if nothing that it depends on has changed.

use crate::sandbox::Sandbox;

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
