//! First steps of a new user, with and without mistakes.

use std::{
    io::{Read, Write},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::sandbox::{
    QUICK, Sandbox, assert_contains, copy_folder, golden_model, prepared_demo, words,
};

#[test]
fn stages_skip_what_is_up_to_date_and_force_repeats_them() {
    let sandbox = Sandbox::new();
    let tokens = ["--tokens", "2500", "--trace-tokens", "800"];
    let profile = [&["profile"][..], &tokens].concat();
    let train = ["train-predictors", "--steps", "15"];
    let place = ["place", "--vram", "0", "--certify", "none"];
    for stage in [&profile[..], &train, &place] {
        let first = sandbox.run(stage).good();
        assert!(!first.stderr.contains("up to date"), "{}", first.stderr);
        let again = sandbox.run(stage).good();
        again.stderr_contains(&["is up to date"]);
        assert!(!again.stdout.is_empty());
        let forced = sandbox.run(&[stage, &["--force"]].concat()).good();
        assert!(!forced.stderr.contains("up to date"), "{}", forced.stderr);
    }
    // Another budget packs again.
    let other = sandbox.run(&words("place --vram 0 --context 64 --certify none"));
    assert!(!other.good().stderr.contains("up to date"));
}

#[test]
fn text_is_asked_for_once() {
    let sandbox = Sandbox::new();
    let model = golden_model("llama-relu-gqa");
    let model = model.to_str().unwrap();
    std::fs::write(
        sandbox.path("text.txt"),
        "some words to calibrate on ".repeat(40),
    )
    .unwrap();
    let prepare = |more: &[&str]| {
        let arguments = ["prepare", model, "--steps", "5", "--hardware", "laptop"];
        sandbox.run(&[&arguments[..], more].concat())
    };
    prepare(&[]).bad(1, &["no calibration text", "`--data FILE`"]);
    // What the model alone decides is an error before text is read.
    prepare(&["--context", "0"]).bad(1, &["1 to 256 tokens, not 0"]);
    prepare(&["--pin", "layers:0-99=cpu"]).bad(1, &["layer 99 is pinned"]);
    let first = prepare(&["--data", "text.txt"]).good();
    // All held-out text is used already, so the advice is to profile more.
    first.stderr_contains(&["there is no certificate: ", "; profile more text: "]);
    first.stderr_contains(&["this will take ", "ready: `powerinfer run llama-relu-gqa`"]);
    for misleading in ["--certify", " 0 s"] {
        assert!(!first.stderr.contains(misleading), "{}", first.stderr);
    }
    for more in [
        &["--quant", "f16"][..],
        &["--policy", "exact"],
        &["--vram", "0"],
    ] {
        prepare(more)
            .good()
            .stderr_contains(&["is used; `--data` profiles other text"]);
    }
    let answer: Value = prepare(&["--json"]).good().json();
    assert_eq!(answer["plan"]["hardware"]["name"], "laptop");
    assert_eq!(answer["bundle"], "llama-relu-gqa.powerinfer/bundle");
}

#[test]
fn this_machine_is_measured_once_and_again_when_it_differs() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let cache = sandbox.path("cache");
    let place = || {
        let mut command = sandbox.command(&["place", "demo", "--dry-run", "--json", "--vram", "0"]);
        command.env("POWERINFER_CACHE", &cache);
        crate::sandbox::run_command(command, b"").good()
    };
    let measures = |run: &crate::sandbox::Run| run.stderr.contains("measuring this machine");
    let first = place();
    assert!(measures(&first));
    let second = place();
    assert!(!measures(&second));
    let hardware = |run: &crate::sandbox::Run| run.json()["plan"]["hardware"].clone();
    assert_eq!(hardware(&first), hardware(&second));
    let file = cache.join("hardware.json");
    let mut kept: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for damage in [
        |kept: &mut Value| kept["fingerprint"]["processor"] = "another".into(),
        |kept: &mut Value| kept["hardware"]["cpu"]["threads"] = 0.into(),
        |kept: &mut Value| *kept = "no machine".into(),
    ] {
        damage(&mut kept);
        std::fs::write(&file, kept.to_string()).unwrap();
        assert!(measures(&place()));
        kept = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    }
    // Without a folder for it the figures are measured each time, which is no error.
    std::fs::remove_dir_all(&cache).unwrap();
    std::fs::write(&cache, "a file").unwrap();
    place().stderr_contains(&["cannot be kept"]);
}

