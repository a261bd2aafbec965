//! Executes one instruction of a thread.

use std::time::Instant;

use half::f16;

use super::{
    instruction::{Instruction, Op, SHARED_WINDOW, Space},
    memory::Memory,
    run::{State, Thread},
};

/// How a thread goes on.
pub(super) enum Next {
    Follow,
    Jump(usize),
    Wait(State),
}

fn float(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// Bits of a result; there is one NaN.
fn bits(value: f32) -> u64 {
    match value.is_nan() {
        true => 0x7fff_ffff,
        false => value.to_bits().into(),
    }
}

fn signed(bits: u64) -> i32 {
    bits as i32
}

fn unsigned(value: i32) -> u64 {
    u64::from(value as u32)
}

/// The low `bytes` bytes of a value, as a number in a register of `instruction.bits`.
fn extend(instruction: &Instruction, value: u64) -> u64 {
    let unused = 64 - 8 * u32::from(instruction.size);
    let value = value << unused;
    let value = match instruction.is_signed {
        true => (value as i64 >> unused) as u64,
        false => value >> unused,
    };
    value & u64::MAX >> (64 - u32::from(instruction.bits))
}

/// Shifts by `amount`, which may be as large as the number; `past` is the result then.
fn shift<T>(amount: u64, bits: u32, past: T, by: impl Fn(u32) -> T) -> T {
    match amount as u32 {
        amount if amount < bits => by(amount),
        _ => past,
    }
}

/// Executes one instruction.
#[inline]
pub(super) fn step(
    instruction: &Instruction,
    registers: &mut [u64],
    thread: &mut Thread,
    memory: &mut Memory<'_>,
    counter: usize,
) -> Result<Next, String> {
    let i = instruction;
    let a = registers[usize::from(i.a)];
    let b = registers[usize::from(i.b)];
    let c = registers[usize::from(i.c)];
    let address = || a.wrapping_add(i.extra as i64 as u64);
    let truth = |value: bool| u64::from(value) ^ i.extra as u64;
    let value = match i.op {
        Op::Move => a,
        Op::Pack16 => a | b << 16,
        Op::Select => match c {
            0 => b,
            _ => a,
        },
        Op::And => a & b,
        Op::Or => a | b,
        Op::Xor => a ^ b,
        Op::Not => !a & u64::MAX >> (64 - u32::from(i.bits)),
        Op::ToGeneric => a.wrapping_add(SHARED_WINDOW),
        Op::Add32 => unsigned(signed(a).wrapping_add(signed(b))),
        Op::Add64 => a.wrapping_add(b),
        Op::Sub32 => unsigned(signed(a).wrapping_sub(signed(b))),
        Op::Sub64 => a.wrapping_sub(b),
        Op::Mul32 => unsigned(signed(a).wrapping_mul(signed(b))),
        Op::Mul64 => a.wrapping_mul(b),
        Op::MulWideSigned => (i64::from(signed(a)) * i64::from(signed(b))) as u64,
        Op::MulHighSigned => unsigned(((i64::from(signed(a)) * i64::from(signed(b))) >> 32) as i32),
        Op::MulHighUnsigned => (a * b) >> 32,
        Op::Mad32 => unsigned(signed(a).wrapping_mul(signed(b)).wrapping_add(signed(c))),
        Op::DivSigned | Op::DivUnsigned | Op::RemSigned | Op::RemUnsigned if b == 0 => {
            return Err("divides by 0".to_owned());
        }
        Op::DivSigned => unsigned(signed(a).wrapping_div(signed(b))),
        Op::DivUnsigned => a / b,
        Op::RemSigned => unsigned(signed(a).wrapping_rem(signed(b))),
        Op::RemUnsigned => a % b,
        Op::MinSigned => unsigned(signed(a).min(signed(b))),
        Op::MinUnsigned => a.min(b),
        Op::MaxSigned => unsigned(signed(a).max(signed(b))),
        Op::MaxUnsigned => a.max(b),
        Op::Shl32 => shift(b, 32, 0, |by| u64::from((a as u32) << by)),
        Op::Shl64 => shift(b, 64, 0, |by| a << by),
        Op::ShrSigned32 => unsigned(shift(b, 32, signed(a) >> 31, |by| signed(a) >> by)),
        Op::ShrSigned64 => shift(b, 64, a as i64 >> 63, |by| a as i64 >> by) as u64,
        Op::ShrUnsigned32 => shift(b, 32, 0, |by| a >> by),
        Op::ShrUnsigned64 => shift(b, 64, 0, |by| a >> by),
        Op::PopCount => a.count_ones().into(),
        Op::LeadingZeros => (a as u32).leading_zeros().into(),
        Op::FindShift => match a {
            0 => u32::MAX.into(),
            a => (a as u32).leading_zeros().into(),
        },
        Op::ReverseBits => (a as u32).reverse_bits().into(),
        Op::InsertBits32 | Op::InsertBits64 => {
            let (bits, all) = match i.op {
                Op::InsertBits64 => (64, u64::MAX),
                _ => (32, u64::from(u32::MAX)),
            };
            let (position, length) = (c & 0xff, registers[i.extra as usize] & 0xff);
            let field = shift(length, bits, all, |length| (1 << length) - 1);
            let field = shift(position, bits, 0, |by| field << by) & all;
            b & !field | shift(position, bits, 0, |by| a << by) & field
        }
        Op::AndOr => a & b | c,
        Op::Logic3 => {
            let table = registers[i.extra as usize];
            let term = |row: i32| match table >> row & 1 {
                0 => 0,
                _ => {
                    let of = |value: u64, bit| if row >> bit & 1 == 1 { value } else { !value };
                    of(a, 2) & of(b, 1) & of(c, 0)
                }
            };
            (0..8).fold(0, |found, row| found | term(row)) & u64::from(u32::MAX)
        }
        Op::PermuteBytes => {
            let bytes = (a | b << 32).to_le_bytes();
            let pick = |byte: usize| {
                let selector = c as usize >> (4 * byte);
                match (bytes[selector & 7], selector & 8) {
                    (byte, 0) => byte,
                    (byte, _) => (byte as i8 >> 7) as u8,
                }
            };
            u32::from_le_bytes(std::array::from_fn(pick)).into()
        }
        Op::Dot4 => {
            let [x, y] = [a, b].map(|value| (value as u32).to_le_bytes().map(|byte| byte as i8));
            let products = x.iter().zip(y).map(|(x, y)| i32::from(*x) * i32::from(y));
            unsigned(signed(c).wrapping_add(products.sum()))
        }
        Op::Equal => truth(a == b),
        Op::LessSigned32 => truth(signed(a) < signed(b)),
        Op::LessUnsigned32 | Op::LessUnsigned64 => truth(a < b),
        Op::LessSigned64 => truth((a as i64) < b as i64),
        Op::EqualF32 => truth(float(a) == float(b)),
        Op::UnorderedF32 => truth(float(a).is_nan() || float(b).is_nan()),
        Op::UnequalF32 => truth(float(a) < float(b) || float(a) > float(b)),
        Op::LessF32 => truth(float(a) < float(b)),
        Op::LessEqualF32 => truth(float(a) <= float(b)),
        Op::AddF32 => bits(float(a) + float(b)),
        Op::SubF32 => bits(float(a) - float(b)),
        Op::MulF32 => bits(float(a) * float(b)),
        Op::DivF32 => bits(float(a) / float(b)),
        Op::FmaF32 => bits(float(a).mul_add(float(b), float(c))),
        Op::FmaDownF32 => bits(fused_down(float(a), float(b), float(c))),
        Op::SqrtF32 => bits(float(a).sqrt()),
        // The sign of 0 counts, unlike in Rust's functions.
        Op::MinF32 => bits(match (float(a), float(b)) {
            (x, y) if x == y => float(a | b),
            (x, y) => x.min(y),
        }),
        Op::MaxF32 => bits(match (float(a), float(b)) {
            (x, y) if x == y => float(a & b),
            (x, y) => x.max(y),
        }),
        Op::NegF32 => a ^ 1 << 31,
        Op::AbsF32 => a & !(1 << 31),
        // The function of the C library, as in the emulator, so that attention can be compared bit for bit.
        Op::Exp2F32 => bits(float(a).exp2()),
        Op::Exp2FlushedF32 => bits(flushed(flushed(float(a)).exp2())),
        Op::ReciprocalF32 => bits(1.0 / float(a)),
        Op::ReciprocalFlushedF32 => bits(flushed(1.0 / flushed(float(a)))),
        Op::SaturateF32 => match float(a) {
            x if x > 0.0 => bits(x.min(1.0)),
            _ => 0,
        },
        Op::AddF64 => (f64::from_bits(a) + f64::from_bits(b)).to_bits(),
        Op::F32ToF64 => f64::from(float(a)).to_bits(),
        Op::F16ToF32 => bits(f16::from_bits(a as u16).to_f32()),
        Op::F32ToF16 => match float(a) {
            x if x.is_nan() => 0x7fff,
            x => f16::from_f32(x).to_bits().into(),
        },
        Op::F32ToInt => (float(a) as i32 as u32).into(),
        Op::IntToF32 => bits(extend(&Instruction { bits: 64, ..*i }, a) as i64 as f32),
        Op::Extend => extend(i, a),
        Op::Timer => nanoseconds(),
        Op::Load(space) => extend(i, memory.load(space, address(), i.size, i.alignment)?),
        Op::LoadAcquire => memory.load_acquire(address())?,
        Op::Store(space) => {
            memory.store(space, address(), b, i.size, i.alignment)?;
            return Ok(Next::Follow);
        }
        Op::StoreRelease => {
            memory.store_release(address(), b)?;
            return Ok(Next::Follow);
        }
        Op::AtomicAdd | Op::AtomicExchange => {
            let before = memory.load(Space::Global, address(), i.size, i.alignment)?;
            let after = match i.op {
                Op::AtomicAdd => before.wrapping_add(b),
                _ => b,
            };
            memory.store(Space::Global, address(), after, i.size, i.alignment)?;
            before
        }
        Op::CopyAsync => {
            // The target is not to be read before the copy lands, which it does as late as allowed.
            for half in [0, 8] {
                memory.load(Space::Global, b.wrapping_add(half), 8, 16 - half as u8)?;
                memory.store(
                    Space::Shared,
                    a.wrapping_add(half),
                    u64::MAX,
                    8,
                    16 - half as u8,
                )?;
            }
            thread.copies.push([a, b]);
            return Ok(Next::Follow);
        }
        Op::CommitCopies => {
            thread.groups.push(thread.copies.len());
            return Ok(Next::Follow);
        }
        Op::WaitCopies => {
            let landing = match usize::try_from(i.extra) {
                Ok(groups) => {
                    let done = thread.groups.len().saturating_sub(groups);
                    thread.groups.drain(..done).next_back().unwrap_or(0)
                }
                Err(_) => {
                    thread.groups.clear();
                    thread.copies.len()
                }
            };
            for [to, from] in thread.copies.drain(..landing) {
                for half in [0, 8] {
                    let value = memory.load(Space::Global, from + half, 8, 8)?;
                    memory.store(Space::Shared, to + half, value, 8, 8)?;
                }
            }
            thread.groups.iter_mut().for_each(|end| *end -= landing);
            return Ok(Next::Follow);
        }
        Op::Branch => return Ok(Next::Jump(i.extra as usize)),
        Op::BranchIf if a != 0 => return Ok(Next::Jump(i.extra as usize)),
        Op::BranchUnless if a == 0 => return Ok(Next::Jump(i.extra as usize)),
        Op::BranchIf | Op::BranchUnless => return Ok(Next::Follow),
        Op::Call => {
            registers[usize::from(i.to)] = counter as u64 + 1;
            return Ok(Next::Jump(i.extra as usize));
        }
        Op::Return => return Ok(Next::Jump(a as usize)),
        Op::Exit => return Ok(Next::Wait(State::Exited)),
        Op::Trap => return Err("meets a trap".to_owned()),
        Op::Barrier => return Ok(Next::Wait(State::Barrier)),
        Op::SyncWarp | Op::Shuffle(_) | Op::Ballot | Op::Mma | Op::LoadMatrices => {
            return Ok(Next::Wait(State::Warp));
        }
    };
    registers[usize::from(i.to)] = value;
    Ok(Next::Follow)
}

fn flushed(value: f32) -> f32 {
    match value.is_subnormal() {
        true => 0.0f32.copysign(value),
        false => value,
    }
}

/// a · b + c, rounded down.
fn fused_down(a: f32, b: f32, c: f32) -> f32 {
    // The product is exact; so is the sum with its error.
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    if !sum.is_finite() {
        return sum as f32;
    }
    let part = sum - product;
    let error = (product - (sum - part)) + (c - part);
    if sum == 0.0 && error == 0.0 {
        let is_negative = product.is_sign_negative() || c.is_sign_negative();
        return if is_negative { -0.0 } else { 0.0 };
    }
    let nearest = sum as f32;
    match f64::from(nearest) > sum || f64::from(nearest) == sum && error < 0.0 {
        true => nearest.next_down(),
        false => nearest,
    }
}

/// Nanoseconds of a clock that all blocks share.
fn nanoseconds() -> u64 {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    START.elapsed().as_nanos() as u64
}
