"""Benchmarks powerinfer and llama.cpp alternately on the same shapes, and writes a report. Run by `bench-cpu.sh`."""

import gzip
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time

POWERINFER = os.environ["POWERINFER"]
LLAMA = pathlib.Path(os.environ["LLAMA_CPP_BIN"])
SHAPES = os.environ.get("SHAPES", "llama-1b llama-7b:16 llama-70b:4").split()
QUANTS = os.environ.get("QUANTS", "f16 q8_0 q4_0").split()
THREADS = [int(word) for word in os.environ.get("THREADS", "1 2").split()]
REPEATS = int(os.environ.get("REPEATS", "3"))
PROMPT_SHAPES = os.environ.get("PROMPT_SHAPES", "llama-1b").split()
SPARSE = os.environ.get("SPARSE", "llama-7b llama-70b").split()
# Texts for speculative decoding, and the folder of the tokenizer that splits them; none skips the section.
HUMAN_EVAL, PLAIN_TEXT, TOKENIZER = (os.environ.get(name) for name in ("HUMAN_EVAL", "PLAIN_TEXT", "TOKENIZER"))
COMPLETIONS = int(os.environ.get("COMPLETIONS", "4"))

TOKENS = 64
PROMPT = 512
CONTEXT = PROMPT + TOKENS
SPARSITY = 0.9
PROFILED = 128
SPARSE_QUANT = "q4_0"
# Predictors of this rank are at most 3% of the model's bytes where both are in 4 bits.
RANKS = {"llama-1b": 96, "llama-7b": 288, "llama-13b": 320, "llama-30b": 448, "llama-70b": 544}
# Shapes too large for a comparison with llama.cpp: they are measured in the sparse format only.
ONLY_SPARSE = {"llama-70b"}
# Mixtures of experts, without predictors, and the share of a layer's experts with 80% of the selections.
MIXTURES = {"mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b"}
EXPERT_SKEW = 0.3
BYTES_PER_WEIGHT = {"f16": 2, "bf16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}
# Stages whose GEMMs cover every prompt token; the head computes the last token only.
PRODUCTS = {"query-key-value", "attention-output", "gate-up", "down"}
# Speedup of dense decoding over llama.cpp, where that reads at this share of the bandwidth or more, and elsewhere.
AT_LIMIT, DECODE_GOALS = 0.9, (1.0, 1.3)
SHARE_GOALS = {"f16": 0.85, "bf16": 0.85, "q8_0": 0.85, "q4_0": 0.75}
# Speedup over the dense policy, and over llama.cpp, by the number of threads.
SPARSE_GOALS = {
    ("llama-7b", "predicted", 1): (2.4, 3.5),
    ("llama-7b", "predicted", 2): (2.3, 2.3),
    ("llama-70b", "predicted", 1): (3.3, None),
    ("llama-70b", "predicted", 2): (3.3, None),
}
PROMPT_GOALS = {"f16": 0.95, "bf16": 0.95}
PROMPT_GOAL, HAND_OVER_GOAL, THREADS_GOAL = 1.0, 3.0, 1.6
# Speedup of a stage on several threads, relative to that of what memory allows it.
SCALING_GOAL = 0.9
# Most seconds to the first token, for bundles of at most `START_BYTES` in the page cache.
START_GOAL, START_BYTES = 1.0, 4 << 30
BATCHES = [1, 2, 4, 8, 16, 32]
BUSY_ROUNDS = 3
DENSITIES = [5, 10, 20, 30, 50, 70]
# Most time of an FFN with a share of its neurons, relative to that in which memory reads as many rows at random places.
DENSITY_GOAL = 1.25
# A run that is starved of CPU time may wait for its threads forever.
LIMIT_SECONDS = 1200
# Speedup of speculative decoding of text that repeats itself, and of text that does not.
SPECULATION_GOALS = {"edited functions": 1.5, "prose": 0.98}


def run(*command, limit=LIMIT_SECONDS, **options):
    """Standard output of a command; None on timeout. Exits with the command's output on failure."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, **options)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def say(line):
    print(line, file=sys.stderr, flush=True)


class Runs:
    """Results of alternating runs: JSON documents of powerinfer, tokens/s of llama.cpp."""

    def __init__(self):
        self.ours, self.prompt, self.decode = [], [], []

    def speeds(self, kind):
        return [run[kind][0]["tokens_per_second"]["median"] for run in self.ours if run[kind]]


def bench(bundle, policy, threads, prompt, *more, repeats=1):
    """JSON document of one `powerinfer bench` run; None on timeout."""
    text = run(
        POWERINFER, "bench", bundle, "--policy", policy, "--threads", threads, "--repeats", repeats,
        "-p", PROMPT if prompt else 0, "-n", TOKENS, "--json", "--quiet", *more,
    )
    return json.loads(text) if text else None


def llama_bench(model, threads, prompt):
    """One llama-bench run: tokens/s of prefill and decode, and the version."""
    text = run(
        LLAMA / "llama-bench", "-m", model, "-t", threads, "-p", PROMPT if prompt else 0, "-n", TOKENS,
        "-r", 1, "-o", "jsonl",
    )
    found = {"prompt": None, "decode": None, "version": ""}
    for line in (text or "").splitlines():
        if line.startswith("{"):
            test = json.loads(line)
            found["prompt" if test["n_prompt"] else "decode"] = test["avg_ts"]
            found["version"] = f"{test['build_commit']} ({test['build_number']})"
    return found


def read_anew(*files):
    """Drops files from the page cache and reads them again. Freshly written files are cached in pages of another
    size than files read from disk, and larger pages are read faster."""
    for path in files:
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(8 << 20):
                pass


def completions(kind):
    """Prompts and completions: functions that are repeated under another name, or paragraphs that go on."""
    if kind == "edited functions":
        opened = gzip.open if HUMAN_EVAL.endswith(".gz") else open
        with opened(HUMAN_EVAL, "rt", encoding="utf-8") as file:
            tasks = [json.loads(line) for line in file if line.strip()][:COMPLETIONS]
        for task in tasks:
            name, function = task["entry_point"], task["prompt"] + task["canonical_solution"]
            prompt = f"Rename `{name}` to `{name}_checked`:\n\n{function}\n"
            yield {"prompt": prompt, "completion": function.replace(name, f"{name}_checked")}
    else:
        text = pathlib.Path(PLAIN_TEXT).read_text(encoding="utf-8")
        paragraphs = [line.strip() for line in text.splitlines() if len(line) > 900][:COMPLETIONS]
        for paragraph in paragraphs:
            yield {"prompt": paragraph[:300], "completion": paragraph[300:900]}


def seconds_to_first_token(bundle, threads):
    """Seconds from process start until one token has been generated."""
    started = time.monotonic()
    run(POWERINFER, "run", bundle, "--threads", threads, "--prompt", "a", "-n", 1, "--quiet")
    return time.monotonic() - started


def in_turn(bundle, model, threads, prompt, policies=("dense",)):
    """Alternating runs: each policy of powerinfer, then llama.cpp, `REPEATS` times."""
    runs = {policy: Runs() for policy in policies}
    versions = set()
    for _ in range(REPEATS):
        for policy in policies:
            found = bench(bundle, policy, threads, prompt)
            if found:
                runs[policy].ours.append(found)
        if model:
            theirs = llama_bench(model, threads, prompt)
            versions.add(theirs["version"])
            for kind in ("prompt", "decode"):
                if theirs[kind]:
                    getattr(runs[policies[0]], kind).append(theirs[kind])
    return runs, versions


def median(values):
    return statistics.median(values) if values else None


def figure(value, digits=2):
    return "–" if value is None else f"{value:.{digits}f}"


def spread(values):
    if not values:
        return "did not finish"
    return f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def ratio(one, other):
    return one / other if one and other else None


def verdict(value, goal, at_most=False):
    """Value, goal and verdict as table cells."""
    if value is None or goal is None:
        return figure(value), "–", "–"
    met = value <= goal if at_most else value >= goal
    return figure(value), f"{'≤' if at_most else '≥'} {goal:g}", "met" if met else "**not met**"


def table(headings, rows):
    align = [":--"] + ["--:"] * (len(headings) - 1)
    lines = [headings, align, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def name_of(shape, layers):
    return f"{shape}, {layers} layer{'s' * (layers != '1')}" if layers else shape


class Model:
    """A synthetic checkpoint and the files derived from it."""

    def __init__(self, folder, text, shape):
        self.shape, _, self.layers = shape.partition(":")
        self.folder, self.text, self.is_made = folder / "models", text, False

    def make(self):
        """Writes the checkpoint and its profile, unless they exist."""
        if self.is_made:
            return
        self.is_made = True
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.checkpoint = self.folder / "model"
        synth = ["synth", "--like", self.shape, "--out", self.checkpoint, "--quiet"]
        if self.shape in MIXTURES:
            synth += ["--skew", EXPERT_SKEW]
        else:
            synth += ["--sparsity", SPARSITY, "--predictor-rank", RANKS.get(self.shape, 256)]
        if self.layers:
            synth += ["--layers", self.layers]
        say(f"making {name_of(self.shape, self.layers)}")
        run(POWERINFER, *synth)
        if TOKENIZER:
            for file in pathlib.Path(TOKENIZER).glob("*token*.json"):
                shutil.copy(file, self.checkpoint)
        # The profile only sorts neurons within layers, so few tokens are enough.
        self.profile = self.folder / "profile"
        run(
            POWERINFER, "profile", self.checkpoint, "--data", self.text, "--tokens", PROFILED, "--out", self.profile,
            "--quiet", limit=None,
        )

    def bundle(self, quant):
        out = self.folder / f"bundle-{quant}"
        policy = ["--policy", "dense"]
        if self.shape not in MIXTURES:
            policy = ["--policy", "predicted", "--predictors", self.checkpoint / "predictors"]
        run(
            POWERINFER, "place", self.checkpoint, "--profile", self.profile, *policy, "--vram", "0G", "--context", CONTEXT,
            "--quant", quant, "--certify", "none", "--hardware", "cpu-only", "--out", out, "--quiet", limit=None,
        )
        return out

    def gguf(self, quant):
        """GGUF file for llama.cpp; models in bf16 are compared with f16."""
        quant = "f16" if quant == "bf16" else quant
        out = self.folder / f"model-{quant}.gguf"
        if not out.exists():
            run(
                POWERINFER, "export", self.checkpoint, "--to", "gguf", out, "--quant", quant,
                "--any-activation", "--no-tokenizer", "--quiet", limit=None,
            )
        return out

    def remove(self):
        if self.is_made:
            shutil.rmtree(self.folder)


class Files:
    """Files of a model in one format for both programs, created on first use."""

    def __init__(self, model, quant):
        self.model, self.quant, self.made = model, quant, None

    def get(self):
        """The bundle, and the GGUF file or None where llama.cpp does not run."""
        if not self.made:
            self.model.make()
            bundle = self.model.bundle(self.quant)
            file = None if self.model.shape in ONLY_SPARSE else self.model.gguf(self.quant)
            read_anew(bundle / "weights.safetensors", *([file] if file else []))
            self.made = bundle, file
        return self.made

    def remove(self):
        if not self.made:
            return
        bundle, file = self.made
        shutil.rmtree(bundle)
        if file and self.quant not in ("f16", "bf16"):
            file.unlink()


def where_time_goes(title, document):
    """Report section: decode stages of a powerinfer run."""
    decode = document["decode"][0]
    total = decode["microseconds_per_token"]["median"]
    rows = []
    for stage in decode["stages"]:
        time, speed, ceiling = stage["microseconds"]["median"], stage["bytes_per_second"], stage["ceiling_bytes_per_second"]
        reads = [f"{stage['bytes'] / 1e6:.1f}", *(f"{of / 1e9:.1f}" for of in (speed, ceiling)), f"{100 * speed / ceiling:.0f}%"]
        rows.append([stage["stage"], f"{time:.0f}", f"{100 * time / total:.1f}%", *(reads if stage["bytes"] else [""] * 4)])
    rows.append(["unaccounted", f"{decode['unaccounted_microseconds']['median']:.0f}", "", "", "", "", ""])
    return f"\n### {title}\n\n" + table(
        ["stage", "µs per token", "share of time", "MB read", "GB/s", "memory allows", "of that"], rows
    )


def where_prompt_time_goes(title, document, quant):
    """Report section: prefill stages of a powerinfer run. Prefill is compute-bound, so GFLOP/s replace GB/s."""
    prompt, decode = document["prompt"][0], document["decode"][0]
    total = prompt["microseconds_per_token"]["median"]
    rows = []
    for stage, of_token in zip(prompt["stages"], decode["stages"]):
        time = stage["microseconds"]["median"]
        # Decoding reads every weight once, so its bytes give the number of weights. Attention reads the KV cache, no weights.
        weights = of_token["bytes"] / BYTES_PER_WEIGHT[quant] if stage["stage"] in PRODUCTS else 0
        speed = f"{2 * weights / time / 1e3:.0f}" if weights and time else ""
        rows.append([stage["stage"], f"{time:.0f}", f"{100 * time / total:.1f}%", speed])
    rows.append(["unaccounted", f"{prompt['unaccounted_microseconds']['median']:.0f}", "", ""])
    return f"\n### {title}\n\n" + table(["stage", "µs per token", "share of time", "GFLOP/s"], rows)


def middle(documents, kind="decode"):
    """The run with the median speed (the upper one of two)."""
    speed = lambda document: document[kind][0]["tokens_per_second"]["median"]
    return sorted(documents, key=speed)[len(documents) // 2]


def share(documents):
    return median([run["decode"][0]["bandwidth_share"]["median"] for run in documents])


class Report:
    """Rows of the report, written after each measurement so that an interrupted run keeps its results."""

    def __init__(self, path, folder):
        self.path, self.folder = path, folder
        self.dense, self.prompts, self.sparse, self.stages, self.densities = [], [], [], [], []
        self.starts, self.batches, self.busy, self.speculation, self.passes = [], [], [], [], []
        self.speeds, self.decodes, self.syncs, self.raw = {}, {}, [], []
        self.disturbed, self.count, self.versions = 0, 0, set()
        # Results of another program or other settings are not reused.
        program = hashlib.sha256(pathlib.Path(POWERINFER).read_bytes()).hexdigest()
        self.identity = {"powerinfer": program, "tokens": TOKENS, "prompt": PROMPT, "repeats": REPEATS}
        self.known = []
        if (folder / "figures.json").exists():
            before = json.loads((folder / "figures.json").read_text())
            if isinstance(before, dict) and before["identity"] == self.identity:
                self.known = before["figures"]
                say(f"resuming from {folder / 'figures.json'}")

    def once(self, what, key, measure):
        """A measurement of this run, or of an interrupted run with the same identity."""
        kept = [entry[key] for entry in self.known if entry["what"] == what and key in entry]
        value = kept[0] if kept else measure()
        self.raw.append({"what": what, key: value})
        return value

    def runs(self, what, policies, measure):
        """Alternating runs, measured now or reused from an interrupted run."""
        kept = {entry["policy"]: entry for entry in self.known if entry["what"] == what and "policy" in entry}
        if all(policy in kept for policy in policies):
            runs, versions = {policy: Runs() for policy in policies}, set()
            for policy, found in runs.items():
                entry = kept[policy]
                found.ours, theirs = entry["powerinfer"], entry["llama.cpp"]
                found.prompt, found.decode = theirs["prompt"], theirs["decode"]
                versions |= set(theirs["versions"])
        else:
            runs, versions = measure()
        self.keep(what, runs, versions)
        return runs

    def keep(self, what, runs, versions):
        self.versions |= versions
        for policy, found in runs.items():
            self.raw.append({
                "what": what, "policy": policy, "powerinfer": found.ours,
                "llama.cpp": {"prompt": found.prompt, "decode": found.decode, "versions": sorted(versions)},
            })
            for document in found.ours:
                self.count += 1
                contention = document["decode"][0]["contention"]
                shares = [contention["waited"] or 0, contention["stolen"] or 0]
                self.disturbed += max(shares) > 0.03
                if document["machine"]["threads"] > 1:
                    self.syncs.append(document["sync_microseconds"])

    def add_dense(self, model, quant, threads, runs):
        found = runs["dense"]
        if not found.ours:
            return
        title = f"{name_of(model.shape, model.layers)}, {quant}, {threads} thread{'s' * (threads > 1)}"
        ours, theirs = found.speeds("decode"), found.decode
        self.speeds[model.shape, quant, threads] = median(ours)
        bandwidth = median([run["decode"][0]["read_bandwidth"]["median"] for run in found.ours])
        bytes_read = found.ours[0]["decode"][0]["bytes_per_token"]["weights"]
        their_share = median(theirs) * bytes_read / bandwidth if theirs else None
        goal = DECODE_GOALS[(their_share or 0) < AT_LIMIT]
        compared = verdict(ratio(median(ours), median(theirs)), goal)
        reached = verdict(share(found.ours), SHARE_GOALS[quant])
        self.dense.append([
            name_of(model.shape, model.layers), quant, threads, spread(ours),
            "not run" if model.shape in ONLY_SPARSE else spread(theirs), *compared,
            f"{bandwidth / 1e9:.1f}", *reached, figure(their_share),
        ])
        if "**not met**" in (*compared, *reached):
            self.stages.append(where_time_goes(f"Dense, {title}", middle(found.ours)))
        ours, theirs = found.speeds("prompt"), found.prompt
        if ours:
            compared = verdict(ratio(median(ours), median(theirs)), PROMPT_GOALS.get(quant, PROMPT_GOAL))
            self.prompts.append(
                [name_of(model.shape, model.layers), quant, threads, spread(ours), spread(theirs), *compared]
            )
            if "**not met**" in compared:
                documents = [document for document in found.ours if document["prompt"]]
                section = where_prompt_time_goes(f"Prefill, {title}", middle(documents, "prompt"), quant)
                self.stages.append(section)

    def add_sparse(self, model, threads, runs):
        dense, theirs = runs["dense"].speeds("decode"), runs["dense"].decode
        for policy in ("exact", "predicted"):
            found = runs[policy]
            if not found.ours or not dense:
                continue
            ours = found.speeds("decode")
            goals = SPARSE_GOALS.get((model.shape, policy, threads), (None, None))
            over_dense = verdict(ratio(median(ours), median(dense)), goals[0])
            over_llama = verdict(ratio(median(ours), median(theirs)), goals[1])
            decode = found.ours[0]["decode"][0]
            dense_bytes = runs["dense"].ours[0]["decode"][0]["bytes_per_token"]["total"]
            # Speedup if every byte were read at the dense policy's speed.
            ceiling = dense_bytes / decode["bytes_per_token"]["total"]
            predictors = decode["bytes_per_token"]["predictors"] / dense_bytes
            self.sparse.append([
                name_of(model.shape, model.layers), policy, threads, spread(ours),
                f"{100 * decode['ffn_neurons_computed']:.1f}%", f"{100 * predictors:.1f}%",
                *over_dense, figure(ceiling), *over_llama,
            ])
            if policy == "predicted":
                self.decodes[model.shape, threads] = middle(found.ours)["decode"][0]["stages"]
            if policy == "predicted" or "**not met**" in (*over_dense, *over_llama):
                title = f"`{policy}`, {name_of(model.shape, model.layers)}, {SPARSE_QUANT}, {threads} thread{'s' * (threads > 1)}"
                self.stages.append(where_time_goes(title, middle(found.ours)))

    def add_densities(self, model, what, files):
        """Times of single FFNs by share of neurons computed."""
        quant, threads = what["quant"], what["threads"]

        def measure():
            densities = ",".join(map(str, DENSITIES))
            found = bench(files.get()[0], "dense", threads, False, "--ffn-densities", densities, repeats=REPEATS)
            return found and found["ffn"]

        found = self.once(what, "ffn", measure)
        if not found:
            return
        rows = []
        for time in found:
            taken, least = time["microseconds"]["median"], time["ceiling_microseconds"]
            rows.append([
                f"{100 * time['neuron_share']:.0f}%", f"{taken:.0f}", f"{100 * time['time_share']:.1f}%", f"{least:.0f}",
                *verdict(taken / least, DENSITY_GOAL, at_most=True),
            ])
        heading = f"One FFN with part of its neurons: {name_of(model.shape, model.layers)}, {quant}, {threads} thread{'s' * (threads > 1)}"
        self.densities.append((heading, table(["neurons", "µs", "share of dense time", "memory allows, µs", "times that", "goal", ""], rows)))

    def add_speculation(self, model, what, files):
        """Texts with and without speculation, `predicted`."""
        for kind, goal in SPECULATION_GOALS.items():
            def measure():
                texts = self.folder / "completions.jsonl"
                texts.write_text("".join(json.dumps(text) + "\n" for text in completions(kind)))
                text = run(
                    POWERINFER, "bench", files.get()[0], "--policy", "predicted", "--threads", what["threads"], "--repeats", REPEATS,
                    "-p", 0, "-n", 0, "--completions", texts, "--json", "--quiet",
                )
                return text and json.loads(text)["speculation"]

            found = self.once({**what, "text": kind, "texts": COMPLETIONS}, "speculation", measure)
            if not found:
                continue
            name = name_of(model.shape, model.layers)
            speeds = [found[speed]["median"] for speed in ("plain", "speculative")]
            self.speculation.append([
                name, kind, what["threads"], found["tokens"], *map(figure, speeds), *verdict(found["speedup"]["median"], goal),
                f"{found['accepted']} of {found['proposed']}",
            ])
            if kind == "edited functions":
                for one in found["passes"]:
                    shares = [f"{100 * one[share]:.1f}%" for share in ("neurons_of_a_token", "neurons_of_any")]
                    self.passes.append([name, what["threads"], one["tokens"], one["passes"], f"{one['microseconds'] / 1e3:.1f}", *shares])

    def add_start(self, model, what, files):
        """Time to the first token, the last of three runs."""
        def measure():
            bundle, _ = files.get()
            taken = [seconds_to_first_token(bundle, what["threads"]) for _ in range(3)]
            return {"bytes": (bundle / "weights.safetensors").stat().st_size, "seconds": taken[-1]}

        found = self.once(what, "start", measure)
        goal = START_GOAL if found["bytes"] <= START_BYTES else None
        self.starts.append([
            name_of(model.shape, model.layers), what["quant"], f"{found['bytes'] / 2**30:.1f}", what["threads"],
            *verdict(found["seconds"], goal, at_most=True),
        ])

    def add_batches(self, model, what, files):
        """Throughput of batched sequences, `predicted` and `dense`."""
        def measure():
            text = run(
                POWERINFER, "bench", files.get()[0], "--policy", "predicted", "--threads", what["threads"], "--repeats", REPEATS,
                "-n", TOKENS, "--batch", ",".join(map(str, BATCHES)), "--json", "--quiet",
            )
            return text and json.loads(text)["batches"]

        for batch in self.once(what, "batches", measure) or []:
            speed, dense = (batch[policy]["tokens_per_second"]["median"] for policy in ("policy", "dense"))
            self.batches.append([
                name_of(model.shape, model.layers), what["quant"], what["threads"], batch["sequences"], f"{speed:.1f}",
                f"{dense:.1f}", *verdict(ratio(speed, dense), 1.0),
            ])

    def add_busy(self, model, what, files):
        """Both programs on one and more threads while another process is CPU-bound."""
        def measure():
            bundle, file = files.get()
            speeds = {program: {str(threads): [] for threads in THREADS} for program in ("powerinfer", "llama.cpp")}
            with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
                try:
                    for _ in range(BUSY_ROUNDS):
                        for threads in THREADS:
                            found = bench(bundle, "dense", threads, False)
                            if found:
                                speeds["powerinfer"][str(threads)].append(found["decode"][0]["tokens_per_second"]["median"])
                            theirs = llama_bench(file, threads, False)["decode"]
                            if theirs:
                                speeds["llama.cpp"][str(threads)].append(theirs)
                finally:
                    other.kill()
            return speeds

        for program, speeds in self.once(what, "busy", measure).items():
            one = speeds[str(THREADS[0])]
            for threads in THREADS[1:]:
                many = speeds[str(threads)]
                goal = 1.0 if program == "powerinfer" else None
                self.busy.append([
                    program, name_of(model.shape, model.layers), what["quant"], spread(one), threads, spread(many),
                    *verdict(ratio(median(many), median(one)), goal),
                ])

    def write(self):
        documents = [document for entry in self.raw for document in entry.get("powerinfer", [])]
        if not documents:
            return
        machine = documents[0]["machine"]
        versions = run(POWERINFER, "--version").strip()
        theirs = ", ".join(sorted(version for version in self.versions if version)) or "not run"
        text = f"""# CPU speed compared with llama.cpp

Written by `scripts/bench-cpu.sh`. Machine: {machine['cores']} cores of {machine['processor']}, {machine['ram_bytes'] / 2**30:.0f} GiB, \
{platform.system()}, instruction set {machine['instruction_set']}. {versions}; llama.cpp {theirs} of llama-cpp-python \
{os.environ['LLAMA_CPP_VERSION']}, compiled for this CPU.

The models are synthetic and have random weights. {100 * SPARSITY:.0f}% of the FFN activations are zero; in mixtures of experts, instead, \
{100 * EXPERT_SKEW:.0f}% of a layer's experts get 80% of the selections. Both programs run the same shape in the same \
format; llama.cpp computes SiLU, which is as fast. Runs alternate, {REPEATS} each; tables show median (minimum–maximum). The read bandwidth is \
measured with plain vector loads over 1 GiB, on the same number of threads, just before and after each powerinfer run. “Memory allows” is that \
bandwidth, or for selected rows the bandwidth of rows of their length at their distances. The bandwidth share of \
llama.cpp refers to the same measurement. Both programs' files were read from disk just before, into pages of the same size. Every powerinfer \
run was first checked against the dense path. {self.disturbed} of {self.count} powerinfer runs were disturbed: other processes took more than 3% of the time.
"""
        goals = ["goal", ""]
        if self.dense:
            text += f"\n## Decoding {TOKENS} tokens, dense\n\n" + table(
                ["model", "format", "threads", "tokens/s", "llama.cpp", "ratio", *goals, "read bandwidth, GB/s",
                 "achieved fraction", *goals, "llama.cpp's fraction"], self.dense)
        if self.prompts:
            text += f"\n## Prefill of {PROMPT} tokens\n\n" + table(
                ["model", "format", "threads", "tokens/s", "llama.cpp", "ratio", *goals], self.prompts)
        if self.sparse:
            text += f"\n## Decoding with {100 * SPARSITY:.0f}% zeros, {SPARSE_QUANT}\n\n" + table(
                ["model", "policy", "threads", "tokens/s", "neurons", "predictors", "speedup over dense", *goals,
                 "bandwidth limit", "speedup over llama.cpp", *goals], self.sparse)
            text += "\n“Bandwidth limit” is the ratio that would result if every byte were read at the speed of the dense policy. A model with fewer layers than the \
real one has a lower limit, because its head takes a larger share.\n"
        for heading, rows in self.densities:
            text += f"\n## {heading}\n\n" + rows
        rows = []
        for (shape, quant, threads), speed in self.speeds.items():
            one = self.speeds.get((shape, quant, 1))
            if threads > 1 and one:
                rows.append([shape, quant, threads, *verdict(ratio(speed, one), THREADS_GOAL)])
        if rows:
            text += "\n## Threads\n\n" + table(["model", "format", "threads", "speedup over one thread", *goals], rows)
        rows = []
        for (shape, threads), stages in self.decodes.items():
            for one, many in zip(self.decodes.get((shape, 1), []) if threads > 1 else [], stages):
                if one["bytes"] >= 1 << 20:
                    faster, allowed = (many[speed] / one[speed] for speed in ("bytes_per_second", "ceiling_bytes_per_second"))
                    rows.append([shape, one["stage"], threads, *map(figure, (faster, allowed)), *verdict(faster / allowed, SCALING_GOAL)])
        if rows:
            text += "\nStages of `predicted`, and how much more memory allows:\n\n" + table(
                ["model", "stage", "threads", "speedup over one thread", "memory", "ratio", *goals], rows)
        if self.busy:
            text += "\nWith one other CPU-bound process running:\n\n" + table(
                ["program", "model", "format", f"{THREADS[0]} thread, tokens/s", "threads", "tokens/s", "speedup over one thread", *goals],
                self.busy)
        if self.syncs:
            row = verdict(median(self.syncs), HAND_OVER_GOAL, at_most=True)
            text += f"\nDispatching a kernel to the thread pool costs {row[0]} µs on top of its work (goal {row[1]}: {row[2]}).\n"
        if self.batches:
            text += "\n## Batched sequences, `predicted`\n\n" + table(
                ["model", "format", "threads", "sequences", "total tokens/s", "dense", "ratio", *goals], self.batches)
        if self.speculation:
            text += f"\n## Speculation, `predicted`, {SPARSE_QUANT}\n\n" + table(
                ["model", "text", "threads", "tokens", "tokens/s, one by one", "speculative", "ratio", *goals, "accepted"], self.speculation)
            text += f"\nEvery token is followed by that of the text, whichever the model samples. The first {COMPLETIONS} functions of HumanEval, to be \
repeated under another name, and {COMPLETIONS} paragraphs of {pathlib.Path(PLAIN_TEXT).name}. Passes of edited functions by their number of tokens:\n\n" + table(
                ["model", "threads", "tokens", "passes", "ms", "neurons of a token", "of any"], self.passes)
        if self.starts:
            text += "\n## Startup\n\nSeconds of `run -n 1` with the bundle in the page cache. The goal applies to bundles of up to 4 GiB.\n\n" + table(
                ["model", "format", "GiB", "threads", "seconds", *goals], self.starts)
        if self.stages:
            text += "\n## Time per stage of predicted runs, and of others where a goal is not met\n" + "".join(self.stages)
        self.path.write_text(text)
        kept = [entry for entry in self.known if entry not in self.raw]
        figures = {"identity": self.identity, "figures": self.raw + kept}
        (self.folder / "figures.json").write_text(json.dumps(figures, indent=1))


def main(folder, path):
    text = folder / "text.txt"
    text.write_text("a few words to read, and then a few more of them\n" * 2000)
    help_text = run(POWERINFER, "place", "--help")
    quants = QUANTS
    if not re.search(r"\bf16\b", help_text):
        quants = ["bf16" if quant == "f16" else quant for quant in quants]
    report = Report(path, folder)
    for entry in SHAPES:
        shape, _, only = entry.partition("/")
        model = Model(folder, text, shape)
        is_sparse = model.shape in SPARSE
        with_prompt = model.shape in PROMPT_SHAPES
        for quant in only.split(",") if only else quants:
            policies = ("dense", "exact", "predicted") if is_sparse and quant == SPARSE_QUANT else ("dense",)
            if model.shape in ONLY_SPARSE and len(policies) == 1:
                continue
            files = Files(model, quant)
            for threads in THREADS:
                what = {"shape": shape, "quant": quant, "threads": threads}

                def measure():
                    bundle, file = files.get()
                    say(f"timing {name_of(model.shape, model.layers)}, {quant}, {threads} threads")
                    return in_turn(bundle, file, threads, with_prompt, policies)

                runs = report.runs(what, policies, measure)
                report.add_dense(model, quant, threads, runs)
                if len(policies) > 1:
                    report.add_sparse(model, threads, runs)
                    report.add_densities(model, what, files)
                    has_texts = TOKENIZER and HUMAN_EVAL and PLAIN_TEXT
                    if has_texts and threads == THREADS[0] and model.shape not in ONLY_SPARSE:
                        report.add_speculation(model, what, files)
                report.write()
            report.add_start(model, {"shape": shape, "quant": quant, "threads": THREADS[-1]}, files)
            if with_prompt and quant == SPARSE_QUANT and model.shape not in MIXTURES:
                what = {"shape": shape, "quant": quant, "threads": THREADS[0]}
                report.add_batches(model, what, files)
                report.add_busy(model, what, files)
            report.write()
            files.remove()
        model.remove()
    say(f"written: {path}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
