"""Runs the experiments behind docs/reports/answers.md, and writes answers.md and answers.json with the commands of each answer. usage: answers.py WORK DOCS [--render]"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

WORK, DOCS = Path(sys.argv[1]), Path(sys.argv[2])
RENDERS = "--render" in sys.argv[3:]
POWERINFER = WORK / "powerinfer"
ROOT = Path(__file__).resolve().parent.parent


def run(folder, *arguments):
    """Standard output of powerinfer, run in a subfolder of the work folder."""
    folder = WORK / folder
    folder.mkdir(parents=True, exist_ok=True)
    print(f"in {folder.relative_to(WORK)}: powerinfer {shlex.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run([POWERINFER, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"powerinfer {shlex.join(arguments)} exited with {done.returncode}")
    return done.stdout


class Failed(Exception):
    """A command that exited with an error."""


class Asked:
    """A command, its folder and its result. Results are cached on disk and reused for the same command."""

    def __init__(self, folder, name, *arguments):
        self.folder, self.arguments = folder, arguments
        kept = WORK / folder / f"{name}.answer.json"
        if kept.exists():
            before = json.loads(kept.read_text())
            if before["arguments"] == list(arguments):
                self.found = before["found"]
                return
        if RENDERS:
            sys.exit(f"`{kept}` does not exist, or is of another command; run scripts/answers.sh without --render")
        self.found = json.loads(run(folder, *arguments, "--json"))
        new = kept.with_suffix(".new")
        new.write_text(json.dumps({"arguments": arguments, "found": self.found}))
        new.replace(kept)

    def command(self):
        return f"powerinfer {shlex.join(self.arguments)}"

    def made(self):
        """Commands that created the bundle; empty for a prepared bundle."""
        return [f"powerinfer {shlex.join(arguments)}" for arguments in making(self.folder)]

    def rows(self):
        return self.found["rows"]


def holds(claim, sentence):
    """Exits if a fixed sentence contradicts the results: it must then be rewritten."""
    if not claim:
        sys.exit(f"the results contradict this statement of the answers: {sentence}")


def holm(tests):
    """Names of the tests that are significant at a family-wise error rate of 5% (Holm 1979)."""
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
    return f"{100 * share:.{digits}f}%"


def rise(found):
    value, low, high = (100 * found[end] for end in ("value", "low", "high"))
    digits = 2 if abs(value) < 10 else 0
    return f"{value:+.{digits}f}% ({low:+.{digits}f} to {high:+.{digits}f})"


def share(found):
    return f"{percent(found['value'])} ({100 * found['low']:.1f}–{100 * found['high']:.1f})"


def table(headings, rows):
    lines = [headings, [":--"] + ["--:"] * (len(headings) - 1), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def verdict(paired):
    """Result of McNemar's exact test, with the minimum detectable effect where it is not significant."""
    p_value = "p < 0.001" if paired["p_value"] < 0.001 else f"p = {paired['p_value']:.3f}"
    if paired["p_value"] < 0.05:
        return f"significant, {p_value}"
    return f"no significant difference, {p_value}; minimum detectable effect {100 * paired['minimum_detectable_effect']:.1f} points"


def functions(row):
    return row["quality"]["functions"][0]


