"""Measures what the questions ask, with commands that are printed beside the answers, and writes answers.md and
answers.json. usage: answers.py WORK DOCS [--render]"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

WORK, DOCS = Path(sys.argv[1]), Path(sys.argv[2])
RENDERS = "--render" in sys.argv[3:]
POWERINFER = WORK / "powerinfer"
ROOT = Path(__file__).resolve().parent.parent


def run(folder, *arguments):
    """Runs powerinfer in a folder of the work folder; returns what it prints."""
    folder = WORK / folder
    folder.mkdir(parents=True, exist_ok=True)
    print(f"in {folder.relative_to(WORK)}: powerinfer {shlex.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run([POWERINFER, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"powerinfer {shlex.join(arguments)} ended with {done.returncode}")
    return done.stdout


class Failed(Exception):
    """A command that did not end well."""


class Asked:
    """A command, where it is run, and what it found: kept beside, and taken from there where the same was asked before."""

    def __init__(self, folder, name, *arguments):
        self.folder, self.arguments = folder, arguments
        kept = WORK / folder / f"{name}.answer.json"
        if kept.exists():
            before = json.loads(kept.read_text())
            if before["arguments"] == list(arguments):
                self.found = before["found"]
                return
        if RENDERS:
            sys.exit(f"`{kept}` is not there, or of another command; run scripts/answers.sh without --render")
        self.found = json.loads(run(folder, *arguments, "--json"))
        beside = kept.with_suffix(".new")
        beside.write_text(json.dumps({"arguments": arguments, "found": self.found}))
        beside.replace(kept)

    def told(self):
        return f"powerinfer {shlex.join(self.arguments)}"

    def made(self):
        """How the bundle that was asked was made, where that is no prepared one."""
        return [f"powerinfer {shlex.join(arguments)}" for arguments in making(self.folder)]

    def rows(self):
        return self.found["rows"]


def holds(claim, told):
    """Stops where a sentence is not what was found: it has to be written anew then."""
    if not claim:
        sys.exit(f"the answers say that {told}; that is not what was found")


def holm(tests):
    """Which of several tests, by name, stand at 5 % together (Holm 1979)."""
    order = sorted(tests, key=tests.get)
    standing = set()
    for place, name in enumerate(order):
        if tests[name] >= 0.05 / (len(order) - place):
            break
        standing.add(name)
    return standing


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share, digits=1):
    return f"{100 * share:.{digits}f} %"


def rise(found):
    value, low, high = (100 * found[end] for end in ("value", "low", "high"))
    digits = 2 if abs(value) < 10 else 0
    return f"{value:+.{digits}f} % ({low:+.{digits}f} to {high:+.{digits}f})"


def share(found):
    return f"{percent(found['value'])} ({100 * found['low']:.1f}–{100 * found['high']:.1f})"


def table(headings, rows):
    lines = [headings, [":--"] + ["--:"] * (len(headings) - 1), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def verdict(paired):
    """What an exact test says of functions, beside what it could have said."""
    told = "p < 0.001" if paired["p_value"] < 0.001 else f"p = {paired['p_value']:.3f}"
    if paired["p_value"] < 0.05:
        return f"a difference, {told}"
    return f"no difference shown, {told}; {100 * paired['minimum_detectable_effect']:.1f} points could have been"


def functions(row):
    return row["quality"]["functions"][0]


def prepare(folder, *arguments):
    """A bundle, where there is none yet."""
    if not RENDERS and not (WORK / folder / "demo.powerinfer" / "bundle" / "manifest.json").exists():
        run(folder, "prepare", *arguments)


def effect(what, value, low=None, high=None, **more):
    return {"what": what, "value": value, "low": low, "high": high, **more}


def hot_threshold():
    """(a)"""
    thresholds = "1,0.5,0.1,0.01,0.001,0"
    halves = Asked(
        "demo", "hot-threshold", "sweep", "demo", "--policy", "exact", "--hot-threshold", thresholds, "--run-placements",
        "--device", "cpu", "--activations", "f32", "--tokens", "16384", "--layer-tokens", "0", "--tasks", "400",
        "--out", "hot-threshold.jsonl",
    )
    emulated = on_emulator(
        "demo", "hot-threshold-emulated", "sweep", "demo", "--policy", "exact,predicted", "--hot-threshold", "0.5,0.01,0",
        "--device", "emulated", "--activations", "f32", "--tokens", "192", "--audit-tokens", "192", "--layer-tokens", "0",
        "--tasks", "2", "-n", "4", "--repeats", "1", "--context", "16", "--out", "hot-threshold-emulated.jsonl",
    )
    lines = [0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 1.0]
    speeds = {
        share: Asked(
            "simulated", f"70b-hot-{share}", "simulate", "--like", "llama-70b", "--quant", "q4_0", "--vram", "80G",
            "--ram", "192G", "--hot", str(share),
        )
        for share in lines
    }
    rows = halves.rows()
    most = max(row["quality"]["largest_logit_difference"] for row in rows)
    tokens, items = rows[0]["quality"]["tokens"], functions(rows[0])["items"]
    agreement = min(row["quality"]["top1_agreement"] for row in rows)
    flat = max(abs(row["quality"]["perplexity_rise"][end]) for row in rows for end in ("low", "high"))
    holds(same_completions(rows), "all completions are the same at every line")
    holds(all(functions(row)["lost"] + functions(row)["won"] == 0 for row in rows), "they pass as those of dense do")
    ends = rows[0]["placement"], rows[-1]["placement"]
    holds(ends[0]["hot_neurons"] == 0 and ends[1]["hot_neurons"] == ends[1]["neurons"], "lines go from no neuron to all")
    page = "## (a) How does the hot-neuron threshold trade accuracy against speed?\n\n"
    page += (
        f"**It does not touch accuracy.** Hot and cold say where a neuron is computed, not whether. With lines between hot and cold from "
        f"*no neuron is hot* to *all are*, each of the two halves computed and summed apart as a GPU and a CPU would, "
        f"all {items} completions of held-out functions are the same token for token, pass@1 is {share(functions(rows[0])['pass_at_1'])} throughout, "
        f"and the largest difference of any logit from `dense` on {tokens:,} tokens is {most:.4f} (the halves are summed in another order; keys and values are kept in 16 bits). "
        f"The likeliest token is the same for {percent(agreement, 2)} of them at least, and perplexity moves by {percent(flat, 3)} at most.\n\n"
    )
    effects = []
    if emulated:
        groups = [[row for row in emulated.rows() if row["axes"]["setting"] == level] for level in ("exact", "predicted")]
        holds(all(same_completions(group) for group in groups), "completions are the same at every line on the emulated GPU")
        first = groups[0][0]["quality"]
        on_device = max(row["quality"]["largest_logit_difference"] for row in groups[0])
        page += (
            f"On the GPU's own kernels, emulated on a processor ({first['tokens']} tokens, {functions(groups[0][0])['items']} functions; no card was at hand): "
            f"{on_device:.4f} from `dense`, completions the same at every line, under `exact` and under `predicted`.\n\n"
        )
        effects.append(effect("largest logit difference on the emulated GPU", on_device, n=first["tokens"]))
    else:
        page += "The GPU's kernels were not run: there was neither a card nor a C++ compiler for their emulator.\n\n"
    page += table(
        ["hot: fires on", "hot neurons", "carry", "largest logit difference", "perplexity", "pass@1 (95 %)"],
        [
            [
                f"≥ {percent(row['axes']['hot_threshold'])} of tokens",
                percent(row["placement"]["neuron_share"]),
                percent(row["placement"]["activation_share"]),
                f"{row['quality']['largest_logit_difference']:.4f}",
                rise(row["quality"]["perplexity_rise"]),
                share(functions(row)["pass_at_1"]),
            ]
            for row in rows
        ],
    )
    speed = {share: asked.found["engines"][0] for share, asked in speeds.items()}
    one = {share: found["decode"][0]["tokens_per_second"] for share, found in speed.items()}
    holds(one[0.0] < one[0.2] < one[1.0], "the more is hot, the faster")
    page += (
        f"\n**It is worth speed.** Simulated, a 70B in four bits with ReLU on a desktop with an RTX 4090 whose memory is taken to be 80 GiB, so that any line can be drawn: "
        f"{number(one[0.0])} tokens/s with no neuron on the card, {number(one[0.2])} with the hottest fifth, which carries {percent(speed[0.2]['hot_share'])} of the activations, "
        f"{number(one[1.0])} with all. `place` draws the line where a token takes least time within the memory there is.\n\n"
    )
    page += table(
        ["70B, hot neurons"] + [percent(share, 0) for share in lines],
        [
            ["carry"] + [percent(speed[share]["hot_share"], 0) for share in lines],
            ["tokens/s, simulated"] + [number(one[share]) for share in lines],
        ],
    )
    page += (
        "\nThe literature speaks of a trade here because its accuracy figures compare the predictor's errors with a dense model "
        "(PowerInfer, Table 7: within 0.42 points but for one model); those are question (b). PowerInfer's own runtime adds "
        "neurons of both sides in an order of the moment; this one's order is fixed.\n"
    )
    answer = {
        "question": "How does the hot-neuron threshold trade accuracy against speed?",
        "verdict": "not at all for accuracy: placement is exact; the more is hot, the faster",
        "effects": [
            effect("largest logit difference from dense, over all thresholds", most, n=tokens),
            effect("share of completions that are the same at every threshold", 1.0, n=items),
            *effects,
            effect(
                "speed with all neurons hot over none, 70B in four bits, simulated",
                one[1.0] / one[0.0],
                simulated=True,
            ),
        ],
    }
    return page, answer, [halves, *([emulated] if emulated else []), *speeds.values()]


def same_completions(rows):
    return len({functions(row)["completions"] for row in rows}) == 1


def on_emulator(*question):
    """What the emulated GPU answers; none where there is none."""
    try:
        return Asked(*question)
    except Failed as failed:
        print(f"{failed}: left out", file=sys.stderr)
        return None


def skip_threshold():
    """(b)"""
    levels = ",".join(
        ["dense", "exact", *(f"predicted:{by:+d}" if by else "predicted" for by in (-4, -2, 0, 1, 2, 3, 4, 6))]
    )
    asked = Asked(
        "demo", "skip-threshold", "sweep", "demo", "--policy", levels, "--vram", "0G,24G", "--tokens", "16384", "--tasks", "400",
        "--out", "skip-threshold.jsonl", "--html", "skip-threshold.html",
    )
    rows = [row for row in asked.rows() if row["axes"]["vram_bytes"] == 0]
    named = {row["axes"]["setting"]: row for row in rows}
    usual, dense, exact = named["predicted"], named["dense"], named["exact"]
    holds(same_completions([dense, exact]), "`exact` writes what `dense` writes")
    predicted = [row for row in rows if row["axes"]["policy"] == "predicted"]
    predicted.sort(key=lambda row: row["axes"]["parameter_value"])
    standing = holm({row["axes"]["setting"]: functions(row)["p_value"] for row in predicted})
    # From where on each level, and all that skip more, lose functions.
    first = None
    for row in reversed(predicted):
        if row["axes"]["setting"] not in standing or functions(row)["difference"] >= 0:
            break
        first = row
    speed = lambda row: row["speed"]["measured"]["tokens_per_second"]["median"]
    page = "## (b) How does the skip threshold trade accuracy, pass@1 and speed?\n\n"
    page += (
        f"**Here is the trade.** As trained, the predictors have {percent(usual['sparsity']['computed_share'])} of the neurons computed; they find {percent(usual['predictor']['count_recall'])} of those that fire "
        f"and {percent(usual['predictor']['contribution_recall'])} of what neurons add. Perplexity rises by {rise(usual['quality']['perplexity_rise'])}; pass@1 of {functions(usual)['pairs']} functions: "
        f"{verdict(functions(usual))}. `exact`, which computes what fires, writes the same completions as `dense`, and no logit is more than {exact['quality']['largest_logit_difference']:.4f} off. "
    )
    if first:
        lost = functions(first)
        page += (
            f"**Code suffers visibly from** `{first['axes']['setting']}` on: perplexity {rise(first['quality']['perplexity_rise'])}, and pass@1 {share(lost['pass_at_1'])} beside "
            f"{share(functions(dense)['pass_at_1'])}, {lost['lost']} functions lost and {lost['won']} won ({verdict(lost)}; it stands beside the other {len(predicted) - 1} levels by Holm's correction). "
        )
    else:
        page += "No level that was tried, and all beyond it, loses functions visibly. "
    ranges = {name: named[name]["speed"]["measured"]["tokens_per_second"] for name in ("dense", "exact", "predicted")}
    told = ", ".join(f"`{name}` {number(found['median'])} ({number(found['least'])}–{number(found['most'])})" for name, found in ranges.items())
    page += (
        f"Speed on this machine's CPU, {rows[0]['speed']['measured']['threads']} threads, tokens/s with the least and the most of {rows[0]['speed']['measured']['repeats']} repeats: {told}. Repeats of a level differ as much as levels do, "
        "and on a model of 3.5 million parameters the predictor and everything but the FFN weigh more than on large ones: the bytes a token are the steadier figure.\n\n"
    )
    page += table(
        [
            "level", "FFN neurons computed", "recall, count", "recall, contribution", "precision", "perplexity", "pass@1 (95 %)",
            "beside dense", "read a token", "tokens/s here", "tokens/s RTX 4090, simulated",
        ],
        [
            [
                f"`{row['axes']['setting']}`",
                percent(row["sparsity"]["computed_share"]),
                *(
                    [percent(row["predictor"][name]) for name in ("count_recall", "contribution_recall", "precision")]
                    if row["predictor"]
                    else ["–"] * 3
                ),
                rise(row["quality"]["perplexity_rise"]),
                share(functions(row)["pass_at_1"]),
                "–" if row is dense else verdict(functions(row)),
                f"{row['speed']['measured']['bytes_per_token'] / 1e6:.2f} MB",
                number(speed(row)),
                number(
                    next(
                        other["speed"]["planned"]["tokens_per_second"]
                        for other in asked.rows()
                        if other["axes"]["setting"] == row["axes"]["setting"] and other["axes"]["vram_bytes"] > 0
                    )
                ),
            ]
            for row in rows
        ],
    )
    told = "; ".join(
        f"at `{row['axes']['setting']}` {percent(row['quality']['perplexity_rise']['value'], 2)} of perplexity and {-100 * functions(row)['difference']:.1f} points of pass@1"
        for row in predicted
        if row["axes"]["setting"] in standing
    )
    page += (
        "\nThe [page of this sweep](answers/skip-threshold.html) draws it, with the layers that bear most. A level is what each layer's trained threshold, a logit, is "
        "raised by.\n\nDoes code suffer before perplexity shows it? Not in what a sample can tell: thousands of tokens show a rise of perplexity that some hundred functions could not. In size it does: "
        f"{told}. The literature has HumanEval fall from 0.56 to 0.46 where perplexity rises by 7 % (50 % sparsity of another model, by other means).\n"
        if told
        else "\nThe [page of this sweep](answers/skip-threshold.html) draws it.\n"
    )
    effects = [
        effect(
            f"perplexity rise, {row['axes']['setting']}", *(row["quality"]["perplexity_rise"][end] for end in ("value", "low", "high")),
            n=row["quality"]["tokens"],
        )
        for row in rows
    ] + [
        effect(
            f"pass@1 difference, {row['axes']['setting']}", functions(row)["difference"], n=functions(row)["items"],
            p_value=functions(row)["p_value"], minimum_detectable_effect=functions(row)["minimum_detectable_effect"],
            pass_at_1=functions(row)["pass_at_1"],
        )
        for row in rows
    ]
    answer = {
        "question": "How does the skip threshold trade accuracy, pass@1 and speed?",
        "verdict": f"as trained {rise(usual['quality']['perplexity_rise'])} of perplexity, pass@1: {verdict(functions(usual))}; visible in pass@1 from {first['axes']['setting'] if first else 'no level that was tried'} on",
        "effects": effects,
    }
    return page, answer, [asked]


def pruning():
    """(c)"""
    asked = Asked(
        "demo", "prune", "eval", "prune", "demo", "--tasks", "400", "--tokens", "16384", "--raise", "0,2,4,6", "--keep",
        "0.9,0.8,0.7,0.6,0.4,0.2,0.1",
    )
    arms = asked.found["arms"]
    dense = arms[0]

    def level(arm):
        if arm["parameter"] is None:
            return "–"
        return f"logit {arm['parameter']['raised_logit']:+g}" if "raised_logit" in arm["parameter"] else f"keep {percent(arm['parameter']['kept'], 0)}"

    skipped = [arm for arm in arms if arm["arm"] == "skip predicted"]
    cold = {arm["parameter"]["kept"]: arm for arm in arms if arm["arm"] == "drop cold"}
    random = {arm["parameter"]["kept"]: arm for arm in arms if arm["arm"] == "drop random"}
    for kept in (0.8, 0.6):
        holds(random[kept]["pass_at_1"]["high"] < cold[kept]["pass_at_1"]["low"], "random neurons are missed more than cold ones")
    holds(cold[0.6]["pass_at_1"]["relative_to_dense"]["p_value"] < 0.05, "two fifths of cold neurons are missed")
    page = "## (c) What if only cold neurons are pruned: sparsity against code accuracy\n\n"
    page += (
        f"**Cold is not useless.** Token by token, {percent(1 - skipped[0]['ffn_neurons_computed'])} of the neurons can be left out for a rise of perplexity of {rise(skipped[0]['perplexity_rise'])} "
        f"and pass@1 {share(skipped[0]['pass_at_1'])} beside {share(dense['pass_at_1'])}. For good, by how often they fired while the model was profiled, the coldest "
        f"fifth costs {rise(cold[0.8]['perplexity_rise'])} of perplexity and, of pass@1, {verdict(cold[0.8]['pass_at_1']['relative_to_dense'])}; the coldest two fifths cost {rise(cold[0.6]['perplexity_rise'])} "
        f"and pass@1 falls to {share(cold[0.6]['pass_at_1'])}; as many at random: {share(random[0.6]['pass_at_1'])}. "
        "So a cold neuron is worth less than another, and far more than nothing: the sparsity that counts is that of each token.\n\n"
    )
    page += table(
        ["arm", "level", "FFN neurons computed", "perplexity", "pass@1 (95 %)", "beside dense"],
        [
            [
                arm["arm"], level(arm), percent(arm["ffn_neurons_computed"]),
                "–" if arm is dense else rise(arm["perplexity_rise"]),
                share(arm["pass_at_1"]),
                "–" if arm is dense else verdict(arm["pass_at_1"]["relative_to_dense"]),
            ]
            for arm in arms
        ],
    )
    page += (
        f"\n*Skip predicted* is what `run` does; *drop cold* keeps the hottest of all layers' neurons for every token; *drop random* as many of each layer, whichever. "
        f"{asked.found['tokens']:,} tokens, {asked.found['tasks']} functions. Where it is said that cold neurons can be pruned, look which of the first two arms was measured.\n"
    )
    answer = {
        "question": "What does pruning only cold neurons cost, against sparsity?",
        "verdict": f"skipping {percent(1 - skipped[0]['ffn_neurons_computed'])} token by token: {verdict(skipped[0]['pass_at_1']['relative_to_dense'])}; dropping the coldest two fifths for good: {verdict(cold[0.6]['pass_at_1']['relative_to_dense'])}; as many at random cost more",
        "effects": [
            effect(
                f"pass@1, {arm['arm']} {level(arm)}", *(arm["pass_at_1"][end] for end in ("value", "low", "high")),
                n=asked.found["tasks"], computed=arm["ffn_neurons_computed"], perplexity_rise=arm["perplexity_rise"],
            )
            for arm in arms
        ],
    }
    return page, answer, [asked]


MODELS = {"llama-30b": "33B", "llama-70b": "70B"}
MEMORIES = [8, 12, 16, 24, 48]


def sizes():
    """(d)"""
    simulated = {
        (model, memory): Asked(
            "simulated", f"{model}-{memory}", "simulate", "--like", model, "--quant", "q4_0", "--vram", f"{memory}G", "--ram", "192G",
        )
        for model in MODELS
        for memory in MEMORIES
    }
    here = {model: synthetic(model) for model in MODELS}

    def engine(model, memory, place=0):
        return simulated[model, memory].found["engines"][place]

    def one(model, memory):
        return engine(model, memory)["decode"][0]

    slow = {memory: one("llama-70b", memory)["milliseconds"] / one("llama-30b", memory)["milliseconds"] for memory in MEMORIES}
    page = "## (d) 33B against 70B on a consumer GPU\n\n"
    page += (
        f"**Simulated; no card was at hand.** LLaMA-30B's shape (32.5 billion parameters) and LLaMA-2-70B's with ReLU in four bits on a desktop with an RTX 4090 and DDR5-5600: with 24 GiB "
        f"{number(one('llama-30b', 24)['tokens_per_second'])} and {number(one('llama-70b', 24)['tokens_per_second'])} tokens/s, the 70B takes {number(slow[24])} times as long for a token; with 8 GiB {number(slow[8])} times, with 48 GiB {number(slow[48])} times. "
        f"What fits decides more than what a model has: [33b-versus-70b.md](33b-versus-70b.md) has sparsity, cards and lines, [simulator.md](simulator.md) how far such predictions were off.\n\n"
    )
    rows = []
    for model, name in MODELS.items():
        for memory in MEMORIES:
            found, at = engine(model, memory), one(model, memory)
            llama = next(e for e in simulated[model, memory].found["engines"] if e["name"] == "llama.cpp")
            plan = simulated[model, memory].found["plan"]["totals"]
            rows.append(
                [
                    f"{name}, {memory} GiB", percent(found["hot_neurons"], 0), percent(found["hot_share"], 0), f"{plan['gpu_bytes'] / 2**30:.1f} GiB",
                    f"{plan['cpu_bytes'] / 2**30:.1f} GiB", number(at["tokens_per_second"]), number(at["milliseconds"]),
                    number(found["decode"][3]["tokens_per_second"]), number(llama["decode"][0]["tokens_per_second"]) if "decode" in llama else "–",
                ]
            )
    page += table(
        ["simulated", "hot neurons", "carry", "on the GPU", "on the CPU", "tokens/s", "ms a token", "8 at once", "llama.cpp's layers"], rows
    )
    measured = []
    for model, (asked, layers) in here.items():
        for row in asked.rows():
            found = row["speed"]["measured"]
            measured.append(
                [
                    f"{MODELS[model]}, {layers} layers, `{row['axes']['setting']}`", percent(row["sparsity"]["computed_share"]), number(found["decode_microseconds"]["median"] / 1e3),
                    number(found["decode_microseconds"]["p95"] / 1e3), number(found["predicted_microseconds"] / 1e3), number(found["measured_over_predicted"]),
                    f"{found['bytes_per_token'] / 1e6:.0f} MB", percent(found["bandwidth_share"], 0),
                ]
            )
    processor = next(iter(here.values()))[0].rows()[0]["identity"]["processor"]
    page += (
        f"\n**Measured, as far as this machine goes** ({processor}, {next(iter(here.values()))[0].rows()[0]['speed']['measured']['threads']} threads, no GPU): layers of both shapes with random weights of which 90 % of the FFN activations are zero, "
        "in four bits, decoded on the CPU, beside what the same cost model says of this machine, whose other tenants make the bandwidth that is probed beside vary.\n\n"
    )
    page += table(
        ["measured", "FFN neurons computed", "ms a token", "P95", "cost model", "measured over it", "read a token", "of the read bandwidth"], measured
    )
    answer = {
        "question": "How do a 33B and a 70B model differ on a consumer GPU?",
        "verdict": f"at 24 GiB the 70B takes {number(slow[24])} times as long for a token (simulated)",
        "effects": [
            effect(f"milliseconds a token, 70B over 33B, {memory} GiB", slow[memory], simulated=True) for memory in MEMORIES
        ]
        + [
            effect(
                f"measured over predicted step, {MODELS[model]} shape, {row['axes']['setting']}", row["speed"]["measured"]["measured_over_predicted"],
                n=row["speed"]["measured"]["decode_microseconds"]["steps"],
            )
            for model, (asked, _) in here.items()
            for row in asked.rows()
        ],
    }
    return page, answer, [*simulated.values(), *(asked for asked, _ in here.values())]


LAYERS = 2


def making(folder):
    """The commands that make a synthetic bundle in a folder, in which `text.txt` is the README; none for other folders."""
    parent, _, model = folder.rpartition("/")
    if parent != "synthetic":
        return []
    return [
        ("synth", "--like", model, "--layers", str(LAYERS), "--predictor-rank", "256", "--out", "model", "-q"),
        ("profile", "model", "--data", "text.txt", "--tokens", "64", "--out", "profile", "-q"),
        (
            "place", "model", "--profile", "profile", "--predictors", "model/predictors", "--vram", "0G", "--hardware", "cpu-only", "--context", "256",
            "--quant", "q4_0", "--policy", "predicted", "--certify-tokens", "0", "--out", "bundle", "-q",
        ),
    ]


def synthetic(model):
    """A sweep of a few layers of a model's shape, made where it is first asked for."""
    folder = f"synthetic/{model}"
    question = (
        folder, "sweep", "sweep", "bundle", "--policy", "dense,exact,predicted", "--vram", "0G", "--data", "text.txt", "--tokens", "600", "--audit-tokens", "64",
        "--layer-tokens", "0", "--context", "80", "-n", "16", "--out", "sweep.jsonl",
    )
    if not RENDERS and not (WORK / folder / "bundle" / "manifest.json").exists():
        (WORK / folder).mkdir(parents=True, exist_ok=True)
        (WORK / folder / "text.txt").write_text((ROOT / "README.md").read_text())
        for arguments in making(folder):
            run(folder, *arguments)
    asked = Asked(*question)
    for checkpoint in (WORK / folder / "model").glob("*.safetensors"):
        if not RENDERS:
            checkpoint.unlink()  # gigabytes that are made again when they are asked for
    return asked, LAYERS


