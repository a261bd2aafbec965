//! Random changes of valid inputs that keep most of their structure: values of JSON, tensor headers, entries of a zip
//! archive, words of a text, integers in binary files.

use std::io::{Cursor, Read, Write};

use powerinfer_artifact::random::Random;
use serde_json::{Map, Value, json};
use zip::{CompressionMethod, ZipArchive, ZipWriter, write::SimpleFileOptions};

/// Words for templates and hardware files.
const WORDS: [&str; 34] = [
    "{% for i in range(100000000) %}",
    "{% endfor %}",
    "{% set x = 'aaaaaaaaaaaaaaaa' %}",
    "{% set x = x ~ x %}",
    "{% set ns = namespace(x='aaaa') %}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{{ x * 1000000000 }}",
    "{{ 'a' * 10000000000 }}",
    "{{ messages * 1000000000 }}",
    "{{ ''.join(messages) }}",
    "{{ messages | tojson(indent=1000000) }}",
    "{{ messages[-1].content | replace('', x) }}",
    "{% macro m(a) %}{{ m(a) }}{% endmacro %}{{ m(1) }}",
    "{% include 'chat_template' %}",
    "{% extends 'chat_template' %}",
    "{{ 9223372036854775807 + 1 }}",
    "{{ 1 / 0 }}",
    "{{ 2 ** 100000 }}",
    "{{ range(0, 10, 0) }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%') }}",
    "{% generation %}",
    "{%- if",
    "{{",
    "}}",
    "\u{0}",
    "inf",
    "nan",
    "-1",
    "1e300",
    "18446744073709551616",
    "[[gpu]]",
    "[cpu]",
    "\"",
];

/// Bytes of the copies that an element of an array gets, at most.
const REPEATED_BYTES: usize = 1 << 20;

/// Changes `bytes`, the content of a file called `name`.
pub fn mutate(name: &str, bytes: &[u8], random: &mut Random) -> Vec<u8> {
    // Some inputs lose their structure.
    if random.chance(20) {
        return binary(bytes, random);
    }
    let mutated = match name.rsplit('.').next() {
        Some("json") => json_bytes(bytes, random),
        Some("safetensors") => tensors(bytes, random),
        Some("bin") => archive(bytes, random),
        Some("jinja" | "toml") => Some(text(bytes, random)),
        _ => None,
    };
    mutated.unwrap_or_else(|| binary(bytes, random))
}

/// Flips one bit.
pub fn flip(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if !bytes.is_empty() {
        let place = random.below(bytes.len());
        bytes[place] ^= 1 << random.below(8);
    }
    bytes
}

/// Whether two JSON documents, or safetensors files of the same data, have the same values: the last digits of a number may
/// differ.
pub fn have_equal_values(one: &[u8], other: &[u8]) -> bool {
    let parse = |bytes: &[u8]| {
        let (header, data) = match header(bytes) {
            Some(parts) => parts,
            None => (bytes, &[][..]),
        };
        let mut value: Value = serde_json::from_slice(header).ok()?;
        if let Some(Value::Object(metadata)) = value.get_mut("__metadata__") {
            for text in metadata.values_mut() {
                *text = text
                    .as_str()
                    .and_then(|text| serde_json::from_str(text).ok())?;
            }
        }
        Some((value, data.to_vec()))
    };
    let (one, other) = (parse(one), parse(other));
    one.is_some() && one == other
}

/// Header and data of a safetensors file.
fn header(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    rest.split_at_checked(length)
}

fn json_bytes(bytes: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let mut value = serde_json::from_slice(bytes).ok()?;
    json(&mut value, random);
    serde_json::to_vec(&value).ok()
}

/// Changes one to three values of `root`.
fn json(root: &mut Value, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let donor = pick(root, random).clone();
        change(pick(root, random), donor, random);
    }
}

