//! Keys or values of one head at every position, laid out as attention streams them.

use std::fmt;
use std::str::FromStr;

use half::f16;

use crate::KernelError;
use crate::format::BLOCK;
use crate::pack::pack_q8_0;

/// How the numbers of a KV cache are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CacheFormat {
    /// Single precision.
    F32,
    /// Half precision; what exceeds its range becomes its largest number.
    F16,
    /// Signed bytes, 32 of a head and position with one `f16` scale.
    Q8_0,
}

impl CacheFormat {
    /// Every format, widest first.
    pub const ALL: [CacheFormat; 3] = [CacheFormat::F32, CacheFormat::F16, CacheFormat::Q8_0];

    /// The name in files, on the command line and in messages.
    pub fn name(self) -> &'static str {
        match self {
            CacheFormat::F32 => "f32",
            CacheFormat::F16 => "f16",
            CacheFormat::Q8_0 => "q8_0",
        }
    }

    /// Bytes of keys or values, 32 numbers a block.
    pub fn block_bytes(self) -> usize {
        match self {
            CacheFormat::F32 => BLOCK * 4,
            CacheFormat::F16 => BLOCK * 2,
            CacheFormat::Q8_0 => BLOCK + 2,
        }
    }

    /// Bytes of a [`CachePlane`] with room for `positions`; both are filled up to whole blocks.
    pub fn plane_bytes(self, head_size: usize, positions: usize) -> usize {
        let blocks = positions.next_multiple_of(BLOCK) * head_size.div_ceil(BLOCK);
        blocks * self.block_bytes()
    }

    /// All names, for messages.
    pub(crate) fn names() -> String {
        CacheFormat::ALL.map(CacheFormat::name).join(", ")
    }
}

impl fmt::Display for CacheFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for CacheFormat {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        CacheFormat::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| KernelError::UnknownCacheFormat {
                name: name.to_owned(),
            })
    }
}

/// 32 rows of 32 numbers.
pub(crate) type Square<T> = [[T; BLOCK]; BLOCK];

/// What the rows of a plane's squares are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lay {
    /// Numbers of a head, each at 32 positions: 32 products with keys grow side by side.
    Keys,
    /// Positions, each with 32 numbers of a head: 32 sums of values grow side by side.
    Values,
}

/// Keys or values of one head: squares of 32 positions by 32 numbers, those of the same positions
/// (a tile) side by side. A head is filled up to whole blocks with zeros, and so is the last tile.
#[derive(Debug, Clone, PartialEq)]
pub struct CachePlane {
    lay: Lay,
    head_size: usize,
    positions: usize,
    capacity: usize,
    pub(crate) data: PlaneData,
}

/// The squares in one of the formats, with a scale for each position where numbers share one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PlaneData {
    F32(Vec<Square<f32>>),
    F16(Vec<Square<f16>>),
    Q8_0 {
        quants: Vec<Square<i8>>,
        scales: Vec<[f16; BLOCK]>,
    },
}

impl CachePlane {
    /// A plane with room for `positions`; none where memory has not got it. What is not used yet is
    /// not touched.
    pub fn new(
        lay: Lay,
        format: CacheFormat,
        head_size: usize,
        positions: usize,
    ) -> Option<CachePlane> {
        let tiles = positions.div_ceil(BLOCK);
        let squares = tiles.checked_mul(head_size.div_ceil(BLOCK))?;
        let data = match format {
            CacheFormat::F32 => PlaneData::F32(reserved(squares)?),
            CacheFormat::F16 => PlaneData::F16(reserved(squares)?),
            CacheFormat::Q8_0 => PlaneData::Q8_0 {
                quants: reserved(squares)?,
                scales: reserved(squares)?,
            },
        };
        Some(CachePlane {
            lay,
            head_size,
            positions: 0,
            capacity: tiles * BLOCK,
            data,
        })
    }

    /// How the numbers are stored.
    pub fn format(&self) -> CacheFormat {
        match self.data {
            PlaneData::F32(_) => CacheFormat::F32,
            PlaneData::F16(_) => CacheFormat::F16,
            PlaneData::Q8_0 { .. } => CacheFormat::Q8_0,
        }
    }

    /// Numbers of a head.
    pub fn head_size(&self) -> usize {
        self.head_size
    }

    /// Numbers of a head, filled up to whole blocks.
    pub fn width(&self) -> usize {
        self.head_size.next_multiple_of(BLOCK)
    }

