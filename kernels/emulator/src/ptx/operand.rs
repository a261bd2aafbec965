//! Operands of a statement: registers, immediates and addresses, resolved to slots.

use std::collections::HashMap;

use super::{
    decode::{Decoded, Decoder},
    instruction::{SHARED_BASE, Special},
};

/// Names of one function.
#[derive(Default)]
pub(super) struct Scope {
    /// Registers `%r<288>`: first slot, count, bits, by prefix.
    pub(super) ranges: HashMap<String, (u16, usize, u32)>,
    /// Parameters and results in slots, of the function and of calls.
    pub(super) slots: HashMap<String, u16>,
    /// Offsets of the kernel's parameters.
    pub(super) offsets: HashMap<String, u64>,
    pub(super) labels: HashMap<String, usize>,
    /// Branches to labels.
    pub(super) branches: Vec<(usize, String)>,
    /// Slot of the place to return to, in functions.
    pub(super) return_to: Option<u16>,
}

pub(super) fn mask(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// Splits at commas outside of brackets.
pub(super) fn split_operands(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (index, character) in text.char_indices() {
        match character {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..index].trim());
                start = index + 1;
            }
            _ => {}
        }
    }
    if !text[start..].trim().is_empty() {
        parts.push(text[start..].trim());
    }
    parts
}

/// The operands between brackets.
pub(super) fn inner(text: &str, open: char, close: char) -> Decoded<Vec<&str>> {
    let inner = text
        .strip_prefix(open)
        .and_then(|text| text.strip_suffix(close));
    let inner = inner.ok_or_else(|| format!("expected `{open}…{close}`, found `{text}`"))?;
    Ok(split_operands(inner))
}

/// Bits and kind (`s`, `u`, `b`, `f`, `p`) of a type.
pub(super) fn parse_type(name: &str) -> Decoded<(char, u32)> {
    if name == "pred" {
        return Ok(('p', 1));
    }
    let bits = name.get(1..).and_then(|bits| bits.parse().ok());
    match (name.chars().next(), bits) {
        (Some(kind @ ('s' | 'u' | 'b' | 'f')), Some(bits @ (8 | 16 | 32 | 64))) => Ok((kind, bits)),
        _ => Err(format!("unknown type `{name}`")),
    }
}

impl Decoder<'_> {
    /// A new slot; all ones at the start, which is NaN.
    pub(super) fn slot(&mut self) -> u16 {
        self.kernel.registers.push(u64::MAX);
        (self.kernel.registers.len() - 1) as u16
    }

    pub(super) fn constant(&mut self, value: u64) -> u16 {
        if let Some(slot) = self.constants.get(&value) {
            return *slot;
        }
        let slot = self.slot();
        self.kernel.registers[usize::from(slot)] = value;
        self.constants.insert(value, slot);
        slot
    }

    /// `.pred %p<108>`.
    pub(super) fn declare(&mut self, scope: &mut Scope, text: &str) -> Decoded<()> {
        let (kind, names) = text.split_once(char::is_whitespace).ok_or("no names")?;
        let (_, bits) = parse_type(kind.trim_start_matches('.'))?;
        for name in split_operands(names) {
            // A register without a range is the scratch register of a call, which nothing uses.
            let Some((prefix, count)) = name.split_once('<') else {
                continue;
            };
            let count: usize = count
                .trim_end_matches('>')
                .parse()
                .map_err(|_| "no count")?;
            let first = self.kernel.registers.len();
            self.kernel.registers.resize(first + count, u64::MAX);
            scope
                .ranges
                .insert(prefix.to_owned(), (first as u16, count, bits));
        }
        Ok(())
    }

    /// Slot and bits of a register.
    pub(super) fn register(&self, scope: &Scope, name: &str) -> Decoded<(u16, u32)> {
        let digits = name.find(|c: char| c.is_ascii_digit());
        let found = digits.and_then(|digits| {
            let (first, count, bits) = scope.ranges.get(&name[..digits])?;
            let index: usize = name[digits..].parse().ok()?;
            (index < *count).then_some((*first + index as u16, *bits))
        });
        found.ok_or_else(|| format!("unknown register `{name}`"))
    }

    /// Slot of a destination of this many bits.
    pub(super) fn destination(&self, scope: &Scope, name: &str, bits: u32) -> Decoded<u16> {
        match self.register(scope, name)? {
            (slot, found) if found == bits => Ok(slot),
            (_, found) => Err(format!("`{name}` has {found} bits, not {bits}")),
        }
    }

    /// Slot of a register, special register, immediate or address, of this many bits.
    pub(super) fn source(&mut self, scope: &Scope, name: &str, bits: u32) -> Decoded<u16> {
        if name.starts_with('%') {
            if let Some(slot) = self.special(name) {
                return Ok(slot);
            }
            return self.destination(scope, name, bits);
        }
        let value = self.immediate(scope, name)?;
        let value = match bits {
            1 => u64::from(value != 0),
            bits => value & mask(bits),
        };
        Ok(self.constant(value))
    }

    pub(super) fn immediate(&self, scope: &Scope, name: &str) -> Decoded<u64> {
        let hexadecimal = ["0f", "0d", "0x"]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix));
        if let Some(digits) = hexadecimal {
            return u64::from_str_radix(digits, 16).map_err(|why| format!("{name}: {why}"));
        }
        if let Ok(value) = name.parse::<i64>() {
            return Ok(value as u64);
        }
        if self.module.shared == Some(name) {
            return Ok(SHARED_BASE);
        }
        let offset = scope.offsets.get(name).copied();
        offset.ok_or_else(|| format!("unknown operand `{name}`"))
    }

    fn special(&mut self, name: &str) -> Option<u16> {
        if let Some(slot) = self.special_slots.get(name) {
            return Some(*slot);
        }
        let (base, dimension) = name.split_once('.').unwrap_or((name, ""));
        let dimension = ["x", "y", "z"].iter().position(|found| *found == dimension);
        let special = match (base, dimension) {
            ("%tid", Some(dimension)) => Special::Thread(dimension),
            ("%ntid", Some(dimension)) => Special::Threads(dimension),
            ("%ctaid", Some(dimension)) => Special::Block(dimension),
            ("%nctaid", Some(dimension)) => Special::Blocks(dimension),
            ("%laneid", None) => Special::Lane,
            _ => return None,
        };
        let slot = self.slot();
        self.kernel.specials.push((slot, special));
        self.special_slots.insert(name.to_owned(), slot);
        Some(slot)
    }

    /// Slot and offset of `[%rd1+-4]`.
    pub(super) fn address(&mut self, scope: &Scope, text: &str, bits: u32) -> Decoded<(u16, i32)> {
        let parts = inner(text, '[', ']')?;
        let [text] = parts[..] else {
            return Err(format!("unknown form of address `{text}`"));
        };
        let (base, offset) = text.split_once('+').unwrap_or((text, "0"));
        let offset = offset.parse().map_err(|why| format!("{offset}: {why}"))?;
        Ok((self.source(scope, base, bits)?, offset))
    }
}
