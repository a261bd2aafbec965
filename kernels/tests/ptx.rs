//! The committed PTX was generated from the committed sources.

use std::{fs, path::Path};

use powerinfer_kernels::cuda::ptx_modules;
use sha2::{Digest, Sha256};

/// Compiler options of `scripts/generate_ptx.py`.
const OPTIONS: &str =
    "--gpu-architecture=compute_80 --std=c++17 --fmad=false --device-as-default-execution-space";

#[test]
fn the_ptx_matches_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_kind = |folder: &str, kind: &str| {
        let mut files: Vec<_> = fs::read_dir(root.join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|found| found == kind))
            .collect();
        files.sort();
        files
    };
    let headers = of_kind("cuda", "cuh");
    let sources = of_kind("cuda", "cu");
    assert_eq!(
        sources.len(),
        of_kind("ptx", "zst").len(),
        "one PTX file per source"
    );
    for source in sources {
        let mut whole = Sha256::new();
        for file in std::iter::once(&source).chain(&headers) {
            whole.update(file.file_name().unwrap().to_string_lossy().as_bytes());
            whole.update([0]);
            whole.update(fs::read(file).unwrap());
            whole.update([0]);
        }
        whole.update(OPTIONS);
        let digest: String = whole
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let name = source.file_stem().unwrap().to_string_lossy();
        let mut modules = ptx_modules();
        let (_, ptx) = modules.find(|(module, _)| *module == name).unwrap();
        assert_eq!(
            ptx.lines().next().unwrap(),
            format!("// source-sha256 {digest}"),
            "{name}.ptx is not of {name}.cu and its headers; run scripts/generate-ptx.sh"
        );
    }
}
