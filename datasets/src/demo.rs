//! The demo checkpoint, embedded so that every installation has a model to try.

/// Names and contents of its files, as in a Hugging Face folder.
pub const FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../demo/config.json")),
    (
        "generation_config.json",
        include_bytes!("../demo/generation_config.json"),
    ),
    (
        "model.safetensors",
        include_bytes!("../demo/model.safetensors"),
    ),
    (
        "special_tokens_map.json",
        include_bytes!("../demo/special_tokens_map.json"),
    ),
    ("tokenizer.json", include_bytes!("../demo/tokenizer.json")),
    (
        "tokenizer_config.json",
        include_bytes!("../demo/tokenizer_config.json"),
    ),
];