/// A random value within `root`, found by walking down.
fn pick<'a>(root: &'a mut Value, random: &mut Random) -> &'a mut Value {
    let children = match root {
        Value::Object(entries) => entries.len(),
        Value::Array(elements) => elements.len(),
        _ => 0,
    };
    if children == 0 || random.chance(15) {
        return root;
    }
    let child = random.below(children);
    match root {
        Value::Object(entries) => match entries.values_mut().nth(child) {
            Some(value) => pick(value, random),
            None => unreachable!("`child` is below the number of entries"),
        },
        Value::Array(elements) => pick(&mut elements[child], random),
        _ => root,
    }
}

fn change(value: &mut Value, donor: Value, random: &mut Random) {
    match value {
        Value::Object(entries) if random.chance(70) => change_object(entries, donor, random),
        Value::Array(elements) if !elements.is_empty() && random.chance(70) => {
            let place = random.below(elements.len());
            match random.below(4) {
                0 => drop(elements.remove(place)),
                1 => elements.push(donor),
                2 => elements[place] = donor,
                _ => {
                    let element = elements[place].clone();
                    let repeats =
                        (1 << random.below(10)).min(REPEATED_BYTES / element.to_string().len());
                    elements.extend(std::iter::repeat_n(element, repeats));
                }
            }
        }
        Value::Number(number) if random.chance(60) => {
            let old = number.as_f64().unwrap_or(0.0);
            let new = match random.below(7) {
                0 => old + 1.0,
                1 => old - 1.0,
                2 => old * 2.0,
                3 => old / 2.0,
                4 => -old,
                5 => old * 1e6,
                _ => old + 0.5,
            };
            *value = if number.is_f64() || new.fract() != 0.0 {
                json!(new)
            } else {
                json!(new as i64)
            };
        }
        // Headers of ours are JSON within a text.
        Value::String(text) if text.starts_with('{') => {
            if let Ok(mut inner) = serde_json::from_str(text) {
                json(&mut inner, random);
                *text = inner.to_string();
            }
        }
        Value::String(text) if random.chance(60) => {
            let bytes = binary(text.as_bytes(), random);
            *text = String::from_utf8_lossy(&bytes).into_owned();
        }
        _ => *value = replacement(donor, random),
    }
}

fn change_object(entries: &mut Map<String, Value>, donor: Value, random: &mut Random) {
    if entries.is_empty() {
        entries.insert("key".to_owned(), donor);
        return;
    }
    let place = random.below(entries.len());
    let keys: Vec<String> = entries.keys().cloned().collect();
    let key = &keys[place];
    match random.below(4) {
        0 => drop(entries.shift_remove(key)),
        1 => drop(entries.insert(format!("{key}_"), donor)),
        2 => drop(entries.insert(key.clone(), donor)),
        _ => {
            let other = &keys[random.below(keys.len())];
            let taken = entries.get(other).cloned().unwrap_or_default();
            entries.insert(key.clone(), taken);
        }
    }
}

fn replacement(donor: Value, random: &mut Random) -> Value {
    match random.below(22) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(-1),
        3 => json!(0),
        4 => json!(1),
        5 => json!(i32::MAX),
        6 => json!(u32::MAX),
        7 => json!(1u64 << 53),
        8 => json!(u64::MAX),
        9 => json!(i64::MIN),
        10 => json!(1e300),
        11 => json!(5e-324),
        12 => json!(-0.0),
        13 => json!(0.1),
        14 => json!(""),
        15 => json!("../../etc/passwd"),
        16 => json!("a".repeat(1 << random.below(16))),
        17 => json!([]),
        18 => json!({}),
        19 => {
            let mut nested = donor;
            for _ in 0..random.below(200) {
                nested = json!([nested]);
            }
            nested
        }
        20 => json!("é\u{0}\u{ffff}"),
        _ => donor,
    }
}

