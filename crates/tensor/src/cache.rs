//! KV-cache number formats, and the keys or values of a layer at every position in the order in which attention
//! streams them.

use std::fmt;
use std::str::FromStr;

use bytemuck::{Pod, Zeroable};
use half::{f16, slice::HalfFloatSliceExt as _};

use crate::TensorError;
use crate::format::BLOCK;
use crate::pack::pack_q8_0;

/// Number format of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CacheFormat {
    /// Single precision.
    F32,
    /// Half precision; larger magnitudes saturate at its largest number.
    F16,
    /// Signed bytes; 32 numbers of a head at one position share an `f16` scale.
    Q8_0,
}

impl CacheFormat {
    /// Every format, widest first.
    pub const ALL: [CacheFormat; 3] = [CacheFormat::F32, CacheFormat::F16, CacheFormat::Q8_0];

    /// Name in files, on the command line and in messages.
    pub fn name(self) -> &'static str {
        match self {
            CacheFormat::F32 => "f32",
            CacheFormat::F16 => "f16",
            CacheFormat::Q8_0 => "q8_0",
        }
    }

    /// Size in bytes of a block of 32 numbers.
    pub fn block_bytes(self) -> usize {
        match self {
            CacheFormat::F32 => BLOCK * 4,
            CacheFormat::F16 => BLOCK * 2,
            CacheFormat::Q8_0 => BLOCK + 2,
        }
    }

    /// Size in bytes of a [`CacheBlock`] with its scales.
    fn cache_block_bytes(self) -> usize {
        BLOCK * self.block_bytes()
    }

    /// Size in bytes of the scales of a [`CacheBlock`].
    fn scale_bytes(self) -> usize {
        match self {
            CacheFormat::F32 | CacheFormat::F16 => 0,
            CacheFormat::Q8_0 => size_of::<[f16; BLOCK]>(),
        }
    }

    /// Size in bytes of a [`CachePlane`] of `heads` heads with room for `positions`; heads and positions are filled
    /// up to multiples of 32.
    pub fn plane_bytes(self, heads: usize, head_size: usize, positions: usize) -> usize {
        let blocks = positions.next_multiple_of(BLOCK) * heads * head_size.div_ceil(BLOCK);
        blocks * self.block_bytes()
    }

    /// All names, for messages.
    pub fn names() -> String {
        CacheFormat::ALL.map(CacheFormat::name).join(", ")
    }
}

impl fmt::Display for CacheFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for CacheFormat {
    type Err = TensorError;

    fn from_str(name: &str) -> Result<Self, TensorError> {
        CacheFormat::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| TensorError::UnknownCacheFormat {
                name: name.to_owned(),
            })
    }
}

/// 32 numbers of a head at 32 positions, in the order of the [`CacheLayout`].
pub type CacheBlock<T> = [[T; BLOCK]; BLOCK];

/// Positions whose keys are adjacent: a register of the narrowest vector instructions, and few enough that a key is written to
/// few cache lines.
pub const KEY_GROUP: usize = 8;

/// A [`CacheBlock`] of keys: `[group of positions, number, position]`.
pub type KeyBlock<T> = [[[T; KEY_GROUP]; BLOCK]; BLOCK / KEY_GROUP];

/// Order of the numbers within a [`CacheBlock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheLayout {
    /// [`KeyBlock`]: products with the keys of many positions grow in parallel.
    Keys,
    /// `[position, number]`: 32 sums of values grow in parallel.
    Values,
}

impl CacheLayout {
    /// Place of number `index` at `position` within a block.
    fn place(self, index: usize, position: usize) -> usize {
        match self {
            CacheLayout::Keys => {
                (position / KEY_GROUP * BLOCK + index) * KEY_GROUP + position % KEY_GROUP
            }
            CacheLayout::Values => position * BLOCK + index,
        }
    }
}

/// Keys or values of a layer at every position: `[tiles, heads, ⌈head size / 32⌉]` blocks, a tile being 32
/// positions, so that the last positions of all heads are adjacent. A head is filled up to whole blocks with zeros,
/// and so is the last tile.
#[derive(Debug)]
pub struct CachePlane {
    layout: CacheLayout,
    format: CacheFormat,
    heads: usize,
    head_size: usize,
    positions: usize,
    capacity: usize,
    /// Blocks of the tiles in use, as in [`CacheData`].
    numbers: Vec<CacheLine>,
    /// Scales of the blocks; empty in the plain formats.
    scales: Vec<CacheLine>,
}

