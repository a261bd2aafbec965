"""Estimates the speed of a 33B- and a 70B-class model with `powerinfer simulate`, and writes
docs/reports/33b-versus-70b.md with plots. usage: 33b_versus_70b.py POWERINFER FOLDER"""

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODELS = {"llama-30b": "33B", "llama-70b": "70B"}
FORMATS = {"q4_0": "INT4", "f16": "FP16"}
CARDS = {"rtx3060-12g": "RTX 3060", "rtx4090": "RTX 4090", "rtx5090": "RTX 5090"}
SPARSITIES = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97]
MEMORIES = [8, 12, 16, 24, 32, 48, 64, 80]
LINES = [0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]
COLOURS = ["#2563eb", "#d9480f", "#2f9e44", "#9c36b5", "#0b7285", "#868e96"]


class Simulator:
    """Estimates of `powerinfer simulate`, each computed once."""

    def __init__(self, program):
        self.program = program
        self.answers = {}

    def ask_all(self, questions):
        questions = [question for question in questions if question not in self.answers]
        with ThreadPoolExecutor(2) as pool:
            self.answers.update(zip(questions, pool.map(self.ask, questions)))

    def ask(self, question):
        command = [self.program, "simulate", "--json", "--ram", "192G", *question]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        return json.loads(done.stdout)


class Point:
    """Estimate for one engine."""

    def __init__(self, answer, engine=0):
        found = answer["engines"][engine]
        decode = {at["requests"]: at for at in found["decode"]}
        self.speed = decode[1]["tokens_per_second"]
        self.latency = decode[1]["milliseconds"]
        self.together = decode[8]["tokens_per_second"]
        self.hot_neurons = found["hot_neurons"]
        self.hot_share = found["hot_share"]


def by_sparsity(model, quant, sparsity):
    return ("--like", model, "--quant", quant, "--sparsity", str(sparsity))


def by_memory(model, card, gibibytes):
    return ("--like", model, "--quant", "q4_0", "--hardware", card, "--vram", f"{gibibytes}G")


