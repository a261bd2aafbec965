//! [`Arena`]: device memory in one range of addresses.
//!
//! The driver allocates whole pages of 2 MiB, so that a model of hundreds of small matrices would lose hundreds of MiB. An
//! arena reserves addresses for all memory of the device and maps pages as they are needed: less than a page is lost in
//! all.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use std::collections::BTreeMap;

use cudarc::driver::{DriverError, sys};

/// Alignment of allocations in bytes, which the driver promises too.
const ALIGNMENT: u64 = 256;

/// Memory of a device that is mapped at consecutive addresses.
pub(super) struct Arena {
    base: u64,
    reserved: u64,
    page: u64,
    properties: sys::CUmemAllocationProp,
    ranges: Ranges,
    /// Mapped chunks in ascending order: their size in bytes, whole pages.
    chunks: Vec<(u64, sys::CUmemGenericAllocationHandle)>,
}

impl Arena {
    /// Reserves addresses for `bytes` of device number `index`.
    pub(super) fn new(index: usize, bytes: usize) -> Result<Self, DriverError> {
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: index as i32,
        };
        let properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let flag = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let (mut page, mut base) = (0, 0);
        // SAFETY: the calls write one number each.
        unsafe {
            sys::cuMemGetAllocationGranularity(&mut page, &properties, flag).result()?;
            page = page.max(1);
            let reserved = bytes.next_multiple_of(page);
            sys::cuMemAddressReserve(&mut base, reserved, 0, 0, 0).result()?;
            Ok(Self {
                base,
                reserved: reserved as u64,
                page: page as u64,
                properties,
                ranges: Ranges::default(),
                chunks: Vec::new(),
            })
        }
    }

    /// Allocates memory and returns its address.
    pub(super) fn allocate(&mut self, bytes: usize) -> Result<u64, DriverError> {
        let (offset, end) = self.ranges.take(bytes as u64);
        match self.map(end) {
            Ok(()) => Ok(self.base + offset),
            Err(why) => {
                self.free(self.base + offset, bytes);
                Err(why)
            }
        }
    }

    /// Frees what [`allocate`](Self::allocate) has returned; nothing on the device uses it.
    pub(super) fn free(&mut self, address: u64, bytes: usize) {
        let end = self.ranges.put_back(address - self.base, bytes as u64);
        while let Some((size, handle)) = self.chunks.last().copied() {
            let start = self.mapped() - size;
            if start < end {
                break;
            }
            self.chunks.pop();
            // SAFETY: the chunk was mapped here, and no allocation is in it. On failure the device is lost, and its memory with
            // it.
            unsafe {
                let _ = sys::cuMemUnmap(self.base + start, size as usize);
                let _ = sys::cuMemRelease(handle);
            }
        }
    }

    /// Bytes that are mapped.
    fn mapped(&self) -> u64 {
        self.chunks.iter().map(|(size, _)| size).sum()
    }

    /// Maps pages up to the offset `end`.
    fn map(&mut self, end: u64) -> Result<(), DriverError> {
        let start = self.mapped();
        if end <= start {
            return Ok(());
        }
        let size = (end - start).next_multiple_of(self.page);
        if start + size > self.reserved {
            return Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        }
        let access = sys::CUmemAccessDesc {
            location: self.properties.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let (address, bytes) = (self.base + start, size as usize);
        let mut handle = 0;
        // SAFETY: the addresses are reserved and not mapped; what was made is undone on failure.
        unsafe {
            sys::cuMemCreate(&mut handle, bytes, &self.properties, 0).result()?;
            let mapped = sys::cuMemMap(address, bytes, 0, handle, 0).result();
            let done = mapped.and_then(|()| {
                let allowed = sys::cuMemSetAccess(address, bytes, &access, 1).result();
                allowed.inspect_err(|_| {
                    let _ = sys::cuMemUnmap(address, bytes);
                })
            });
            done.inspect_err(|_| {
                let _ = sys::cuMemRelease(handle);
            })?;
        }
        self.chunks.push((size, handle));
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let mut start = 0;
        for (size, handle) in self.chunks.drain(..) {
            // SAFETY: as in `free`; the device is dropped.
            unsafe {
                let _ = sys::cuMemUnmap(self.base + start, size as usize);
                let _ = sys::cuMemRelease(handle);
            }
            start += size;
        }
        // SAFETY: reserved by `new`, with this size.
        let _ = unsafe { sys::cuMemAddressFree(self.base, self.reserved as usize) };
    }
}

/// Offsets in use and free ones between them.
#[derive(Debug, Default)]
struct Ranges {
    /// Start and length of free ranges, none adjacent to another or to the end.
    free: BTreeMap<u64, u64>,
    /// End of the last range in use.
    end: u64,
}

impl Ranges {
    /// Takes the first free range of at least `bytes`, or the end. Returns its offset, and the end of what is in use.
    fn take(&mut self, bytes: u64) -> (u64, u64) {
        let size = padded(bytes);
        let found = self.free.iter().find(|(_, length)| **length >= size);
        let Some((&start, &length)) = found else {
            let start = self.end;
            self.end += size;
            return (start, self.end);
        };
        self.free.remove(&start);
        if length > size {
            self.free.insert(start + size, length - size);
        }
        (start, self.end)
    }

    /// Puts a range back. Returns the end of what is in use.
    fn put_back(&mut self, mut start: u64, bytes: u64) -> u64 {
        let mut end = start + padded(bytes);
        if let Some(length) = self.free.remove(&end) {
            end += length;
        }
        if let Some((&before, &length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            self.free.remove(&before);
            start = before;
        }
        if end == self.end {
            self.end = start;
        } else {
            self.free.insert(start, end - start);
        }
        self.end
    }
}

/// Bytes that an allocation of `bytes` takes.
fn padded(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_in_use_never_overlap_and_are_reused() {
        let mut ranges = Ranges::default();
        let mut used: Vec<(u64, u64)> = Vec::new();
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..20_000 {
            if random(2) == 0 || used.is_empty() {
                let bytes = random(5000);
                let (start, end) = ranges.take(bytes);
                let stop = start + bytes.max(1);
                assert!(start % ALIGNMENT == 0 && stop <= end);
                let is_free = |(other, length): &(u64, u64)| {
                    stop <= *other || other + length.max(&1) <= start
                };
                assert!(used.iter().all(is_free));
                used.push((start, bytes));
            } else {
                let index = random(used.len() as u64) as usize;
                let (start, bytes) = used.swap_remove(index);
                ranges.put_back(start, bytes);
            }
            // Free ranges and those in use make up the whole.
            let taken: u64 = used.iter().map(|(_, bytes)| padded(*bytes)).sum();
            assert_eq!(taken + ranges.free.values().sum::<u64>(), ranges.end);
        }
        for (start, bytes) in used.drain(..) {
            ranges.put_back(start, bytes);
        }
        assert!(ranges.free.is_empty() && ranges.end == 0);
    }
}
