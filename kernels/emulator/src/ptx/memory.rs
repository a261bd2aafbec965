//! Memory of a running thread block: every access is checked to lie in an allocation and to be aligned.
#![expect(unsafe_code, reason = "accesses memory by address")]

use std::{
    ops::Range,
    sync::atomic::{AtomicU32, Ordering},
};

use super::instruction::{SHARED_BASE, SHARED_WINDOW, Space};

/// The memory that a thread block may access.
#[derive(Debug)]
pub(crate) struct Memory<'a> {
    /// Allocations of global memory, sorted.
    allocations: &'a [Range<u64>],
    /// The allocation accessed last.
    last: Range<u64>,
    /// Shared memory; words, so that it is aligned.
    shared: Vec<u128>,
    shared_bytes: u64,
    arguments: &'a [u8],
}

impl<'a> Memory<'a> {
    /// # Safety
    /// While it lives, the allocations stay allocated, and only its accesses and those through atomics change them.
    pub(crate) unsafe fn new(
        allocations: &'a [Range<u64>],
        shared_bytes: usize,
        arguments: &'a [u8],
    ) -> Self {
        Self {
            allocations,
            last: 0..0,
            shared: vec![u128::MAX; shared_bytes.div_ceil(size_of::<u128>())],
            shared_bytes: shared_bytes as u64,
            arguments,
        }
    }

    /// Makes all shared memory NaN, for the next block.
    pub(crate) fn begin_block(&mut self) {
        self.shared.fill(u128::MAX);
    }

    /// Loads `bytes` bytes, extended with zeros.
    ///
    /// # Errors
    ///
    /// The access is out of bounds or not aligned.
    #[inline]
    pub(crate) fn load(
        &mut self,
        space: Space,
        address: u64,
        bytes: u8,
        alignment: u8,
    ) -> Result<u64, String> {
        let place = self.resolve(space, address, bytes.into(), alignment.into(), "loads")?;
        // SAFETY: `resolve` checked that these bytes are allocated.
        Ok(unsafe {
            match bytes {
                1 => u64::from(*place),
                2 => u64::from(place.cast::<u16>().read_unaligned()),
                4 => u64::from(place.cast::<u32>().read_unaligned()),
                _ => place.cast::<u64>().read_unaligned(),
            }
        })
    }

    /// Stores the low `bytes` bytes of a value. Errors as [`Memory::load`].
    #[inline]
    pub(crate) fn store(
        &mut self,
        space: Space,
        address: u64,
        value: u64,
        bytes: u8,
        alignment: u8,
    ) -> Result<(), String> {
        let place = self.resolve(space, address, bytes.into(), alignment.into(), "stores")?;
        // SAFETY: as for loads; the decoder refuses stores to parameters.
        unsafe {
            match bytes {
                1 => *place = value as u8,
                2 => place.cast::<u16>().write_unaligned(value as u16),
                4 => place.cast::<u32>().write_unaligned(value as u32),
                _ => place.cast::<u64>().write_unaligned(value),
            }
        }
        Ok(())
    }

    /// The word at a global address, for accesses that are ordered with those of the host. Errors as [`Memory::load`].
    pub(crate) fn word(&mut self, address: u64) -> Result<&AtomicU32, String> {
        let place = self.resolve(Space::Global, address, 4, 4, "accesses")?;
        // SAFETY: as for loads; an aligned word that the host accesses with atomics too.
        Ok(unsafe { AtomicU32::from_ptr(place.cast()) })
    }

    /// Loads with [`Ordering::Acquire`].
    pub(crate) fn load_acquire(&mut self, address: u64) -> Result<u64, String> {
        Ok(self.word(address)?.load(Ordering::Acquire).into())
    }

    /// Stores with [`Ordering::Release`].
    pub(crate) fn store_release(&mut self, address: u64, value: u64) -> Result<(), String> {
        self.word(address)?.store(value as u32, Ordering::Release);
        Ok(())
    }

    /// Checks an access of `bytes` bytes and returns where it is.
    #[inline]
    fn resolve(
        &mut self,
        space: Space,
        address: u64,
        bytes: u64,
        alignment: u64,
        action: &str,
    ) -> Result<*mut u8, String> {
        if address & (alignment - 1) != 0 {
            return Err(format!(
                "{action} at {address:#x}, which is not aligned to {alignment} bytes"
            ));
        }
        let (offset, size, start) = match space {
            Space::Shared => self.shared_range(address),
            Space::Generic if address >= SHARED_WINDOW => {
                self.shared_range(address.wrapping_sub(SHARED_WINDOW))
            }
            Space::Parameter => (
                address,
                self.arguments.len() as u64,
                self.arguments.as_ptr().cast_mut(),
            ),
            Space::Global | Space::Generic => {
                if !(self.last.start <= address && address < self.last.end) {
                    let next = self
                        .allocations
                        .partition_point(|range| range.start <= address);
                    self.last = match next {
                        0 => 0..0,
                        next => self.allocations[next - 1].clone(),
                    };
                }
                (
                    address.wrapping_sub(self.last.start),
                    self.last.end - self.last.start,
                    self.last.start as *mut u8,
                )
            }
        };
        if offset >= size || size - offset < bytes {
            return Err(format!(
                "{action} {bytes} bytes at {address:#x}, outside of {space:?} memory"
            ));
        }
        // SAFETY: within the allocation, the shared memory or the arguments.
        Ok(unsafe { start.add(offset as usize) })
    }

    fn shared_range(&mut self, address: u64) -> (u64, u64, *mut u8) {
        (
            address.wrapping_sub(SHARED_BASE),
            self.shared_bytes,
            self.shared.as_mut_ptr().cast(),
        )
    }
}
