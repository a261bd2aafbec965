//! Layering of the crates: dependencies point down, and heavy ones stay out of the crates that do without. The wording of
//! prose is checked here too.
#![expect(clippy::unwrap_used, reason = "a failed test panics")]

mod prose;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Our crates from the bottom up; a crate depends only on those before it.
const LADDER: &[&str] = &[
    "powerinfer-tensor",
    "powerinfer-pool",
    "powerinfer-guard",
    "powerinfer-artifact",
    "powerinfer-report",
    "powerinfer-model",
    "powerinfer-cluster",
    "powerinfer-import",
    "powerinfer-hub",
    "powerinfer-kernels",
    "powerinfer-gpu",
    "powerinfer-text",
    "powerinfer-corpus",
    "powerinfer-datasets",
    "powerinfer-reference",
    "powerinfer-synth",
    "powerinfer-bundle",
    "powerinfer-export",
    "powerinfer-runtime",
    "powerinfer-profile",
    "powerinfer-predictor",
    "powerinfer-solver",
    "powerinfer-eval",
    "powerinfer-planner",
    "powerinfer-pipeline",
    "powerinfer",
    "powerinfer-server",
    "powerinfer-cli",
    "powerinfer-attack",
];

/// Crates that handle formats and values without computing with weights.
const WITHOUT_KERNELS: &[&str] = &[
    "powerinfer-tensor",
    "powerinfer-artifact",
    "powerinfer-report",
    "powerinfer-model",
    "powerinfer-import",
    "powerinfer-hub",
    "powerinfer-bundle",
    "powerinfer-export",
    "powerinfer-solver",
    "powerinfer-cluster",
];

/// Dependencies that must not be linked into a program that only runs bundles.
const HEAVY: &[&str] = &[
    "candle-core",
    "candle-nn",
    "polars",
    "tokenizers",
    "good_lp",
    "microlp",
    "powerinfer-import",
    "powerinfer-corpus",
    "zip",
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
    for (rung, package) in LADDER.iter().copied().enumerate() {
        let above = &LADDER[rung..];
        for dependency in &dependencies[package] {
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
    for &heavy in HEAVY {
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
    for &package in WITHOUT_KERNELS {
        let reached = reached(&dependencies, package);
        for kernels in ["cudarc", "powerinfer-kernels"] {
            assert!(dependencies.contains_key(kernels));
            assert!(!reached.contains(kernels), "{package} pulls in {kernels}");
        }
    }
}

#[test]
fn profiling_needs_nothing_that_runs_bundles() {
    let dependencies = dependencies();
    let reached = reached(&dependencies, "powerinfer-profile");
    assert!(reached.contains("powerinfer-gpu"));
    for package in ["runtime", "bundle"] {
        let package = format!("powerinfer-{package}");
        assert!(dependencies.contains_key(&package));
        assert!(!reached.contains(&package), "profile pulls in {package}");
    }
}

/// All files in `folder` and in the folders below.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| {
            if path.is_dir() {
                files_below(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

/// Modules of `commands` that `source` names, a file `depth` folders below.
fn named_modules(source: &str, depth: usize) -> BTreeSet<&str> {
    let is_identifier = |character: char| character.is_alphanumeric() || character == '_';
    let outside = format!("super::{}", "super::".repeat(depth));
    let mut named = BTreeSet::new();
    for prefix in ["commands::", &outside] {
        for (start, _) in source.match_indices(prefix) {
            // Only whole paths: one `super::` of two is still inside the command.
            if prefix == outside && source[..start].ends_with(':') {
                continue;
            }
            let rest = &source[start + prefix.len()..];
            let items = match rest.strip_prefix('{') {
                Some(list) => top_level_items(list),
                None => vec![rest],
            };
            named.extend(items.into_iter().map(|item| {
                let end = item.find(|character| !is_identifier(character));
                &item[..end.unwrap_or(item.len())]
            }));
        }
    }
    named
}

/// Items of a list in braces that follows its opening brace.
fn top_level_items(list: &str) -> Vec<&str> {
    let mut items = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (index, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => {
                items.push(list[start..index].trim());
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                items.push(list[start..index].trim());
                start = index + 1;
            }
            _ => {}
        }
    }
    items
}

#[test]
fn no_command_imports_another() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/commands");
    let files: Vec<PathBuf> = files_below(&folder)
        .iter()
        .map(|file| file.strip_prefix(&folder).unwrap().to_owned())
        .filter(|file| *file != Path::new("mod.rs"))
        .collect();
    let command_of = |file: &Path| {
        let first = file.iter().next().unwrap().to_str().unwrap();
        first.trim_end_matches(".rs").to_owned()
    };
    let commands: BTreeSet<String> = files.iter().map(|file| command_of(file)).collect();
    assert!(commands.contains("run") && commands.contains("eval"));
    for file in &files {
        let own = command_of(file);
        let source = fs::read_to_string(folder.join(file)).unwrap();
        for other in named_modules(&source, file.components().count() - 1) {
            assert!(
                other == own || !commands.contains(other),
                "`{}` imports `commands::{other}`",
                file.display()
            );
        }
    }
}
