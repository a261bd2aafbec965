//! Generated `tokenizer.model` files: splits compared with the definition, and damaged files.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::{collections::BTreeMap, path::Path};

use powerinfer_text::{SpecialTokens, TextError, Tokenizer};

/// Reads a tokenizer that consists of a `tokenizer.model` alone.
fn open(model: &[u8]) -> Result<Tokenizer, TextError> {
    Tokenizer::from_files_in(Path::new("model"), |name| {
        (name == "tokenizer.model").then(|| model.to_vec().into())
    })
}

/// The golden with user-defined pieces.
fn golden() -> Vec<u8> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read(workspace.join("tests/golden/tokenizers/tok-spm-user/tokenizer.model")).unwrap()
}

/// Appends an integer of a protocol buffer.
fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// Encodes a field of a protocol buffer: its number, wire type and content.
fn field(number: u64, value: FieldValue) -> Vec<u8> {
    let mut bytes = Vec::new();
    match value {
        FieldValue::Integer(value) => {
            varint(&mut bytes, number << 3);
            varint(&mut bytes, value);
        }
        FieldValue::Float(value) => {
            varint(&mut bytes, number << 3 | 5);
            bytes.extend(value.to_le_bytes());
        }
        FieldValue::Bytes(value) => {
            varint(&mut bytes, number << 3 | 2);
            varint(&mut bytes, value.len() as u64);
            bytes.extend(value);
        }
    }
    bytes
}

enum FieldValue {
    Integer(u64),
    Float(f32),
    Bytes(Vec<u8>),
}

const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;
const BYTE: u64 = 6;

/// Writes a `tokenizer.model` of the type `algorithm` with `pieces`; `prefix` puts a space in front of texts.
fn model(algorithm: u64, pieces: &[(&str, f32, u64)], prefix: bool) -> Vec<u8> {
    use FieldValue::{Bytes, Float, Integer};
    let pieces = pieces.iter().map(|(text, score, kind)| {
        let piece = [
            field(1, Bytes(text.as_bytes().to_vec())),
            field(2, Float(*score)),
            field(3, Integer(*kind)),
        ];
        field(1, Bytes(piece.concat()))
    });
    let trainer = field(2, Bytes(field(3, Integer(algorithm))));
    let normalizer = [field(3, Integer(prefix.into())), field(4, Integer(0))];
    let normalizer = field(3, Bytes(normalizer.concat()));
    pieces
        .chain([trainer, normalizer])
        .collect::<Vec<_>>()
        .concat()
}

