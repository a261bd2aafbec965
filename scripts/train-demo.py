#!/usr/bin/env python3
"""Trains the demo model from the stored tasks, in an estimated half hour on two CPU cores.

Install first: pip install torch tokenizers safetensors numpy
(the smallest PyTorch is enough: pip install torch --index-url https://download.pytorch.org/whl/cpu)

usage: scripts/train-demo.py [--out DIR] [--steps N] [--activation silu] …      see --help

Writes a Hugging Face checkpoint and `training-log.jsonl`. An interrupted run continues when it is started again with
the same options. The published model came from an earlier trainer with this recipe, other random numbers and another
order of the same tasks. Its weights stay as they are, so the default output is another folder.
"""

import argparse
import bz2
import gzip
import json
import math
import os
import re
import sys
import time
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer
except ImportError as error:
    sys.exit(f"error: {error}\nhint: run `pip install torch tokenizers safetensors numpy`")

DEMO = Path(__file__).resolve().parent.parent / "datasets" / "demo"
COPIED = ["generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
BEGIN, END = 0, 1

# A prompt's tokens weigh 0.2 in the loss, a solution's 1: what a task asks cannot be predicted.
PROMPT_WEIGHT = 0.2
# Parts of a batch whose losses are averaged; each part weighs its own tokens.
SHARDS = 2
REPORT_EVERY = 100
WARM_UP_STEPS = 60
GRADIENT_LIMIT = 1.0
# Bands of neighbouring neurons share a penalty. Each band shall be active half as often as the one before.
BANDS = 8
BAND_RATIO = 0.5
# Share of the schedule over which the sparsity rises from a half to its goal.
SPARSITY_RAMP = 0.4
ADAM = dict(lr=0.0, betas=(0.9, 0.98), eps=1e-8)
WEIGHT_DECAY = 0.1
MUON_MOMENTUM = 0.95
# Root mean square of an AdamW step in units of its learning rate, which Muon's step is given.
MUON_STEP_LENGTH = 0.2
MUON_ITERATIONS = 5
MUON_QUINTIC = (3.4445, -4.7750, 2.0315)


def training_tasks():
    """The stored training tasks, as (prompt, solution).

    The file has four columns, one after the other, with a line per task: function, parameters, docstring, body. `$k`
    stands for parameter k, `@k` in a body for number k of the docstring, and `|` for the start of a line.
    """
    text = bz2.decompress((DEMO / "training-tasks.txt.bz2").read_bytes()).decode()
    tasks = []
    for name, parameters, docstring, body in zip(*(column.split("\n") for column in text.split("\n\n"))):
        names = parameters.split(", ")
        numbers = re.findall(r"(?<!\$)\b\d+\b", docstring)
        body = re.sub(r"@(\d+)", lambda mark: numbers[int(mark[1])], body.replace("|", "\n    "))
        docstring, body = (re.sub(r"\$(\d)", lambda mark: names[int(mark[1])], part) for part in (docstring, body))
        tasks.append((f'def {name}({parameters}):\n    """{docstring}"""', f"\n    {body}\n"))
    return tasks


def held_out_tasks(count):
    """The first `count` held-out tasks of different combinations, as (prompt, solution)."""
    tasks = {}
    for line in gzip.open(DEMO / "held-out.jsonl.gz", "rt"):
        task = json.loads(line)
        tasks.setdefault(task["combination"], (task["prompt"], task["solution"]))
    return list(tasks.values())[:count]


def encode(tokenizer, tasks):
    """Token ids of each whole text, with its begin and end, and the number of its prompt's tokens."""
    prompts = tokenizer.encode_batch_fast([prompt for prompt, _ in tasks], add_special_tokens=False)
    texts = tokenizer.encode_batch_fast([prompt + solution for prompt, solution in tasks], add_special_tokens=False)
    return [([BEGIN, *text.ids, END], len(prompt.ids) + 1) for prompt, text in zip(prompts, texts)]


class Batch:
    """Texts laid end to end; attention sees them padded, everything else sees their tokens only."""

    def __init__(self, shards, device):
        texts = [text for shard in shards for text in shard]
        lengths = torch.tensor([len(ids) - 1 for ids, _ in texts])
        starts = lengths.cumsum(0) - lengths
        columns = torch.arange(int(lengths.max()))
        real = columns < lengths[:, None]
        weights = []
        for shard in shards:
            of_shard = [1.0 if index >= prompt else PROMPT_WEIGHT for ids, prompt in shard for index in range(1, len(ids))]
            total = sum(of_shard) * len(shards)
            weights += [weight / total for weight in of_shard]
        self.shards = len(shards)
        self.tokens = torch.tensor([id for ids, _ in texts for id in ids[:-1]], device=device)
        self.targets = torch.tensor([id for ids, _ in texts for id in ids[1:]], device=device)
        # `[tokens]`: what each target weighs; all together weigh 1.
        self.weights = torch.tensor(weights, device=device)
        # `[texts, longest]`: where each padded position comes from; padding comes from token 0 and is never looked at.
        self.slots = torch.where(real, starts[:, None] + columns, 0).to(device)
        # `[tokens]`: where each token lies in the padded layout.
        self.places = real.flatten().nonzero().flatten().to(device)
        # First solution token of each text among the targets, and the text's end.
        self.solutions = [(int(start) + prompt - 1, int(start) + len(ids) - 1) for start, (ids, prompt) in zip(starts, texts)]


class Model:
    """The demo's Llama as a differentiable function; parameters have the names of a Hugging Face checkpoint."""

    def __init__(self, config, device):
        self.config, self.device = config, device
        self.relu = config["hidden_act"] == "relu"
        self.parameters = {}

    def initialise(self, generator):
        """Normally distributed matrices; those that write to the residual stream start smaller by √(2·layers)."""
        config, hidden, ffn = self.config, self.config["hidden_size"], self.config["intermediate_size"]
        heads = config["num_attention_heads"] * config["head_dim"]
        kv_heads = config["num_key_value_heads"] * config["head_dim"]
        read, write = hidden**-0.5, 0.5 / math.sqrt(2 * config["num_hidden_layers"])

        def matrix(name, rows, columns, deviation):
            self.parameters[name] = torch.randn(rows, columns, generator=generator) * deviation

        matrix("model.embed_tokens.weight", config["vocab_size"], hidden, 0.05)
        for layer in range(config["num_hidden_layers"]):
            of = f"model.layers.{layer}."
            matrix(of + "self_attn.q_proj.weight", heads, hidden, read)
            matrix(of + "self_attn.k_proj.weight", kv_heads, hidden, read)
            matrix(of + "self_attn.v_proj.weight", kv_heads, hidden, read)
            matrix(of + "self_attn.o_proj.weight", hidden, heads, write * heads**-0.5)
            matrix(of + "mlp.gate_proj.weight", ffn, hidden, read)
            matrix(of + "mlp.up_proj.weight", ffn, hidden, read)
            matrix(of + "mlp.down_proj.weight", hidden, ffn, write * ffn**-0.5)
            self.parameters[of + "input_layernorm.weight"] = torch.ones(hidden)
            self.parameters[of + "post_attention_layernorm.weight"] = torch.ones(hidden)
        self.parameters["model.norm.weight"] = torch.ones(hidden)
        self.load(self.parameters)

    def load(self, parameters):
        """Takes `parameters` over, as float32 leaves."""
        self.parameters = {
            name: value.detach().to(self.device, torch.float32).requires_grad_() for name, value in parameters.items()
        }

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.parameters[name], self.config["rms_norm_eps"])

    def attention(self, x, layer, batch, rotation):
        """Causal grouped-query attention with rotary positions, `[tokens, hidden]` to `[tokens, hidden]`."""
        size, group = self.config["head_dim"], self.config["num_attention_heads"] // self.config["num_key_value_heads"]

        def heads(part):
            rows = x @ self.parameters[f"model.layers.{layer}.self_attn.{part}.weight"].T
            return rows[batch.slots].unflatten(-1, (-1, size)).transpose(1, 2)

        def rotate(y):
            a, b = y.chunk(2, dim=-1)
            cosine, sine = rotation
            return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)

        queries, keys, values = rotate(heads("q_proj")), rotate(heads("k_proj")), heads("v_proj")
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        # Padding follows the text, so that the causal mask hides it.
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2).flatten(0, 1)[batch.places]
        return mixed @ self.parameters[f"model.layers.{layer}.self_attn.o_proj.weight"].T

    def forward(self, batch, penalties=None):
        """Logits `[tokens, vocabulary]`, penalty of the active neurons, and how often each was active `[layers, ffn]`.

        `penalties` `[layers, bands]` are the prices of an active neuron's gate.
        """
        half = self.config["head_dim"] // 2
        frequencies = self.config["rope_theta"] ** -(torch.arange(half, device=self.device) / half)
        angles = torch.arange(batch.slots.shape[1], device=self.device)[:, None] * frequencies
        rotation = angles.cos(), angles.sin()
        penalty, active = torch.zeros((), device=self.device), []
        x = self.parameters["model.embed_tokens.weight"][batch.tokens]
        for layer in range(self.config["num_hidden_layers"]):
            of = f"model.layers.{layer}."
            x = x + self.attention(self.norm(x, of + "input_layernorm.weight"), layer, batch, rotation)
            y = self.norm(x, of + "post_attention_layernorm.weight")
            gate = y @ self.parameters[of + "mlp.gate_proj.weight"].T
            up = y @ self.parameters[of + "mlp.up_proj.weight"].T
            if self.relu:
                open_gate = F.relu(gate)
                active.append((gate > 0).sum(0))
                if penalties is not None:
                    prices = penalties[layer].repeat_interleave(gate.shape[1] // BANDS)
                    penalty = penalty + (open_gate.sum(0) * prices).sum()
            else:
                open_gate = F.silu(gate)
                active.append(torch.full((gate.shape[1],), len(gate), device=self.device))
            x = x + (open_gate * up) @ self.parameters[of + "mlp.down_proj.weight"].T
        x = self.norm(x, "model.norm.weight")
        return x @ self.parameters["model.embed_tokens.weight"].T, penalty, torch.stack(active)

    def gradients(self, batch, penalties):
        """Sets every parameter's gradient; returns the loss without the penalty, and the activity `[layers, ffn]`."""
        for parameter in self.parameters.values():
            parameter.grad = None
        logits, penalty, active = self.forward(batch, penalties)
        loss = (F.cross_entropy(logits, batch.targets, reduction="none") * batch.weights).sum()
        (loss + penalty / batch.shards).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), GRADIENT_LIMIT)
        if not norm.isfinite():
            sys.exit("error: the gradient is not finite\nhint: use a lower `--learning-rate`")
        return loss.item(), active


