//! Pre-tokenizers of byte-level BPE, by the names that llama.cpp gives them (`tokenizer.ggml.pre`).

use serde_json::{Value as Json, json};

/// Names under which pre-tokenizers are written.
pub(crate) const NAMES: [&str; 6] = ["gpt-2", "qwen2", "llama-bpe", "smollm", "falcon", "default"];

/// Pre-tokenizer, and the settings that its name implies.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Splitting {
    /// The pre-tokenizer, as in `tokenizer.json`.
    pub(crate) steps: Json,
    /// Whether whole tokens take precedence over merges.
    pub(crate) ignores_merges: bool,
    /// Whether BOS is put in front of a text if the file does not state it.
    pub(crate) adds_bos: bool,
    /// Whether the published tokenizers normalise to NFC; a GGUF file does not state this.
    pub(crate) nfc: bool,
}

impl Splitting {
    /// Returns the pre-tokenizer called `name`.
    ///
    /// # Errors
    ///
    /// Explains why the name is not supported.
    pub(crate) fn named(name: &str) -> Result<Self, &'static str> {
        let llama_3 = words(r"\p{N}{1,3}");
        let qwen = words(r"\p{N}");
        let steps = match name {
            // Written by converters for unknown models; this is llama.cpp's default.
            "default" => sequence(&[
                r"[\p{P}$+<=>^~|]+",
                &format!(r"{GPT_2}|\s+"),
                r"\p{N}+",
                "[0-9][0-9][0-9]",
            ]),
            "gpt-2" | "olmo" | "phi-2" | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de"
            | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" | "mpt" | "jais" | "trillion"
            | "granite-docling" | "exaone4" => bytes(true),
            "starcoder" | "smollm" | "refact" | "command-r" | "codeshell" | "exaone"
            | "minerva-7b" | "mellum2" => {
                json!({ "type": "Sequence", "pretokenizers": [cut(r"\p{N}"), bytes(true)] })
            }
            "falcon" => json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Punctuation", "behavior": "Contiguous" },
                bytes(true),
                { "type": "Digits", "individual_digits": false },
                cut("[0-9][0-9][0-9]"),
            ] }),
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral"
            | "midm-2.0" | "lfm2" | "jina-v5-nano" | "dbrx" | "smaug-bpe" | "glm4"
            | "chatglm-bpe" => sequence(&[&llama_3]),
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2"
            | "hunyuan" | "solar-open" | "grok-2" => sequence(&[&qwen]),
            "qwen35" => sequence(&[&format!(
                r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
            )]),
            "ufakzeka" => sequence(&[&format!(
                r"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
            )]),
            "laguna" => sequence(&[r"[^\n]+|[\n]+", &qwen]),
            "minicpm5" => sequence(&[r"\p{N}{1,3}", &words(r"\p{N}+")]),
            "jais-2" => {
                let runs =
                    [512, 256, 128, 64, 32, 16, 8, 4].map(|count| format!(r"\s{{{count}}}(?!\S)"));
                let runs = runs.join("|");
                sequence(&[&format!(
                    r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{runs}|\s{{1,2}}(?!\S)|\s{{1}}"
                )])
            }
            "bailingmoe" | "bailingmoe2" | "llada-moe" => sequence(&[
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            ]),
            "seed-coder" => sequence(&[&format!(
                r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
            )]),
            "exaone-moe" => sequence(&[&format!(
                r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
            )]),
            "tekken" => sequence(&[&cased("", r"\p{N}", "")]),
            "gpt-4o"
            | "llama4"
            | "kanana2"
            | "talkie"
            | "minimax-m2"
            | "granite-embed-multi-97m" => {
                sequence(&[&cased(&format!("{CONTRACTIONS}?"), r"\p{N}{1,3}", "")])
            }
            "tiny_aya" | "cohere2moe" => sequence(&[
                r"\d{1,3}(?=(?:\d{3})*\b)",
                &cased(&format!("{CONTRACTIONS}?"), r"\p{N}{1,3}", ""),
            ]),
            "kimi-k2" => sequence(&[&format!(
                r"\p{{Han}}+|{}",
                cased(&format!("{CONTRACTIONS}?"), r"\p{N}{1,3}", r"&&[^\p{Han}]")
            )]),
            "youtu" => sequence(&[
                r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
                &cased(&format!("{CONTRACTIONS}?"), r"\p{N}", ""),
            ]),
            "deepseek-llm" => sequence(&[
                r"[\r\n]",
                &format!(r"\s?[{CASED_LETTERS}]+"),
                r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
                r"\s+$",
                ASIAN,
                r"\p{N}+",
            ]),
            "deepseek-coder" => sequence(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}"]),
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => sequence(&[
                r"\p{N}{1,3}",
                r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
                &format!(r"{PUNCTUATED}+[\r\n]*|{SPACES}"),
            ]),
            "spark2_5" => sequence(&[
                r"\p{N}{1,3}",
                r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
                &format!(r"{PUNCTUATED}+|[\r\n]|\s+(?!\S)|\s+"),
                r"\p{N}",
            ]),
            "afmoe" => sequence(&[
                // Groups of three digits, counted from the end of the number.
                r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
                r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
                &format!(r"{PUNCTUATED}+[\r\n]*|{SPACES}"),
            ]),
            "poro-chat" | "bloom" | "gpt3-finnish" => sequence(&[SENTENCES]),
            "viking" => sequence(&[SENTENCES, r"\p{N}"]),
            "superbpe" => sequence(&[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
            "chameleon" => sequence(&[
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT_2,
            ]),
            "gemma4" | "granite-embed-multi-311m" | "sarvam-moe" | "whitespace" => {
                return Err("its tokens are characters instead of bytes");
            }
            "jina-v1-en" | "jina-v2-code" | "roberta-bpe" => {
                return Err("it puts a separator after each text, as models of embeddings do");
            }
            _ => return Err("it is unknown"),
        };
        let is_llama_3 = matches!(
            name,
            "llama-bpe"
                | "llama3"
                | "llama-v3"
                | "falcon3"
                | "falcon-h1"
                | "pixtral"
                | "midm-2.0"
                | "lfm2"
                | "jina-v5-nano"
        );
        Ok(Self {
            steps,
            ignores_merges: is_llama_3
                || matches!(
                    name,
                    "minicpm5" | "youtu" | "tekken" | "granite-embed-multi-97m"
                ),
            adds_bos: is_llama_3 || matches!(name, "tekken" | "chameleon"),
            nfc: matches!(
                name,
                "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "qwen35"
            ),
        })
    }
}

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const SPACES: &str = r"\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const SENTENCES: &str = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+";
const ASIAN: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
/// A word after a punctuation mark, letters with combining marks, or signs; a repetition operator must follow.
const PUNCTUATED: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]"##;
/// Upper and lower case letters of the Unicode version that DeepSeek's tokenizer was made with.
const CASED_LETTERS: &str = r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}";

