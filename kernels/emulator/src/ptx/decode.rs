//! Decodes the statements of a kernel, and of the functions that it calls, into [`Instruction`]s.

use std::collections::HashMap;

use super::{
    PtxError,
    arithmetic::arithmetic,
    instruction::{Instruction, Kernel, Op, Shuffle, Space},
    operand::{Scope, inner, parse_type, split_operands},
    parse::{Function, Module},
};

/// Slot of the constant 0, for operands that an operation does not have.
pub(super) const ZERO: u16 = 0;
/// Slot of results that nothing reads.
pub(super) const UNUSED: u16 = 1;
/// The only product of matrices that is known.
const MMA: &str = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32";
const LOAD_MATRICES: &str = "ldmatrix.sync.aligned.m8n8.x4.shared.b16";
/// Number of registers that a thread may have.
const MAX_REGISTERS: usize = 1 << 16;

/// Result of decoding a statement; the error is the reason.
pub(super) type Decoded<T> = Result<T, String>;

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
    // Functions follow the kernel. They call no others.
    for callee in std::mem::take(&mut decoder.callees) {
        let entry = decoder.kernel.code.len() as i32;
        for call in &callee.calls {
            decoder.kernel.code[*call].extra = entry;
        }
        decoder.function(callee.function, Some(&callee))?;
    }
    Ok(decoder.kernel)
}

/// A function that the kernel calls, with registers of its own, since it cannot call itself.
struct Callee<'a> {
    function: &'a Function<'a>,
    /// Slots of the parameters, of the result and of the place to return to.
    parameters: Vec<u16>,
    result: u16,
    return_to: u16,
    /// Instructions that call it.
    calls: Vec<usize>,
}

/// A kernel that is being decoded.
pub(super) struct Decoder<'a> {
    pub(super) module: &'a Module<'a>,
    pub(super) kernel: Kernel,
    pub(super) constants: HashMap<u64, u16>,
    pub(super) special_slots: HashMap<String, u16>,
    callees: Vec<Callee<'a>>,
    /// Line of the statement.
    line: u32,
}

/// The operands of an operation, for [`Decoder::emit`].
pub(super) fn operation(op: Op, to: u16, [a, b, c]: [u16; 3], extra: i32) -> Instruction {
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

    pub(super) fn emit(&mut self, instruction: Instruction) {
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
            let mut sources = [ZERO; 4];
            for (index, bits) in source_bits.iter().enumerate() {
                sources[index] = self.source(scope, operands[index + 1], *bits)?;
            }
            let [a, b, c, fourth] = sources;
            let op = match op {
                Op::Logic3 if self.kernel.registers[usize::from(fourth)] == 0xea => Op::AndOr,
                op => op,
            };
            self.emit(Instruction {
                bits: to_bits as u8,
                ..operation(op, to, [a, b, c], fourth.into())
            });
            return Ok(());
        }
        let parts: Vec<&str> = opcode.split('.').collect();
        match parts[..] {
            ["mov", kind] => {
                count(2)?;
                self.move_value(scope, kind, &operands)
            }
            ["setp", comparison, ref combine @ .., kind] if combine.len() <= 1 => {
                self.compare(scope, comparison, combine.first().copied(), kind, &operands)
            }
            ["cvt", ref modifiers @ ..] => {
                count(2)?;
                self.convert(scope, modifiers, &operands)
            }
            ["ld" | "st", ref modifiers @ ..] => {
                count(2)?;
                self.access(scope, parts[0] == "ld", modifiers, &operands)
            }
            ["atom", "global", action, kind] => {
                count(3)?;
                let (_, bits) = parse_type(kind)?;
                let to = self.destination(scope, operands[0], bits)?;
                self.atomic(scope, action, to, bits, &operands[1..])
            }
            ["red", "global", action @ "add", kind] => {
                count(2)?;
                let (_, bits) = parse_type(kind)?;
                self.atomic(scope, action, UNUSED, bits, &operands)
            }
            // Only the order of accesses, of which there is one, and the speed are affected.
            ["membar", "gl" | "cta" | "sys"] | ["prefetch", "global", "L2"] => Ok(()),
            ["cp", "async", "cg", "shared", "global"] => {
                count(3)?;
                let (a, to_offset) = self.address(scope, operands[0], 32)?;
                let (b, from_offset) = self.address(scope, operands[1], 64)?;
                if (operands[2], to_offset, from_offset) != ("16", 0, 0) {
                    return Err("only copies of 16 bytes without offsets are known".to_owned());
                }
                self.emit(operation(Op::CopyAsync, UNUSED, [a, b, ZERO], 0));
                Ok(())
            }
            ["cp", "async", "commit_group"] => self.control(Op::CommitCopies, 0),
            ["cp", "async", "wait_all"] => self.control(Op::WaitCopies, -1),
            ["cp", "async", "wait_group"] => {
                count(1)?;
                let groups = self.immediate(scope, operands[0])? as i32;
                self.control(Op::WaitCopies, groups)
            }
            ["bra"] | ["bra", "uni"] => {
                count(1)?;
                let branch = (self.kernel.code.len(), operands[0].to_owned());
                scope.branches.push(branch);
                self.control(Op::Branch, 0)
            }
            ["call"] | ["call", "uni"] => self.call(scope, &operands),
            ["ret"] => {
                self.emit_return(scope);
                Ok(())
            }
            ["exit"] => self.control(Op::Exit, 0),
            ["trap"] => self.control(Op::Trap, 0),
            ["bar", "sync"] if operands == ["0"] => self.control(Op::Barrier, 0),
            ["bar", "warp", "sync"] => {
                count(1)?;
                let a = self.source(scope, operands[0], 32)?;
                self.emit(operation(Op::SyncWarp, UNUSED, [a, ZERO, ZERO], 0));
                Ok(())
            }
            ["shfl", "sync", mode, "b32"] => {
                count(5)?;
                self.shuffle(scope, mode, &operands)
            }
            _ if opcode == MMA => {
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
                let index = self.kernel.lists.len() as i32;
                self.kernel
                    .lists
                    .push(slots.try_into().expect("14 registers"));
                self.control(Op::Mma, index)
            }
            _ if opcode == LOAD_MATRICES => {
                count(2)?;
                let mut list = [UNUSED; 14];
                let names = inner(operands[0], '{', '}')?;
                if names.len() != 4 {
                    return Err(format!("expected 4 registers in `{}`", operands[0]));
                }
                for (slot, name) in list.iter_mut().zip(names) {
                    *slot = self.source(scope, name, 32)?;
                }
                list[4] = self.source(scope, inner(operands[1], '[', ']')?[0], 32)?;
                let index = self.kernel.lists.len() as i32;
                self.kernel.lists.push(list);
                self.control(Op::LoadMatrices, index)
            }
            _ => Err(format!("unknown opcode `{opcode}`")),
        }
    }

    fn control(&mut self, op: Op, extra: i32) -> Decoded<()> {
        self.emit(operation(op, UNUSED, [ZERO; 3], extra));
        Ok(())
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
