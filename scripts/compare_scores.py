"""Compares the scores that decide which weights a SiLU FFN skips, for compare_methods.py.

The model, a small Llama checkpoint, generates two texts. Thresholds are quantiles of the scores on the first text, at the same share in
every layer. Perplexity is measured on the second text.
"""

import json
import struct
import time

import numpy as np

SEQUENCES, TOKENS = 16, 128
SHARES = [share / 100 for share in range(5, 100, 5)]
RISES = (1, 5)


class Model:
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        raw = (folder / "model.safetensors").read_bytes()
        start = 8 + struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8:start])
        header.pop("__metadata__", None)
        types = {"F32": np.float32, "BF16": np.uint16}
        values = lambda info: np.frombuffer(raw[start:][slice(*info["data_offsets"])], types[info["dtype"]])
        wide = lambda found: found if found.dtype == np.float32 else (found.astype(np.uint32) << 16).view(np.float32)  # bfloat16
        self.weights = {name: wide(values(info)).reshape(info["shape"]) for name, info in header.items()}
        self.layers, self.hidden = self.config["num_hidden_layers"], self.config["hidden_size"]
        self.neurons = self.config["intermediate_size"]

    def mlp(self, layer):
        return [self.weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def logits(self, ids, ffn):
        """Logits of `ids [sequences, tokens]`; `ffn(layer, x)` computes an FFN."""
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size, (sequences, tokens) = self.hidden // heads, ids.shape
        angles = np.outer(np.arange(tokens), self.config["rope_theta"] ** (-np.arange(0, size, 2) / size))
        cos, sin = (np.concatenate([f(angles)] * 2, -1).astype(np.float32) for f in (np.cos, np.sin))
        turn = lambda x: x * cos + np.concatenate([-x[..., size // 2:], x[..., :size // 2]], -1) * sin
        mask = np.triu(np.full((tokens, tokens), -1e30, np.float32), 1)
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            y = self.norm(x, prefix + "input_layernorm.weight")
            q, k, v = ((y @ self.weights[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(sequences, tokens, -1, size)
                       .transpose(0, 2, 1, 3) for name in "qkv")
            k, v = (np.repeat(part, heads // kv_heads, 1) for part in (turn(k), v))
            scores = turn(q) @ k.transpose(0, 1, 3, 2) / np.float32(size ** 0.5) + mask
            mixed = softmax(scores) @ v
            x = x + mixed.transpose(0, 2, 1, 3).reshape(sequences, tokens, -1) @ self.weights[prefix + "self_attn.o_proj.weight"].T
            x = x + ffn(layer, self.norm(x, prefix + "post_attention_layernorm.weight"))
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self.norm(x, "model.norm.weight") @ head.T

    def text(self, seed):
        random = np.random.default_rng(seed)
        ids = np.full((SEQUENCES, 1), self.config["bos_token_id"])
        dense = lambda layer, x: (silu(x @ self.mlp(layer)[0].T) * (x @ self.mlp(layer)[1].T)) @ self.mlp(layer)[2].T
        while ids.shape[1] < TOKENS:
            chances = softmax(self.logits(ids, dense)[:, -1].astype(np.float64))
            ids = np.concatenate([ids, [[random.choice(len(row), p=row)] for row in chances]], 1)
        return ids

    def loss(self, ids, ffn):
        chances = softmax(self.logits(ids[:, :-1], ffn).astype(np.float64))
        return -np.log(np.take_along_axis(chances, ids[:, 1:, None], -1)).mean()


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def regressions(x, target, ranks):
    """Reduced-rank regressions of `target` on `x` and a constant."""
    x = np.concatenate([x, np.ones((len(x), 1))], 1)
    mean, covariance = target.mean(0), x.T @ x / len(x) + 1e-4 * np.eye(x.shape[1])
    full = np.linalg.solve(covariance, x.T @ (target - mean) / len(x)).T
    values, vectors = np.linalg.eigh(covariance)
    roots = np.sqrt(np.maximum(values, 1e-9))
    u, s, vt = np.linalg.svd(full @ (vectors * roots) @ vectors.T, full_matrices=False)
    inverse = vectors / roots @ vectors.T
    return {rank: ((u[:, :rank] * s[:rank]) @ vt[:rank] @ inverse, mean) for rank in ranks}


def compare(folder):
    """Size, recalls and shares of bytes read for each score."""
    model, fitted, seconds = Model(folder), {}, 0.0
    ranks = [model.hidden // 8, model.hidden // 4, model.hidden // 2, model.hidden]

    def scores(layer, x, only=None):
        """Inputs of down, their contributions, and scores by method (all or `only`): of neurons, or of the inputs of down and of gate and up."""
        nonlocal seconds
        gate, up, down = model.mlp(layer)
        activation, products = silu(x @ gate.T), x @ up.T
        h, norms, inputs = activation * products, np.linalg.norm(down, axis=0), np.linalg.norm(np.concatenate([gate, up]), axis=0)
        if layer not in fitted:
            flat, started = lambda values: values.reshape(-1, values.shape[-1]), time.monotonic()
            target = np.log(np.abs(flat(h)) * norms + 1e-6)
            fitted[layer] = np.sqrt((flat(products) ** 2).mean(0)), regressions(flat(x), target, ranks)
            seconds += time.monotonic() - started
        rms, predictors = fitted[layer]
        calculated = {
            "`gate` (CATS)": lambda: [np.abs(activation)], "`weighted-gate`": lambda: [np.abs(activation) * norms * rms],
            "`contribution` (CETT)": lambda: [np.abs(h) * norms], "inputs of all matrices (TEAL)": lambda: [np.abs(h), np.abs(x)],
            "inputs, weighted (WINA)": lambda: [np.abs(h) * norms, np.abs(x) * inputs],
        }
        for rank, (weights, mean) in predictors.items():
            calculated[f"predicted, rank {rank}"] = lambda weights=weights, mean=mean: [x @ weights[:, :-1].T + weights[:, -1] + mean]
        return h, np.abs(h) * norms, {method: score() for method, score in calculated.items() if only in (None, method)}

    calibration, recorded = model.text(1), {}

    def record(layer, x):
        h, _, own = scores(layer, x)
        recorded[layer] = {method: [np.sort(values, axis=None) for values in parts] for method, parts in own.items()}
        return h @ model.mlp(layer)[2].T

    model.loss(calibration, record)
    text = model.text(2)
    dense = model.loss(text, lambda layer, x: scores(layer, x, "")[0] @ model.mlp(layer)[2].T)

    def skip(method, share, kept=None):
        """Percent by which perplexity rises if `share` of the neurons or inputs is skipped; `kept` receives each layer's share and recalls."""
        bounds = {layer: [values[int(share * len(values))] for values in of_layer[method]] for layer, of_layer in recorded.items()}

        def ffn(layer, x):
            h, contributions, own = scores(layer, x, method)
            if len(own[method]) > 1:
                h, contributions, own = scores(layer, x * (own[method][1] >= bounds[layer][1]), method)
            chosen = own[method][0] >= bounds[layer][0]
            if kept is not None:
                largest = contributions >= np.quantile(contributions, 1 - chosen.mean())
                kept.append([chosen.mean(), (chosen & largest).sum() / largest.sum(), contributions[chosen].sum() / contributions.sum()])
            return (h * chosen) @ model.mlp(layer)[2].T

        return 100 * np.expm1(model.loss(text, ffn) - dense)

    found = {}
    for method in recorded[0]:
        rank = int(method.split()[-1]) if "rank" in method else 0
        size = model.layers * rank * (model.hidden + model.neurons) / 2  # in 4 bits
        points, best = [(1.0, 0.0)], 0.0
        for share in SHARES:
            read = {"`gate` (CATS)": (3 - 2 * share) / 3, "`weighted-gate`": (3 - 2 * share) / 3, "`contribution` (CETT)": (3 - share) / 3}
            # The weights have 8 bits.
            read = read.get(method, 1 - share) + size / (3 * model.layers * model.hidden * model.neurons)
            points.append((read, skip(method, share)))
            if points[-1][1] > max(RISES):
                break
            if all(rise <= 1 for _, rise in points):
                best = share
        kept = []
        skip(method, best, kept)
        found[method] = {
            "bytes": size or None, "seconds": seconds if rank else None,
            **dict(zip(("computed", "recall", "contribution_recall"), np.mean(kept, 0).tolist())),
            **{f"read_{rise}": float(least(points, rise)) for rise in RISES},
        }
    # Only the rank that reads the fewest bytes is kept.
    ranked = sorted((method for method in found if "rank" in method), key=lambda method: (found[method]["read_1"], found[method]["read_5"]))
    return {method: point for method, point in found.items() if method not in ranked[1:]}


def least(points, rise):
    """Smallest share of bytes before the rise is exceeded, interpolated."""
    for (read, low), (less, high) in zip(points, points[1:]):
        if high > rise:
            return min(read + (less - read) * max(rise - low, 0) / (high - low), 1)
    return points[-1][0]
