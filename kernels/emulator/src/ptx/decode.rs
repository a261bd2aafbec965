//! Decodes the statements of a kernel, and of the functions that it calls, into [`Instruction`]s.

use std::collections::HashMap;

use super::{
    PtxError,
    instruction::{Instruction, Kernel, Op, SHARED_BASE, SHARED_WINDOW, Shuffle, Space, Special},
    parse::{Function, Module},
};

/// Slot of the constant 0, for operands that an operation does not have.
const ZERO: u16 = 0;
/// Slot of results that nothing reads.
const UNUSED: u16 = 1;
/// Number of registers that a thread may have.
const MAX_REGISTERS: usize = 1 << 16;

/// Result of decoding a statement; the error is the reason.
type Decoded<T> = Result<T, String>;

/// Decodes a kernel.
///
/// # Errors
///
/// A statement is not known.
pub(crate) fn decode(module: &Module<'_>, function: &Function<'_>) -> Result<Kernel, PtxError> {
    let mut decoder = Decoder {
        module,
        kernel: Kernel {
            code: Vec::new(),
            lines: Vec::new(),
            registers: vec![0, u64::MAX],
            specials: Vec::new(),
            lists: Vec::new(),
            argument_bytes: 0,
            max_threads: function.max_threads,
        },
        constants: HashMap::from([(0, ZERO)]),
        special_slots: HashMap::new(),
        callees: Vec::new(),
        line: 0,
    };
    decoder.function(function, None)?;
    // Functions follow the kernel; a function that is called may call others.
    let mut next = 0;
    while let Some(callee) = decoder.callees.get(next).cloned() {
        let entry = decoder.kernel.code.len() as i32;
        for (index, instruction) in decoder.kernel.code.iter_mut().enumerate() {
            if instruction.op == Op::Call && callee.calls.contains(&index) {
                instruction.extra = entry;
            }
        }
        decoder.function(callee.function, Some(&callee))?;
        next += 1;
    }
    Ok(decoder.kernel)
}

/// A function that the kernel calls, with registers of its own: it cannot call itself.
#[derive(Clone)]
struct Callee<'a> {
    function: &'a Function<'a>,
    /// Slots of the parameters, of the result and of the place to return to.
    parameters: Vec<u16>,
    result: u16,
    return_to: u16,
    /// Instructions that call it.
    calls: Vec<usize>,
}

struct Decoder<'a> {
    module: &'a Module<'a>,
    kernel: Kernel,
    constants: HashMap<u64, u16>,
    special_slots: HashMap<String, u16>,
    callees: Vec<Callee<'a>>,
    /// Line of the statement.
    line: u32,
}

/// Names of one function.
#[derive(Default)]
struct Scope {
    /// Registers `%r<288>`: first slot, count, bits, by prefix.
    ranges: HashMap<String, (u16, usize, u32)>,
    /// Parameters and results in slots, of the function and of calls.
    slots: HashMap<String, u16>,
    /// Offsets of the kernel's parameters.
    offsets: HashMap<String, u64>,
    labels: HashMap<String, usize>,
    /// Branches to labels.
    branches: Vec<(usize, String)>,
    /// Slot of the place to return to, in functions.
    return_to: Option<u16>,
}

/// The operands of an operation, for [`Decoder::emit`].
fn operation(op: Op, to: u16, [a, b, c]: [u16; 3], extra: i32) -> Instruction {
    Instruction {
        op,
        size: 0,
        alignment: 0,
        is_signed: false,
        bits: 64,
        to,
        a,
        b,
        c,
        extra,
    }
}

