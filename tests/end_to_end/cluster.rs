//! `cluster`: scripts of the stages, which run here one after the other, and estimates. `scripts/check-slurm.sh` runs them on
//! Slurm.

use std::{fs, process::Command};

use crate::sandbox::{Run, Sandbox, words};

const OPTIONS: [&str; 14] = [
    "--tokens",
    "6000",
    "--trace-tokens",
    "4000",
    "--steps",
    "8",
    "--hardware",
    "pc-low",
    "--vram",
    "70M",
    "--certify",
    "500",
    "--seed",
    "3",
];

fn cluster(sandbox: &Sandbox, scheduler: &str, more: &[&str]) -> Run {
    sandbox.run(&[&["cluster", scheduler, "demo"], &OPTIONS[..], more].concat())
}

/// Runs a task of the stage `name`, as a pod does.
fn task(sandbox: &Sandbox, name: &str, index: usize) -> bool {
    // Paths of the program and of its configuration are those of a test.
    let mut command = sandbox.command(&[]);
    let program = std::path::PathBuf::from(command.get_program());
    let mut bash = Command::new("bash");
    bash.arg(sandbox.path(&format!("demo.powerinfer/cluster/{name}.sh")));
    let environment = command
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
    bash.envs(environment.collect::<Vec<_>>());
    let paths = std::env::var_os("PATH").unwrap();
    let paths = [program.parent().unwrap().to_owned()]
        .into_iter()
        .chain(std::env::split_paths(&paths));
    bash.env("PATH", std::env::join_paths(paths).unwrap());
    bash.env("JOB_COMPLETION_INDEX", index.to_string())
        .env_remove("SLURM_JOB_ID");
    command.current_dir(sandbox.path("."));
    let output = bash.current_dir("/").output().unwrap();
    let status = fs::read_to_string(sandbox.path(&format!(
        "demo.powerinfer/cluster/status/{name}-{}",
        index + 1
    )));
    let code = output.status.code().unwrap();
    assert_eq!(status.unwrap().trim(), code.to_string());
    code == 0
}

#[cfg(target_os = "linux")]
#[test]
fn the_stages_make_the_bundle_of_one_process() {
    let sandbox = Sandbox::new();
    let here = sandbox.path(".").canonicalize().unwrap();
    let shards = ["--nodes", "2", "--certify-shards", "3"];
    let pods = [
        "--image",
        "an image",
        "--claim",
        "shared",
        "--mount",
        here.to_str().unwrap(),
    ];
    let written = cluster(&sandbox, "kubernetes", &[&shards[..], &pods].concat()).good();
    written.stdout_contains(&["1-profile", "5-certify", "6-finish"]);
    assert!(!task(&sandbox, "4-place", 0), "nothing is profiled yet");
    for (stage, tasks) in [
        ("1-profile", 2),
        ("2-merge", 1),
        ("3-train", 2),
        ("4-place", 1),
        ("5-certify", 3),
        ("6-finish", 1),
    ] {
        // Twice: a task that is done is run again when all is submitted again.
        for index in (0..tasks).chain(0..tasks) {
            assert!(task(&sandbox, stage, index), "{stage}, task {index}");
        }
    }
    sandbox
        .run(&[&["prepare", "demo", "--out", "one"], &OPTIONS[..]].concat())
        .good();
    for part in ["profile", "predictors", "bundle"] {
        let [many, one] = ["demo.powerinfer", "one"].map(|folder| sandbox.path(folder).join(part));
        let same = Command::new("diff")
            .arg("-r")
            .args([many, one])
            .status()
            .unwrap();
        assert!(same.success(), "{part}");
    }
    let manifest =
        fs::read_to_string(sandbox.path("demo.powerinfer/cluster/1-profile.yaml")).unwrap();
    for line in [
        "completions: 2",
        "image: 'an image'",
        "claimName: 'shared'",
        "cpu: \"",
    ] {
        assert!(manifest.contains(line), "{manifest}");
    }
}