#[test]
fn a_model_that_is_not_prepared_names_the_command() {
    let sandbox = Sandbox::new();
    let model = golden_model("llama-relu-gqa");
    let model = model.to_str().unwrap();
    for (name, command) in [
        ("demo", "powerinfer prepare demo"),
        (model, "powerinfer prepare /"),
    ] {
        for verb in ["run", "bench", "sweep"] {
            let parts = ["is a model, and there is no bundle of it", command];
            sandbox.run(&[verb, name]).bad(1, &parts);
        }
    }
    let none = sandbox
        .run(&["run", "nothing.powerinfer"])
        .bad(1, &["no bundle"]);
    assert!(
        !none.stderr.contains("powerinfer.powerinfer"),
        "{}",
        none.stderr
    );
}

#[test]
fn the_name_of_a_prepared_model_is_known_to_every_command() {
    let sandbox = Sandbox::new();
    copy_folder(prepared_demo(), &sandbox.path("mine.powerinfer"));
    // A path means what is there, with or without the ending, and nothing of that name here.
    copy_folder(prepared_demo(), &sandbox.path("sub/other.powerinfer"));
    copy_folder(prepared_demo(), &sandbox.path("out"));
    let run = |name: &str| sandbox.run(&["run", name, "--prompt", "def", "-n", "2"]);
    for name in ["sub/other", "./sub/other.powerinfer", "./mine", "out"] {
        run(name).good();
    }
    let nowhere = "there is no bundle in `/nowhere/mine.powerinfer/bundle`";
    run("/nowhere/mine").bad(1, &[nowhere]);
    run("./sub/mine").bad(1, &["there is no bundle in `./sub/mine.powerinfer/bundle`"]);
    let listed = sandbox.run(&["list"]).good();
    listed.stdout_contains(&["mine ", "out "]);
    sandbox
        .run(&["run", "mine", "--prompt", "def", "-n", "1"])
        .good()
        .stderr_contains(&["stopped after 1 token;", "decode: 1 token\n"]);
    sandbox
        .run(&["place", "mine", "--vram", "0", "--dry-run"])
        .good()
        .stdout_contains(&["policies"]);
    sandbox
        .run(&["inspect", "mine", "--html", "page.html", "-v"])
        .good()
        .stdout_contains(&["powerinfer-bundle", "halves overlap"]);
    sandbox
        .run(&words("eval perplexity mine --data page.html --tokens 200"))
        .good()
        .stderr_contains(&["window 512, stride 256, "]);
    sandbox
        .run(&words("logits mine --ids 1,2 --out logits.safetensors"))
        .good();
    // Without `-v` a screen is enough.
    let short = sandbox.run(&["inspect", "mine"]).good().text();
    assert!(short.lines().count() <= 30, "{short}");
    // The name of a model and that of its work folder mean the same, before and after it is prepared.
    let same = |verb: &[&str], code: i32, part: &str| {
        let both = ["demo", "demo.powerinfer", "demo:latest"];
        let runs = both.map(|name| sandbox.run(&[verb, &[name]].concat()));
        let texts = runs.each_ref().map(|run| (run.code, run.text()));
        assert_eq!(texts[0].0, code, "{}", runs[0].stderr);
        let said = |run: &crate::sandbox::Run| run.text() + &run.stderr;
        for run in &runs {
            assert!(said(run).contains(part), "{part}: {}", said(run));
        }
        texts
    };
    for (verb, code, part) in [
        (&["show"][..], 0, "`powerinfer prepare demo` prepares it"),
        (&["run"], 1, "hint: `powerinfer prepare demo` makes one"),
        (&["serve"], 1, "error: `demo` is a model"),
        (&["rm"], 2, "`rm -r demo.powerinfer`"),
        (&["place"], 1, "hint: `powerinfer profile demo` makes one"),
    ] {
        let texts = same(verb, code, part);
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    }
    sandbox.copy_demo();
    let shown = same(&["show"], 0, "parameters   3.5 M");
    assert_eq!(shown[0], shown[1]);
    assert_eq!(shown[0], shown[2]);
    same(&["run", "-p", "def", "-n", "2"], 0, "decode: 2 tokens");

    for verb in [
        &["run"][..],
        &["place"],
        &["inspect"],
        &["bench"],
        &["sweep"],
        &["eval", "perplexity"],
    ] {
        sandbox
            .run(&[verb, &["other"]].concat())
            .bad(1, &["hint: prepared in this folder: `demo`, `mine`"]);
    }
    Sandbox::new()
        .run(&["place", "other"])
        .bad(1, &["called `other`", "`powerinfer prepare MODEL`"]);
}

