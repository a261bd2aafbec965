"""Compares the perplexity of powerinfer and llama.cpp; see compare-perplexity.sh.

Windows are those of `Windows` in crates/eval/src/fidelity.rs: they begin `stride` tokens apart, and each
scores the tokens that no earlier window has scored. Only the tokenizer's BOS token is prepended, and only
to the text. Both programs process one sequence at a time from an empty KV cache.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFReader

LIMIT = 0.005  # largest relative difference
EXACT_LIMIT = 0.0005  # the same, with both in float32 on the same weights
BYTES_PER_TOKEN = 16  # as in powerinfer: upper limit of the text read per token


@llama_cpp.llama_log_callback
def say_nothing(_level, _message, _data):
    """Discards llama.cpp's log."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--powerinfer", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--stride", type=int, required=True)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    arguments = parser.parse_args()
    llama_cpp.llama_log_set(say_nothing, ctypes.c_void_p(0))

    # Both read the same bytes, enough for the number of tokens.
    most = arguments.tokens * BYTES_PER_TOKEN
    text = arguments.text.read_bytes()[:most].decode(errors="ignore").encode()
    part = arguments.work / "text.txt"
    part.write_bytes(text)

    model = arguments.model
    if model.is_dir():
        model = arguments.work / f"{model.name}.gguf"
        powerinfer(arguments, "export", arguments.model, "--to", "gguf", model)
    files = [model]
    if weight_types(model) <= {"F16", "F32"}:
        files += [converted(model, kind, arguments.work) for kind in ("MOSTLY_Q8_0", "MOSTLY_Q4_0")]

    agree = True
    rounded = False
    rows = []
    for file in files:
        ids, same = token_ids(arguments, file, part)
        agree &= same
        theirs = llama_perplexity(file, ids, arguments.window, arguments.stride)
        # With quantised weights llama.cpp rounds activations to 8 bits. With the same weights dequantised to
        # float32 it does not, so a remaining difference has another cause.
        unpacked = converted(file, "ALL_F32", arguments.work)
        exact = llama_perplexity(unpacked, ids, arguments.window, arguments.stride)
        # f32 represents the weights of the file exactly. The format of the same name does not: down is
        # stored transposed, so its blocks differ, and a head in Q6_K is repacked as well.
        own = {"Q8_0": ["q8_0"], "Q4_0": ["q4_0"]}.get(general_type(file), [])
        for format in ["f32", *own]:
            ours = powerinfer_perplexity(arguments, file, part, format, ids)
            difference = ours / theirs - 1
            judged = format != "q4_0"
            agree &= not judged or abs(difference) <= LIMIT
            agree &= format != "f32" or abs(ours / exact - 1) <= EXACT_LIMIT
            rounded |= abs(theirs / exact - 1) > LIMIT
            rows.append((
                "+".join(sorted(weight_types(file))), format, str(len(ids) - 1),
                f"{ours:.4f}", f"{theirs:.4f}", f"{100 * difference:+.3f}%" + ("" if judged else " *"),
                f"{exact:.4f}", f"{100 * (ours / exact - 1):+.3f}%",
            ))

    version = f"llama-cpp-python {llama_cpp.__version__}, llama.cpp {llama_cpp.llama_version().decode()}"
    print(f"{arguments.model.name} on {arguments.text.name}, {version}")
    print(f"windows of {arguments.window} tokens, stride {arguments.stride}")
    print_table((
        "GGUF", "bundle", "tokens", "powerinfer", "llama.cpp", "difference",
        "llama.cpp in float32", "difference",
    ), rows)
    if any("*" in row[5] for row in rows):
        print("* not judged: repacking into 4 bits rounds `down`, and tensors in other formats, a second time")
    if rounded:
        print(f"llama.cpp's 8-bit activations alone change perplexity by more than {LIMIT:.1%} here")
    limits = f"within {LIMIT:.1%}, f32 within {EXACT_LIMIT:.2%} of llama.cpp in float32, same token ids"
    print(limits if agree else f"NOT {limits}")
    return 0 if agree else 1