def without_zeros():
    """(e)"""
    errors = ["2%", "2.5%", "3.2%", "4%", "5%", "6.3%", "8%", "10%", "16%"]
    gates = ["30%", "40%", "50%", "60%", "70%"]
    levels = ",".join(["dense", *(f"error:{one}" for one in errors), *(f"gate:{one}" for one in gates)])
    asked = Asked(
        "silu-work", "magnitude", "sweep", "demo", "--policy", levels, "--vram", "0G", "--tokens", "16384", "--tasks", "400", "--out", "magnitude.jsonl",
        "--html", "magnitude.html",
    )
    rows = asked.rows()
    dense = rows[0]

    def best(kind):
        allowed = [row for row in rows if row["axes"]["setting"].startswith(kind) and row["quality"]["perplexity_rise"]["high"] <= 0.01]
        return min(allowed, key=lambda row: row["sparsity"]["computed_share"], default=None)

    found = {kind: best(kind) for kind in ("error", "gate")}
    told = []
    for kind, row in found.items():
        name = "thresholds to a relative error of each FFN's output (CETT)" if kind == "error" else "percentiles of |gate| (CATS)"
        if row is None:
            told.append(f"{name}: no level that was tried is shown to stay within 1 %")
            continue
        told.append(
            f"{name}: {percent(1 - row['sparsity']['computed_share'], 0)} of the neurons left out (`{row['axes']['setting']}`), perplexity {rise(row['quality']['perplexity_rise'])}, pass@1 {share(functions(row)['pass_at_1'])}, {verdict(functions(row))}"
        )
    page = "## (e) How sparse are models without ReLU, by magnitude?\n\n"
    most = max((1 - row["sparsity"]["computed_share"] for row in found.values() if row), default=0.0)
    head = f"**{percent(most, 0)} of the neurons at most, where the demo with ReLU leaves out nineteen in twenty.**" if most > 0 else "**Not by any level that was tried.**"
    holds(most < 0.9, "a model without ReLU leaves out less")
    page += (
        f"{head} The demo's architecture trained with SiLU instead, {percent(functions(dense)['pass_at_1']['value'])} of {functions(dense)['items']} held-out functions dense. "
        f"With the upper end of the interval within +1 % of perplexity: {'; '.join(told)}.\n\n"
    )
    page += table(
        ["level", "FFN neurons computed", "relative FFN error", "perplexity", "pass@1 (95 %)", "beside dense"],
        [
            [
                f"`{row['axes']['setting']}`", percent(row["sparsity"]["computed_share"]), percent(row["sparsity"]["relative_error"]), rise(row["quality"]["perplexity_rise"]),
                share(functions(row)["pass_at_1"]), "–" if row is dense else verdict(functions(row)),
            ]
            for row in rows
        ],
    )
    page += (
        "\nNeurons are chosen after their gates are read, so of three matrices one at least is read whole: leaving out a share s saves at most two thirds of s of the FFN's bytes. “50 % at a negligible change” "
        "(arXiv 2412.12178, 2404.08763) is of models of billions of parameters and of zero-shot tasks; perplexity here is of code that has one right continuation most of the time.\n"
    )
    answer = {
        "question": "How sparse can a model without ReLU be made by magnitude at no more than 1 % of perplexity, and what does it do to pass@1?",
        "verdict": "; ".join(told),
        "effects": [
            effect(
                f"perplexity rise, {row['axes']['setting']}", *(row["quality"]["perplexity_rise"][end] for end in ("value", "low", "high")),
                n=row["quality"]["tokens"], computed=row["sparsity"]["computed_share"], pass_at_1=functions(row)["pass_at_1"],
                p_value=functions(row)["p_value"], items=functions(row)["items"],
            )
            for row in rows
        ],
    }
    return page, answer, [asked]