class Muon:
    """Momentum whose matrix is replaced by the nearest orthogonal one, so that a step moves every direction of a matrix
    equally (Jordan et al. 2024; scaled to AdamW's step length as in Liu et al. 2025, "Muon is Scalable", §2.2).

    For this model 2.8 M tokens did what took AdamW 4.1 M.
    """

    def __init__(self, matrices):
        self.groups = {}
        for matrix in matrices:
            self.groups.setdefault(tuple(matrix.shape), []).append(matrix)
        # `[matrices, rows, columns]` of each shape.
        self.momenta = [torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self.groups.items()]

    @torch.no_grad()
    def step(self, rate):
        for momentum, (shape, group) in zip(self.momenta, self.groups.items()):
            gradient = torch.stack([matrix.grad for matrix in group])
            momentum.mul_(MUON_MOMENTUM).add_(gradient)
            # Nesterov: look where the momentum goes next.
            steps = orthogonal(momentum * MUON_MOMENTUM + gradient) * (MUON_STEP_LENGTH * math.sqrt(max(shape)))
            for matrix, step in zip(group, steps):
                matrix.mul_(1 - rate * WEIGHT_DECAY).sub_(step, alpha=rate)


def orthogonal(matrices):
    """About the nearest matrices with orthogonal rows or columns; singular values end within about 0.7 to 1.2."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-12)
    a, b, c = MUON_QUINTIC
    for _ in range(MUON_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if wide else x.mT


class Sparsity:
    """Moves the penalty of each layer and band until the band is as sparse as asked."""

    def __init__(self, layers, mean_activity):
        shares = [BAND_RATIO**band for band in range(BANDS)]
        self.goals = torch.tensor([mean_activity * share * BANDS / sum(shares) for share in shares], dtype=torch.float64)
        self.penalties = torch.full((layers, BANDS), 1e-7, dtype=torch.float64)

    def step(self, active, tokens, progress):
        """Corrects by the activity `[layers, ffn]` of one step."""
        shares = active.cpu().double().unflatten(1, (BANDS, -1)).mean(2) / tokens
        goals = 0.5 + (self.goals - 0.5) * min(progress / SPARSITY_RAMP, 1.0)
        correction = (0.1 * (shares / goals - 1)).clamp(-0.05, 0.05)
        self.penalties = (self.penalties * correction.exp()).clamp(1e-10, 1e-4)


def schedule(step, progress):
    """Share of the learning rate: a warm-up, then a cosine to almost nothing."""
    return min((step + 1) / WARM_UP_STEPS, 1.0) * max(0.5 + 0.5 * math.cos(math.pi * progress), 0.01)


@torch.no_grad()
def evaluate(model, batch):
    """Loss per solution token, exact matches and sparsity. Where the largest logit is the right token all along a
    solution, greedy decoding writes just that solution."""
    logits, _, active = model.forward(batch)
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    right = logits.gather(1, batch.targets[:, None])[:, 0] >= logits.amax(1)
    loss = sum(losses[begin:end].double().sum().item() for begin, end in batch.solutions)
    counts = active.double().sort(1, descending=True).values
    before = counts.cumsum(1) - counts
    tokens, neurons = len(batch.tokens), active.shape[1]
    share = lambda values: [round(value, 4) for value in values.tolist()]
    return {
        "held_out_solution_loss": loss / sum(end - begin for begin, end in batch.solutions),
        "held_out_exact_match": sum(bool(right[begin:end].all()) for begin, end in batch.solutions) / len(batch.solutions),
        "zeros_per_layer": share(1 - counts.sum(1) / (tokens * neurons)),
        "neurons_for_80_percent_per_layer": share((before < 0.8 * counts.sum(1, keepdim=True)).sum(1) / neurons),
        "dead_neurons_per_layer": share((counts == 0).sum(1) / neurons),
    }


class Shuffled:
    """The tasks in an endless random order that a seed decides: all of them, then all again in another order."""

    def __init__(self, texts, seed):
        self.texts, self.seed, self.taken = texts, seed, 0
        self.epoch = None

    def next(self):
        epoch, index = divmod(self.taken, len(self.texts))
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.order = epoch, torch.randperm(len(self.texts), generator=generator).tolist()
        self.taken += 1
        return self.texts[self.order[index]]

    def shard(self, tokens):
        """Texts of at least `tokens` tokens together."""
        shard, count = [], 0
        while count < tokens:
            shard.append(self.next())
            count += len(shard[-1][0]) - 1
        return shard


def replace(path, write):
    """Writes to a temporary path next to `path`, then renames."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)