/// Contractions, words, `digits`, signs and spaces, as in GPT-4.
fn words(digits: &str) -> String {
    format!(
        r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
    )
}

/// Words that change once from upper to lower case, `digits`, signs and spaces, as in GPT-4o. `contraction` may follow a
/// word; `except` excludes letters.
fn cased(contraction: &str, digits: &str, except: &str) -> String {
    let upper = format!(r"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{except}]");
    let lower = format!(r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{except}]");
    let before = r"[^\r\n\p{L}\p{N}]?";
    let line_end = if except.is_empty() {
        r"[\r\n/]*"
    } else {
        r"[\r\n]*"
    };
    format!(
        r"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{line_end}|{SPACES}"
    )
}

/// Isolates each match of a regular expression.
fn cut(regex: &str) -> Json {
    json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })
}

/// Splits by each expression in turn, then maps bytes to characters.
fn sequence(regexes: &[&str]) -> Json {
    let steps = regexes.iter().map(|regex| cut(regex));
    let steps: Vec<Json> = steps.chain([bytes(false)]).collect();
    json!({ "type": "Sequence", "pretokenizers": steps })
}

/// Maps bytes to characters; with `regex`, first splits as in GPT-2.
pub(super) fn bytes(regex: bool) -> Json {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex })
}
