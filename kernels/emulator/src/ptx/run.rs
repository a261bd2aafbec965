//! Runs the threads of a block: each on its own until it meets a barrier or an operation of its warp.

use std::ops::Range;

use super::{
    instruction::{Kernel, Op, Shuffle, Space, Special},
    memory::Memory,
    step::{Next, step},
    tensor_core,
};

/// Lanes of a warp.
const WARP: usize = 32;

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    /// At the barrier at its program counter.
    Barrier,
    /// At the operation of the warp at its program counter.
    Warp,
    Exited,
}

/// A thread, without its registers.
#[derive(Debug)]
pub(super) struct Thread {
    state: State,
    /// Index of the next instruction.
    counter: usize,
    /// Asynchronous copies that have not landed: to shared memory, from global memory.
    pub(super) copies: Vec<[u64; 2]>,
    /// Number of copies at the end of each group that was committed.
    pub(super) groups: Vec<usize>,
}

/// Runs all blocks of a grid, one after the other.
///
/// # Errors
///
/// A thread makes a mistake: its block, number, line in the PTX and the mistake.
pub(crate) fn run_grid(
    kernel: &Kernel,
    grid: [u32; 3],
    threads: u32,
    mut memory: Memory<'_>,
) -> Result<(), String> {
    let blocks = (0..grid[2])
        .flat_map(|z| (0..grid[1]).flat_map(move |y| (0..grid[0]).map(move |x| [x, y, z])));
    let mut registers = vec![0; kernel.registers.len() * threads as usize];
    for block in blocks {
        for (thread, registers) in registers
            .chunks_exact_mut(kernel.registers.len())
            .enumerate()
        {
            registers.copy_from_slice(&kernel.registers);
            for (slot, special) in &kernel.specials {
                let value = match *special {
                    Special::Thread(0) => thread as u32,
                    Special::Thread(_) => 0,
                    Special::Threads(0) => threads,
                    Special::Threads(_) => 1,
                    Special::Block(dimension) => block[dimension],
                    Special::Blocks(dimension) => grid[dimension],
                    Special::Lane => (thread % WARP) as u32,
                };
                registers[usize::from(*slot)] = value.into();
            }
        }
        memory.begin_block();
        let new_thread = || Thread {
            state: State::Ready,
            counter: 0,
            copies: Vec::new(),
            groups: Vec::new(),
        };
        let mut running = Block {
            kernel,
            registers: &mut registers,
            threads: (0..threads).map(|_| new_thread()).collect(),
            memory: &mut memory,
        };
        running.run().map_err(|(thread, reason)| {
            let line = kernel.lines[running.threads[thread].counter];
            let [x, y, z] = block;
            format!("line {line} of the PTX: block ({x}, {y}, {z}) thread {thread} {reason}")
        })?;
    }
    Ok(())
}

/// A running thread block.
struct Block<'a, 'm> {
    kernel: &'a Kernel,
    /// The registers of all threads.
    registers: &'a mut [u64],
    threads: Vec<Thread>,
    memory: &'a mut Memory<'m>,
}

/// A thread and its mistake.
type Mistake = (usize, String);

impl Block<'_, '_> {
    fn run(&mut self) -> Result<(), Mistake> {
        let count = self.threads.len();
        loop {
            for first in (0..count).step_by(WARP) {
                self.run_warp(first..count.min(first + WARP))?;
            }
            // Every thread that has not exited waits at the barrier, or for lanes that can never arrive.
            let waits = |state| self.threads.iter().position(|thread| thread.state == state);
            if let Some(thread) = waits(State::Warp) {
                let reason = "waits for lanes of its warp that have exited or wait elsewhere";
                return Err((thread, reason.to_owned()));
            }
            let Some(first) = waits(State::Barrier) else {
                return Ok(());
            };
            let counter = self.threads[first].counter;
            for (index, thread) in self.threads.iter_mut().enumerate() {
                if thread.state != State::Barrier {
                    continue;
                }
                if thread.counter != counter {
                    let reason =
                        format!("waits at another barrier than thread {first} of its block");
                    return Err((index, reason));
                }
                thread.counter += 1;
                thread.state = State::Ready;
            }
        }
    }

    /// Runs the threads of a warp until all wait at a barrier or have exited, or none can go on.
    fn run_warp(&mut self, lanes: Range<usize>) -> Result<(), Mistake> {
        loop {
            let mut has_run = false;
            for thread in lanes.clone() {
                if self.threads[thread].state == State::Ready {
                    self.run_thread(thread).map_err(|reason| (thread, reason))?;
                    has_run = true;
                }
            }
            for thread in lanes.clone() {
                if self.threads[thread].state == State::Warp {
                    self.complete(thread, lanes.clone())
                        .map_err(|reason| (thread, reason))?;
                }
            }
            if !has_run {
                return Ok(());
            }
        }
    }

    fn register(&self, thread: usize, slot: u16) -> u64 {
        self.registers[thread * self.kernel.registers.len() + usize::from(slot)]
    }

    fn set_register(&mut self, thread: usize, slot: u16, value: u64) {
        self.registers[thread * self.kernel.registers.len() + usize::from(slot)] = value;
    }

