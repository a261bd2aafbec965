#!/usr/bin/env python3
"""Compares the time estimates of `powerinfer prepare` with measured times by stage, and rewrites the table of docs/guide/large-models.md.

Takes about half an hour on two cores. Nothing else may run at the same time. POWERINFER names the program, and SILU a model with SiLU
and the shape of the demo (scripts/answers.sh trains one). Without SILU, the row of that model is left out.

usage: scripts/compare-estimates.py
"""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(os.environ.get("POWERINFER", ROOT / "target/release/powerinfer")).resolve()
FOLDER = ROOT / "target/estimates"
SILU = os.environ.get("SILU")
STAGES = {
    "profile": "^profiled",
    "predictors": "^(calculated|trained|calibrated)",
    "bundle": "^bundle written",
    "certificate": "^certified",
}
# Name in the table; shape of `synth` and number of layers, if any; options.
RUNS = [
    ("`demo --quick`", None, ["demo", "--quick"]),
    ("`demo`", None, ["demo"]),
    ("`demo` with SiLU", None, [str(Path(SILU).resolve())] if SILU else []),
    ("`llama-1b --quick`", ("llama-1b", None), ["--quick"]),
    ("`llama-7b --quick` (1)", ("llama-7b", 1), ["--quick"]),
    ("`llama3-8b --quick` (1)", ("llama3-8b", 1), ["--quick", "--tokens", "2048"]),
    ("`qwen3-30b-a3b --quick` (1), SiLU", ("qwen3-30b-a3b", 1), ["--quick", "--tokens", "2048"]),
]


def seconds(text):
    """Seconds of a duration such as `about 1 min 5 s`."""
    units = {"h": 3600, "min": 60, "s": 1}
    return sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) (h|min|s)\b", text))


def run(arguments):
    """Estimated and measured seconds by stage, and the number of tokens."""
    bundle = FOLDER / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    command = [PROGRAM, "prepare", *arguments, "--vram", "24G", "--out", bundle]
    process = subprocess.Popen(command, cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    estimated, measured, tokens, lines, since = {}, {}, "", [], time.monotonic()
    for line in process.stdout:
        now = time.monotonic()
        lines.append(line)
        if "this will take" in line:
            since = now
            total, _, parts = line.split("this will take ")[1].partition(": ")
            estimated = {part.split()[0]: seconds(part) for part in parts.split(", ") if part.strip()}
            estimated["all"] = seconds(total)
        if found := re.search(r"^profiled .* on (\d+) tokens", line):
            tokens = f"{int(found[1]):,}"
        for stage, pattern in STAGES.items():
            if stage not in measured and re.match(pattern, line):
                measured[stage], since = now - since, now
    if process.wait() or not estimated or measured.keys() != STAGES.keys():
        raise SystemExit("".join(lines))
    measured["all"] = sum(measured.values())
    return estimated, measured, tokens


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, shape, options in RUNS:
        if not options:
            continue
        arguments = options
        if shape:
            model = FOLDER / "-".join(map(str, filter(None, shape)))
            if not model.exists():
                layers = ["--layers", str(shape[1])] if shape[1] else []
                subprocess.run([PROGRAM, "synth", "--like", shape[0], *layers, "--out", model], check=True)
            os.sync()  # Writing back the model would slow down the measurement of this machine's speed.
            arguments = [model, "--data", ROOT / "README.md", *options]
        estimated, measured, tokens = run(arguments)
        cells = [f"{estimated.get(s, 0):.0f}, {measured.get(s, 0):.0f}" for s in [*STAGES, "all"]]
        rows.append(f"| {name} | {tokens} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
        if shape:
            shutil.rmtree(model)
    page = ROOT / "docs/guide/large-models.md"
    head = "| model (layers of `synth`) | tokens | profile | predictors | place | certify | all |\n|---|--:|--:|--:|--:|--:|--:|\n"
    before, rest = page.read_text().split(head)
    after = rest[rest.index("\n\n") :]
    page.write_text(before + head + "\n".join(rows) + after)


main()