/// Blocks of a [`CachePlane`], borrowed, one variant per [`CacheFormat`].
#[derive(Debug, Clone, Copy)]
pub enum CacheData<'a> {
    /// `[tiles, heads, ⌈head size / 32⌉]`.
    F32(&'a [CacheBlock<f32>]),
    /// `[tiles, heads, ⌈head size / 32⌉]`.
    F16(&'a [CacheBlock<f16>]),
    /// A number is `quant * scale`.
    Q8_0 {
        /// `[tiles, heads, ⌈head size / 32⌉]`.
        quants: &'a [CacheBlock<i8>],
        /// One scale per position, for each block.
        scales: &'a [[f16; BLOCK]],
    },
}

impl CachePlane {
    /// Reserves a plane with room for `positions`; `None` if the allocation fails. Unused memory is not
    /// touched.
    pub fn new(
        layout: CacheLayout,
        format: CacheFormat,
        heads: usize,
        head_size: usize,
        positions: usize,
    ) -> Option<CachePlane> {
        let tiles = positions.div_ceil(BLOCK);
        let blocks = heads.checked_mul(head_size.div_ceil(BLOCK))?;
        let blocks = tiles.checked_mul(blocks)?;
        let bytes = blocks.checked_mul(format.cache_block_bytes())?;
        let scales = blocks * format.scale_bytes();
        Some(CachePlane {
            layout,
            format,
            heads,
            head_size,
            positions: 0,
            capacity: tiles * BLOCK,
            numbers: reserved(bytes - scales)?,
            scales: reserved(scales)?,
        })
    }

    /// Number format.
    pub fn format(&self) -> CacheFormat {
        self.format
    }

    /// Number of heads.
    #[inline]
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Numbers of a head.
    #[inline]
    pub fn head_size(&self) -> usize {
        self.head_size
    }

    /// Numbers of a head, rounded up to a multiple of 32.
    #[inline]
    pub fn width(&self) -> usize {
        self.head_size.next_multiple_of(BLOCK)
    }

    /// Number of positions stored.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Size in bytes of the reserved memory.
    pub fn bytes(&self) -> usize {
        (self.numbers.capacity() + self.scales.capacity()) * size_of::<CacheLine>()
    }

    /// Appends a position; `heads` is `[heads, head_size]`.
    ///
    /// # Panics
    ///
    /// Panics if the plane is full or `heads` has another length.
    pub fn push(&mut self, heads: &[f32]) {
        assert_eq!(
            heads.len(),
            self.heads * self.head_size,
            "numbers of all heads"
        );
        let each = heads.chunks(self.head_size);
        if let Some((tile, writer, _)) = self.append(1) {
            let tiles = tile.chunks_exact_mut(writer.head_bytes);
            return tiles
                .zip(each)
                .for_each(|(tile, head)| writer.write(tile, head));
        }
        assert!(self.positions < self.capacity, "the plane has room");
        let (tile, column) = (self.positions / BLOCK, self.positions % BLOCK);
        if column == 0 {
            self.set_tiles(tile + 1);
        }
        let (layout, first) = (self.layout, tile * self.tile_blocks());
        let blocks = (first..).zip(each.flat_map(|head| head.chunks(BLOCK)));
        if let CacheDataMut::Q8_0 { quants, scales } = self.data_mut() {
            blocks.for_each(|(index, numbers)| {
                let mut padded = [0.0; BLOCK];
                padded[..numbers.len()].copy_from_slice(numbers);
                let (packed, scale) = pack_q8_0(&padded);
                // A block with a NaN shows it, instead of quants that look sound.
                let is_number = !numbers.iter().any(|number| number.is_nan());
                scales[index][column] = saturated(if is_number { scale } else { f32::NAN });
                let packed = &packed[..numbers.len()];
                write(&mut quants[index], layout, column, packed);
            });
        }
        self.positions += 1;
    }

    /// Appends up to `most` positions of one tile, with all numbers 0. Returns the memory of the tile, `[heads, bytes of a head]`; a writer
    /// for one head at the first new position; and the number of new positions. Returns `None` in a quantised format; use
    /// [`Self::push`] instead.
    ///
    /// # Panics
    ///
    /// Panics if the plane is full.
    pub fn append(&mut self, most: usize) -> Option<(&mut [u8], HeadWriter, usize)> {
        if self.format == CacheFormat::Q8_0 {
            return None;
        }
        let (tile, column) = (self.positions / BLOCK, self.positions % BLOCK);
        let count = most.min(BLOCK - column);
        assert!(
            self.positions + count <= self.capacity,
            "the plane has room"
        );
        if column == 0 {
            self.set_tiles(tile + 1);
        }
        self.positions += count;
        let writer = HeadWriter {
            layout: self.layout,
            format: self.format,
            column,
            head_bytes: self.head_size.div_ceil(BLOCK) * self.format.cache_block_bytes(),
        };
        let tile_bytes = self.heads * writer.head_bytes;
        let numbers: &mut [u8] = bytemuck::cast_slice_mut(&mut self.numbers);
        Some((&mut numbers[tile * tile_bytes..], writer, count))
    }

    /// Keeps the first `positions`.
    pub fn truncate(&mut self, positions: usize) {
        if positions >= self.positions {
            return;
        }
        self.positions = positions;
        self.set_tiles(positions.div_ceil(BLOCK));
        // The rest of the last tile is zero, as in a tile that was never filled.
        let (tile, column) = (positions / BLOCK, positions % BLOCK);
        if column > 0 {
            let (layout, tile_blocks) = (self.layout, self.tile_blocks());
            let blocks = tile * tile_blocks..(tile + 1) * tile_blocks;
            match self.data_mut() {
                CacheDataMut::F32(all) => blank(&mut all[blocks], layout, column),
                CacheDataMut::F16(all) => blank(&mut all[blocks], layout, column),
                CacheDataMut::Q8_0 { quants, scales } => {
                    blank(&mut quants[blocks.clone()], layout, column);
                    for scales in &mut scales[blocks] {
                        scales[column..].fill(f16::ZERO);
                    }
                }
            }
        }
    }

    /// Replaces the contents by the first `positions` of `other`, a plane of the same shape and format.
    ///
    /// # Panics
    ///
    /// Panics if `other` has fewer positions or another shape or format, or if the plane has no room for them.
    pub fn copy_from(&mut self, other: &CachePlane, positions: usize) {
        let shape = |plane: &CachePlane| (plane.format, plane.heads, plane.head_size);
        assert_eq!(shape(self), shape(other), "planes of one shape and format");
        assert!(positions <= other.positions, "in range");
        let (numbers, scales) = other.as_bytes();
        self.read_bytes(numbers, scales, positions);
    }

    /// The blocks of the tiles in use.
    #[inline]
    pub fn data(&self) -> CacheData<'_> {
        match self.format {
            CacheFormat::F32 => CacheData::F32(bytemuck::cast_slice(&self.numbers)),
            CacheFormat::F16 => CacheData::F16(bytemuck::cast_slice(&self.numbers)),
            CacheFormat::Q8_0 => CacheData::Q8_0 {
                quants: bytemuck::cast_slice(&self.numbers),
                scales: bytemuck::cast_slice(&self.scales),
            },
        }
    }

    /// The same, mutably.
    fn data_mut(&mut self) -> CacheDataMut<'_> {
        match self.format {
            CacheFormat::F32 => CacheDataMut::F32(bytemuck::cast_slice_mut(&mut self.numbers)),
            CacheFormat::F16 => CacheDataMut::F16(bytemuck::cast_slice_mut(&mut self.numbers)),
            CacheFormat::Q8_0 => CacheDataMut::Q8_0 {
                quants: bytemuck::cast_slice_mut(&mut self.numbers),
                scales: bytemuck::cast_slice_mut(&mut self.scales),
            },
        }
    }

    /// Bytes of the numbers, and of the scales, which only quantised formats have: tile after tile, in
    /// each the blocks of all heads.
    pub fn as_bytes(&self) -> (&[u8], &[u8]) {
        (
            bytemuck::cast_slice(&self.numbers),
            bytemuck::cast_slice(&self.scales),
        )
    }

    /// Replaces the contents by the first `positions` of bytes in the order of [`CachePlane::as_bytes`].
    ///
    /// # Panics
    ///
    /// Panics if there are too few bytes, or if the plane has no room for the positions.
    pub fn read_bytes(&mut self, numbers: &[u8], scales: &[u8], positions: usize) {
        assert!(positions <= self.capacity, "the plane has room");
        let tiles = positions.div_ceil(BLOCK);
        self.set_tiles(tiles);
        let fill = |to: &mut [CacheLine], from: &[u8]| {
            let to: &mut [u8] = bytemuck::cast_slice_mut(to);
            to.copy_from_slice(&from[..to.len()]);
        };
        fill(&mut self.numbers, numbers);
        fill(&mut self.scales, scales);
        self.positions = tiles * BLOCK;
        self.truncate(positions);
    }

    /// Size in bytes of a head as [`copy_rows`](Self::copy_rows) stores it.
    pub fn rows_bytes(&self) -> usize {
        let blocks = self.head_size.div_ceil(BLOCK);
        let position = match self.format {
            CacheFormat::F32 => 4 * self.head_size,
            CacheFormat::F16 => 2 * self.head_size,
            CacheFormat::Q8_0 => blocks * self.format.block_bytes(),
        };
        self.positions * position
    }

    /// Copies `head` at all positions to `rows`, position by position instead of in blocks: numbers `[positions, head size]`. Quantised
    /// formats have numbers `[positions, ⌈head size / 32⌉ · 32]`, followed by scales `[⌈head size / 32⌉, positions]`.
    ///
    /// # Panics
    ///
    /// Panics if the length of `rows` is not [`rows_bytes`](Self::rows_bytes).
    pub fn copy_rows(&self, head: usize, rows: &mut [u8]) {
        assert_eq!(rows.len(), self.rows_bytes(), "all positions of a head");
        match self.data() {
            CacheData::F32(blocks) => self.copy_numbers(blocks, head, self.head_size, rows),
            CacheData::F16(blocks) => self.copy_numbers(blocks, head, self.head_size, rows),
            CacheData::Q8_0 { quants, scales } => {
                let size = self.head_size.next_multiple_of(BLOCK);
                let (numbers, rest) = rows.split_at_mut(self.positions * size);
                self.copy_numbers(quants, head, size, numbers);
                for (block, rest) in rest.chunks_exact_mut(2 * self.positions).enumerate() {
                    for (tile, rest) in rest.chunks_mut(2 * BLOCK).enumerate() {
                        let scales = &scales[self.block(head, tile) + block];
                        rest.copy_from_slice(&bytemuck::cast_slice(scales)[..rest.len()]);
                    }
                }
            }
        }
    }

    /// Copies the first `size` numbers of `head` at all positions to `rows`.
    fn copy_numbers<T: Pod>(
        &self,
        blocks: &[CacheBlock<T>],
        head: usize,
        size: usize,
        rows: &mut [u8],
    ) {
        for (tile, rows) in rows.chunks_mut(BLOCK * size * size_of::<T>()).enumerate() {
            for (position, row) in rows.chunks_exact_mut(size * size_of::<T>()).enumerate() {
                for (block, part) in row.chunks_mut(BLOCK * size_of::<T>()).enumerate() {
                    let block = blocks[self.block(head, tile) + block].as_flattened();
                    for (index, number) in part.chunks_exact_mut(size_of::<T>()).enumerate() {
                        let place = self.layout.place(index, position);
                        number.copy_from_slice(bytemuck::bytes_of(&block[place]));
                    }
                }
            }
        }
    }

    /// Number `index` of `head` at `position`, without its scale.
    pub fn value(&self, head: usize, position: usize, index: usize) -> f32 {
        let block = self.block(head, position / BLOCK) + index / BLOCK;
        let place = self.layout.place(index % BLOCK, position % BLOCK);
        match self.data() {
            CacheData::F32(blocks) => blocks[block].as_flattened()[place],
            CacheData::F16(blocks) => blocks[block].as_flattened()[place].to_f32(),
            CacheData::Q8_0 { quants, .. } => f32::from(quants[block].as_flattened()[place]),
        }
    }

    /// Scale of the numbers of block `block` of `head` at `position`, 1 in the plain formats.
    pub fn scale(&self, head: usize, position: usize, block: usize) -> f32 {
        match self.data() {
            CacheData::Q8_0 { scales, .. } => {
                let block = self.block(head, position / BLOCK) + block;
                scales[block][position % BLOCK].to_f32()
            }
            _ => 1.0,
        }
    }

    /// Number of tiles of 32 positions in use.
    #[inline]
    pub fn tiles(&self) -> usize {
        self.positions.div_ceil(BLOCK)
    }

    /// Order of the numbers within blocks.
    #[inline]
    pub fn layout(&self) -> CacheLayout {
        self.layout
    }

    /// Index of the first block of `head` in `tile`.
    #[inline]
    pub fn block(&self, head: usize, tile: usize) -> usize {
        (tile * self.heads + head) * self.head_size.div_ceil(BLOCK)
    }

    /// Blocks of 32 numbers that a tile takes.
    fn tile_blocks(&self) -> usize {
        self.block(0, 1)
    }

    /// Adds tiles of zeros, or drops the last ones, to have `tiles`.
    fn set_tiles(&mut self, tiles: usize) {
        let blocks = tiles * self.tile_blocks();
        let scales = blocks * self.format.scale_bytes() / size_of::<CacheLine>();
        let numbers = blocks * self.format.cache_block_bytes() / size_of::<CacheLine>() - scales;
        self.numbers.resize(numbers, CacheLine::zeroed());
        self.scales.resize(scales, CacheLine::zeroed());
    }
}

