//! Decodes moves, comparisons, conversions, and all arithmetic that a table describes.

use super::{
    decode::{Decoded, Decoder, ZERO, operation},
    instruction::{Instruction, Op},
    operand::{Scope, inner, parse_type},
};

/// Operation, bits of the destination and of the sources of what has no further modifiers. Float operations without
/// `.rn` are not known: an assembler may fuse them.
pub(super) fn arithmetic(opcode: &str) -> Option<(Op, u32, &'static [u32])> {
    const ONE: [&[u32]; 2] = [&[32], &[64]];
    const TWO: [&[u32]; 2] = [&[32, 32], &[64, 64]];
    const THREE: &[u32] = &[32, 32, 32];
    Some(match opcode {
        "cvta.to.global.u64" => (Op::Move, 64, &[64]),
        "cvta.shared.u64" => (Op::ToGeneric, 64, &[64]),
        "selp.u16" | "selp.b16" => (Op::Select, 16, &[16, 16, 1]),
        "selp.b32" | "selp.u32" | "selp.s32" | "selp.f32" => (Op::Select, 32, &[32, 32, 1]),
        "selp.b64" | "selp.u64" | "selp.s64" => (Op::Select, 64, &[64, 64, 1]),
        "not.pred" => (Op::Not, 1, &[1]),
        "not.b16" => (Op::Not, 16, &[16]),
        "not.b32" => (Op::Not, 32, &[32]),
        "not.b64" => (Op::Not, 64, &[64]),
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
        "bfi.b32" => (Op::InsertBits32, 32, &[32, 32, 32, 32]),
        "bfi.b64" => (Op::InsertBits64, 64, &[64, 64, 32, 32]),
        "lop3.b32" => (Op::Logic3, 32, &[32, 32, 32, 32]),
        "vote.sync.ballot.b32" => (Op::Ballot, 32, &[1, 32]),
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

impl Decoder<'_> {
    pub(super) fn move_value(
        &mut self,
        scope: &Scope,
        kind: &str,
        operands: &[&str],
    ) -> Decoded<()> {
        let (_, bits) = parse_type(kind)?;
        let to = self.destination(scope, operands[0], bits)?;
        let instruction = if operands[1] == "%globaltimer" {
            operation(Op::Timer, to, [ZERO; 3], 0)
        } else if operands[1].starts_with('{') {
            let parts = inner(operands[1], '{', '}')?;
            let ([low, high], 32) = (&parts[..], bits) else {
                return Err("only two registers of 16 bits can be packed".to_owned());
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
    pub(super) fn compare(
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
            ("nan", Some(_)) => (Op::UnorderedF32, false, false),
            ("num", Some(_)) => (Op::UnorderedF32, false, true),
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

    pub(super) fn convert(
        &mut self,
        scope: &Scope,
        modifiers: &[&str],
        operands: &[&str],
    ) -> Decoded<()> {
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
            (["rzi"], ('s', 32), ('f', 32)) => Op::F32ToInt,
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
}