    /// Positions that are there.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Bytes that are reserved.
    pub fn bytes(&self) -> usize {
        match &self.data {
            PlaneData::F32(squares) => squares.capacity() * size_of::<Square<f32>>(),
            PlaneData::F16(squares) => squares.capacity() * size_of::<Square<f16>>(),
            PlaneData::Q8_0 { quants, scales } => {
                quants.capacity() * size_of::<Square<i8>>()
                    + scales.capacity() * size_of::<[f16; BLOCK]>()
            }
        }
    }

    /// Appends a position; `head` holds `head_size` numbers.
    ///
    /// Panics where there is no room for one more.
    pub fn push(&mut self, head: &[f32]) {
        assert_eq!(head.len(), self.head_size, "numbers of a head");
        assert!(self.positions < self.capacity, "the plane has room");
        let (tile, column) = (self.positions / BLOCK, self.positions % BLOCK);
        if column == 0 {
            self.set_tiles(tile + 1);
        }
        let (lay, blocks) = (self.lay, self.width() / BLOCK);
        for (block, numbers) in head.chunks(BLOCK).enumerate() {
            let index = tile * blocks + block;
            match &mut self.data {
                PlaneData::F32(squares) => {
                    write(&mut squares[index], lay, column, numbers.iter().copied());
                }
                PlaneData::F16(squares) => {
                    let numbers = numbers.iter().copied().map(saturated);
                    write(&mut squares[index], lay, column, numbers);
                }
                PlaneData::Q8_0 { quants, scales } => {
                    let mut padded = [0.0; BLOCK];
                    padded[..numbers.len()].copy_from_slice(numbers);
                    let (packed, scale) = pack_q8_0(&padded);
                    // A block with a NaN shows it, instead of quants that look sound.
                    let is_number = !numbers.iter().any(|number| number.is_nan());
                    scales[index][column] = saturated(if is_number { scale } else { f32::NAN });
                    let packed = packed.into_iter().take(numbers.len());
                    write(&mut quants[index], lay, column, packed);
                }
            }
        }
        self.positions += 1;
    }

    /// Forgets all positions from `positions` on.
    pub fn truncate(&mut self, positions: usize) {
        if positions >= self.positions {
            return;
        }
        self.positions = positions;
        self.set_tiles(positions.div_ceil(BLOCK));
        // What is forgotten of the last tile is as if it had never been.
        let (tile, column) = (positions / BLOCK, positions % BLOCK);
        if column > 0 {
            let (lay, blocks) = (self.lay, self.width() / BLOCK);
            let squares = tile * blocks..(tile + 1) * blocks;
            match &mut self.data {
                PlaneData::F32(all) => blank(&mut all[squares], lay, column),
                PlaneData::F16(all) => blank(&mut all[squares], lay, column),
                PlaneData::Q8_0 { quants, scales } => {
                    blank(&mut quants[squares.clone()], lay, column);
                    for scales in &mut scales[squares] {
                        scales[column..].fill(f16::ZERO);
                    }
                }
            }
        }
    }

    /// Takes over the first `positions` of `other`, a plane of the same shape and format with as much
    /// room, instead of what is here.
    pub fn copy_from(&mut self, other: &CachePlane, positions: usize) {
        assert!(positions <= other.positions.min(self.capacity), "in range");
        let squares = positions.div_ceil(BLOCK) * (self.width() / BLOCK);
        self.truncate(0);
        match (&mut self.data, &other.data) {
            (PlaneData::F32(to), PlaneData::F32(from)) => to.extend(&from[..squares]),
            (PlaneData::F16(to), PlaneData::F16(from)) => to.extend(&from[..squares]),
            (
                PlaneData::Q8_0 { quants, scales },
                PlaneData::Q8_0 {
                    quants: from_quants,
                    scales: from_scales,
                },
            ) => {
                quants.extend(&from_quants[..squares]);
                scales.extend(&from_scales[..squares]);
            }
            _ => panic!("planes of one format"),
        }
        self.positions = positions.next_multiple_of(BLOCK);
        self.truncate(positions);
        self.positions = positions;
    }

    /// Bytes of the numbers, and of the scales where there are any: tiles one after the other, in each
    /// its squares.
    pub fn as_bytes(&self) -> (&[u8], &[u8]) {
        match &self.data {
            PlaneData::F32(squares) => (bytemuck::cast_slice(squares), &[]),
            PlaneData::F16(squares) => (bytemuck::cast_slice(squares), &[]),
            PlaneData::Q8_0 { quants, scales } => {
                (bytemuck::cast_slice(quants), bytemuck::cast_slice(scales))
            }
        }
    }