def export(model, folder):
    """Writes a Hugging Face checkpoint in bfloat16."""
    config = (DEMO / "config.json").read_text().replace('"relu"', json.dumps(model.config["hidden_act"]))
    replace(folder / "config.json", lambda path: path.write_text(config))
    for name in COPIED:
        replace(folder / name, lambda path: path.write_bytes((DEMO / name).read_bytes()))
    weights = {name: value.detach().to("cpu", torch.bfloat16) for name, value in model.parameters.items()}
    replace(folder / "model.safetensors", lambda path: save_file(weights, path, metadata={"format": "pt"}))


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains the demo model from the stored tasks.")
    parser.add_argument("--out", type=Path, default=Path("target/demo"), help="folder of the checkpoint and the log (target/demo)")
    parser.add_argument("--tokens", type=int, default=7_000_000, help="training tokens that the schedules are laid out for (7,000,000)")
    parser.add_argument(
        "--steps", type=int, default=1400, help="steps after which to stop (1400): a model that never fails would not show what skipping costs"
    )
    parser.add_argument("--batch", type=int, default=3072, help="tokens per step (3072)")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="largest learning rate (0.005)")
    parser.add_argument("--activation", choices=["relu", "silu"], default="relu", help="only relu is made sparse (relu)")
    parser.add_argument("--sparsity", type=float, default=0.93, help="share of zero activations to train for (0.93)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the order of the tasks (0)")
    parser.add_argument("--device", default="cpu", help="PyTorch device (cpu)")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="print what the checkpoint in DIR does on held-out tasks, and stop")
    return parser.parse_args()


