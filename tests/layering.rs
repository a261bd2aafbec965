//! Layering of the crates: dependencies point down, and heavy ones stay out of the crates that do without.
#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

/// Our crates from the bottom up; a crate depends only on those before it.
const LADDER: [&str; 18] = [
    "powerinfer-tensor",
    "powerinfer-pool",
    "powerinfer-artifact",
    "powerinfer-model",
    "powerinfer-hub",
    "powerinfer-kernels",
    "powerinfer-text",
    "powerinfer-datasets",
    "powerinfer-reference",
    "powerinfer-synth",
    "powerinfer-bundle",
    "powerinfer-runtime",
    "powerinfer-profile",
    "powerinfer-predictor",
    "powerinfer-solver",
    "powerinfer-eval",
    "powerinfer-planner",
    "powerinfer-cli",
];

/// Crates that handle formats and figures without computing with weights.
const WITHOUT_KERNELS: [&str; 5] = [
    "powerinfer-tensor",
    "powerinfer-artifact",
    "powerinfer-model",
    "powerinfer-hub",
    "powerinfer-solver",
];

/// Dependencies that must not be linked into a program that only runs bundles.
const HEAVY: [&str; 8] = [
    "candle-core",
    "candle-nn",
    "polars",
    "tokenizers",
    "good_lp",
    "microlp",
    "monty",
    "ureq",
];

/// Normal dependencies of every package, by name.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let rustc = Command::new("rustc").arg("-vV").output().unwrap();
    let about = String::from_utf8(rustc.stdout).unwrap();
    let host = about
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .unwrap();
    // For this platform alone: what others need has not been fetched.
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--filter-platform",
            host,
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: BTreeMap<&str, &str> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| {
            (
                package["id"].as_str().unwrap(),
                package["name"].as_str().unwrap(),
            )
        })
        .collect();
    let normal = |dependency: &&serde_json::Value| {
        dependency["dep_kinds"]
            .as_array()
            .unwrap()
            .iter()
            .any(|kind| kind["kind"].is_null())
    };
    metadata["resolve"]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| {
            let of_node = node["deps"].as_array().unwrap().iter().filter(normal);
            let of_node =
                of_node.map(|dependency| names[dependency["pkg"].as_str().unwrap()].to_owned());
            (
                names[node["id"].as_str().unwrap()].to_owned(),
                of_node.collect(),
            )
        })
        .collect()
}

#[test]
fn no_edge_points_up() {
    let dependencies = dependencies();
    for (rung, package) in LADDER.iter().enumerate() {
        let above = &LADDER[rung..];
        for dependency in &dependencies[*package] {
            assert!(
                !above.contains(&dependency.as_str()),
                "{package} depends on {dependency}, which is above it"
            );
        }
    }
}

/// All packages that `package` links, itself included.
fn reached(dependencies: &BTreeMap<String, BTreeSet<String>>, package: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![package.to_owned()];
    while let Some(package) = open.pop() {
        if reached.insert(package.clone()) {
            open.extend(dependencies[&package].iter().cloned());
        }
    }
    reached
}

#[test]
fn the_runtime_stays_light() {
    let dependencies = dependencies();
    let reached = reached(&dependencies, "powerinfer-runtime");
    for heavy in HEAVY {
        assert!(
            dependencies.contains_key(heavy),
            "{heavy} is not in the workspace any more; mend this list"
        );
        assert!(!reached.contains(heavy), "the runtime pulls in {heavy}");
    }
}

#[test]
fn formats_hub_and_solver_link_neither_cuda_nor_cpu_kernels() {
    let dependencies = dependencies();
    for package in WITHOUT_KERNELS {
        let reached = reached(&dependencies, package);
        for kernels in ["cudarc", "powerinfer-kernels"] {
            assert!(dependencies.contains_key(kernels));
            assert!(!reached.contains(kernels), "{package} pulls in {kernels}");
        }
    }
}
