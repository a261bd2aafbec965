"""Converts a Llama in Hugging Face layout to GGUF: matrices in F16, vectors in F32."""

import json
import mmap

import gguf
import numpy as np

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(folder, out, any_activation=False, with_tokenizer=True):
    """Writes the model in `folder` to the file `out`; exits if GGUF's `llama` cannot represent it.

    With `any_activation`, a model of another activation is accepted, for measuring speed: `llama` computes SiLU.
    """
    config = json.loads((folder / "config.json").read_text())
    plain = config["model_type"] == "llama" and (any_activation or config.get("hidden_act", "silu") == "silu")
    if not plain or config.get("rope_scaling") or config.get("attention_bias") or config.get("mlp_bias"):
        raise SystemExit(f"error: `{folder}` is not a plain Llama with SiLU, the only one that GGUF's `llama` represents")
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads", heads)
    head_size = config.get("head_dim") or config["hidden_size"] // heads

    writer = gguf.GGUFWriter(out, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    if with_tokenizer:
        add_tokenizer(writer, folder, config)
    else:
        writer.add_tokenizer_model("no_vocab")
    parts = sorted(folder.glob("model*.safetensors"))
    for name, values in (tensor for part in parts for tensor in tensors(part)):
        name = name.removesuffix(".weight")
        # RoPE in GGUF's `llama` rotates adjacent pairs; Hugging Face rotates pairs half a head apart.
        if name.endswith(("q_proj", "k_proj")):
            count = heads if name.endswith("q_proj") else key_heads
            values = values.reshape(count, 2, head_size // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            name = f"blk.{layer}.{LAYER[part]}"
        else:
            name = WHOLE[name]
        kind = np.float32 if values.ndim == 1 else np.float16
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, folder, config):
    """Writes a byte-level BPE tokenizer, pre-tokenized as in GPT-2, with or without individual digits."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    steps = tokenizer["pre_tokenizer"]
    steps = [step["type"] for step in steps.get("pretokenizers", [steps])]
    splittings = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
    if tuple(steps) not in splittings or tokenizer["model"]["type"] != "BPE":
        raise SystemExit(f"error: the tokenizer in `{folder}` has an unsupported pre-tokenizer or model: {', '.join(steps)}")
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [token for token, _ in tokens]
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    processor = tokenizer.get("post_processor") or {}
    begins = "SpecialToken" in (processor.get("single") or [{}])[0]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splittings[tuple(steps)])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for kind, add in [("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)]:
        if config.get(f"{kind}_token_id") is not None:
            add(config[f"{kind}_token_id"])
    writer.add_add_bos_token(begins)


def tensors(path):
    """Names and float32 values of the tensors of a safetensors file."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    for name, tensor in sorted(header.items()):
        begin, end = tensor["data_offsets"]
        raw = data[start + begin : start + end]
        if tensor["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[tensor["dtype"]])
        yield name, values.astype(np.float32).reshape(tensor["shape"])
