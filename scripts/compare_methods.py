"""Compares methods of making predictors and thresholds, and rewrites the tables of docs/reports/predictors.md; see compare-methods.sh.

usage: compare_methods.py POWERINFER WORK REPORT SILU [CHECKPOINT …]
"""

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from compare_scores import compare

POWERINFER, WORK, REPORT, SILU, *CHECKPOINTS = (Path(argument).resolve() for argument in sys.argv[1:])
TASKS = 200
BEGIN, END = "<!-- written by scripts/compare-methods.sh -->\n", "<!-- end -->\n"
CLOSED, TRAINED = ["--method", "closed-form"], ["--method", "trained"]
HIGHER, EQUAL, LOWER = (["--contribution-recall", recall] for recall in ("0.998", "0.995", "0.99"))
METHODS = {
    "`auto` (default; contribution recall 99.5%)": [], "`closed-form`, 99.8% (its default)": [*CLOSED, *HIGHER],
    "`trained` from random weights, with ReLU, 99.5%": TRAINED, "`auto`, 99%": LOWER,
    "`closed-form`, 99.5%": [*CLOSED, *EQUAL], "`closed-form`, 99%": [*CLOSED, *LOWER], "`trained`, 99%": [*TRAINED, *LOWER],
}
SIZES = {
    "at most 2.8% of the model": ["--max-bytes", "2.8%", *LOWER], "4 bits, any size": ["--max-bytes", "100%", *LOWER],
    "8 bits, any size": ["--predictor-quant", "q8_0", "--max-bytes", "100%", *LOWER],
    "16 bits, any size": ["--predictor-quant", "bf16", "--max-bytes", "100%", *LOWER],
    "4 bits, contribution recall 1%": ["--contribution-recall", "0.01"],
    "`--sizing paper`: trained, recall only": ["--sizing", "paper"],
}
# `--min-saving 0` trains every layer further, whatever saving `auto` estimates.
LARGE = {"`closed-form`": [*CLOSED, *EQUAL], "trained from it": ["--min-saving", "0"], "`trained` from random weights, with ReLU": TRAINED}


def run(*arguments):
    """Standard output of powerinfer."""
    print(f"powerinfer {shlex.join(map(str, arguments))}", file=sys.stderr, flush=True)
    return subprocess.run([POWERINFER, *arguments], cwd=WORK, stdout=subprocess.PIPE, text=True, check=True).stdout


def ask(*arguments):
    """JSON that powerinfer prints."""
    return json.loads(run(*arguments, "--json"))


def cached(name, inputs, measure):
    """Result of `measure`, or the one cached in the work folder if its `inputs` (files and options) are the same."""
    path = WORK / f"{name}.json"
    inputs = [hashlib.sha256(found.read_bytes()).hexdigest() if isinstance(found, Path) else found for found in inputs]
    if path.exists():
        found = json.loads(path.read_text())
        if found["inputs"] == inputs:
            return found["result"]
    result = measure()
    path.write_text(json.dumps({"inputs": inputs, "result": result}))
    return result


def train(model, profile, options):
    """Predictors trained for `model`, and the seconds that it took."""
    for leftover in WORK.glob("predictors*"):
        shutil.rmtree(leftover)
    started = time.monotonic()
    layers = ask("train-predictors", model, "--profile", profile, "--out", "predictors", *options)["layers"]
    return {"layers": layers, "seconds": time.monotonic() - started}


def place(model, profile, *options):
    shutil.rmtree(WORK / "bundle", ignore_errors=True)
    run("place", model, "--profile", profile, "--predictors", "predictors", "--out", "bundle", "-q", *options)


def quality(policies):
    """Fidelity and pass@1 of the bundle under `dense` and `policies`."""
    fidelity = ask("eval", "fidelity", "bundle", "--policy", policies)
    tasks = ask("eval", "tasks", "bundle", "--count", str(TASKS), "--threads", "1", "--policy", f"dense,{policies}")
    return {"fidelity": fidelity, "tasks": tasks}