/// Writes the numbers of a head at one position of a plane.
#[derive(Debug, Clone, Copy)]
pub struct HeadWriter {
    layout: CacheLayout,
    format: CacheFormat,
    column: usize,
    /// Bytes of a head in a tile.
    pub head_bytes: usize,
}

impl HeadWriter {
    /// Writer for the position that comes `positions` later in the same tile.
    #[must_use]
    pub fn after(self, positions: usize) -> Self {
        Self {
            column: self.column + positions,
            ..self
        }
    }

    /// Yields the bytes that [`write`](Self::write) changes in `tiles`, the tiles of one or more heads.
    pub fn written<'a>(&self, tiles: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let block_bytes = self.format.cache_block_bytes();
        let (index, count) = match self.layout {
            CacheLayout::Keys => (self.column / KEY_GROUP, BLOCK / KEY_GROUP),
            CacheLayout::Values => (self.column, BLOCK),
        };
        let length = block_bytes / count;
        let blocks = tiles.chunks_exact(block_bytes);
        blocks.map(move |block| &block[index * length..][..length])
    }

    /// Writes `numbers [head size]` to the `tile` of the head, which has [`head_bytes`](Self::head_bytes) bytes.
    ///
    /// # Panics
    ///
    /// Panics if `tile` has another length or is not aligned like the plane's memory, or if there are more numbers than a head has.
    pub fn write(&self, tile: &mut [u8], numbers: &[f32]) {
        assert_eq!(tile.len(), self.head_bytes, "the tile of one head");
        let blocks = numbers.chunks(BLOCK).enumerate();
        match self.format {
            CacheFormat::F32 => {
                let tile: &mut [CacheBlock<f32>] = bytemuck::cast_slice_mut(tile);
                blocks.for_each(|(index, numbers)| {
                    write(&mut tile[index], self.layout, self.column, numbers);
                });
            }
            CacheFormat::F16 => {
                let tile: &mut [CacheBlock<f16>] = bytemuck::cast_slice_mut(tile);
                blocks.for_each(|(index, numbers)| {
                    let packed = &saturated_block(numbers)[..numbers.len()];
                    write(&mut tile[index], self.layout, self.column, packed);
                });
            }
            CacheFormat::Q8_0 => unreachable!("quantised planes have no writers"),
        }
    }
}