def weight_types(file):
    """Types of the matrices of a GGUF file."""
    tensors = GGUFReader(file).tensors
    return {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}


def general_type(file):
    """Type of most of the weights of a GGUF file."""
    sizes = {}
    for tensor in GGUFReader(file).tensors:
        name = tensor.tensor_type.name
        sizes[name] = sizes.get(name, 0) + int(tensor.n_elements)
    return max(sizes, key=sizes.get)


def converted(file, kind, folder):
    """Path of the file converted to another type by llama.cpp's quantiser."""
    out = folder / f"{file.stem}.{kind.lower()}.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}")
    parameters.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), parameters) != 0:
        sys.exit(f"error: llama.cpp cannot convert `{file}` to {kind}")
    return out


def powerinfer(arguments, *command, **options):
    """Standard output of a powerinfer command."""
    command = [arguments.powerinfer, *map(str, command), "--quiet"]
    result = subprocess.run(command, capture_output=True, check=False, **options)
    if result.returncode != 0:
        sys.exit(f"`{' '.join(command)}` failed:\n{result.stderr.decode()}")
    return result.stdout


def token_ids(arguments, file, part):
    """Token ids of powerinfer, and whether llama.cpp's are the same."""
    text = part.read_bytes()
    ours = json.loads(powerinfer(arguments, "tokenize", file, input=text))[: arguments.tokens]
    vocabulary = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    theirs = vocabulary.tokenize(text, add_bos=True, special=True)[: arguments.tokens]
    if ours != theirs:
        pairs = enumerate(zip(ours, theirs))
        first = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        print(f"token ids differ from token {first} on:", ours[first : first + 8], theirs[first : first + 8])
    return ours, ours == theirs


def powerinfer_perplexity(arguments, file, part, format, ids):
    """Perplexity of the dense model, packed in a format."""
    profile = arguments.work / f"{file.name}.profile"
    if not profile.exists():
        powerinfer(arguments, "profile", file, "--data", part, "--tokens", 512, "--out", profile)
    bundle = arguments.work / f"{file.name}.{format}"
    powerinfer(
        arguments, "place", file, "--profile", profile, "--vram", 0, "--hardware", "cpu-only",
        "--policy", "dense", "--quant", format, "--out", bundle,
    )
    result = json.loads(powerinfer(
        arguments, "eval", "perplexity", bundle, "--data", part, "--tokens", arguments.tokens,
        "--window", arguments.window, "--stride", arguments.stride, "--policy", "dense", "--json",
    ))
    assert result["tokens"] == len(ids) - 1, "both score the same tokens"
    return result["dense_perplexity"]


def llama_perplexity(file, ids, length, stride):
    """Perplexity of token ids under llama.cpp with default settings."""
    model = llama_cpp.Llama(
        str(file), n_ctx=length, n_batch=length, n_ubatch=length, logits_all=True, verbose=False
    )
    total = 0.0
    for begin, end, scored in windows(len(ids), length, stride):
        given = ids[begin : end - 1]
        model.reset()
        model.eval(given)
        logits = model.scores[len(given) - scored : len(given)].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        targets = ids[end - scored : end]
        total += np.log(np.exp(logits).sum(axis=1)).sum() - logits[np.arange(scored), targets].sum()
    return float(np.exp(total / (len(ids) - 1)))


def windows(tokens, length, stride):
    """Begin and end of each window, and the number of tokens scored at its end."""
    scored = 1  # the first token has no context
    begin = 0
    while scored < tokens:
        end = min(tokens, begin + length)
        if end > scored:
            yield begin, end, end - scored
            scored = end
        begin += stride


def print_table(headings, rows):
    columns = list(zip(headings, *rows))
    widths = [max(map(len, column)) for column in columns]
    for row in (headings, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


if __name__ == "__main__":
    sys.exit(main())