    /// Takes over the first `positions` of what [`CachePlane::as_bytes`] gave for at least as many,
    /// instead of what is here.
    ///
    /// Panics where the bytes are too few or there is no room.
    pub fn read_bytes(&mut self, numbers: &[u8], scales: &[u8], positions: usize) {
        assert!(positions <= self.capacity, "the plane has room");
        let tiles = positions.div_ceil(BLOCK);
        let squares = tiles * (self.width() / BLOCK);
        self.truncate(0);
        self.set_tiles(tiles);
        let fill = |to: &mut [u8], from: &[u8]| to.copy_from_slice(&from[..to.len()]);
        match &mut self.data {
            PlaneData::F32(to) => fill(bytemuck::cast_slice_mut(&mut to[..squares]), numbers),
            PlaneData::F16(to) => fill(bytemuck::cast_slice_mut(&mut to[..squares]), numbers),
            PlaneData::Q8_0 {
                quants,
                scales: own,
            } => {
                fill(bytemuck::cast_slice_mut(&mut quants[..squares]), numbers);
                fill(bytemuck::cast_slice_mut(&mut own[..squares]), scales);
            }
        }
        self.positions = tiles * BLOCK;
        self.truncate(positions);
        self.positions = positions;
    }

    /// Number `index` of the head at `position`, without its scale.
    pub(crate) fn number(&self, position: usize, index: usize) -> f32 {
        let square = position / BLOCK * (self.width() / BLOCK) + index / BLOCK;
        let (row, column) = match self.lay {
            Lay::Keys => (index % BLOCK, position % BLOCK),
            Lay::Values => (position % BLOCK, index % BLOCK),
        };
        match &self.data {
            PlaneData::F32(squares) => squares[square][row][column],
            PlaneData::F16(squares) => squares[square][row][column].to_f32(),
            PlaneData::Q8_0 { quants, .. } => f32::from(quants[square][row][column]),
        }
    }

    /// What the numbers of `block` at `position` are to be multiplied by.
    pub(crate) fn scale(&self, position: usize, block: usize) -> f32 {
        match &self.data {
            PlaneData::Q8_0 { scales, .. } => {
                let square = position / BLOCK * (self.width() / BLOCK) + block;
                scales[square][position % BLOCK].to_f32()
            }
            _ => 1.0,
        }
    }

    /// Tiles that are there.
    pub(crate) fn tiles(&self) -> usize {
        self.positions.div_ceil(BLOCK)
    }

    /// What the rows of the squares are.
    pub(crate) fn lay(&self) -> Lay {
        self.lay
    }

    /// Adds tiles of zeros, or drops the last ones, until there are so many.
    fn set_tiles(&mut self, tiles: usize) {
        let squares = tiles * (self.width() / BLOCK);
        match &mut self.data {
            PlaneData::F32(all) => all.resize(squares, [[0.0; BLOCK]; BLOCK]),
            PlaneData::F16(all) => all.resize(squares, [[f16::ZERO; BLOCK]; BLOCK]),
            PlaneData::Q8_0 { quants, scales } => {
                quants.resize(squares, [[0; BLOCK]; BLOCK]);
                scales.resize(squares, [f16::ZERO; BLOCK]);
            }
        }
    }
}

fn reserved<T>(count: usize) -> Option<Vec<T>> {
    let mut reserved = Vec::new();
    reserved.try_reserve_exact(count).ok()?;
    Some(reserved)
}

/// The nearest number that is not infinite.
fn saturated(number: f32) -> f16 {
    f16::from_f32(number.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Writes one position's numbers.
fn write<T>(square: &mut Square<T>, lay: Lay, position: usize, numbers: impl Iterator<Item = T>) {
    for (index, number) in numbers.enumerate() {
        match lay {
            Lay::Keys => square[index][position] = number,
            Lay::Values => square[position][index] = number,
        }
    }
}

/// Zeros all positions from `first` on.
fn blank<T: Default + Copy>(squares: &mut [Square<T>], lay: Lay, first: usize) {
    for square in squares {
        match lay {
            Lay::Keys => square
                .iter_mut()
                .for_each(|row| row[first..].fill(T::default())),
            Lay::Values => square[first..].fill([T::default(); BLOCK]),
        }
    }
}