#[test]
fn scripts_have_the_options_of_their_stage() {
    let sandbox = Sandbox::new();
    let more = [
        "--nodes",
        "3",
        "--cores",
        "5",
        "--pin",
        "head=cpu",
        "--data",
        "it's text",
        "--max-bytes",
        "4%",
        "--jobs",
        "the jobs",
    ];
    fs::write(
        sandbox.path("it's text"),
        "def f(x):\n    return x\n".repeat(400),
    )
    .unwrap();
    cluster(&sandbox, "slurm", &more).good();
    let script =
        |name: &str| fs::read_to_string(sandbox.path(&format!("the jobs/{name}.sh"))).unwrap();
    let [profile, train, place, finish] =
        ["1-profile", "3-train", "4-place", "6-finish"].map(script);
    for (script, with, without) in [
        (
            &profile,
            &[
                "--array=1-3",
                "--cpus-per-task=5",
                r"'--data=it'\''s text'",
                "--shard $task/3",
                "--seed=3",
            ][..],
            &["--pin", "--steps"][..],
        ),
        (
            &train,
            &["--max-bytes=4%", "--steps=8", "--seed=3"],
            &["--data", "--pin", "--vram"],
        ),
        (
            &place,
            &["--pin=head=cpu", "--vram=70M", "--certify-later"],
            &["--data", "--steps", "--seed", "#SBATCH --array"],
        ),
        (
            &finish,
            &["--pin=head=cpu", "--data=", "--steps=8", "--seed=3"],
            &["--nodes", "--cores", "--jobs"],
        ),
    ] {
        for part in with {
            assert!(script.contains(part), "{part}: {script}");
        }
        for part in without {
            assert!(!script.contains(part), "{part}: {script}");
        }
    }
    let stages = script("submit");
    assert!(stages.contains("1-profile 2-merge 3-train 4-place 5-certify 6-finish"));
}

#[test]
fn what_cannot_be_prepared_is_refused_before_anything_is_written() {
    let sandbox = Sandbox::new();
    let run = |arguments: &[&str]| sandbox.run(&[&["cluster"], arguments].concat());
    run(&["slurm", "demo", "--nodes", "2"]).bad(1, &["--tokens N"]);
    run(&["slurm", "demo", "--nodes", "0"]).bad(2, &["--nodes"]);
    run(&["slurm", "nothing", "--tokens", "5"]).bad(1, &["nothing"]);
    run(&["slurm", "demo", "--tokens", "5", "--data", "gone.txt"]).bad(1, &["gone.txt"]);
    run(&[
        "slurm", "demo", "--tokens", "5", "--submit", "--policy", "wrong",
    ])
    .bad(2, &["wrong"]);
    run(&words(
        "kubernetes demo --tokens 5 --image i --claim c --mount /elsewhere",
    ))
    .bad(1, &["is not inside `/elsewhere`"]);
    run(&[]).bad(1, &["--estimate --like SHAPE"]);
    run(&["--estimate"]).bad(2, &["--like"]);
    run(&["--estimate", "--like", "nothing"]).bad(1, &["nothing"]);
    assert!(!sandbox.path("demo.powerinfer").exists());
    // A folder with something else in it is not written to.
    fs::create_dir(sandbox.path("thesis")).unwrap();
    fs::write(sandbox.path("thesis/chapter.txt"), "years").unwrap();
    run(&["slurm", "demo", "--tokens", "5", "--jobs", "thesis"])
        .bad(1, &["was not made by this command"]);
    assert_eq!(fs::read_dir(sandbox.path("thesis")).unwrap().count(), 1);
    // Without Slurm, its absence is reported.
    let mut command = sandbox.command(&["cluster", "slurm", "demo", "--tokens", "5", "--submit"]);
    let bin = sandbox.path("bin");
    fs::create_dir(&bin).unwrap();
    for program in ["bash", "env", "dirname", "rm"] {
        let found = std::env::split_paths(&std::env::var_os("PATH").unwrap())
            .map(|folder| folder.join(program))
            .find(|path| path.exists())
            .unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(found, bin.join(program)).unwrap();
    }
    command.env("PATH", &bin);
    crate::sandbox::run_command(command, b"").bad(1, &["submit.sh` failed", "sbatch"]);
}

#[test]
fn an_estimate_grows_with_the_work_and_shrinks_with_the_nodes() {
    let sandbox = Sandbox::new();
    let estimate = |more: &[&str]| {
        let like = words("cluster --estimate --like llama-70b --hardware pc-low --json");
        sandbox.run(&[&like[..], more].concat()).good().json()
    };
    let seconds = |report: &serde_json::Value, stage: usize| {
        report["stages"][stage]["seconds"].as_f64().unwrap()
    };
    let one = estimate(&["--nodes", "1", "--cores", "32"]);
    let many = estimate(&["--nodes", "8", "--cores", "32"]);
    let fewer_cores = estimate(&["--nodes", "8", "--cores", "16"]);
    for stage in [0, 2, 4] {
        assert!(seconds(&many, stage) < seconds(&one, stage), "{stage}");
        assert!(
            seconds(&many, stage) < seconds(&fewer_cores, stage),
            "{stage}"
        );
    }
    let longer = estimate(&["--nodes", "8", "--cores", "32", "--tokens", "10000000"]);
    assert!(seconds(&longer, 0) > 5.0 * seconds(&many, 0));
    // A layer of a 70B in f32 and the hidden states.
    let memory = many["stages"][0]["memory_bytes"].as_f64().unwrap();
    assert!((3e9..20e9).contains(&memory), "{memory}");
}
