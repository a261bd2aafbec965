"""Prints a table of predicted against measured time per token. Run by `check-speed.sh`."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

POWERINFER = os.environ["POWERINFER"]
SHAPES = os.environ.get("SHAPES", "llama-1b:8 llama-7b:3").split()
DENSITIES = [float(word) for word in os.environ.get("DENSITIES", "5 10 25 50").split()]
THREADS = [int(word) for word in os.environ.get("THREADS", "1 2").split()]
QUANT = os.environ.get("QUANT", "q8_0")
ALLOWED = 0.15
# Several runs, because other processes disturb only some. Not too few tokens: pages are mapped as rows are first read.
RUNS = 7
TOKENS = 32
# Short, so that the KV cache, which plans count as full, is negligible.
CONTEXT = 96
# Hidden units of the predictors: an eighth of the hidden size.
RANKS = {"llama-1b": 256, "llama-7b": 512}


def powerinfer(*arguments):
    """Standard output of a powerinfer command. Exits with its error output on failure."""
    done = subprocess.run([POWERINFER, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: powerinfer {' '.join(map(str, arguments))}\n{done.stderr}")
    return done.stdout


def measured(bundle, policy, threads):
    """Lower quartile of the milliseconds per token over `RUNS` runs, and the share of neurons computed."""
    arguments = ["run", bundle, "--prompt", "a few words", "-n", TOKENS, "--json"]
    arguments += ["--policy", policy, "--threads", threads]
    runs = [json.loads(powerinfer(*arguments)) for _ in range(RUNS)]
    times = sorted(1e3 / run["decode_tokens_per_second"] for run in runs)
    return times[RUNS // 4], runs[0]["ffn_neurons_computed"]


def doctor(folder, when):
    """Writes `WHEN-THREADS.toml` with the measured hardware for each thread count."""
    for threads in THREADS:
        powerinfer("doctor", "--threads", threads, "--write", folder / f"{when}-{threads}.toml", "-q")


def main(folder):
    text = folder / "text.txt"
    text.write_text("a few words to read, and then a few more of them\n" * 2000)
    print("| shape | active | policy | threads | predicted ms, before and after | measured ms | mean predicted / measured |")
    print("|---|--:|---|--:|--:|--:|--:|")
    worst, count, within = 0.0, 0, 0
    for shape in SHAPES:
        name, layers = shape.split(":")
        for density in DENSITIES:
            # The speed of a shared machine changes within minutes, so it is measured before and after.
            doctor(folder, "before")
            model, profile, bundle = folder / "model", folder / "profile", folder / "bundle"
            # The higher the density, the lower the possible skew of the activation frequencies.
            sparsity, skew = 1 - density / 100, 0.26 + 0.5 * density / 100
            powerinfer(
                "synth", "--like", name, "--layers", layers, "--sparsity", sparsity,
                "--skew", skew, "--predictor-rank", RANKS.get(name, 512), "--out", model,
            )
            powerinfer("profile", model, "--data", text, "--tokens", 128, "--out", profile)
            place = [
                "place", model, "--profile", profile, "--predictors", model / "predictors",
                "--vram", "0G", "--context", CONTEXT, "--quant", QUANT, "--certify", "none",
            ]
            powerinfer(*place, "--policy", "predicted", "--out", bundle, "--hardware", "laptop")
            policies = ["exact", "predicted"] + (["dense"] if density == DENSITIES[-1] else [])
            rows = [(policy, threads) for policy in policies for threads in THREADS]
            times = {row: measured(bundle, *row) for row in rows}
            doctor(folder, "after")
            for policy, threads in rows:
                both = []
                for when in ("before", "after"):
                    machine = folder / f"{when}-{threads}.toml"
                    planned = json.loads(powerinfer(
                        *place, "--policy", policy, "--dry-run", "--json", "--hardware", machine,
                    ))
                    both.append(planned["plan"]["totals"]["microseconds_per_token"] / 1e3)
                predicted = sum(both) / 2
                time, computed = times[policy, threads]
                ratio = predicted / time
                worst = max(worst, abs(ratio - 1))
                count, within = count + 1, within + (abs(ratio - 1) <= ALLOWED)
                print(
                    f"| {name}, {layers} layers | {100 * computed:.1f}% | {policy} | {threads} "
                    f"| {both[0]:.2f}, {both[1]:.2f} | {time:.2f} | {ratio:.2f} |",
                    flush=True,
                )
            for made in (model, profile, bundle):
                shutil.rmtree(made)
    print(
        f"\n{within} of {count} rows are within {100 * ALLOWED:.0f}%; the largest error is {100 * worst:.0f}%. "
        f"Weights in {QUANT}."
    )


main(pathlib.Path(sys.argv[1]))