def by_line(model, share):
    return ("--like", model, "--quant", "q4_0", "--vram", "80G", "--hot", str(share))


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(headings, rows):
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def plot(path, title, horizontal, ticks, vertical, curves):
    """A chart of `curves`, [(name, [(x, y)])], with a logarithmic vertical axis."""
    width, height, left, bottom, top, right = 720, 360, 56, 44, 34, 150
    xs = [x for _, points in curves for x, _ in points]
    ys = [y for _, points in curves for _, y in points]
    low, high = math.log10(min(ys)) - 0.05, math.log10(max(ys)) + 0.05
    first, last = min(xs), max(xs)

    def across(x):
        return left + (x - first) / (last - first) * (width - left - right)

    def up(y):
        return height - bottom - (math.log10(y) - low) / (high - low) * (height - bottom - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}" font-family="system-ui,sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="20" font-size="15">{title}</text>',
        f'<text x="{left}" y="{height - 8}">{horizontal}</text>',
        f'<text x="{width - right + 8}" y="{top}">{vertical}</text>',
    ]
    for x in ticks:
        parts.append(f'<text x="{across(x):.1f}" y="{height - bottom + 16}" text-anchor="middle">{x:g}</text>')
    for power in range(math.floor(low), math.ceil(high) + 1):
        for digit in (1, 2, 5):
            y = digit * 10.0**power
            if low <= math.log10(y) <= high:
                parts.append(
                    f'<path d="M{left} {up(y):.1f}H{width - right}" stroke="#ddd"/>'
                    f'<text x="{left - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
                )
    for index, (name, points) in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        dash = ' stroke-dasharray="6 4"' if index % 2 else ""
        line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for x, y in points:
            parts.append(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5" fill="{colour}"/>')
        y = top + 20 + 18 * index
        parts.append(
            f'<path d="M{width - right + 8} {y - 4}h24" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{width - right + 38}" y="{y}">{name}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>", ""]))


def main():
    simulator = Simulator(sys.argv[1])
    folder = Path(sys.argv[2])
    plots = folder / "33b-versus-70b"
    plots.mkdir(exist_ok=True)
    simulator.ask_all(
        [by_sparsity(m, q, s) for m in MODELS for q in FORMATS for s in SPARSITIES]
        + [by_memory(m, c, g) for m in MODELS for c in CARDS for g in MEMORIES]
        + [by_line(m, s) for m in MODELS for s in LINES]
    )

    def at(question, engine=0):
        return Point(simulator.answers[question], engine)

    sparse = {(m, q, s): at(by_sparsity(m, q, s)) for m in MODELS for q in FORMATS for s in SPARSITIES}
    memory = {(m, c, g): at(by_memory(m, c, g)) for m in MODELS for c in CARDS for g in MEMORIES}
    whole = {(m, c, g): at(by_memory(m, c, g), -1) for m in MODELS for c in CARDS for g in MEMORIES}
    line = {(m, s): at(by_line(m, s)) for m in MODELS for s in LINES}

    plot(
        plots / "sparsity.svg", "Speed by sparsity, RTX 4090", "zeros among FFN activations", [0.5, 0.6, 0.7, 0.8, 0.9, 0.97], "tokens/s",
        [(f"{MODELS[m]} {FORMATS[q]}", [(s, sparse[m, q, s].speed) for s in SPARSITIES]) for q in FORMATS for m in MODELS],
    )
    plot(
        plots / "vram.svg", "Speed by VRAM, INT4", "GiB of VRAM, all else unchanged", MEMORIES, "tokens/s",
        [(f"{MODELS[m]} {CARDS[c]}", [(g, memory[m, c, g].speed) for g in MEMORIES]) for c in CARDS for m in MODELS],
    )
    plot(
        plots / "line.svg", "Speed by share of hot neurons, INT4, RTX 4090 with 80 GiB",
        "share of each layer's neurons on the GPU", LINES, "tokens/s",
        [(f"{MODELS[m]} 1 request", [(s, line[m, s].speed) for s in LINES]) for m in MODELS]
        + [(f"{MODELS[m]} 8 requests", [(s, line[m, s].together) for s in LINES]) for m in MODELS],
    )

    def gain(points, first, last):
        return points[last].speed / points[first].speed

    small, large = MODELS
    sparsity_gain = {
        (m, q): gain({s: sparse[m, q, s] for s in SPARSITIES}, 0.5, 0.97) for m in MODELS for q in FORMATS
    }
    text = f"""# 33B versus 70B

How throughput and latency of a 33B- and a 70B-class model on consumer GPUs depend on sparsity, on
VRAM and on the share of hot neurons. Predicted by
the cost model of `powerinfer simulate`, not measured. [simulator.md](simulator.md) compares such
predictions with published measurements of other engines. The GPU kernels are assumed to read at 80% of a
card's nominal bandwidth, which good kernels sustain, and each kernel to take a further 6 µs. Written by
`scripts/33b-versus-70b.sh`.

The models have the shapes of LLaMA-30B (32.5 billion parameters) and LLaMA-2-70B with a ReLU in their FFNs.
The defaults are:

* 82% sparsity for the 70B (published) and 80% for the 33B (assumed, between the published 13B and 70B),
* 43% of the neurons account for 80% of the activations, or the nearest share that the sparsity allows,
* a KV cache for 2048 tokens, of which 128 are filled,
* a desktop with DDR5-5600 and an RTX 4090, with 192 GiB of RAM so that every model fits.

The 33B has keys and values for each of its 52 heads, the 70B for 8 groups. In 16 bits, the KV cache for 2048 tokens
therefore takes 3.0 GiB for the 33B and 0.6 GiB for the 70B.

## Summary

* **Sparsity** matters to the extent that the CPU reads neurons. From 50% to 97% sparsity the 33B becomes
  {number(sparsity_gain[small, "q4_0"])} times faster in INT4 and {number(sparsity_gain[small, "f16"])} times in FP16, the 70B
  {number(sparsity_gain[large, "q4_0"])} and {number(sparsity_gain[large, "f16"])} times. The rest is attention and predictors, which are read
  in full for every token.
* **VRAM** matters until the CPU's reads are negligible. On the RTX 4090 in INT4 the 33B decodes
  {number(memory[small, "rtx4090", 8].speed)}, {number(memory[small, "rtx4090", 24].speed)} and {number(memory[small, "rtx4090", 48].speed)} tokens/s with 8, 24 and 48 GiB, the 70B
  {number(memory[large, "rtx4090", 8].speed)}, {number(memory[large, "rtx4090", 24].speed)} and {number(memory[large, "rtx4090", 48].speed)}. At 24 GiB the 70B takes
  {number(memory[large, "rtx4090", 24].latency / memory[small, "rtx4090", 24].latency)} times as long per token as the 33B; dense with whole layers offloaded, as in llama.cpp,
  {number(whole[small, "rtx4090", 24].speed / whole[large, "rtx4090", 24].speed)} times.
* **Hot neurons**: the hottest tenth of the neurons accounts for {100 * line[large, 0.1].hot_share:.0f}% of the 70B's activations. Placed on the GPU,
  it gives {number(line[large, 0.1].speed / line[large, 0.0].speed)} times the speed of no hot neurons; the hottest
  40% give {number(line[large, 0.4].speed / line[large, 0.0].speed)} times and all {number(line[large, 1.0].speed / line[large, 0.0].speed)} times. Eight concurrent requests
  also read colder neurons; there the speedups are {number(line[large, 0.1].together / line[large, 0.0].together)},
  {number(line[large, 0.4].together / line[large, 0.0].together)} and {number(line[large, 1.0].together / line[large, 0.0].together)} times. The share of hot neurons decides where
  neurons are computed, not which.
* **GPU bandwidth** matters only when most of the bytes read are in VRAM. With 12 GiB the 70B decodes
  {number(memory[large, "rtx3060-12g", 12].speed)} tokens/s on an RTX 3060, {number(memory[large, "rtx4090", 12].speed)} on an RTX 4090 and {number(memory[large, "rtx5090", 12].speed)} on an RTX 5090,
  whose desktops have RAM of 51, 90 and 96 GB/s.

## Sparsity

![Speed by sparsity](33b-versus-70b/sparsity.svg)

RTX 4090, 24 GiB. Tokens/s and milliseconds per token of one request; total tokens/s of eight concurrent requests.

"""
    rows = [
        [f"{100 * s:.0f}%"]
        + [
            cell
            for m in MODELS
            for q in FORMATS
            for cell in [
                number(sparse[m, q, s].speed),
                number(sparse[m, q, s].latency),
                number(sparse[m, q, s].together),
            ]
        ]
        for s in SPARSITIES
    ]
    headings = ["sparsity"] + [
        f"{MODELS[m]} {FORMATS[q]} {what}" for m in MODELS for q in FORMATS for what in ("tokens/s", "ms", "8 requests")
    ]
    text += table(headings, rows)
    text += """
## VRAM

![Speed by VRAM](33b-versus-70b/vram.svg)

INT4. The VRAM of each card is varied, everything else is unchanged. Tokens/s of one request; in brackets,
the estimate for llama.cpp, which offloads whole layers.

"""
    rows = [
        [f"{g} GiB"]
        + [f"{number(memory[m, c, g].speed)} ({number(whole[m, c, g].speed)})" for m in MODELS for c in CARDS]
        for g in MEMORIES
    ]
    text += table(["VRAM"] + [f"{MODELS[m]} {CARDS[c]}" for m in MODELS for c in CARDS], rows)
    text += """
Milliseconds per token of one request, and total tokens/s of eight concurrent requests, on the RTX 4090:

"""
    rows = [
        [f"{g} GiB"]
        + [
            cell
            for m in MODELS
            for cell in [
                number(memory[m, "rtx4090", g].latency),
                number(memory[m, "rtx4090", g].together),
                f"{100 * memory[m, 'rtx4090', g].hot_neurons:.0f}%",
            ]
        ]
        for g in MEMORIES
    ]
    text += table(["VRAM"] + [f"{MODELS[m]} {what}" for m in MODELS for what in ("ms", "8 requests", "hot")], rows)
    text += """
## Share of hot neurons

![Speed by share of hot neurons](33b-versus-70b/line.svg)

INT4 on an RTX 4090 with an assumed 80 GiB, so that attention, predictors and the KV cache are always on the GPU and
only the share of hot neurons varies. *Activations* is the share of the activations on the hot neurons.

"""
    rows = [
        [f"{100 * s:.0f}%"]
        + [
            cell
            for m in MODELS
            for cell in [
                f"{100 * line[m, s].hot_share:.0f}%",
                number(line[m, s].speed),
                number(line[m, s].latency),
                number(line[m, s].together),
            ]
        ]
        for s in LINES
    ]
    text += table(
        ["hot"] + [f"{MODELS[m]} {what}" for m in MODELS for what in ("activations", "tokens/s", "ms", "8 requests")], rows
    )
    (folder / "33b-versus-70b.md").write_text(text)


main()