    /// Completes the operation of the warp at which a thread waits, if all lanes of its mask that run have arrived.
    fn complete(&mut self, thread: usize, lanes: Range<usize>) -> Result<(), String> {
        let counter = self.threads[thread].counter;
        let instruction = self.kernel.code[counter];
        let mask = |block: &Self, thread: usize| -> u32 {
            match instruction.op {
                Op::SyncWarp => block.register(thread, instruction.a) as u32,
                Op::Ballot => block.register(thread, instruction.b) as u32,
                Op::Shuffle(_) => block.register(thread, (instruction.extra >> 16) as u16) as u32,
                _ => u32::MAX,
            }
        };
        let members = mask(self, thread);
        let lane = thread - lanes.start;
        if members >> lane & 1 == 0 {
            return Err("is not in the mask of its own warp operation".to_owned());
        }
        let mut participants = Vec::with_capacity(WARP);
        for other in lanes
            .clone()
            .filter(|other| members >> (other - lanes.start) & 1 == 1)
        {
            match self.threads[other].state {
                State::Exited => {}
                State::Warp if self.threads[other].counter == counter => {
                    if mask(self, other) != members {
                        return Err("has another mask than a lane of its mask".to_owned());
                    }
                    participants.push(other);
                }
                _ => return Ok(()),
            }
        }
        let sources = |block: &Self, slot: u16| -> [u64; WARP] {
            let mut values = [0; WARP];
            for other in &participants {
                values[other - lanes.start] = block.register(*other, slot);
            }
            values
        };
        match instruction.op {
            Op::Shuffle(kind) => {
                let values = sources(self, instruction.a);
                for other in &participants {
                    let lane = other - lanes.start;
                    let by = self.register(*other, instruction.b) as usize & 31;
                    let clamp = self.register(*other, instruction.c) as usize;
                    let (segment, clamp) = (clamp >> 8 & 31, clamp & 31);
                    let last = lane & segment | clamp & !segment;
                    let (source, is_inside) = match kind {
                        Shuffle::Up => (lane.wrapping_sub(by), lane >= last + by),
                        Shuffle::Down => (lane + by, lane + by <= last),
                        Shuffle::Butterfly => (lane ^ by, lane ^ by <= last),
                        Shuffle::Index => {
                            let source = lane & segment | by & !segment;
                            (source, source <= last)
                        }
                    };
                    let source = if is_inside { source } else { lane };
                    if !participants.contains(&(lanes.start + source)) {
                        return Err(format!("shuffles from lane {source}, which takes no part"));
                    }
                    self.set_register(*other, instruction.to, values[source]);
                    self.set_register(*other, instruction.extra as u16, is_inside.into());
                }
            }
            Op::Ballot => {
                let votes = sources(self, instruction.a).into_iter().enumerate();
                let votes = votes.fold(0, |votes, (lane, vote)| votes | vote << lane);
                for other in &participants {
                    self.set_register(*other, instruction.to, votes);
                }
            }
            Op::LoadMatrices => {
                if participants.len() != WARP {
                    return Err("loads matrices without all lanes of its warp".to_owned());
                }
                let list = self.kernel.lists[instruction.extra as usize];
                // Of each lane's row two parts of four elements.
                let mut rows = [[0; 2]; WARP];
                for (address, row) in sources(self, list[4]).into_iter().zip(&mut rows) {
                    for (place, part) in row.iter_mut().enumerate() {
                        let from = address + 8 * place as u64;
                        *part = self
                            .memory
                            .load(Space::Shared, from, 8, 16 - 8 * place as u8)?;
                    }
                }
                for (lane, thread) in lanes.enumerate() {
                    let (row, pair) = (lane / 4, lane % 4);
                    for (matrix, slot) in list[..4].iter().enumerate() {
                        let part: u64 = rows[8 * matrix + row][pair / 2];
                        self.set_register(thread, *slot, part >> (32 * (pair % 2)) & 0xffff_ffff);
                    }
                }
            }
            Op::Mma => {
                if participants.len() != WARP {
                    return Err("multiplies matrices without all lanes of its warp".to_owned());
                }
                let list = self.kernel.lists[instruction.extra as usize];
                let fragments = std::array::from_fn(|lane| {
                    std::array::from_fn(|index| {
                        self.register(lanes.start + lane, list[4 + index]) as u32
                    })
                });
                let sums = tensor_core::multiply_accumulate(&fragments);
                for (other, sums) in lanes.zip(sums) {
                    for (slot, sum) in list.iter().zip(sums) {
                        self.set_register(other, *slot, sum.into());
                    }
                }
            }
            _ => {}
        }
        for other in participants {
            self.threads[other].counter += 1;
            self.threads[other].state = State::Ready;
        }
        Ok(())
    }

    /// Runs a thread until it waits or exits. After an error, its counter is that of the instruction.
    fn run_thread(&mut self, thread: usize) -> Result<(), String> {
        let count = self.kernel.registers.len();
        let registers = &mut self.registers[thread * count..][..count];
        let thread = &mut self.threads[thread];
        let mut counter = thread.counter;
        let (state, result) = loop {
            let instruction = self.kernel.code[counter];
            match step(&instruction, registers, thread, self.memory, counter) {
                Ok(Next::Follow) => counter += 1,
                Ok(Next::Jump(target)) => counter = target,
                Ok(Next::Wait(state)) => break (state, Ok(())),
                Err(reason) => break (thread.state, Err(reason)),
            }
        };
        thread.counter = counter;
        thread.state = state;
        result
    }
}