def mean(layers, value):
    return sum(map(value, layers)) / len(layers)


def percent(share, digits=1):
    return f"{100 * share:.{digits}f}%"


def size(count):
    return f"{count / 1024:.0f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


def table(headings, rows):
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("|".join(f" {cell} " for cell in cells).strip() + "\n" for cells in lines) + "\n"


def learned(found):
    """Table cells for predictors: rank, size, recall, contribution recall, neurons predicted."""
    layers = found["layers"]
    ranks = sorted({layer["rank"] for layer in layers})
    return [
        "–".join(str(rank) for rank in dict.fromkeys([ranks[0], ranks[-1]])), size(sum(layer["bytes"] for layer in layers)),
        percent(mean(layers, lambda layer: layer["recall"])), percent(mean(layers, lambda layer: layer["contribution_recall"]), 2),
        percent(mean(layers, lambda layer: 1 - layer["predicted_sparsity"])),
    ]


def judged(found, policy):
    """Table cells for the bundle's quality under `policy`."""
    row, own = (next(row for row in found[kind]["policies"] if row["policy"] == policy) for kind in ("fidelity", "tasks"))
    rise = row["perplexity_rise"]
    return [
        f"{own['bytes_per_token'] / (1 << 20):.2f} MiB", f"{percent(rise['value'], 2)} ({100 * rise['low']:.2f} to {100 * rise['high']:.2f})",
        f"{row['kl_divergence_mean']['value']:.4f}", f"{percent(own['pass_at_1'])}", str(own["same_completions_as_first"]),
    ]


def demo():
    """Methods and sizes on the demo."""
    run("profile", "demo", "--out", "demo-profile", "-q")

    def measure(options, policy="predicted", *others):
        found = train("demo", "demo-profile", options)
        place("demo", "demo-profile", "--vram", "24G", "--policy", policy)
        return {**found, **quality(",".join([policy, *others]))}

    headings = ["predictors", "rank", "size", "recall", "contribution recall", "neurons predicted", "read per token", "perplexity rise", "KL mean", "pass@1", "same outputs"]
    found = {
        name: cached(f"demo-{number}", [POWERINFER, *options], lambda: measure(options))
        for number, (name, options) in enumerate({**METHODS, **SIZES}.items())
    }
    signs = cached("demo-signs", [POWERINFER], lambda: measure([], "sign-bit", "exact"))
    own = lambda name: [name, *learned(found[name]), *judged(found[name], "predicted")]
    tasks = signs["tasks"]["policies"][0]
    exact = judged(signs, "exact")
    sign = [layer["sign_bit"] for layer in signs["layers"]]
    sign = ["sign test (no training)", "", size(sum(layer["bytes"] for layer in sign)), *learned({"layers": [{**layer, "rank": 0} for layer in sign]})[2:], *judged(signs, "sign-bit"), ""]
    tokens = signs["fidelity"]["tokens"]
    return (
        f"The demo (ReLU) with {tokens:,} held-out tokens and {TASKS} held-out tasks, of which `dense` passes {percent(tasks['pass_at_1'])}. `exact` needs no predictor. It reads {exact[0]} per token and has a mean KL divergence of {exact[2]}. Seconds are for all six layers:\n\n"
        + table([*headings, "seconds"], [[*own(name), f"{found[name]['seconds']:.1f}"] for name in METHODS] + [sign])
        + "Other sizes and formats, made by `auto` with a contribution recall of 99% unless stated otherwise:\n\n"
        + table(headings, [own(name) for name in SIZES])
    )