#[test]
fn a_prompt_beyond_the_context_is_an_error_before_anything_is_printed() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let place = ["place", "demo.powerinfer", "--vram", "0", "--context", "16"];
    sandbox.run(&place).good();
    let parts = [
        "the context holds 16",
        "place demo.powerinfer/bundle --context",
    ];
    let echo = sandbox.run_with(&["run", "--echo", "-n", "9"], "x ".repeat(40).as_bytes());
    assert_eq!(echo.bad(1, &parts).text(), "");
    let example = sandbox.run(&["run", "demo"]);
    assert_eq!(example.bad(1, &parts).text(), "");
    let longer = sandbox.run_with(&["run"], "x ".repeat(600).as_bytes());
    longer.bad(1, &["a context of 512 tokens at most"]);
}

#[test]
fn settings_of_earlier_runs_are_kept_until_they_are_changed() {
    let sandbox = Sandbox::new();
    let prepare = |more: &[&str]| {
        sandbox
            .run(&[&["prepare", "demo"][..], more].concat())
            .good()
    };
    let format = || {
        let report = sandbox
            .run(&["inspect", "demo.powerinfer/bundle", "--json"])
            .good();
        report.json()["manifest"]["quant"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let first = prepare(
        &[
            &QUICK[..],
            &words("--hardware laptop --quant q4_0 --certify none --policy exact"),
        ]
        .concat(),
    );
    first.stderr_contains(&["none are trained, as `--policy exact` uses none"]);
    assert!(!first.stderr.contains("earlier runs"), "{}", first.stderr);
    assert!(!sandbox.path("demo.powerinfer/predictors").exists());
    assert_eq!(format(), "q4_0");
    // Neither command changes anything unasked.
    for command in ["prepare", "place"] {
        let again = sandbox.run(&[command, "demo"]).good();
        again.stderr_contains(&[
            "as in earlier runs: --certify none --hardware laptop --policy exact --quant q4_0",
            "bundle: `demo.powerinfer/bundle` is up to date",
        ]);
    }
    // A plan that is only shown is not a setting.
    sandbox
        .run(&["place", "demo", "--dry-run", "--quant", "f16"])
        .good();
    prepare(&[]).stderr_contains(&["--quant q4_0"]);
    // One setting is changed, the others stay.
    let changed = prepare(&["--quant=f16"]);
    changed.stderr_contains(&[
        "earlier runs: --certify none --hardware laptop --policy exact --s",
        "was made from other artifacts or settings",
    ]);
    assert_eq!(format(), "f16");
    // The options of re-planning are kept too; it fills in only the kept options that it accepts.
    let replaced = sandbox
        .run(&["place", "demo.powerinfer", "--context", "64"])
        .good();
    replaced.stderr_contains(&["as in earlier runs: --hardware laptop (`--reset`"]);
    prepare(&[]).stderr_contains(&[
        "--context 64",
        "`demo.powerinfer/bundle` still has the policies of its first budget",
    ]);
    // A killed run is resumed with its options; a failed one changes nothing.
    let file = sandbox.path("demo.powerinfer/settings.json");
    let before = std::fs::read(&file).unwrap();
    sandbox
        .run(&["place", "demo", "--ram", "1M"])
        .bad(1, &["--ram"]);
    assert_eq!(std::fs::read(&file).unwrap(), before);
    let mut killed = sandbox
        .command(&words(
            "prepare demo --seed 3 --steps 100000 --policy predicted",
        ))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while std::fs::read(&file).unwrap() == before && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let settings = std::fs::read_to_string(&file).unwrap();
    assert_contains(&settings, &["\"seed\"", "\"100000\""]);
    std::fs::write(&file, before).unwrap();
    std::fs::remove_dir_all(sandbox.path("demo.powerinfer/bundle")).unwrap();
    let shown = sandbox.run(&["show", "demo"]).good();
    shown.stdout_contains(&["powerinfer-profile"]);
    shown.stderr_contains(&["there is no bundle yet"]);
    let afresh = prepare(&words(
        "--reset --hardware laptop --certify none --steps 5 --tokens 5000",
    ));
    assert!(!afresh.stderr.contains("earlier runs"), "{}", afresh.stderr);
    assert_eq!(format(), "q8_0");
    // Predictors work with weights in any format.
    let trained = sandbox.path("demo.powerinfer/predictors/predictors.safetensors");
    let predictors = std::fs::read(&trained).unwrap();
    prepare(&["--quant", "q4_0"]).stderr_contains(&[
        "trained for weights in q8_0 are kept",
        "predictors` is up to date",
    ]);
    assert_eq!(
        (format(), std::fs::read(&trained).unwrap()),
        ("q4_0".to_owned(), predictors)
    );
    prepare(&["--quant", "q8_0"]);
    // Predictors that exceed their budget are refused before any work starts.
    sandbox
        .run(&words(
            "prepare demo --quant q4_0 --policy predicted --out other",
        ))
        .bad(1, &["take at least 100.1 KiB", "raise `--max-bytes`"]);
    assert!(!sandbox.path("other/profile").exists());
    // An earlier option that this version rejects is named and dropped.
    let settings = std::fs::read_to_string(&file).unwrap();
    let settings = settings.replace("\"laptop\"", "\"laptop\"], \"objective\": [\"fun\"");
    std::fs::write(&file, settings).unwrap();
    prepare(&[]).stderr_contains(&["no longer kept", "you gave: --objective fun"]);
    let again = prepare(&[]);
    assert!(!again.stderr.contains("no longer"), "{}", again.stderr);
    // A file of somebody else is not replaced.
    std::fs::write(&file, "{}").unwrap();
    for more in [&[][..], &["--reset"]] {
        let run = sandbox.run(&[&["prepare", "demo"][..], more].concat());
        run.bad(
            1,
            &["demo.powerinfer/settings.json` is JSON without a PowerInfer header"],
        );
        assert_eq!(std::fs::read(&file).unwrap(), b"{}");
    }
    std::fs::write(&file, "[").unwrap();
    sandbox.run(&["prepare", "demo"]).bad(
        1,
        &["demo.powerinfer/settings.json` is not the expected JSON"],
    );
}

#[test]
fn habits_of_other_programs_are_understood() {
    let sandbox = Sandbox::new();
    sandbox
        .run(&["list"])
        .good()
        .stderr_contains(&["`powerinfer prepare MODEL`"]);
    sandbox.copy_demo();
    for command in ["list", "ls"] {
        let list = sandbox.run(&[command]).good();
        list.stdout_contains(&["name", "demo", "MiB", "q8_0", "in 6 layers", "just now"]);
    }
    let list = sandbox.run(&["list", "--json"]).good().json();
    assert_eq!(list["models"][0]["folder"], "./demo.powerinfer/bundle");
    let shown = sandbox.run(&["show", "demo.powerinfer/bundle"]).good();
    shown.stdout_contains(&["powerinfer-bundle"]);
    // If `demo.gguf` is missing, it does not stand for the prepared model `demo`.
    for argument in ["demo.gguf", "./demo.gguf"] {
        let run = sandbox.run(&["run", argument, "x"]);
        run.bad(
            1,
            &["there is no file `", "prepared in this folder: `demo`"],
        );
        sandbox.run(&["show", argument]).bad(1, &["demo.gguf"]);
    }
    sandbox
        .run(&["run", "demo", "--seed", "-1", "x"])
        .bad(2, &["--seed", "-1", "whole number"]);
    sandbox
        .run(&["run", "demo", "--stop", "x"])
        .bad(2, &["`stop` in the API of `powerinfer serve`"]);
    // A certification that was interrupted leaves the windows that it measured.
    let windows = sandbox.path("mine.powerinfer/bundle-certificate.jsonl");
    sandbox
        .run(&words(
            "place demo --vram 0 --certify none --out mine.powerinfer/bundle",
        ))
        .good();
    let state = || {
        let list = sandbox.run(&["list", "--json"]).good().json();
        let models = list["models"].as_array().unwrap().clone();
        models
            .iter()
            .map(|model| model["certificate"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(state(), ["complete", "none"]);
    std::fs::write(&windows, "").unwrap();
    assert_eq!(state(), ["complete", "incomplete"]);
    let list = sandbox.run(&["list"]).good();
    list.stderr_contains(&["run the same `powerinfer prepare` again"]);
    let shown = sandbox.run(&["show", "mine"]).good();
    shown.stdout_contains(&["the certificate is incomplete"]);
    std::fs::remove_dir_all(sandbox.path("mine.powerinfer")).unwrap();
    let given = sandbox
        .run(&["run", "demo", "def add(a, b):", "-n", "8"])
        .good();
    let prompt = sandbox
        .run(&["run", "demo", "-p", "def add(a, b):", "-n", "8"])
        .good();
    assert_eq!(given.stdout, prompt.stdout);
    let all = sandbox
        .run(&["run", "demo", "def add(a, b):", "-n", "-1"])
        .good();
    let (all, given) = (all.text(), given.text());
    assert!(
        all.len() > given.len() && all.starts_with(given.trim_end()),
        "{all}"
    );
    sandbox.run(&["run", "demo", "-n", "-2"]).bad(2, &["or -1"]);
    let file = "demo.powerinfer/bundle/plan.json";
    sandbox
        .run(&["run", file])
        .bad(1, &["is a file of the bundle `demo.powerinfer/bundle`"]);
    for missing in [
        "models/tiny.gguf",
        "other.powerinfer/bundle",
        "./tiny",
        "tiny/weights.safetensors",
    ] {
        sandbox
            .run(&["tokenize", missing])
            .bad(1, &["there is no model at"]);
    }
    let command = "`powerinfer prepare org/name --data TEXT`";
    sandbox
        .run(&["run", "org/name"])
        .bad(1, &["`org/name` is a model", command]);
    std::fs::write(sandbox.path("short.txt"), "twelve bytes").unwrap();
    let profile = ["profile", "demo", "--data", "short.txt", "--out", "short"];
    sandbox
        .run(&profile)
        .bad(1, &["held-out tokens are needed: give at least"]);
}

#[test]
fn options_of_llama_cpp_name_ours() {
    let sandbox = Sandbox::new();
    for (options, ours) in [
        (&["run", "-m", "model.gguf"][..], "`powerinfer run MODEL`"),
        (&["run", "demo", "-ngl", "20"], "`--vram SIZE`"),
        (&["run", "demo", "-c", "4096"], "`--context N`"),
        (&["run", "demo", "--ctx-size=4096"], "`--context N`"),
        (&["run", "demo", "-ctk", "q8_0"], "`--kv-cache FORMAT`"),
        (
            &["run", "demo", "-f", "prompt.txt"],
            "`powerinfer run MODEL < FILE`",
        ),
        (&["run", "demo", "-cnv"], "`powerinfer run MODEL -i`"),
        (&["run", "demo", "-sys", "Be brief."], "`/system TEXT`"),
        (&["prepare", "-c", "4096"], "`--context N`"),
        (&["run", "demo", "--num-ctx", "4096"], "`--context N`"),
        (&["run", "demo", "--prompt-file", "a.txt"], "MODEL < FILE`"),
        (&["run", "demo", "--num-predict", "9"], "`-n N`"),
        (&["run", "demo", "-fa"], "omit it"),
        (&["serve", "demo", "-np", "4"], "`--parallel N`"),
        (&["stop", "demo"], "Ctrl-C"),
        (&["rm", "org/tiny:Q4_0"], "`rm -r tiny.powerinfer`"),
        (&["rm"], "`rm -r NAME.powerinfer`"),
        (
            &["perplexity", "-m", "x.gguf"],
            "`powerinfer eval perplexity",
        ),
    ] {
        let run = sandbox.run(options).bad(2, &["\nhint: ", ours]);
        assert!(!run.stderr.contains("tip: "), "{}", run.stderr);
    }
    let help = sandbox.run(&["run", "-hf", "org/name"]);
    help.stderr_contains(&["hint: give the name", "prepare org/name:Q4_K_M"]);
    let others = sandbox.run(&["run", "--contest", "4096"]).bad(2, &[]);
    assert!(!others.stderr.contains("hint: "), "{}", others.stderr);
    sandbox
        .run(&["run", "-h"])
        .good()
        .stdout_contains(&["Usage"]);
}

#[test]
fn json_is_one_document() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    // Without a prompt: an example.
    let run = sandbox
        .run(&["run", "demo", "-n", "3", "--json"])
        .good()
        .json();
    assert_eq!(run["generated_tokens"], 3);
    assert_eq!(run["stop_reason"], "max_tokens");
    let prepare = [&["prepare", "demo", "--vram", "24G", "--json"][..], &QUICK].concat();
    assert!(sandbox.run(&prepare).good().json()["certificate"].is_object());
}

/// Types `keys`, at each prompt one of them, into `powerinfer run demo -i` on a terminal; `None` where `script` cannot
/// make one.
fn chat_on_a_terminal(sandbox: &Sandbox, keys: &[&str]) -> Option<String> {
    on_a_terminal(sandbox, "run demo -i -n 8", "> ", keys)
}

/// Runs a command on a terminal and types one of `keys` after each `prompt`; `None` if `script` cannot create a terminal.
fn on_a_terminal(
    sandbox: &Sandbox,
    arguments: &str,
    prompt: &str,
    keys: &[&str],
) -> Option<String> {
    let program = env!("CARGO_BIN_EXE_powerinfer");
    let line = format!("{program} {arguments}");
    let mut child = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .current_dir(sandbox.path(""))
        .env("TERM", "xterm")
        .env("POWERINFER_CACHE", sandbox.path("cache"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut input = child.stdin.take().unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut seen = Vec::new();
    for key in keys {
        // The prompt of the editor comes after what it turns on.
        let from = seen.len();
        let mut bytes = [0; 4096];
        while !String::from_utf8_lossy(&seen[from..]).contains(prompt) {
            let count = output.read(&mut bytes).unwrap();
            if count == 0 {
                break;
            }
            seen.extend(&bytes[..count]);
        }
        input.write_all(key.as_bytes()).unwrap();
    }
    drop(input);
    output.read_to_end(&mut seen).unwrap();
    assert!(child.wait().unwrap().success());
    Some(String::from_utf8_lossy(&seen).into_owned())
}

#[test]
fn a_chat_has_commands_history_and_lines_that_continue() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let keys = [
        "/help\r",
        "/halp\r",
        "def f(xs):\\\r",
        "    return\r",
        "/save nowhere/chat.json\r",
        "/save chat.json\r",
        "/reset\r",
        "/bye\r",
    ];
    let Some(seen) = chat_on_a_terminal(&sandbox, &keys) else {
        eprintln!("skipped: `script` is not installed");
        return;
    };
    for part in [
        "/system TEXT",
        "no command `/halp`",
        "the folder `nowhere` does not exist",
        "saved the chat to `chat.json`",
        "1 answer: ",
    ] {
        assert!(seen.contains(part), "{part}: {seen}");
    }
    let chat = std::fs::read(sandbox.path("chat.json")).unwrap();
    let chat: Value = serde_json::from_slice(&chat).unwrap();
    assert_eq!(chat[0]["content"], "def f(xs):\n    return");
    assert_eq!(
        (chat.as_array().unwrap().len(), &chat[1]["role"]),
        (2, &"assistant".into())
    );
    let history = std::fs::read_to_string(sandbox.path("cache/chat_history")).unwrap();
    assert!(history.contains("/save chat.json"), "{history}");
}

#[test]
fn a_terminal_is_for_a_conversation() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let keys = ["def f(xs):\r", "/bye\r"];
    let Some(seen) = on_a_terminal(&sandbox, "run demo -n 8", "> ", &keys) else {
        eprintln!("skipped: `script` is not installed");
        return;
    };
    for part in ["an example:", "def answer(", "2 answers: "] {
        assert!(seen.contains(part), "{part}: {seen}");
    }
    let keys = ["def f\n\u{4}"];
    let seen = on_a_terminal(&sandbox, "tokenize demo", "Ctrl-D", &keys).unwrap();
    assert!(seen.contains("reading text from standard input"), "{seen}");
    assert!(seen.contains(']'), "{seen}");
}

#[test]
fn what_is_typed_during_an_answer_stays_for_the_next_lines() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let keys = ["def f(xs):\rdef g(xs):\r/save ch", "at.json\r", "/quit\r"];
    let Some(seen) = chat_on_a_terminal(&sandbox, &keys) else {
        eprintln!("skipped: `script` is not installed");
        return;
    };
    assert!(seen.contains("2 answers: "), "{seen}");
    assert!(sandbox.path("chat.json").exists(), "{seen}");
}

#[test]
fn a_chat_from_stdin_takes_commands_and_skips_empty_lines() {
    let sandbox = Sandbox::new();
    sandbox.copy_demo();
    let lines = b"\n/help\ndef f(xs):\n\n// no command\n/save\n/quit\ndef g(xs):\n";
    let chat = sandbox
        .run_with(&["run", "demo", "-i", "-n", "4"], lines)
        .good();
    chat.stderr_contains(&["/reset", "`/save` takes a file", "2 answers: 8 tokens"]);
}
