//! Pre-tokenizers of GGUF files under llama.cpp's names, compared with its regular expressions in Python's `regex`.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::path::{Path, PathBuf};

use powerinfer_model::{Files, ModelError};
use powerinfer_text::{SpecialTokens, Tokenizer};
use tokenizers::{Decoder, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

const TEXT: &str =
    "We'LL see IT'S 2048, x1234567=½!?\n\n  f(a):\r\n\tÉté /* 今日は,한국。 */    a\u{301}";

/// Names of pre-tokenizers, and the parts into which they split [`TEXT`].
const SPLIT: &[(&str, &str)] = &[
    (
        "jais-2",
        "We¦'LL¦ see¦ IT¦'S¦ ¦204¦8¦,¦ x¦123¦456¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦  ¦ ¦ a¦\u{301}",
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 chatglm-bpe",
        "We¦'LL¦ see¦ IT¦'S¦ ¦204¦8¦,¦ x¦123¦456¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "deepseek-llm",
        "We¦'¦LL¦ see¦ IT¦'¦S¦ ¦2048¦,¦ x¦1234567¦=¦½¦!?¦\n¦\n¦ ¦ f¦(¦a¦):¦\r¦\n¦\tÉ¦t¦é¦ /*¦ ¦今日は¦,¦한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "deepseek-v3 joyai-llm hunyuan-dense hy_v4",
        "We¦'LL¦ see¦ IT¦'S¦ ¦204¦8¦,¦ x¦123¦456¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ ¦今日は¦,¦한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "spark2_5",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?¦\n¦\n¦ ¦ f¦(a¦):¦\r¦\n¦\tÉté¦ /*¦ ¦今日は¦,¦한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "youtu",
        "We'LL¦ see¦ IT'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ ¦今日は¦,¦한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "deepseek-coder",
        "We¦'¦LL¦ see¦ IT¦'¦S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?¦\n¦\n¦ ¦ f¦(¦a¦):¦\r¦\n¦\tÉté¦ /*¦ ¦今日は¦,¦한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        "We¦'¦LL¦ see¦ IT¦'¦S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?¦\n\n ¦ f¦(¦a¦):¦\r\n¦\t¦Été¦ /*¦ 今日は¦,¦한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4",
        "We¦'¦LL¦ see¦ IT¦'¦S¦ 2048¦,¦ x¦1234567¦=¦½¦!?¦\n\n ¦ f¦(¦a¦):¦\r\n¦\t¦Été¦ /*¦ 今日は¦,¦한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "qwen35",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "bloom poro-chat gpt3-finnish",
        "We'LL¦ see¦ IT'S¦ 2048¦,¦ x1234567=½¦!?\n\n ¦ f¦(¦a¦)¦:¦\r\n\t¦Été¦ /*¦ 今日は¦,¦한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "viking",
        "We'LL¦ see¦ IT'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?\n\n ¦ f¦(¦a¦)¦:¦\r\n\t¦Été¦ /*¦ 今日は¦,¦한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "tekken",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "chameleon",
        "We¦'¦LL¦ see¦ IT¦'¦S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!¦?¦\n¦\n¦  ¦f¦(¦a¦)¦:¦\r¦\n¦\t¦Été¦ ¦/¦*¦ 今日は¦,¦한국¦。¦ ¦*¦/¦    ¦a¦\u{301}",
    ),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m",
        "We'LL¦ see¦ IT'S¦ ¦204¦8¦,¦ x¦123¦456¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "tiny_aya cohere2moe",
        "We'LL¦ see¦ IT'S¦ ¦2¦048¦,¦ x¦1¦234¦567¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "superbpe",
        "We'LL see IT'S ¦2¦048¦, x¦1¦234¦567¦=¦½¦!?\n\n  f(a):\r\n\tÉté /* 今日は,한국。 */    a\u{301}",
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "seed-coder",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?¦\n\n¦ ¦ f¦(a¦):¦\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "ufakzeka",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "afmoe",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦048¦,¦ x¦1¦234¦567¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ ¦今日は¦,¦한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "laguna",
        "We¦'LL¦ see¦ IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?¦\n\n¦ ¦ f¦(a¦):\r¦\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "exaone-moe",
        "We¦'LL¦ see IT¦'S¦ ¦2¦0¦4¦8¦,¦ x¦1¦2¦3¦4¦5¦6¦7¦=¦½¦!?\n¦\n¦ ¦ f¦(a¦):\r¦\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "minicpm5",
        "We¦'LL¦ see¦ IT¦'S¦ ¦204¦8¦,¦ x¦123¦456¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ 今日は¦,한국¦。¦ */¦   ¦ a¦\u{301}",
    ),
    (
        "kimi-k2",
        "We'LL¦ see¦ IT'S¦ ¦204¦8¦,¦ x¦123¦456¦7¦=¦½¦!?\n\n¦ ¦ f¦(a¦):\r\n¦\tÉté¦ /*¦ ¦今日¦は¦,한국¦。¦ */¦   ¦ a\u{301}",
    ),
    (
        "default",
        "We¦'¦LL¦ see¦ IT¦'¦S¦ ¦204¦8¦,¦ x¦123¦456¦7¦=¦½¦!?¦\n\n ¦ f¦(¦a¦):¦\r\n¦\t¦Été¦ ¦/*¦ 今日は¦,¦한국¦。¦ ¦*/¦   ¦ a¦\u{301}",
    ),
];

/// A file of the goldens of GGUF.
fn golden(name: &str) -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    workspace.join("tests/golden/gguf").join(name)
}