#[test]
fn damaged_model_files_are_reported_by_name() {
    let whole = golden();
    let refuse = |bytes: Vec<u8>| {
        let error = open(&bytes).unwrap_err().to_string();
        assert!(error.contains("`model/tokenizer.model`"), "{error}");
        error
    };
    for length in (0..whole.len()).step_by(97) {
        refuse(whole[..length].to_vec());
    }
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 499723\n";
    assert!(refuse(pointer.to_vec()).contains("git lfs pull"));
    for text in [
        "<!doctype html><html></html>",
        "{}",
        "{\"model\": {\"type\": \"BPE\"}}",
    ] {
        assert!(refuse(text.as_bytes().to_vec()).contains("download it again"));
    }
    // A piece of 2^60 bytes, an integer that does not end, and a group.
    let long = [b"\x0a".to_vec(), vec![0xff; 8], vec![0x0f]].concat();
    for bytes in [long, vec![0xff; 40], vec![0x0b, 0x0c]] {
        assert!(refuse(bytes).contains("download it again"));
    }
    assert!(refuse(Vec::new()).contains("no pieces"));
    let unk = ("<unk>", 0.0, UNKNOWN);
    for (algorithm, pieces, reason) in [
        (
            1,
            vec![unk, ("a", 0.0, NORMAL), ("b", 0.0, USER_DEFINED)],
            "unigram model with user-defined pieces",
        ),
        (3, vec![unk], "words"),
        (4, vec![unk], "characters"),
        (9, vec![unk], "type 9"),
        (2, vec![("a", 0.0, NORMAL)], "no piece for unknown text"),
        (
            2,
            vec![unk, ("<u>", 0.0, UNKNOWN)],
            "two pieces for unknown text",
        ),
        (
            2,
            vec![unk, ("a", 0.0, NORMAL), ("a", 0.0, CONTROL)],
            "are both",
        ),
        (2, vec![unk, ("", 0.0, NORMAL)], "empty"),
        (2, vec![unk, ("a\0", 0.0, NORMAL)], "zero byte"),
        (2, vec![unk, ("a", f32::NAN, NORMAL)], "NaN"),
        (2, vec![unk, ("<0x1>", 0.0, BYTE)], "the byte piece"),
        (2, vec![unk, ("a", 0.0, 7)], "unknown type 7"),
    ] {
        let error = refuse(model(algorithm, &pieces, true));
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn changed_model_files_never_panic() {
    let whole = golden();
    for place in (0..whole.len()).step_by(61) {
        let mut changed = whole.clone();
        changed[place] ^= 1 << (place % 8);
        if let Ok(tokenizer) = open(&changed) {
            tokenizer
                .encode("<tool> text é    ", SpecialTokens::Add)
                .unwrap();
        }
    }
}

/// Splits `text` by the definition of BPE: repeatedly merges the pair with the highest score, the leftmost among equals.
fn pieces_by_definition(pieces: &[(String, f32, u64)], text: &str) -> Vec<String> {
    let find = |text: &str| pieces.iter().find(|(piece, _, _)| piece == text);
    let mut symbols: Vec<(String, bool)> = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let whole = pieces
            .iter()
            .filter(|(piece, _, kind)| *kind == USER_DEFINED && rest.starts_with(piece));
        let whole = whole.map(|(piece, _, _)| piece.len()).max();
        let length = whole.unwrap_or(first.len_utf8());
        symbols.push((rest[..length].to_owned(), whole.is_some()));
        rest = &rest[length..];
    }
    let mut parts: BTreeMap<String, [String; 2]> = BTreeMap::new();
    loop {
        let mut best: Option<(usize, f32)> = None;
        for (index, pair) in symbols.windows(2).enumerate() {
            let [(left, false), (right, false)] = pair else {
                continue;
            };
            let Some((piece, score, kind)) = find(&format!("{left}{right}")) else {
                continue;
            };
            if *kind == UNUSED {
                parts.insert(piece.clone(), [left.clone(), right.clone()]);
            }
            if best.is_none_or(|(_, other)| *score > other) {
                best = Some((index, *score));
            }
        }
        let Some((index, _)) = best else {
            break;
        };
        let (right, _) = symbols.remove(index + 1);
        symbols[index].0.push_str(&right);
    }
    let mut all: Vec<String> = symbols.into_iter().map(|(piece, _)| piece).collect();
    while let Some(index) = all.iter().position(|piece| parts.contains_key(piece)) {
        let pair = parts[&all[index]].clone();
        all.splice(index..=index, pair);
    }
    all
}

/// Returns the highest sum of scores of pieces that make up `text`; scores are quarters, so sums are exact.
fn highest_sum(pieces: &[(&str, f32, u64)], text: &str) -> f32 {
    if text.is_empty() {
        return 0.0;
    }
    let sums = pieces.iter().filter_map(|(piece, score, _)| {
        let rest = text.strip_prefix(piece)?;
        Some(score + highest_sum(pieces, rest))
    });
    sums.fold(f32::NEG_INFINITY, f32::max)
}

proptest::proptest! {
    #[test]
    fn pieces_are_merged_as_defined(
        pieces in proptest::collection::btree_map("[ab▁]{2,4}", (-3i8..0, 0usize..9), 1..20),
        text in "[ab ]{0,14}",
    ) {
        let mut all = vec![("<unk>".to_owned(), 0.0, UNKNOWN)];
        for single in ["a", "b", "▁"] {
            all.push((single.to_owned(), -9.0, NORMAL));
        }
        for (piece, (score, kind)) in pieces {
            let kind = match kind { 0 => USER_DEFINED, 1 => UNUSED, _ => NORMAL };
            all.push((piece, f32::from(score), kind));
        }
        let stored: Vec<(&str, f32, u64)> =
            all.iter().map(|(piece, score, kind)| (&piece[..], *score, *kind)).collect();
        let tokenizer = open(&model(2, &stored, false)).unwrap();
        let ids = tokenizer.encode(&text, SpecialTokens::Omit).unwrap();
        let got: Vec<&str> = ids.iter().map(|id| stored[*id as usize].0).collect();
        assert_eq!(got, pieces_by_definition(&all, &text.replace(' ', "▁")));
    }

    #[test]
    fn unigram_pieces_have_the_highest_sum_of_scores(
        pieces in proptest::collection::btree_map("[ab▁]{2,4}", -40i8..-1, 1..20),
        text in "[ab ]{0,9}",
    ) {
        let mut all = vec![("<unk>".to_owned(), 0.0, UNKNOWN)];
        for (single, score) in [("a", -7.0), ("b", -8.5), ("▁", -6.25)] {
            all.push((single.to_owned(), score, NORMAL));
        }
        all.extend(pieces.into_iter().map(|(piece, score)| (piece, f32::from(score) / 4.0, NORMAL)));
        let stored: Vec<(&str, f32, u64)> =
            all.iter().map(|(piece, score, kind)| (&piece[..], *score, *kind)).collect();
        let tokenizer = open(&model(1, &stored, false)).unwrap();
        let ids = tokenizer.encode(&text, SpecialTokens::Omit).unwrap();
        let text = text.replace(' ', "▁");
        let got: String = ids.iter().map(|id| stored[*id as usize].0).collect();
        assert_eq!(got, text);
        let sum: f32 = ids.iter().map(|id| stored[*id as usize].1).sum();
        assert_eq!(sum, highest_sum(&stored, &text));
    }
}