/// Memory of a plane, so that blocks start at cache lines.
#[derive(Debug, Clone, Copy, Zeroable, Pod)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

/// Blocks of [`CacheData`], mutably.
enum CacheDataMut<'a> {
    F32(&'a mut [CacheBlock<f32>]),
    F16(&'a mut [CacheBlock<f16>]),
    Q8_0 {
        quants: &'a mut [CacheBlock<i8>],
        scales: &'a mut [[f16; BLOCK]],
    },
}

/// Empty vector with room for `bytes`, whole cache lines; `None` if the allocation fails.
fn reserved(bytes: usize) -> Option<Vec<CacheLine>> {
    let mut reserved = Vec::new();
    reserved
        .try_reserve_exact(bytes / size_of::<CacheLine>())
        .ok()?;
    Some(reserved)
}

/// Rounds to `f16`; beyond its range to its largest number.
fn saturated(number: f32) -> f16 {
    f16::from_f32(number.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const()))
}

/// [`saturated`] for up to 32 numbers, with the conversion instructions of the processor.
fn saturated_block(numbers: &[f32]) -> [f16; BLOCK] {
    let (mut clamped, mut packed) = ([0.0; BLOCK], [f16::ZERO; BLOCK]);
    for (clamped, number) in clamped.iter_mut().zip(numbers) {
        *clamped = number.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const());
    }
    packed.convert_from_f32_slice(&clamped);
    packed
}

