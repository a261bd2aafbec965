"""Prints the configuration keys that transformers reads, one architecture per line, for crates/model/src/families/config_keys.txt.

Run it with every version of transformers whose files are to be read, and pass all outputs:
    python3 generate-config-keys.py > NEW; python3 generate-config-keys.py --merge OLD NEW > config_keys.txt
"""

import inspect
import sys

ARCHITECTURES = """ArceeForCausalLM CohereForCausalLM FalconForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM
GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoXForCausalLM GraniteForCausalLM LlamaForCausalLM MistralForCausalLM
NanoChatForCausalLM NemotronForCausalLM Olmo2ForCausalLM OPTForCausalLM Phi3ForCausalLM PhiForCausalLM Qwen2ForCausalLM
Qwen3ForCausalLM SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM""".split()
# Keys that the code of some classes reads although no class declares them.
READ_ELSEWHERE = ["head_dim", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings"]


def keys_of(architecture):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    kinds = [kind for kind, name in names.items() if architecture in ([name] if isinstance(name, str) else name)]
    if not kinds:
        return None
    from transformers import PretrainedConfig

    base = set(getattr(PretrainedConfig, "__dataclass_fields__", {})) | set(
        inspect.signature(PretrainedConfig.__init__).parameters
    )
    keys = set(READ_ELSEWHERE)
    for kind in kinds:
        config = CONFIG_MAPPING[kind]
        own = set(inspect.signature(config.__init__).parameters) | set(getattr(config, "__dataclass_fields__", {}))
        keys |= own - base
        keys |= set(config.attribute_map) | set(config.attribute_map.values())
    return sorted(keys - {"self", "kwargs", "args"})


def read(path):
    lines = [line.split(": ", 1) for line in open(path).read().splitlines()]
    return {name: set(keys.split()) for name, keys in lines}


tables = [read(path) for path in sys.argv[2:]]
if not tables:
    tables = [{name: keys for name in ARCHITECTURES if (keys := keys_of(name))}]
for name in ARCHITECTURES:
    keys = set().union(*(table.get(name, ()) for table in tables))
    if keys:
        print(f"{name}: {' '.join(sorted(keys))}")
