//! Published sparse models: a pull fetches the files that running the model needs, with the weights in only one format.

use std::collections::{BTreeMap, BTreeSet};

use powerinfer_hub::SnapshotFile;

use crate::{TestHub, noise};

/// A published model and its files.
struct Published {
    name: &'static str,
    /// Files that are fetched, without shards that an index lists.
    needed: &'static [&'static str],
    /// Shards that an index lists.
    shards: &'static [&'static str],
    /// Files that are not fetched.
    others: &'static [&'static str],
}

/// Published models. The file list of TurboSparse-Mistral-Instruct comes from a public copy of its repository. The other
/// lists were written from memory and are not verified, except for three facts: Bamboo and ProSparse have `tokenizer.model`
/// but no `tokenizer.json`, and OPT has `vocab.json`, `merges.txt` and two shards in PyTorch's format.
const PUBLISHED: [Published; 9] = [
    Published {
        name: "PowerInfer/TurboSparse-Mistral-Instruct",
        needed: &[
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ],
        shards: &[
            "model-00001-of-00004.safetensors",
            "model-00002-of-00004.safetensors",
            "model-00003-of-00004.safetensors",
            "model-00004-of-00004.safetensors",
        ],
        others: &[
            ".gitattributes",
            "README.md",
            "configuration_bamboo.py",
            "modeling_bamboo.py",
            "scheduler.pt",
            "takeaway.png",
            "trainer_state.json",
            "training_args.bin",
        ],
    },
    Published {
        name: "PowerInfer/Bamboo-base-v0_1",
        needed: &[
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "special_tokens_map.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ],
        shards: &[
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
        ],
        others: &[
            ".gitattributes",
            "README.md",
            "configuration_bamboo.py",
            "modeling_bamboo.py",
        ],
    },
    Published {
        name: "SparseLLM/prosparse-llama-2-7b",
        needed: &[
            "added_tokens.json",
            "config.json",
            "generation_config.json",
            "pytorch_model.bin.index.json",
            "special_tokens_map.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ],
        shards: &[
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
        ],
        others: &[
            ".gitattributes",
            "README.md",
            "configuration_sparsellama.py",
            "modeling_sparsellama.py",
        ],
    },
    Published {
        name: "SparseLLM/ReluLLaMA-7B",
        needed: &[
            "config.json",
            "generation_config.json",
            "pytorch_model.bin.index.json",
            "special_tokens_map.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ],
        shards: &[
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
        ],
        others: &[".gitattributes", "README.md"],
    },
    Published {
        name: "facebook/opt-6.7b",
        needed: &[
            "config.json",
            "generation_config.json",
            "merges.txt",
            "pytorch_model.bin.index.json",
            "special_tokens_map.json",
            "tokenizer_config.json",
            "vocab.json",
        ],
        shards: &[
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
        ],
        others: &[
            ".gitattributes",
            "LICENSE.md",
            "README.md",
            "flax_model-00001-of-00002.msgpack",
            "flax_model-00002-of-00002.msgpack",
            "flax_model.msgpack.index.json",
            "tf_model-00001-of-00002.h5",
            "tf_model-00002-of-00002.h5",
            "tf_model.h5.index.json",
        ],
    },
    Published {
        name: "openbmb/MiniCPM-S-1B-sft",
        needed: &[
            "added_tokens.json",
            "config.json",
            "generation_config.json",
            "pytorch_model.bin",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ],
        shards: &[],
        others: &[
            ".gitattributes",
            "README.md",
            "configuration_minicpm.py",
            "modeling_minicpm.py",
        ],
    },
    Published {
        name: "SakanaAI/sparselm",
        needed: &[
            "config.json",
            "generation_config.json",
            "merges.txt",
            "model.safetensors",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.json",
        ],
        shards: &[],
        others: &[".gitattributes", "README.md"],
    },
    Published {
        name: "arcee-ai/AFM-4.5B",
        needed: &[
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ],
        shards: &[
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ],
        others: &[".gitattributes", "LICENSE", "README.md"],
    },
    Published {
        name: "nvidia/Minitron-4B-Base",
        needed: &[
            "config.json",
            "generation_config.json",
            "model.safetensors.index.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ],
        shards: &[
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ],
        others: &[
            ".gitattributes",
            "README.md",
            "nemo/minitron-4b-base.nemo",
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
            "pytorch_model.bin.index.json",
        ],
    },
];

impl Published {
    /// Returns the model's files with short contents.
    fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let all = [self.needed, self.shards, self.others].concat();
        let content = |name: &str| {
            if name.ends_with(".index.json") {
                let shards = self.shards.iter().enumerate();
                let shards: Vec<String> = shards
                    .map(|(index, shard)| format!("\"tensor{index}\": \"{shard}\""))
                    .collect();
                format!("{{\"weight_map\": {{{}}}}}", shards.join(", ")).into_bytes()
            } else {
                noise(name.len() * 10)
            }
        };
        let all = all.into_iter().map(|name| (name.to_owned(), content(name)));
        all.collect()
    }
}

#[test]
fn published_sparse_models_are_fetched_with_their_tokenizer_and_each_weight_once() {
    for model in &PUBLISHED {
        let name = model.name;
        let mut test = TestHub::serving(name, model.contents());
        let wanted: BTreeSet<&str> = [model.needed, model.shards].concat().into_iter().collect();
        let check = |files: &[SnapshotFile]| {
            let fetched: BTreeSet<&str> = files.iter().map(|file| &file.name[..]).collect();
            assert_eq!(fetched, wanted, "{name}");
            assert_eq!(files.len(), wanted.len(), "{name}: twice");
        };
        check(&test.pull_named(name).unwrap().files);
        test.settings.offline = true;
        check(&test.pull_named(name).unwrap().files);
    }
}

#[test]
fn parts_of_a_gguf_file_are_fetched_together() {
    let parts = [
        "Q8_0/x-00001-of-00003.gguf",
        "Q8_0/x-00002-of-00003.gguf",
        "Q8_0/x-00003-of-00003.gguf",
    ];
    let other = "Q4_0/x-00001-of-00001.gguf";
    let files = |names: &[&str]| {
        names
            .iter()
            .map(|name| ((*name).to_owned(), noise(90)))
            .collect()
    };
    let mut test = TestHub::new(files(&parts));
    let check = |test: &TestHub| {
        let pulled = test.pull().unwrap();
        let names: Vec<&str> = pulled.files.iter().map(|file| &file.name[..]).collect();
        assert_eq!(names, parts);
        assert!(pulled.path.ends_with(parts[0]));
    };
    check(&test);
    test.settings.offline = true;
    check(&test);

    // Of several models one is named, by any part.
    let test = TestHub::new(files(&[&parts[..], &[other]].concat()));
    test.refused(&["several GGUF models", other, parts[0]]);
    let second = test.pull_file(parts[1]).unwrap();
    assert!(second.path.ends_with(parts[1]));
    let names: Vec<&str> = second.files.iter().map(|file| &file.name[..]).collect();
    assert_eq!(names, parts);
    TestHub::new(files(&parts[1..])).refused(&["without `Q8_0/x-00001-of-00003.gguf`"]);
}