/// Writes the numbers of one position.
fn write<T: Pod>(block: &mut CacheBlock<T>, layout: CacheLayout, position: usize, numbers: &[T]) {
    match layout {
        CacheLayout::Keys => {
            let groups: &mut KeyBlock<T> = bytemuck::cast_mut(block);
            let group = &mut groups[position / KEY_GROUP];
            for (row, number) in group.iter_mut().zip(numbers) {
                row[position % KEY_GROUP] = *number;
            }
        }
        CacheLayout::Values => block[position][..numbers.len()].copy_from_slice(numbers),
    }
}

/// Zeroes all positions from `first` on.
fn blank<T: Default + Copy>(blocks: &mut [CacheBlock<T>], layout: CacheLayout, first: usize) {
    for block in blocks {
        let block = block.as_flattened_mut();
        for position in first..BLOCK {
            for index in 0..BLOCK {
                block[layout.place(index, position)] = T::default();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_changes_no_other_bytes_than_it_names() {
        for layout in [CacheLayout::Keys, CacheLayout::Values] {
            for format in [CacheFormat::F32, CacheFormat::F16] {
                let (heads, size) = (3, 40);
                let mut plane = CachePlane::new(layout, format, heads, size, 40).unwrap();
                for _ in 0..40 {
                    let (tile, writer, _) = plane.append(1).unwrap();
                    tile.fill(0);
                    let start = tile.as_ptr() as usize;
                    let named: Vec<bool> = {
                        let mut named = vec![false; tile.len()];
                        for bytes in writer.written(tile) {
                            let first = bytes.as_ptr() as usize - start;
                            named[first..first + bytes.len()].fill(true);
                        }
                        named
                    };
                    for tile in tile.chunks_exact_mut(writer.head_bytes) {
                        writer.write(tile, &[f32::MAX; 40]);
                    }
                    assert!(
                        tile.iter()
                            .zip(&named)
                            .all(|(byte, named)| *byte == 0 || *named)
                    );
                    let count = named.iter().filter(|named| **named).count();
                    // A cache line of keys also holds keys of other positions.
                    let most = heads * 64 * size_of::<f32>() * KEY_GROUP;
                    assert!(count <= most, "{count} bytes");
                }
            }
        }
    }

    #[test]
    fn rows_hold_the_numbers_of_each_position_in_order() {
        let (heads, size) = (3, 40);
        for layout in [CacheLayout::Keys, CacheLayout::Values] {
            for (format, positions) in CacheFormat::ALL.into_iter().zip([33, 64, 70]) {
                let mut plane = CachePlane::new(layout, format, heads, size, positions).unwrap();
                for position in 0..positions {
                    let number = |index| ((position * 120 + index) % 97) as f32 - 48.5;
                    plane.push(&(0..heads * size).map(number).collect::<Vec<f32>>());
                }
                let mut rows = vec![0; plane.rows_bytes()];
                for head in 0..heads {
                    plane.copy_rows(head, &mut rows);
                    for position in 0..positions {
                        for index in 0..size {
                            let place = position * size + index;
                            let half = |at: usize| f16::from_le_bytes([rows[at], rows[at + 1]]);
                            let found = match format {
                                CacheFormat::F32 => {
                                    f32::from_le_bytes(rows[4 * place..][..4].try_into().unwrap())
                                }
                                CacheFormat::F16 => half(2 * place).to_f32(),
                                CacheFormat::Q8_0 => {
                                    let quant = rows[position * 64 + index] as i8;
                                    let scales = positions * 64;
                                    let scale = index / BLOCK * positions + position;
                                    f32::from(quant) * half(scales + 2 * scale).to_f32()
                                }
                            };
                            let scale = plane.scale(head, position, index / BLOCK);
                            let want = plane.value(head, position, index) * scale;
                            assert_eq!(found, want, "{format} {head} {position} {index}");
                        }
                    }
                }
            }
        }
    }
}