/// Changes the header of a safetensors file, and its length to match, or its data.
fn tensors(bytes: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let (header, data) = header(bytes)?;
    if random.chance(20) {
        return Some([&bytes[..8 + header.len()], &binary(data, random)].concat());
    }
    let header = json_bytes(header, random)?;
    let length = (header.len() as u64).to_le_bytes();
    Some([&length, &header[..], data].concat())
}

/// Changes one entry of a zip archive, with a checksum to match.
fn archive(bytes: &[u8], random: &mut Random) -> Option<Vec<u8>> {
    let mut zip = ZipArchive::new(Cursor::new(bytes)).ok()?;
    // Pickled objects are more than numbers.
    let pickled = zip
        .file_names()
        .position(|name| name.is_ok_and(|name| name.ends_with(".pkl")));
    let chosen = match pickled {
        Some(place) if random.chance(80) => place,
        _ => random.below(zip.len()),
    };
    let mut written = ZipWriter::new(Cursor::new(Vec::with_capacity(bytes.len())));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for index in 0..zip.len() {
        let mut entry = zip.by_index(index).ok()?;
        let mut content = Vec::new();
        entry.read_to_end(&mut content).ok()?;
        if index == chosen {
            content = binary(&content, random);
        }
        let name = entry.name().ok()?.into_owned();
        written.start_file(name, options).ok()?;
        written.write_all(&content).ok()?;
    }
    Some(written.finish().ok()?.into_inner())
}

/// Changes one to three words.
fn text(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let text = String::from_utf8_lossy(bytes);
    let mut words: Vec<&str> = text
        .split_inclusive([' ', '\n', '(', ')', '}', '='])
        .collect();
    for _ in 0..=random.below(3) {
        let place = random.below(words.len() + 1);
        let word = WORDS[random.below(WORDS.len())];
        if place == words.len() {
            words.push(word);
            continue;
        }
        match random.below(5) {
            0 => drop(words.remove(place)),
            1 => words.insert(place, words[place]),
            2 => words[place] = words[random.below(words.len())],
            3 => words[place] = word,
            _ => words.insert(place, word),
        }
    }
    words.concat().into_bytes()
}

/// Changes one to four places, more often near the start and the end, where headers and directories are.
fn binary(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            bytes.push(random.next_bits() as u8);
            continue;
        }
        let place = match random.below(10) {
            0..5 => random.below(bytes.len().min(4096)),
            5..7 => bytes.len() - 1 - random.below(bytes.len().min(512)),
            _ => random.below(bytes.len()),
        };
        let end = place + 1 + random.below((bytes.len() - place).min(16));
        match random.below(8) {
            0 => bytes[place] ^= 1 << random.below(8),
            1 => bytes[place] = random.next_bits() as u8,
            2 | 3 => overwrite(&mut bytes[place..], random),
            4 => drop(bytes.drain(place..end)),
            5 => {
                let copied = bytes[place..end].to_vec();
                bytes.splice(place..place, copied);
            }
            6 => {
                let from = random.below(bytes.len());
                let length = (end - place).min(bytes.len() - from);
                let to = place.min(bytes.len() - length);
                bytes.copy_within(from..from + length, to);
            }
            _ if random.chance(30) => bytes.truncate(place),
            _ => bytes.insert(place, random.next_bits() as u8),
        }
    }
    bytes
}

/// Writes an integer of 1 to 8 bytes to the start of `bytes`.
fn overwrite(bytes: &mut [u8], random: &mut Random) {
    let value: u64 = match random.below(9) {
        0 => 0,
        1 => 1,
        2 => u64::MAX,
        3 => i64::MAX as u64,
        4 => u64::from(u32::MAX),
        5 => i32::MAX as u64,
        6 => 1 << random.below(64),
        7 => (1 << random.below(64)) - 1,
        _ => random.next_bits() >> random.below(64),
    };
    let width = (1 << random.below(4)).min(bytes.len());
    bytes[..width].copy_from_slice(&value.to_le_bytes()[..width]);
}
