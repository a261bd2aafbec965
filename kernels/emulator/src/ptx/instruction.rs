//! Decoded instructions: operations with operands resolved to register slots.

/// Base of shared memory in its own address space; below it, addresses are errors.
pub(crate) const SHARED_BASE: u64 = 1024;
/// What `cvta.shared` adds: the generic addresses of shared memory. No host pointer is that large.
pub(crate) const SHARED_WINDOW: u64 = 1 << 60;

/// State space of a memory access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Parameter,
}

/// Special register, constant while a thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    /// `%tid`, of this dimension.
    Thread(usize),
    /// `%ntid`.
    Threads(usize),
    /// `%ctaid`.
    Block(usize),
    /// `%nctaid`.
    Blocks(usize),
    /// `%laneid`.
    Lane,
}

/// Which lane a shuffle reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// An operation. Operands `a`, `b`, `c` and destination `to` are slots, unless stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Move,
    Pack16,
    /// `a` if `c`, else `b`.
    Select,
    And,
    Or,
    Xor,
    /// Of the bits of the destination.
    Not,
    /// `cvta.shared`.
    ToGeneric,
    Add32,
    Add64,
    Sub32,
    Sub64,
    /// Low word of the product; of 16 bits too, with a product of 32.
    Mul32,
    Mul64,
    MulWideSigned,
    MulHighSigned,
    MulHighUnsigned,
    Mad32,
    DivSigned,
    DivUnsigned,
    RemSigned,
    RemUnsigned,
    MinSigned,
    MinUnsigned,
    MaxSigned,
    MaxUnsigned,
    Shl32,
    Shl64,
    ShrSigned32,
    ShrSigned64,
    ShrUnsigned32,
    ShrUnsigned64,
    PopCount,
    LeadingZeros,
    /// `bfind.shiftamt`: as [`Op::LeadingZeros`], but all ones of 0.
    FindShift,
    ReverseBits,
    /// Inserts `a` into `b` at bit `c`; `extra` is the slot of the length.
    InsertBits32,
    InsertBits64,
    /// `a & b | c`, the most frequent `lop3`.
    AndOr,
    /// `lop3`; `extra` is the slot of the table.
    Logic3,
    PermuteBytes,
    /// `dp4a.s32.s32`.
    Dot4,
    /// The comparisons are inverted if `extra` is 1.
    Equal,
    LessSigned32,
    LessUnsigned32,
    LessSigned64,
    LessUnsigned64,
    EqualF32,
    UnequalF32,
    /// Whether one of both is NaN.
    UnorderedF32,
    LessF32,
    LessEqualF32,
    AddF32,
    SubF32,
    MulF32,
    DivF32,
    FmaF32,
    /// `fma.rm`: rounds down.
    FmaDownF32,
    SqrtF32,
    MinF32,
    MaxF32,
    NegF32,
    AbsF32,
    Exp2F32,
    /// With subnormal inputs and results flushed to 0.
    Exp2FlushedF32,
    ReciprocalF32,
    ReciprocalFlushedF32,
    SaturateF32,
    AddF64,
    F32ToF64,
    F16ToF32,
    F32ToF16,
    /// From an integer of `size` bytes.
    IntToF32,
    /// To `s32`, towards 0; saturated, and 0 of NaN.
    F32ToInt,
    /// From `size` bytes to a register.
    Extend,
    Timer,
    /// From `a + extra`, `size` bytes.
    Load(Space),
    LoadAcquire,
    /// Of `b` to `a + extra`.
    Store(Space),
    StoreRelease,
    AtomicAdd,
    AtomicExchange,
    /// 16 bytes from `b` to shared `a`, `extra` more on both sides being 0.
    CopyAsync,
    CommitCopies,
    /// Waits for all groups but `extra`; for all copies if that is negative.
    WaitCopies,
    /// To instruction `extra`.
    Branch,
    /// If `a`.
    BranchIf,
    BranchUnless,
    /// Of the instruction `extra`, with `to` for the place to return to.
    Call,
    Return,
    Exit,
    Trap,
    Barrier,
    /// With mask `a`.
    SyncWarp,
    /// Of `a` by `b`, clamped by `c`; the low half of `extra` is the slot of the predicate, the high one of the mask.
    Shuffle(Shuffle),
    /// Of `a` with mask `b`.
    Ballot,
    /// `extra` is an index into [`Kernel::lists`].
    Mma,
    /// `ldmatrix`, of four matrices.
    LoadMatrices,
}

/// A decoded instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Instruction {
    pub(crate) op: Op,
    /// Bytes of a memory access or of the number that is converted.
    pub(crate) size: u8,
    /// Alignment that a memory access needs.
    pub(crate) alignment: u8,
    /// Whether a load or conversion extends the sign.
    pub(crate) is_signed: bool,
    /// Bits of the destination register of loads and conversions.
    pub(crate) bits: u8,
    pub(crate) to: u16,
    pub(crate) a: u16,
    pub(crate) b: u16,
    pub(crate) c: u16,
    pub(crate) extra: i32,
}

/// A kernel that can run.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) code: Vec<Instruction>,
    /// Line in the PTX of each instruction.
    pub(crate) lines: Vec<u32>,
    /// Registers of a thread at its start: constants, and for all others all ones, which is NaN.
    pub(crate) registers: Vec<u64>,
    /// Slots that hold special registers.
    pub(crate) specials: Vec<(u16, Special)>,
    /// Operands of `mma`: four of d, four of a, two of b, four of c.
    pub(crate) lists: Vec<[u16; 14]>,
    pub(crate) argument_bytes: usize,
    pub(crate) max_threads: u32,
}