def prepare(folder, *arguments):
    """Prepares a bundle unless one was already prepared with the same arguments."""
    made = WORK / folder / "prepared.json"
    if RENDERS or made.exists() and json.loads(made.read_text()) == list(arguments):
        return
    for found in (WORK / folder).glob("*"):
        shutil.rmtree(found) if found.is_dir() else found.unlink()  # answers of another bundle
    run(folder, "prepare", *arguments)
    made.write_text(json.dumps(arguments))


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
    holds(same_completions(rows), "all completions are the same at every threshold")
    holds(all(functions(row)["lost"] + functions(row)["won"] == 0 for row in rows), "they have the same verdicts as those of dense")
    ends = rows[0]["placement"], rows[-1]["placement"]
    holds(ends[0]["hot_neurons"] == 0 and ends[1]["hot_neurons"] == ends[1]["neurons"], "thresholds range from no hot neuron to all")
    page = "## (a) How does the hot-neuron threshold trade accuracy against speed?\n\n"
    page += (
        f"**It does not affect accuracy.** Hot and cold decide where a neuron is computed, not whether. With thresholds from "
        f"*no hot neuron* to *all neurons hot* and the hot and cold neurons computed and summed separately, as a GPU and a CPU do, "
        f"all {items} completions of held-out functions are identical token for token. Pass@1 is {share(functions(rows[0])['pass_at_1'])} throughout, "
        f"and the largest logit difference from `dense` on {tokens:,} tokens is {most:.4f} (the partial sums are added in another order; the KV cache has 16 bits). "
        f"Top-1 agreement is at least {percent(agreement, 2)}, and perplexity changes by at most {percent(flat, 3)}.\n\n"
    )
    effects = []
    if emulated:
        groups = [[row for row in emulated.rows() if row["axes"]["setting"] == level] for level in ("exact", "predicted")]
        holds(all(same_completions(group) for group in groups), "completions are the same at every threshold on the emulated GPU")
        first = groups[0][0]["quality"]
        on_device = max(row["quality"]["largest_logit_difference"] for row in groups[0])
        page += (
            f"On the GPU's own kernels, emulated on a CPU ({first['tokens']} tokens, {functions(groups[0][0])['items']} functions; no GPU was available): "
            f"the largest logit difference from `dense` is {on_device:.4f}; completions are the same at every threshold, under `exact` and under `predicted`.\n\n"
        )
        effects.append(effect("largest logit difference on the emulated GPU", on_device, n=first["tokens"]))
    else:
        page += "The GPU kernels were not run: neither a GPU nor a C++ compiler for the emulator was available.\n\n"
    page += table(
        ["hot: active on", "hot neurons", "activations", "largest logit difference", "perplexity", "pass@1 (95%)"],
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
    holds(one[0.0] < one[0.2] < one[1.0], "more hot neurons are faster")
    page += (
        f"\n**It affects speed.** Simulated for a 70B model with ReLU in four bits, on a desktop with an RTX 4090 and an assumed 80 GiB of VRAM, so that every threshold fits: "
        f"{number(one[0.0])} tokens/s with no neuron on the GPU, {number(one[0.2])} with the hottest fifth, which accounts for {percent(speed[0.2]['hot_share'])} of the activations, "
        f"{number(one[1.0])} with all. `place` chooses the split with the least time per token within the available memory.\n\n"
    )
    page += table(
        ["70B, hot neurons"] + [percent(share, 0) for share in lines],
        [
            ["activations"] + [percent(speed[share]["hot_share"], 0) for share in lines],
            ["tokens/s, simulated"] + [number(one[share]) for share in lines],
        ],
    )
    page += (
        "\nThe literature describes a trade-off here because its accuracy figures compare the predictor's errors with a dense model "
        "(PowerInfer, Table 7: within 0.42 points except for one model); these errors are question (b). PowerInfer's runtime adds "
        "the sums of both devices in a nondeterministic order; the order here is fixed.\n"
    )
    answer = {
        "question": "How does the hot-neuron threshold trade accuracy against speed?",
        "verdict": "accuracy does not change, because placement is exact; more hot neurons are faster",
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
    """Result on the emulated GPU; None without an emulator."""
    try:
        return Asked(*question)
    except Failed as failed:
        print(f"{failed}: skipped", file=sys.stderr)
        return None


METHODS = ["closed-form", "trained"]
# The default of `auto`; the default of `closed-form` is higher.
EQUAL = ["--contribution-recall", "0.995"]


def skip_threshold():
    """(b)"""
    levels = ",".join(
        ["dense", "exact", *(f"predicted:{by:+d}" if by else "predicted" for by in (-4, -2, 0, 1, 2, 3, 4, 6))]
    )
    asked = Asked(
        "demo", "skip-threshold", "sweep", "demo", "--policy", levels, "--vram", "0G,24G", "--tokens", "16384", "--tasks", "400",
        "--out", "skip-threshold.jsonl", "--html", "skip-threshold.html",
    )
    methods = {
        method: Asked(
            method, f"skip-threshold-{method}", "sweep", "demo", "--policy", "dense,predicted:-2,predicted,predicted:+1,predicted:+2,predicted:+4",
            "--vram", "0G", "--tokens", "16384", "--tasks", "400", "--out", "skip-threshold.jsonl",
        )
        for method in METHODS
    }
    rows = [row for row in asked.rows() if row["axes"]["vram_bytes"] == 0]
    named = {row["axes"]["setting"]: row for row in rows}
    usual, dense, exact = named["predicted"], named["dense"], named["exact"]
    holds(same_completions([dense, exact]), "`exact` and `dense` have the same completions")
    predicted = [row for row in rows if row["axes"]["policy"] == "predicted"]
    predicted.sort(key=lambda row: row["axes"]["parameter_value"])
    standing = holm({row["axes"]["setting"]: functions(row)["p_value"] for row in predicted})
    # The lowest threshold from which on every setting loses functions significantly.
    first = None
    for row in reversed(predicted):
        if row["axes"]["setting"] not in standing or functions(row)["difference"] >= 0:
            break
        first = row
    speed = lambda row: row["speed"]["measured"]["tokens_per_second"]["median"]
    page = "## (b) How does the skip threshold trade accuracy, pass@1 and speed?\n\n"
    page += (
        f"**Raising the threshold trades accuracy for bytes.** At the calibrated thresholds, {percent(usual['sparsity']['computed_share'])} of the neurons are computed. The predictors' recall is {percent(usual['predictor']['count_recall'])} of the active neurons "
        f"and {percent(usual['predictor']['contribution_recall'])} of the contributions. Perplexity rises by {rise(usual['quality']['perplexity_rise'])}; pass@1 of {functions(usual)['pairs']} functions: "
        f"{verdict(functions(usual))}. `exact`, which computes the active neurons, has the same completions as `dense`; the largest logit difference is {exact['quality']['largest_logit_difference']:.4f}. "
    )
    if first:
        lost = functions(first)
        page += (
            f"**The loss of pass@1 is significant from** `{first['axes']['setting']}` on: perplexity {rise(first['quality']['perplexity_rise'])}, and pass@1 {share(lost['pass_at_1'])} against "
            f"{share(functions(dense)['pass_at_1'])}, {lost['lost']} functions lost and {lost['won']} won ({verdict(lost)}; also after Holm's correction for {len(predicted)} settings). "
        )
    else:
        page += "From no setting on is the loss of pass@1 significant. "
    ranges = {name: named[name]["speed"]["measured"]["tokens_per_second"] for name in ("dense", "exact", "predicted")}
    listed = ", ".join(f"`{name}` {number(found['median'])} ({number(found['least'])}–{number(found['most'])})" for name, found in ranges.items())
    page += (
        f"Speed on this machine's CPU, {rows[0]['speed']['measured']['threads']} threads, tokens/s, median (minimum–maximum) of {rows[0]['speed']['measured']['repeats']} repeats: {listed}. Repeats of one setting differ as much as settings do, "
        "and in a model of 3.5 million parameters the predictor and everything outside the FFN take a larger share than in large models. The bytes per token are the more stable figure.\n\n"
    )
    page += table(
        [
            "setting", "FFN neurons computed", "recall, count", "recall, contribution", "precision", "perplexity", "pass@1 (95%)",
            "pass@1 vs dense", "bytes read per token", "tokens/s here", "tokens/s RTX 4090, simulated",
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
    costs = "; ".join(
        f"at `{row['axes']['setting']}` {percent(row['quality']['perplexity_rise']['value'], 2)} of perplexity and {-100 * functions(row)['difference']:.1f} points of pass@1"
        for row in predicted
        if row["axes"]["setting"] in standing
    )
    page += (
        "\nThe page that this command draws (`--html`) has charts, and the sensitivity of each layer. The number after `predicted:` is added to the calibrated threshold of each layer, "
        "a logit.\n\nDoes pass@1 fall before perplexity rises? Not in statistical significance: thousands of tokens resolve a smaller effect than some hundred functions. In magnitude it does: "
        f"{costs}. In the literature, HumanEval falls from 0.56 to 0.46 where perplexity rises by 7% (another model at 50% sparsity, by another method).\n"
        if costs
        else "\nThe page that this command draws (`--html`) has charts.\n"
    )
    compared = {"auto": rows, **{method: found.rows() for method, found in methods.items()}}
    page += (
        "\n**Other methods**: `closed-form` calculates the predictors. `auto` (above) calculates them, then trains them further. `trained` starts from random weights and uses ReLU, as in the paper. "
        "Each method's thresholds are calibrated for a contribution recall of 99.5%; the default of `closed-form` is 99.8% ([predictors.md](predictors.md)).\n\n"
    )
    page += table(
        ["setting", "method", "neurons predicted", "recall, count", "recall, contribution", "perplexity", "pass@1 (95%)", "pass@1 vs dense", "bytes read per token"],
        [
            [
                f"`{row['axes']['setting']}`", f"`{method}`", percent(predicted_share(row)),
                *(percent(row["predictor"][name]) for name in ("count_recall", "contribution_recall")),
                rise(row["quality"]["perplexity_rise"]), share(functions(row)["pass_at_1"]), verdict(functions(row)),
                f"{row['speed']['measured']['bytes_per_token'] / 1e6:.2f} MB",
            ]
            for setting in [row["axes"]["setting"] for row in methods["closed-form"].rows()]
            for method, found in compared.items()
            for row in found
            if row["axes"]["setting"] == setting and row["predictor"]
        ],
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
    ] + [
        effect(
            f"perplexity rise, {method}, {row['axes']['setting']}", *(row["quality"]["perplexity_rise"][end] for end in ("value", "low", "high")),
            n=row["quality"]["tokens"], predicted=predicted_share(row), pass_at_1=functions(row)["pass_at_1"], p_value=functions(row)["p_value"],
        )
        for method, found in methods.items()
        for row in found.rows()
        if row["predictor"]
    ]
    answer = {
        "question": "How does the skip threshold trade accuracy, pass@1 and speed?",
        "verdict": f"without a raised threshold {rise(usual['quality']['perplexity_rise'])} of perplexity, pass@1: {verdict(functions(usual))}; significant in pass@1 from {first['axes']['setting'] if first else 'no setting'} on",
        "effects": effects,
    }
    return page, answer, [asked, *methods.values()]


def predicted_share(row):
    """Share of the neurons that are predicted active."""
    return 1 - row["sparsity"]["predicted_share"]


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
        holds(random[kept]["pass_at_1"]["high"] < cold[kept]["pass_at_1"]["low"], "dropping random neurons costs more than dropping cold ones")
    holds(cold[0.6]["pass_at_1"]["relative_to_dense"]["p_value"] < 0.05, "dropping the coldest two fifths costs pass@1")
    page = "## (c) What if only cold neurons are pruned: sparsity against code accuracy\n\n"
    page += (
        f"**Cold neurons matter.** Token by token, {percent(1 - skipped[0]['ffn_neurons_computed'])} of the neurons can be skipped, at a rise of perplexity of {rise(skipped[0]['perplexity_rise'])} "
        f"and pass@1 {share(skipped[0]['pass_at_1'])} against {share(dense['pass_at_1'])}. Dropping neurons for good, by activation frequency in the profile, is different: the coldest "
        f"fifth costs {rise(cold[0.8]['perplexity_rise'])} of perplexity; pass@1: {verdict(cold[0.8]['pass_at_1']['relative_to_dense'])}; the coldest two fifths cost {rise(cold[0.6]['perplexity_rise'])} "
        f"and pass@1 falls to {share(cold[0.6]['pass_at_1'])}; with the same number of random neurons it is {share(random[0.6]['pass_at_1'])}. "
        "A cold neuron contributes less than a hot one, but far from nothing. The usable sparsity is that of the single token.\n\n"
    )
    page += table(
        ["arm", "setting", "FFN neurons computed", "perplexity", "pass@1 (95%)", "pass@1 vs dense"],
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
        f"\n*Skip predicted* is the policy of `run`. *Drop cold* keeps the hottest neurons of all layers for every token. *Drop random* keeps the same number per layer, chosen at random. "
        f"{asked.found['tokens']:,} tokens, {asked.found['tasks']} functions. Claims that cold neurons can be pruned should name which of the first two arms they measured.\n"
    )
    answer = {
        "question": "What does pruning only cold neurons cost, against sparsity?",
        "verdict": f"skipping {percent(1 - skipped[0]['ffn_neurons_computed'])} token by token: {verdict(skipped[0]['pass_at_1']['relative_to_dense'])}; dropping the coldest two fifths for good: {verdict(cold[0.6]['pass_at_1']['relative_to_dense'])}; random neurons, the same number, cost more",
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
        f"**Simulated; no GPU was available.** The shapes of LLaMA-30B (32.5 billion parameters) and LLaMA-2-70B with ReLU, in four bits on a desktop with an RTX 4090 and DDR5-5600: "
        f"{number(one('llama-30b', 24)['tokens_per_second'])} and {number(one('llama-70b', 24)['tokens_per_second'])} tokens/s with 24 GiB of VRAM. The 70B takes {number(slow[24])} times as long per token; with 8 GiB {number(slow[8])} times, with 48 GiB {number(slow[48])} times. "
        f"The share of the model that fits in VRAM matters more than its size. [33b-versus-70b.md](33b-versus-70b.md) varies sparsity, VRAM and the share of hot neurons; [simulator.md](simulator.md) has the errors of such predictions.\n\n"
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
        ["simulated", "hot neurons", "activations", "on the GPU", "on the CPU", "tokens/s", "ms per token", "8 requests", "llama.cpp, tokens/s"], rows
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
        f"\n**Measured on this machine** ({processor}, {next(iter(here.values()))[0].rows()[0]['speed']['measured']['threads']} threads, no GPU): layers of both shapes with random weights and 90% zero FFN activations, "
        "in four bits, decoded on the CPU, compared with the same cost model for this machine. The host is shared, so the probed bandwidth varies.\n\n"
    )
    page += table(
        ["measured", "FFN neurons computed", "ms per token", "p95", "cost model", "measured / predicted", "bytes read per token", "fraction of read bandwidth"], measured
    )
    answer = {
        "question": "How do a 33B and a 70B model differ on a consumer GPU?",
        "verdict": f"at 24 GiB the 70B takes {number(slow[24])} times as long per token (simulated)",
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
    """Commands that create a synthetic bundle in a folder whose `text.txt` is the README; empty for other folders."""
    parent, _, model = folder.rpartition("/")
    if parent != "synthetic":
        return []
    return [
        ("synth", "--like", model, "--layers", str(LAYERS), "--predictor-rank", "256", "--out", "model", "-q"),
        ("profile", "model", "--data", "text.txt", "--tokens", "128", "--out", "profile", "-q"),
        (
            "place", "model", "--profile", "profile", "--predictors", "model/predictors", "--vram", "0G", "--hardware", "cpu-only", "--context", "256",
            "--quant", "q4_0", "--policy", "predicted", "--certify", "none", "--out", "bundle", "-q",
        ),
    ]


def synthetic(model):
    """A sweep of a synthetic model with few layers; the model is created on first use."""
    folder = f"synthetic/{model}"
    question = (
        folder, "sweep", "sweep", "bundle", "--policy", "dense,exact,predicted", "--vram", "0G", "--data", "text.txt", "--tokens", "600", "--audit-tokens", "64",
        "--layer-tokens", "0", "--context", "80", "-n", "16", "--out", "sweep.jsonl",
    )
    if not RENDERS and not (WORK / folder / "bundle" / "manifest.json").exists():
        (WORK / folder).mkdir(parents=True, exist_ok=True)
        (WORK / folder / "text.txt").write_text((ROOT / "README.md").read_text())
        for leftover in ("model", "profile", "bundle"):
            shutil.rmtree(WORK / folder / leftover, ignore_errors=True)
        for answer in (WORK / folder).glob("sweep.*"):
            answer.unlink()
        for arguments in making(folder):
            run(folder, *arguments)
    asked = Asked(*question)
    for checkpoint in (WORK / folder / "model").glob("*.safetensors"):
        if not RENDERS:
            checkpoint.unlink()  # saves gigabytes; created again when needed
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
    best_of = []
    for kind, row in found.items():
        name = "thresholds to a relative error of each FFN's output (CETT)" if kind == "error" else "percentiles of |gate| (CATS)"
        if row is None:
            best_of.append(f"{name}: no setting is shown to stay within 1%")
            continue
        best_of.append(
            f"{name}: {percent(1 - row['sparsity']['computed_share'], 0)} of the neurons skipped (`{row['axes']['setting']}`), perplexity {rise(row['quality']['perplexity_rise'])}, pass@1 {share(functions(row)['pass_at_1'])}, {verdict(functions(row))}"
        )
    page = "## (e) How sparse are models without ReLU, by magnitude?\n\n"
    most = max((1 - row["sparsity"]["computed_share"] for row in found.values() if row), default=0.0)
    head = f"**At most {percent(most, 0)} of the neurons can be skipped; the demo with ReLU skips nineteen in twenty.**" if most > 0 else "**No setting stays within the budget.**"
    holds(most < 0.9, "a model without ReLU skips fewer neurons")
    page += (
        f"{head} The demo's architecture was trained with SiLU: {percent(functions(dense)['pass_at_1']['value'])} of {functions(dense)['items']} held-out functions pass under `dense`. "
        f"With the upper end of the interval within +1% of perplexity: {'; '.join(best_of)}.\n\n"
    )
    page += table(
        ["setting", "FFN neurons computed", "relative FFN error", "perplexity", "pass@1 (95%)", "pass@1 vs dense"],
        [
            [
                f"`{row['axes']['setting']}`", percent(row["sparsity"]["computed_share"]), percent(row["sparsity"]["relative_error"]), rise(row["quality"]["perplexity_rise"]),
                share(functions(row)["pass_at_1"]), "–" if row is dense else verdict(functions(row)),
            ]
            for row in rows
        ],
    )
    page += (
        "\nNeurons are selected after their gates are computed, so at least one of the three matrices is read in full: skipping a share s saves at most two thirds of s of the FFN's bytes. “50% at a negligible change” "
        "(arXiv 2412.12178, 2404.08763) refers to models with billions of parameters and to zero-shot tasks. The perplexity here is of code, which usually has one correct continuation.\n"
    )
    answer = {
        "question": "How sparse can a model without ReLU be made by magnitude at no more than 1% of perplexity, and what does it do to pass@1?",
        "verdict": "; ".join(best_of),
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
    """Commands that reproduce the figures."""
    lines = "".join("".join(f"{line}\n" for line in [*one.made(), one.command()]) for one in asked)
    return f"\n```sh\n{lines}```\n"


def main():
    prepare("demo", "demo", "--vram", "24G")
    for method in METHODS:
        prepare(method, "demo", "--vram", "24G", "--method", method, *EQUAL)
    prepare("silu-work", str(WORK / "silu" / "demo"), "--vram", "24G")
    sections, answers = [], []
    for letter, ask in zip("abcde", [hot_threshold, skip_threshold, pruning, sizes, without_zeros]):
        page, answer, asked = ask()
        sections.append(page + commands(asked))
        answer = {"id": letter, **answer, "commands": [line for one in asked for line in [*one.made(), one.command()]]}
        answers.append(answer)
    first = json.loads((WORK / "demo" / "skip-threshold.json").read_text())["rows"][0]
    identity = first["identity"]
    about = (
        "# Answers\n\n"
        "Accuracy and speed of computing only the active neurons, in five questions. Accuracy is measured on the model that this repository ships, a Llama of 3.5 million parameters with ReLU, trained on small Python functions, "
        "and on the same architecture with SiLU. Speeds of large models are simulated, and marked so.\n\nRises of perplexity are relative to `dense` on the same tokens, with 95% intervals by the paired bootstrap of blocks of 64 tokens. Pass@1 is measured on held-out functions with greedy decoding, "
        "Wilson's intervals, and differences are tested by McNemar's exact test on the same functions. Where a difference is not significant, the minimum detectable effect is given.\n\n"
        f"Written by `scripts/answers.sh` ({identity['tool']}, {identity['processor']}, {identity['instruction_set']}, {first['speed']['measured']['threads']} threads; seed {identity['seed']}). Each section ends with its commands. They run in a folder "
        "where `powerinfer prepare demo --vram 24G` has run. For (b)'s other methods, it has run with `--contribution-recall 0.995` and `--method closed-form` or `--method trained`. The commands of (e) run where the SiLU model was prepared (`scripts/train-demo.py --activation silu --steps 900 --out silu/demo`, `powerinfer prepare silu/demo --vram 24G`), and "
        "(d)'s synthetic layers where `text.txt` is this repository's README, each in a folder of its own; `--device emulated` takes a build with `--features emulator`. Figures other than times are reproducible. "
        "[answers.json](answers.json) has the figures in machine-readable form.\n\n"
    )
    DOCS.joinpath("answers.md").write_text(about + "\n".join(sections))
    document = {
        "tool": identity["tool"], "processor": identity["processor"], "model": identity["model"], "fingerprint": identity["fingerprint"], "answers": answers,
    }
    DOCS.joinpath("answers.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written: {DOCS / 'answers.md'}", file=sys.stderr)


main()