def large():
    """Methods on one layer with the shape of a 7B model."""
    def measure():
        shutil.rmtree(WORK / "7b", ignore_errors=True)
        run("synth", "--like", "llama-7b", "--layers", "1", "--sparsity", "0.9", "--predictor-rank", "256", "--out", "7b", "-q")
        text = Path(__file__).parent.parent / "docs/guide/tuning.md"
        run("profile", "7b", "--data", str(text.parent), "--tokens", "6000", "--out", "7b-profile", "-q")
        found = {name: train("7b", "7b-profile", options) for name, options in LARGE.items()}
        shutil.rmtree(WORK / "7b")  # saves gigabytes
        return found

    found = cached("7b", [POWERINFER, LARGE], measure)
    sparsity = mean(found["`closed-form`"]["layers"], lambda layer: 1 - layer["sparsity"])
    rows = [[name, *learned(of), str(of["layers"][0]["steps"]), f"{of['seconds']:.0f}"] for name, of in found.items()]
    return (
        f"One layer with the shape of a 7B model and random weights (4096 × 11,008, {percent(sparsity)} of the neurons active, 6,000 tokens, contribution recall 99.5%):\n\n"
        + table(["predictors", "rank", "size", "recall", "contribution recall", "neurons predicted", "steps", "seconds"], rows)
    )


def without_zeros():
    """Scores on models with SiLU, and the thresholds that `place` chooses."""
    rows = []
    for folder in [SILU, *CHECKPOINTS]:
        name = "demo with SiLU" if folder == SILU else folder.name.removesuffix("-llama")
        inputs = [Path(__file__).parent / "compare_scores.py", folder / "model.safetensors"]
        found = cached(f"scores-{name.replace(' ', '-')}", inputs, lambda: compare(folder))
        for method, point in found.items():
            seconds = "" if point["seconds"] is None else f"{point['seconds']:.1f}"
            bytes_ = "0" if point["bytes"] is None else size(point["bytes"])
            rows.append([name, method, bytes_, *(percent(point[key], 0) for key in ("computed", "recall", "contribution_recall", "read_1", "read_5")), seconds])

    def measure():
        run("profile", str(SILU), "--out", "silu-profile", "-q")
        train(str(SILU), "silu-profile", [])
        place(str(SILU), "silu-profile", "--vram", "0G", "--hardware", "cpu-only")
        return quality("threshold")

    placed = cached("silu", [POWERINFER, SILU / "model.safetensors"], measure)
    row = placed["fidelity"]["policies"][0]
    dense, own = placed["tasks"]["policies"]
    return (
        "Models with SiLU. The columns \"read at 1%\" and \"at 5%\" give the share of the FFN's bytes that must be read if perplexity may rise by that much. "
        "Neurons computed and both recalls are for the largest share of neurons that can be skipped at 1%. Recall compares the computed neurons with the same number "
        "of neurons with the largest contributions:\n\n"
        + table(["model", "score", "size", "neurons computed", "recall", "contribution recall", "read at 1%", "at 5%", "seconds"], rows)
        + "The policy that `place` chooses for the demo with SiLU, within its default budget of 1%:\n\n"
        + table(
            ["demo with SiLU", "dense", "threshold"],
            [
                ["neurons computed, read per token", f"100%, {dense['bytes_per_token'] / (1 << 20):.2f} MiB", f"{percent(row['ffn_neurons_computed'], 0)}, {own['bytes_per_token'] / (1 << 20):.2f} MiB"],
                [f"perplexity, {placed['fidelity']['tokens']:,} tokens", f"{placed['fidelity']['dense_perplexity']:.4f}", f"{row['perplexity']:.4f}, {percent(row['perplexity_rise']['value'], 2)} ({100 * row['perplexity_rise']['low']:.2f} to {100 * row['perplexity_rise']['high']:.2f})"],
                ["pass@1; top-1 agreement", percent(dense["pass_at_1"]), f"{percent(own['pass_at_1'])}; {percent(row['top1_agreement'])}"],
            ],
        )
    )


def main():
    WORK.mkdir(parents=True, exist_ok=True)
    written = demo() + large() + without_zeros()
    page = REPORT.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    REPORT.write_text(before + BEGIN + written.rstrip("\n") + "\n" + END + after)
    print(f"written: {REPORT}", file=sys.stderr)


main()