/// Opens the golden vocabulary of `splitting` under a different pre-tokenizer name.
fn renamed(splitting: &str, name: &str) -> Result<Files, ModelError> {
    let bytes = std::fs::read(golden(&format!("splitting-{splitting}.gguf"))).unwrap();
    let key = b"tokenizer.ggml.pre\x08\0\0\0";
    let found = bytes.windows(key.len()).position(|window| window == key);
    let (before, after) = bytes.split_at(found.unwrap() + key.len());
    let mut changed = before.to_vec();
    changed.extend((name.len() as u64).to_le_bytes());
    changed.extend(name.as_bytes());
    changed.extend(&after[8 + splitting.len()..]);
    let folder = std::env::temp_dir().join(format!("splittings-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(format!("{splitting}-{name}.gguf"));
    std::fs::write(&path, changed).unwrap();
    let files = Files::open(&path);
    std::fs::remove_file(&path).unwrap();
    files
}

/// Returns the `tokenizer.json` that is generated from a file.
fn json(files: &Files) -> Vec<u8> {
    files.read("tokenizer.json").unwrap().unwrap().to_vec()
}

#[test]
fn every_name_of_llama_cpp_splits_or_is_refused() {
    for (names, expected) in SPLIT {
        for name in names.split(' ') {
            let json = String::from_utf8(json(&renamed("qwen2", name).unwrap())).unwrap();
            let tokenizer: tokenizers::Tokenizer = json.parse().unwrap();
            let mut parts = PreTokenizedString::from(TEXT);
            let pre_tokenizer = tokenizer.get_pre_tokenizer().unwrap();
            pre_tokenizer.pre_tokenize(&mut parts).unwrap();
            let parts = parts.get_splits(OffsetReferential::Original, OffsetType::None);
            let parts = parts.into_iter().map(|(part, _, _)| {
                let decoder = tokenizer.get_decoder().unwrap();
                decoder.decode(vec![part.to_owned()]).unwrap()
            });
            let parts: Vec<String> = parts.collect();
            assert_eq!(parts.join("¦"), *expected, "{name}");
        }
    }
    for (name, reason) in [
        ("gemma4", "characters instead of bytes"),
        ("granite-embed-multi-311m", "characters instead of bytes"),
        ("sarvam-moe", "characters instead of bytes"),
        ("whitespace", "characters instead of bytes"),
        ("jina-v1-en", "models of embeddings"),
        ("jina-v2-code", "models of embeddings"),
        ("roberta-bpe", "models of embeddings"),
        ("of-tomorrow", "is unknown"),
    ] {
        let error = renamed("qwen2", name).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(reason), "{error}");
    }
}

#[test]
fn names_of_one_splitting_give_the_same_ids() {
    let json = std::fs::read(golden("splittings.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let texts: Vec<String> = serde_json::from_value(json["texts"].clone()).unwrap();
    for (splitting, names) in [
        (
            "qwen2",
            "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2",
        ),
        (
            "llama3",
            "falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        ),
        ("smollm", "starcoder exaone minerva-7b mellum2"),
    ] {
        let expected: Vec<Vec<u32>> =
            serde_json::from_value(json["llamacpp_ids"][splitting].clone()).unwrap();
        for name in names.split(' ') {
            let files = renamed(splitting, name).unwrap();
            let read = |name: &str| files.read(name).unwrap().map(|bytes| bytes.to_vec().into());
            let tokenizer = Tokenizer::from_files(read).unwrap();
            for (text, expected) in texts.iter().zip(&expected) {
                let ids = tokenizer.encode(text, SpecialTokens::Add).unwrap();
                assert_eq!(ids, *expected, "{name}: {text:?}");
            }
        }
    }
}

#[test]
fn published_names_of_qwen_distillations_are_read() {
    let cases =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/cases/03-gguf-pre-alias");
    let plain = json(&Files::open(&golden("splitting-qwen2.gguf")).unwrap());
    let pre_tokenizer = |json: &[u8]| {
        let json: serde_json::Value = serde_json::from_slice(json).unwrap();
        [json["pre_tokenizer"].clone(), json["normalizer"].clone()]
    };
    for name in ["deepseek-r1-qwen", "kormo"] {
        let path = cases.join(format!("pre-{name}.gguf"));
        if path.exists() {
            let json = json(&Files::open(&path).unwrap());
            assert_eq!(pre_tokenizer(&json), pre_tokenizer(&plain), "{name}");
        }
    }
}