def commands(asked):
    """Where a reader can check every figure."""
    lines = "".join("".join(f"{line}\n" for line in [*one.made(), one.told()]) for one in asked)
    return f"\n```sh\n{lines}```\n"


def main():
    prepare("demo", "demo", "--vram", "24G")
    prepare("silu-work", str(WORK / "silu" / "demo"), "--vram", "24G")
    sections, answers = [], []
    for letter, ask in zip("abcde", [hot_threshold, skip_threshold, pruning, sizes, without_zeros]):
        page, answer, asked = ask()
        sections.append(page + commands(asked))
        answer = {"id": letter, **answer, "commands": [line for one in asked for line in [*one.made(), one.told()]]}
        answers.append(answer)
    first = json.loads((WORK / "demo" / "skip-threshold.json").read_text())["rows"][0]
    identity = first["identity"]
    about = (
        "# Answers\n\n"
        "What computing only the neurons that fire costs and brings, asked five ways. Measured on the model that this repository ships, a Llama of 3.5 million parameters with ReLU trained on small Python functions, "
        "and on its sibling with SiLU; speeds of large models are simulated, and marked so. Perplexities rise over `dense` on the same tokens, intervals of 95 % by the paired bootstrap of blocks of 64 tokens; pass@1 of held-out functions, greedy, "
        "Wilson's intervals, differences by McNemar's exact test on the same functions, with the smallest difference that the sample could have told from none.\n\n"
        f"Written by `scripts/answers.sh` ({identity['tool']}, {identity['processor']}, {identity['instruction_set']}, {first['speed']['measured']['threads']} threads; seed {identity['seed']}). Each section ends with its commands; they run in a folder "
        "where `powerinfer prepare demo --vram 24G` has run, (e) where that was done with the sibling (`scripts/train-demo.sh --activation silu --steps 900 --out silu/demo`, `powerinfer prepare silu/demo --vram 24G`), and "
        "(d)'s synthetic layers where `text.txt` is this repository's README, each in a folder of its own; `--device emulated` takes a build with `--features emulator`. Figures that do not depend on the clock come out the same again. "
        "[answers.json](answers.json) has the figures for programs.\n\n"
    )
    DOCS.joinpath("answers.md").write_text(about + "\n".join(sections))
    document = {
        "tool": identity["tool"], "processor": identity["processor"], "model": identity["model"], "fingerprint": identity["fingerprint"], "answers": answers,
    }
    DOCS.joinpath("answers.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    pages = DOCS / "answers"
    pages.mkdir(exist_ok=True)
    for folder, name in [("demo", "skip-threshold"), ("silu-work", "magnitude")]:
        (pages / f"{name}.html").write_text((WORK / folder / f"{name}.html").read_text())
    print(f"written: {DOCS / 'answers.md'}", file=sys.stderr)


main()