class Run:
    """A training run, and the file that it continues from."""

    def __init__(self, model, texts, arguments):
        self.model, self.arguments = model, arguments
        self.path = arguments.out / "training-state.pt"
        self.stream = Shuffled(texts, arguments.seed)
        self.sparsity = Sparsity(model.config["num_hidden_layers"], 1 - arguments.sparsity)
        self.settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "device", "steps", "evaluate")}
        self.step, self.seen, self.seconds, self.log = 0, 0, 0.0, ""
        saved = torch.load(self.path, map_location="cpu", weights_only=True) if self.path.exists() else None
        if saved and saved["settings"] != self.settings:
            sys.exit(f"error: `{self.path}` is of a run with other options\nhint: delete it, or choose another `--out`")
        if saved:
            model.load(saved["parameters"])
        else:
            model.initialise(torch.Generator().manual_seed(arguments.seed))
        named = model.parameters.items()
        self.adam = torch.optim.AdamW(
            [
                {"params": [value for name, value in named if "embed" in name], "weight_decay": WEIGHT_DECAY},
                {"params": [value for name, value in named if "norm" in name], "weight_decay": 0.0},
            ],
            **ADAM,
        )
        self.muon = Muon([value for name, value in named if "proj" in name])
        if saved:
            self.adam.load_state_dict(saved["adam"])
            for momentum, value in zip(self.muon.momenta, saved["muon"]):
                momentum.copy_(value)
            self.sparsity.penalties, self.stream.taken = saved["penalties"], saved["taken"]
            self.step, self.seen, self.seconds, self.log = (saved[name] for name in ("step", "seen", "seconds", "log"))
            print(f"continuing after step {self.step}", file=sys.stderr)

    def save(self):
        state = {
            "settings": self.settings,
            "parameters": {name: value.detach() for name, value in self.model.parameters.items()},
            "adam": self.adam.state_dict(),
            "muon": self.muon.momenta,
            "penalties": self.sparsity.penalties,
            "taken": self.stream.taken,
        } | {name: getattr(self, name) for name in ("step", "seen", "seconds", "log")}
        replace(self.path, lambda path: torch.save(state, path))

    def done(self):
        return self.step >= self.arguments.steps or self.seen >= self.arguments.tokens

    def take_step(self):
        """Runs one step; returns its loss and learning rate."""
        progress = self.seen / self.arguments.tokens
        rate = self.arguments.learning_rate * schedule(self.step, progress)
        batch = Batch([self.stream.shard(self.arguments.batch // SHARDS) for _ in range(SHARDS)], self.model.device)
        loss, active = self.model.gradients(batch, self.sparsity.penalties.float().to(self.model.device))
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.muon.step(rate)
        self.sparsity.step(active, len(batch.tokens), progress)
        self.seen += len(batch.tokens)
        self.step += 1
        return loss, rate

    def train(self, held_out):
        """Trains to the end. Every `REPORT_EVERY` steps it writes the log, the checkpoint and the state."""
        losses, started = [], time.monotonic() - self.seconds
        while not self.done():
            loss, rate = self.take_step()
            losses.append(loss)
            if sys.stderr.isatty():
                print(f"\rstep {self.step} of {self.arguments.steps}, loss {loss:.3f} ", end="", file=sys.stderr)
            if self.step % REPORT_EVERY == 0 or self.done():
                self.seconds = time.monotonic() - started
                line = {
                    "step": self.step,
                    "tokens": self.seen,
                    "seconds": int(self.seconds),
                    "learning_rate": rate,
                    "training_loss": sum(losses) / len(losses),
                    **evaluate(self.model, held_out),
                    "penalty_per_layer_and_band": self.sparsity.penalties.tolist(),
                }
                losses = []
                text = json.dumps(line)
                self.log += text + "\n"
                print(("\r" if sys.stderr.isatty() else "") + text, file=sys.stderr)
                export(self.model, self.arguments.out)
                replace(self.arguments.out / "training-log.jsonl", lambda path: path.write_text(self.log))
                self.save()


def main():
    arguments = parse_arguments()
    # The same seed and processor give the same bytes.
    torch.use_deterministic_algorithms(arguments.device == "cpu")
    config = json.loads((DEMO / "config.json").read_text())
    model = Model(config | {"hidden_act": arguments.activation}, torch.device(arguments.device))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    held_out = Batch([encode(tokenizer, held_out_tasks(200))], model.device)
    if arguments.evaluate:
        model.load(load_file(arguments.evaluate / "model.safetensors"))
        print(json.dumps(evaluate(model, held_out)))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(model, encode(tokenizer, training_tasks()), arguments)
    run.train(held_out)


if __name__ == "__main__":
    main()