fn mask(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// Splits at commas outside of brackets.
fn split_operands(text: &str) -> Vec<&str> {
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
fn inner(text: &str, open: char, close: char) -> Decoded<Vec<&str>> {
    let inner = text
        .strip_prefix(open)
        .and_then(|text| text.strip_suffix(close));
    let inner = inner.ok_or_else(|| format!("expected `{open}…{close}`, found `{text}`"))?;
    Ok(split_operands(inner))
}

/// Bits and kind (`s`, `u`, `b`, `f`, `p`) of a type.
fn parse_type(name: &str) -> Decoded<(char, u32)> {
    if name == "pred" {
        return Ok(('p', 1));
    }
    let bits = name.get(1..).and_then(|bits| bits.parse().ok());
    match (name.chars().next(), bits) {
        (Some(kind @ ('s' | 'u' | 'b' | 'f')), Some(bits @ (8 | 16 | 32 | 64))) => Ok((kind, bits)),
        _ => Err(format!("unknown type `{name}`")),
    }
}

impl<'a> Decoder<'a> {
    fn function(
        &mut self,
        function: &Function<'_>,
        callee: Option<&Callee<'_>>,
    ) -> Result<(), PtxError> {
        let mut scope = Scope::default();
        match callee {
            Some(callee) => {
                scope.return_to = Some(callee.return_to);
                let names = function.parameters.iter().chain(&function.result);
                let slots = callee.parameters.iter().chain([&callee.result]);
                scope.slots = names
                    .zip(slots)
                    .map(|(variable, slot)| (variable.name.to_owned(), *slot))
                    .collect();
            }
            None => {
                for variable in &function.parameters {
                    let start = self
                        .kernel
                        .argument_bytes
                        .next_multiple_of(variable.alignment);
                    scope.offsets.insert(variable.name.to_owned(), start as u64);
                    self.kernel.argument_bytes = start + variable.bytes;
                }
            }
        }
        let error = |line, statement: &str, reason| PtxError {
            file: self.module.file.to_owned(),
            line,
            statement: statement.to_owned(),
            reason,
        };
        for (line, statement) in &function.statements {
            self.line = *line;
            self.statement(&mut scope, statement)
                .map_err(|reason| error(*line, statement, reason))?;
        }
        for (index, label) in &scope.branches {
            let target = scope.labels.get(label).ok_or_else(|| {
                error(self.kernel.lines[*index], label, "unknown label".to_owned())
            })?;
            self.kernel.code[*index].extra = *target as i32;
        }
        // A body may end without `ret`.
        self.emit_return(&scope);
        if self.kernel.registers.len() > MAX_REGISTERS {
            return Err(error(
                self.line,
                function.name,
                "too many registers".to_owned(),
            ));
        }
        Ok(())
    }

    fn emit(&mut self, instruction: Instruction) {
        self.kernel.code.push(instruction);
        self.kernel.lines.push(self.line);
    }

    fn emit_return(&mut self, scope: &Scope) {
        let (op, slot) = match scope.return_to {
            Some(slot) => (Op::Return, slot),
            None => (Op::Exit, ZERO),
        };
        self.emit(operation(op, UNUSED, [slot, ZERO, ZERO], 0));
    }

    /// A new slot; all ones at the start, which is NaN.
    fn slot(&mut self) -> u16 {
        self.kernel.registers.push(u64::MAX);
        (self.kernel.registers.len() - 1) as u16
    }

    fn constant(&mut self, value: u64) -> u16 {
        if let Some(slot) = self.constants.get(&value) {
            return *slot;
        }
        let slot = self.slot();
        self.kernel.registers[usize::from(slot)] = value;
        self.constants.insert(value, slot);
        slot
    }

    /// Slot and bits of a register.
    fn register(&self, scope: &Scope, name: &str) -> Decoded<(u16, u32)> {
        let digits = name.find(|c: char| c.is_ascii_digit());
        let found = digits.and_then(|digits| {
            let (first, count, bits) = scope.ranges.get(&name[..digits])?;
            let index: usize = name[digits..].parse().ok()?;
            (index < *count).then_some((*first + index as u16, *bits))
        });
        found.ok_or_else(|| format!("unknown register `{name}`"))
    }

    /// Slot of a destination of this many bits.
    fn destination(&self, scope: &Scope, name: &str, bits: u32) -> Decoded<u16> {
        match self.register(scope, name)? {
            (slot, found) if found == bits => Ok(slot),
            (_, found) => Err(format!("`{name}` has {found} bits, not {bits}")),
        }
    }

    /// Slot of a register, special register, immediate or address, of this many bits.
    fn source(&mut self, scope: &Scope, name: &str, bits: u32) -> Decoded<u16> {
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

    fn immediate(&self, scope: &Scope, name: &str) -> Decoded<u64> {
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

    fn statement(&mut self, scope: &mut Scope, statement: &str) -> Decoded<()> {
        if let Some(label) = statement.strip_suffix(':') {
            scope
                .labels
                .insert(label.to_owned(), self.kernel.code.len());
            return Ok(());
        }
        let (word, rest) = statement
            .split_once(char::is_whitespace)
            .unwrap_or((statement, ""));
        match word {
            ".pragma" => Ok(()),
            ".reg" => self.declare(scope, rest),
            ".param" => {
                let name = rest.split_whitespace().next_back().unwrap_or_default();
                let slot = self.slot();
                scope.slots.insert(name.to_owned(), slot);
                Ok(())
            }
            _ => {
                let Some(guard) = word.strip_prefix('@') else {
                    return self.instruction(scope, word, rest.trim());
                };
                let (is_inverted, name) = match guard.strip_prefix('!') {
                    Some(name) => (true, name),
                    None => (false, guard),
                };
                let guard = self.source(scope, name, 1)?;
                let rest = rest.trim();
                let (opcode, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                let index = self.kernel.code.len();
                let is_branch = opcode == "bra" || opcode == "bra.uni";
                // A guarded instruction that is no branch is branched over.
                let op = match is_branch != is_inverted {
                    true => Op::BranchIf,
                    false => Op::BranchUnless,
                };
                self.emit(operation(op, UNUSED, [guard, ZERO, ZERO], 0));
                if is_branch {
                    scope.branches.push((index, operands.trim().to_owned()));
                } else {
                    self.instruction(scope, opcode, operands.trim())?;
                    self.kernel.code[index].extra = self.kernel.code.len() as i32;
                }
                Ok(())
            }
        }
    }

    /// `.pred %p<108>`.
    fn declare(&mut self, scope: &mut Scope, text: &str) -> Decoded<()> {
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

    fn instruction(&mut self, scope: &mut Scope, opcode: &str, operands: &str) -> Decoded<()> {
        let operands = split_operands(operands);
        let count = |expected: usize| match operands.len() == expected {
            true => Ok(()),
            false => Err(format!(
                "expected {expected} operands, found {}",
                operands.len()
            )),
        };
        if let Some((op, to_bits, source_bits)) = arithmetic(opcode) {
            count(source_bits.len() + 1)?;
            let to = self.destination(scope, operands[0], to_bits)?;
            let mut sources = [ZERO; 3];
            for (index, bits) in source_bits.iter().enumerate() {
                sources[index] = self.source(scope, operands[index + 1], *bits)?;
            }
            self.emit(operation(op, to, sources, 0));
            return Ok(());
        }
        let (name, modifiers) = opcode.split_once('.').unwrap_or((opcode, ""));
        let modifiers: Vec<&str> = modifiers
            .split('.')
            .filter(|part| !part.is_empty())
            .collect();
        match (name, &modifiers[..]) {
            ("mov", [kind]) => {
                count(2)?;
                self.move_value(scope, kind, &operands)
            }
            ("not", [kind]) => {
                count(2)?;
                let (_, bits) = parse_type(kind)?;
                let to = self.destination(scope, operands[0], bits)?;
                let a = self.source(scope, operands[1], bits)?;
                let ones = self.constant(mask(bits));
                self.emit(operation(Op::Xor, to, [a, ones, ZERO], 0));
                Ok(())
            }
            ("selp", [kind]) => {
                count(4)?;
                let (_, bits) = parse_type(kind)?;
                let to = self.destination(scope, operands[0], bits)?;
                let a = self.source(scope, operands[1], bits)?;
                let b = self.source(scope, operands[2], bits)?;
                let c = self.source(scope, operands[3], 1)?;
                self.emit(operation(Op::Select, to, [a, b, c], 0));
                Ok(())
            }
            ("bfi", ["b32"]) => {
                count(5)?;
                let to = self.destination(scope, operands[0], 32)?;
                let mut sources = [ZERO; 4];
                for (source, name) in sources.iter_mut().zip(&operands[1..]) {
                    *source = self.source(scope, name, 32)?;
                }
                let [a, b, c, length] = sources;
                self.emit(operation(Op::InsertBits, to, [a, b, c], length.into()));
                Ok(())
            }
            ("lop3", ["b32"]) => {
                count(5)?;
                let to = self.destination(scope, operands[0], 32)?;
                let mut sources = [ZERO; 3];
                for (source, name) in sources.iter_mut().zip(&operands[1..]) {
                    *source = self.source(scope, name, 32)?;
                }
                let (op, table) = match self.immediate(scope, operands[4])? {
                    0xea => (Op::AndOr, 0),
                    table => (Op::Logic3, (table & 0xff) as i32),
                };
                self.emit(operation(op, to, sources, table));
                Ok(())
            }
            ("setp", [comparison, combine @ .., kind]) if combine.len() <= 1 => {
                self.compare(scope, comparison, combine.first().copied(), kind, &operands)
            }
            ("cvt", modifiers) => {
                count(2)?;
                self.convert(scope, modifiers, &operands)
            }
            ("cvta", ["to", "global", "u64"]) | ("cvta", ["global", "u64"]) => {
                count(2)?;
                self.move_value(scope, "u64", &operands)
            }
            ("cvta", ["shared", "u64"]) => {
                count(2)?;
                let to = self.destination(scope, operands[0], 64)?;
                let a = self.source(scope, operands[1], 64)?;
                let window = self.constant(SHARED_WINDOW);
                self.emit(operation(Op::Add64, to, [a, window, ZERO], 0));
                Ok(())
            }
            ("ld" | "st", modifiers) => {
                count(2)?;
                self.access(scope, name == "ld", modifiers, &operands)
            }
            ("atom", ["global", action, kind]) => {
                count(3)?;
                let (_, bits) = parse_type(kind)?;
                let to = self.destination(scope, operands[0], bits)?;
                self.atomic(scope, action, to, bits, &operands[1..])
            }
            ("red", ["global", action @ "add", kind]) => {
                count(2)?;
                let (_, bits) = parse_type(kind)?;
                self.atomic(scope, action, UNUSED, bits, &operands)
            }
            // Only the order of accesses, of which there is one, and the speed are affected.
            ("membar", ["gl" | "cta" | "sys"]) | ("prefetch", ["global", "L2"]) => Ok(()),
            ("cp", ["async", "cg", "shared", "global"]) => {
                count(3)?;
                if operands[2] != "16" {
                    return Err("only copies of 16 bytes are known".to_owned());
                }
                let (a, to_offset) = self.address(scope, operands[0], 32)?;
                let (b, from_offset) = self.address(scope, operands[1], 64)?;
                if (to_offset, from_offset) != (0, 0) {
                    return Err("offsets of copies are not known".to_owned());
                }
                self.emit(operation(Op::CopyAsync, UNUSED, [a, b, ZERO], 0));
                Ok(())
            }
            ("cp", ["async", "commit_group"]) => self.control(Op::CommitCopies, 0),
            ("cp", ["async", "wait_all"]) => self.control(Op::WaitCopies, -1),
            ("cp", ["async", "wait_group"]) => {
                count(1)?;
                let groups = self.immediate(scope, operands[0])? as i32;
                self.control(Op::WaitCopies, groups)
            }
            ("bra", [] | ["uni"]) => {
                count(1)?;
                scope
                    .branches
                    .push((self.kernel.code.len(), operands[0].to_owned()));
                self.control(Op::Branch, 0)
            }
            ("call", [] | ["uni"]) => self.call(scope, &operands),
            ("ret", []) => {
                self.emit_return(scope);
                Ok(())
            }
            ("exit", []) => self.control(Op::Exit, 0),
            ("trap", []) => self.control(Op::Trap, 0),
            ("bar", ["sync"]) if operands == ["0"] => self.control(Op::Barrier, 0),
            ("bar", ["warp", "sync"]) => {
                count(1)?;
                let a = self.source(scope, operands[0], 32)?;
                self.emit(operation(Op::SyncWarp, UNUSED, [a, ZERO, ZERO], 0));
                Ok(())
            }
            ("shfl", ["sync", mode, "b32"]) => {
                count(5)?;
                self.shuffle(scope, mode, &operands)
            }
            ("vote", ["sync", "ballot", "b32"]) => {
                count(3)?;
                let to = self.destination(scope, operands[0], 32)?;
                let a = self.source(scope, operands[1], 1)?;
                let b = self.source(scope, operands[2], 32)?;
                self.emit(operation(Op::Ballot, to, [a, b, ZERO], 0));
                Ok(())
            }
            (
                "mma",
                [
                    "sync",
                    "aligned",
                    "m16n8k16",
                    "row",
                    "col",
                    "f32",
                    "f16",
                    "f16",
                    "f32",
                ],
            ) => {
                count(4)?;
                let mut slots = Vec::new();
                for (list, expected) in operands.iter().zip([4, 4, 2, 4]) {
                    let names = inner(list, '{', '}')?;
                    if names.len() != expected {
                        return Err(format!("expected {expected} registers in `{list}`"));
                    }
                    for name in names {
                        slots.push(self.source(scope, name, 32)?);
                    }
                }
                let list = slots.try_into().expect("14 registers");
                let index = self.kernel.lists.len() as i32;
                self.kernel.lists.push(list);
                self.control(Op::Mma, index)
            }
            _ => Err(format!("unknown opcode `{opcode}`")),
        }
    }

    fn control(&mut self, op: Op, extra: i32) -> Decoded<()> {
        self.emit(operation(op, UNUSED, [ZERO; 3], extra));
        Ok(())
    }

    fn move_value(&mut self, scope: &Scope, kind: &str, operands: &[&str]) -> Decoded<()> {
        let (_, bits) = parse_type(kind)?;
        let to = self.destination(scope, operands[0], bits)?;
        let instruction = if operands[1] == "%globaltimer" {
            operation(Op::Timer, to, [ZERO; 3], 0)
        } else if operands[1].starts_with('{') {
            let parts = inner(operands[1], '{', '}')?;
            let ([low, high], 32) = (&parts[..], bits) else {
                return Err("only two halves of 16 bits can be packed".to_owned());
            };
            let low = self.source(scope, low, 16)?;
            let high = self.source(scope, high, 16)?;
            operation(Op::Pack16, to, [low, high, ZERO], 0)
        } else {
            let a = self.source(scope, operands[1], bits)?;
            operation(Op::Move, to, [a, ZERO, ZERO], 0)
        };
        self.emit(instruction);
        Ok(())
    }

    /// `setp.lt.and.s32 p|q, a, b, c`: p is `(a < b) & c`, q is `!(a < b) & c`.
    fn compare(
        &mut self,
        scope: &Scope,
        comparison: &str,
        combine: Option<&str>,
        kind: &str,
        operands: &[&str],
    ) -> Decoded<()> {
        let (kind, bits) = parse_type(kind)?;
        let expected = if combine.is_some() { 4 } else { 3 };
        if operands.len() != expected {
            return Err(format!(
                "expected {expected} operands, found {}",
                operands.len()
            ));
        }
        let a = self.source(scope, operands[1], bits)?;
        let b = self.source(scope, operands[2], bits)?;
        let (less, less_equal) = match (kind, bits) {
            ('f', 32) => (Op::LessF32, Some(Op::LessEqualF32)),
            ('s', 32) => (Op::LessSigned32, None),
            ('s', 64) => (Op::LessSigned64, None),
            ('u' | 'b', 32) => (Op::LessUnsigned32, None),
            ('u' | 'b', 64) => (Op::LessUnsigned64, None),
            _ => return Err(format!("unknown type of comparison `{kind}{bits}`")),
        };
        let equal = if kind == 'f' { Op::EqualF32 } else { Op::Equal };
        // What is not less or equal is greater, and the other way round, but for NaN: unordered comparisons are inverted
        // ordered ones.
        let (op, is_swapped, is_inverted) = match (comparison, less_equal) {
            ("eq", _) => (equal, false, false),
            ("ne", Some(_)) => (Op::UnequalF32, false, false),
            ("ne", None) => (equal, false, true),
            ("lt", _) => (less, false, false),
            ("gt", _) => (less, true, false),
            ("le", None) => (less, true, true),
            ("ge", None) => (less, false, true),
            ("le", Some(less_equal)) => (less_equal, false, false),
            ("ge", Some(less_equal)) => (less_equal, true, false),
            ("neu", Some(_)) => (equal, false, true),
            ("equ", Some(_)) => (Op::UnequalF32, false, true),
            ("geu", Some(_)) => (less, false, true),
            ("leu", Some(_)) => (less, true, true),
            ("gtu", Some(less_equal)) => (less_equal, false, true),
            ("ltu", Some(less_equal)) => (less_equal, true, true),
            _ => return Err(format!("unknown comparison `{comparison}`")),
        };
        let sources = if is_swapped {
            [b, a, ZERO]
        } else {
            [a, b, ZERO]
        };
        let (p, q) = match operands[0].split_once('|') {
            Some((p, q)) => (p, Some(q)),
            None => (operands[0], None),
        };
        let p = self.destination(scope, p, 1)?;
        let Some(combine) = combine else {
            self.emit(operation(op, p, sources, is_inverted.into()));
            if let Some(q) = q {
                let q = self.destination(scope, q, 1)?;
                self.emit(operation(op, q, sources, (!is_inverted).into()));
            }
            return Ok(());
        };
        let with = match combine {
            "and" => Op::And,
            "or" => Op::Or,
            "xor" => Op::Xor,
            _ => return Err(format!("unknown combination `{combine}`")),
        };
        let (result, inverse, other) = (self.slot(), self.slot(), self.slot());
        let (is_not, name) = match operands[3].strip_prefix('!') {
            Some(name) => (true, name),
            None => (false, operands[3]),
        };
        let c = self.source(scope, name, 1)?;
        let flip = self.constant(is_not.into());
        self.emit(operation(Op::Xor, other, [c, flip, ZERO], 0));
        self.emit(operation(op, result, sources, is_inverted.into()));
        self.emit(operation(op, inverse, sources, (!is_inverted).into()));
        self.emit(operation(with, p, [result, other, ZERO], 0));
        if let Some(q) = q {
            let q = self.destination(scope, q, 1)?;
            self.emit(operation(with, q, [inverse, other, ZERO], 0));
        }
        Ok(())
    }

    fn convert(&mut self, scope: &Scope, modifiers: &[&str], operands: &[&str]) -> Decoded<()> {
        let (modifiers, [to_type, from_type]) = modifiers
            .split_last_chunk::<2>()
            .ok_or("expected two types")?;
        let (to_kind, to_bits) = parse_type(to_type)?;
        let (from_kind, from_bits) = parse_type(from_type)?;
        // Integers may be in wider registers.
        let (to, register_bits) = self.register(scope, operands[0])?;
        let (a, source_bits) = self.register(scope, operands[1])?;
        let op = match (modifiers, (to_kind, to_bits), (from_kind, from_bits)) {
            ([], ('f', 32), ('f', 16)) => Op::F16ToF32,
            (["rn"], ('f', 16), ('f', 32)) => Op::F32ToF16,
            ([], ('f', 64), ('f', 32)) => Op::F32ToF64,
            (["sat"], ('f', 32), ('f', 32)) => Op::SaturateF32,
            (["rn"], ('f', 32), ('s', _) | ('u', 8..=32)) => Op::IntToF32,
            ([], ('s' | 'u', _), ('s' | 'u', _)) => Op::Extend,
            _ => return Err("unknown conversion".to_owned()),
        };
        let is_float = to_kind == 'f';
        if source_bits < from_bits
            || register_bits < to_bits
            || is_float && register_bits != to_bits
        {
            return Err("registers of other types than the conversion".to_owned());
        }
        if op == Op::Extend && to_bits < from_bits.min(register_bits) && to_bits != register_bits {
            return Err("narrowing conversions into wider registers are not known".to_owned());
        }
        self.emit(Instruction {
            size: (from_bits / 8) as u8,
            is_signed: from_kind == 's',
            bits: register_bits as u8,
            ..operation(op, to, [a, ZERO, ZERO], 0)
        });
        Ok(())
    }

    /// Slot and offset of `[%rd1+-4]`.
    fn address(&mut self, scope: &Scope, text: &str, bits: u32) -> Decoded<(u16, i32)> {
        let parts = inner(text, '[', ']')?;
        let [text] = parts[..] else {
            return Err(format!("unknown form of address `{text}`"));
        };
        let (base, offset) = text.split_once('+').unwrap_or((text, "0"));
        let offset = offset.parse().map_err(|why| format!("{offset}: {why}"))?;
        Ok((self.source(scope, base, bits)?, offset))
    }

    fn access(
        &mut self,
        scope: &Scope,
        is_load: bool,
        modifiers: &[&str],
        operands: &[&str],
    ) -> Decoded<()> {
        let [modifiers @ .., kind] = modifiers else {
            return Err("no type".to_owned());
        };
        let (kind, bits) = parse_type(kind)?;
        let (mut space, mut count) = (Space::Generic, 1);
        let mut op = None;
        for modifier in modifiers {
            match *modifier {
                "global" => space = Space::Global,
                "shared" => space = Space::Shared,
                "param" => space = Space::Parameter,
                "v2" => count = 2,
                "v4" => count = 4,
                "acquire" => op = Some(Op::LoadAcquire),
                "release" => op = Some(Op::StoreRelease),
                "nc" | "relaxed" | "gpu" | "sys" | "L1::no_allocate" => {}
                _ => return Err(format!("unknown modifier `{modifier}`")),
            }
        }
        if op.is_some() && (space != Space::Global || count != 1 || bits != 32) {
            return Err("acquire and release are of 32 bits of global memory".to_owned());
        }
        let (address, values) = match is_load {
            true => (operands[1], operands[0]),
            false => (operands[0], operands[1]),
        };
        let values = match values.starts_with('{') {
            true => inner(values, '{', '}')?,
            false => vec![values],
        };
        if values.len() != count {
            return Err(format!("expected {count} registers"));
        }
        // Parameters of functions are slots.
        let name = inner(address, '[', ']')?.concat();
        let name = name.split_once('+').unwrap_or((&name, "0"));
        if let (Space::Parameter, Some(slot), "0", 1) =
            (space, scope.slots.get(name.0).copied(), name.1, count)
        {
            let (to, from) = match is_load {
                true => (self.destination(scope, values[0], bits)?, slot),
                false => (slot, self.source(scope, values[0], bits)?),
            };
            self.emit(operation(Op::Move, to, [from, ZERO, ZERO], 0));
            return Ok(());
        }
        if !is_load && space == Space::Parameter {
            return Err("the parameters of a kernel are constant".to_owned());
        }
        let (address, offset) = self.address(scope, address, 64)?;
        let size = (bits / 8) as u8;
        for (index, value) in values.into_iter().enumerate() {
            // Registers may be wider than what is loaded or stored.
            let (value, register_bits) = match value.starts_with('%') {
                true => self.register(scope, value)?,
                false => (self.source(scope, value, bits)?, bits),
            };
            if register_bits < bits || kind == 'f' && register_bits != bits {
                return Err(format!("a register of {register_bits} bits"));
            }
            let extra = offset + index as i32 * i32::from(size);
            let (op, to, b) = match is_load {
                true => (op.unwrap_or(Op::Load(space)), value, ZERO),
                false => (op.unwrap_or(Op::Store(space)), UNUSED, value),
            };
            self.emit(Instruction {
                size,
                // The first access of a vector checks its alignment; the others follow it.
                alignment: if index == 0 { size * count as u8 } else { size },
                is_signed: kind == 's',
                bits: register_bits as u8,
                ..operation(op, to, [address, b, ZERO], extra)
            });
        }
        Ok(())
    }

    fn atomic(
        &mut self,
        scope: &Scope,
        action: &str,
        to: u16,
        bits: u32,
        operands: &[&str],
    ) -> Decoded<()> {
        let op = match action {
            "add" => Op::AtomicAdd,
            "exch" => Op::AtomicExchange,
            _ => return Err(format!("unknown atomic operation `{action}`")),
        };
        let (address, offset) = self.address(scope, operands[0], 64)?;
        let value = self.source(scope, operands[1], bits)?;
        let size = (bits / 8) as u8;
        self.emit(Instruction {
            size,
            alignment: size,
            bits: bits as u8,
            ..operation(op, to, [address, value, ZERO], offset)
        });
        Ok(())
    }

    fn shuffle(&mut self, scope: &Scope, mode: &str, operands: &[&str]) -> Decoded<()> {
        let mode = match mode {
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Butterfly,
            "idx" => Shuffle::Index,
            _ => return Err(format!("unknown shuffle `{mode}`")),
        };
        let (to, predicate) = match operands[0].split_once('|') {
            Some((to, predicate)) => (to, self.destination(scope, predicate, 1)?),
            None => (operands[0], UNUSED),
        };
        let to = self.destination(scope, to, 32)?;
        let mut sources = [ZERO; 4];
        for (source, name) in sources.iter_mut().zip(&operands[1..]) {
            *source = self.source(scope, name, 32)?;
        }
        let [a, b, c, mask] = sources;
        let extra = i32::from(predicate) | i32::from(mask) << 16;
        self.emit(operation(Op::Shuffle(mode), to, [a, b, c], extra));
        Ok(())
    }

    /// `call.uni (retval0), name, (param0, param1)`.
    fn call(&mut self, scope: &Scope, operands: &[&str]) -> Decoded<()> {
        let [result, name, arguments] = operands else {
            return Err("only calls with a result and arguments are known".to_owned());
        };
        let module = self.module;
        let function = module
            .functions
            .iter()
            .find(|found| found.name == *name && !found.is_kernel);
        let function = function.ok_or_else(|| format!("unknown function `{name}`"))?;
        let slots = |text: &str| -> Decoded<Vec<u16>> {
            let slot = |name: &&str| scope.slots.get(*name).copied();
            let slots = inner(text, '(', ')')?.iter().map(slot).collect();
            Option::ok_or(slots, format!("unknown parameter in `{text}`"))
        };
        let (result, arguments) = (slots(result)?, slots(arguments)?);
        if result.len() != 1 || arguments.len() != function.parameters.len() {
            return Err("another number of arguments than the function has".to_owned());
        }
        let known = self
            .callees
            .iter()
            .position(|callee| callee.function.name == *name);
        let index = known.unwrap_or_else(|| {
            let callee = Callee {
                function,
                parameters: arguments.iter().map(|_| self.slot()).collect(),
                result: self.slot(),
                return_to: self.slot(),
                calls: Vec::new(),
            };
            self.callees.push(callee);
            self.callees.len() - 1
        });
        if scope.return_to.is_some() {
            return Err("calls within functions are not known".to_owned());
        }
        let parameters = self.callees[index].parameters.clone();
        for (parameter, argument) in parameters.into_iter().zip(arguments) {
            self.emit(operation(Op::Move, parameter, [argument, ZERO, ZERO], 0));
        }
        let (from, return_to) = (self.callees[index].result, self.callees[index].return_to);
        self.callees[index].calls.push(self.kernel.code.len());
        self.emit(operation(Op::Call, return_to, [ZERO; 3], 0));
        self.emit(operation(Op::Move, result[0], [from, ZERO, ZERO], 0));
        Ok(())
    }
}

/// Operation, bits of the destination and of the sources of what has no further modifiers. Float operations without
/// `.rn` are not known: an assembler may fuse them.
fn arithmetic(opcode: &str) -> Option<(Op, u32, &'static [u32])> {
    const ONE: [&[u32]; 2] = [&[32], &[64]];
    const TWO: [&[u32]; 2] = [&[32, 32], &[64, 64]];
    const THREE: &[u32] = &[32, 32, 32];
    Some(match opcode {
        "and.pred" => (Op::And, 1, &[1, 1]),
        "or.pred" => (Op::Or, 1, &[1, 1]),
        "xor.pred" => (Op::Xor, 1, &[1, 1]),
        "and.b16" => (Op::And, 16, &[16, 16]),
        "or.b16" => (Op::Or, 16, &[16, 16]),
        "xor.b16" => (Op::Xor, 16, &[16, 16]),
        "and.b32" => (Op::And, 32, TWO[0]),
        "or.b32" => (Op::Or, 32, TWO[0]),
        "xor.b32" => (Op::Xor, 32, TWO[0]),
        "and.b64" => (Op::And, 64, TWO[1]),
        "or.b64" => (Op::Or, 64, TWO[1]),
        "xor.b64" => (Op::Xor, 64, TWO[1]),
        "add.s32" | "add.u32" => (Op::Add32, 32, TWO[0]),
        "add.s64" | "add.u64" => (Op::Add64, 64, TWO[1]),
        "sub.s32" | "sub.u32" => (Op::Sub32, 32, TWO[0]),
        "sub.s64" | "sub.u64" => (Op::Sub64, 64, TWO[1]),
        "mul.lo.s32" | "mul.lo.u32" => (Op::Mul32, 32, TWO[0]),
        "mul.lo.s64" | "mul.lo.u64" => (Op::Mul64, 64, TWO[1]),
        "mul.hi.s32" => (Op::MulHighSigned, 32, TWO[0]),
        "mul.hi.u32" => (Op::MulHighUnsigned, 32, TWO[0]),
        "mul.wide.s32" => (Op::MulWideSigned, 64, TWO[0]),
        // Operands are extended with zeros.
        "mul.wide.u32" => (Op::Mul64, 64, TWO[0]),
        "mul.wide.u16" => (Op::Mul32, 32, &[16, 16]),
        "mad.lo.s32" | "mad.lo.u32" => (Op::Mad32, 32, THREE),
        "div.s32" => (Op::DivSigned, 32, TWO[0]),
        "div.u32" => (Op::DivUnsigned, 32, TWO[0]),
        "rem.s32" => (Op::RemSigned, 32, TWO[0]),
        "rem.u32" => (Op::RemUnsigned, 32, TWO[0]),
        "min.s32" => (Op::MinSigned, 32, TWO[0]),
        "min.u32" => (Op::MinUnsigned, 32, TWO[0]),
        "max.s32" => (Op::MaxSigned, 32, TWO[0]),
        "max.u32" => (Op::MaxUnsigned, 32, TWO[0]),
        "shl.b32" => (Op::Shl32, 32, TWO[0]),
        "shl.b64" => (Op::Shl64, 64, &[64, 32]),
        "shr.u16" => (Op::ShrUnsigned32, 16, &[16, 32]),
        "shr.u32" | "shr.b32" => (Op::ShrUnsigned32, 32, TWO[0]),
        "shr.s32" => (Op::ShrSigned32, 32, TWO[0]),
        "shr.u64" | "shr.b64" => (Op::ShrUnsigned64, 64, &[64, 32]),
        "shr.s64" => (Op::ShrSigned64, 64, &[64, 32]),
        "popc.b32" => (Op::PopCount, 32, ONE[0]),
        "clz.b32" => (Op::LeadingZeros, 32, ONE[0]),
        "bfind.shiftamt.u32" => (Op::FindShift, 32, ONE[0]),
        "brev.b32" => (Op::ReverseBits, 32, ONE[0]),
        "prmt.b32" => (Op::PermuteBytes, 32, THREE),
        "dp4a.s32.s32" => (Op::Dot4, 32, THREE),
        "add.rn.f32" => (Op::AddF32, 32, TWO[0]),
        "sub.rn.f32" => (Op::SubF32, 32, TWO[0]),
        "mul.rn.f32" => (Op::MulF32, 32, TWO[0]),
        "div.rn.f32" => (Op::DivF32, 32, TWO[0]),
        "fma.rn.f32" => (Op::FmaF32, 32, THREE),
        "fma.rm.f32" => (Op::FmaDownF32, 32, THREE),
        "sqrt.rn.f32" => (Op::SqrtF32, 32, ONE[0]),
        "rcp.rn.f32" => (Op::ReciprocalF32, 32, ONE[0]),
        "rcp.approx.ftz.f32" => (Op::ReciprocalFlushedF32, 32, ONE[0]),
        "ex2.approx.f32" => (Op::Exp2F32, 32, ONE[0]),
        "ex2.approx.ftz.f32" => (Op::Exp2FlushedF32, 32, ONE[0]),
        "min.f32" => (Op::MinF32, 32, TWO[0]),
        "max.f32" => (Op::MaxF32, 32, TWO[0]),
        "neg.f32" => (Op::NegF32, 32, ONE[0]),
        "abs.f32" => (Op::AbsF32, 32, ONE[0]),
        "add.rn.f64" => (Op::AddF64, 64, TWO[1]),
        _ => return None,
    })
}
