//! Packed matrices in tensor files: one tensor for plain formats; for quantised ones a plane of quants and
//! one or two of scales, row-major each.

use std::{collections::BTreeMap, ops::Range};

use bytemuck::Pod;
use half::{bf16, f16};
use powerinfer_tensor::{BLOCK, Format, Matrix, MatrixData, OwnedMatrix, SUPER_BLOCK};

use crate::{
    ArtifactError, TensorFile,
    tensor_file::Dtype,
    tensor_writer::{TensorShapes, TensorSource, TensorWriter},
};

/// Plane of a matrix: suffix of the tensor's name, element type, elements per row.
type Plane = (&'static str, Dtype, usize);

/// Returns the planes of a matrix with `columns` columns.
fn planes(format: Format, columns: usize) -> Vec<Plane> {
    let blocks = columns.div_ceil(BLOCK);
    match format {
        Format::F32 => vec![("", Dtype::F32, columns)],
        Format::F16 => vec![("", Dtype::F16, columns)],
        Format::Bf16 => vec![("", Dtype::BF16, columns)],
        Format::Q8_0 => vec![
            (".quants", Dtype::I8, blocks * BLOCK),
            (".scales", Dtype::F16, blocks),
        ],
        Format::Q4K => vec![
            (".quants", Dtype::U8, blocks * BLOCK / 2),
            (".scales", Dtype::F16, blocks.div_ceil(SUPER_BLOCK) * 2),
            (".factors", Dtype::U8, blocks * 2),
        ],
        Format::Q4_0 => vec![
            (".quants", Dtype::U8, blocks * BLOCK / 2),
            (".scales", Dtype::F16, blocks),
        ],
    }
}

/// Returns the bytes of each plane of `matrix`, in the order of [`planes`].
fn plane_bytes(matrix: &OwnedMatrix) -> Vec<&[u8]> {
    match matrix.as_view().data() {
        MatrixData::F32(values) => vec![bytemuck::cast_slice(values)],
        MatrixData::F16(values) => vec![bytemuck::cast_slice(values)],
        MatrixData::Bf16(values) => vec![bytemuck::cast_slice(values)],
        MatrixData::Q8_0 { quants, scales } => {
            vec![bytemuck::cast_slice(quants), bytemuck::cast_slice(scales)]
        }
        MatrixData::Q4K {
            quants,
            scales,
            factors,
        } => vec![quants, bytemuck::cast_slice(scales), factors.as_flattened()],
        MatrixData::Q4_0 { quants, scales } => vec![quants, bytemuck::cast_slice(scales)],
    }
}

/// Inserts the planes of `matrix` into `tensors` under `name`.
pub fn insert_matrix<'a>(
    tensors: &mut BTreeMap<String, TensorSource<'a>>,
    name: &str,
    matrix: &'a OwnedMatrix,
) {
    let view = matrix.as_view();
    let planes = planes(view.format(), view.columns());
    for ((suffix, dtype, per_row), bytes) in planes.into_iter().zip(plane_bytes(matrix)) {
        let source = TensorSource::borrowed(dtype, vec![view.rows(), per_row], bytes);
        tensors.insert(format!("{name}{suffix}"), source);
    }
}

/// Declares the planes of a `[rows, columns]` matrix that [`append_rows`] will fill.
pub fn declare_matrix(
    shapes: &mut TensorShapes,
    name: &str,
    format: Format,
    rows: usize,
    columns: usize,
) {
    for (suffix, dtype, per_row) in planes(format, columns) {
        shapes.insert(format!("{name}{suffix}"), (dtype, vec![rows, per_row]));
    }
}

/// Appends `rows` to the declared matrix called `name`.
///
/// # Errors
///
/// [`ArtifactError::Write`].
///
/// # Panics
///
/// If the matrix was not declared, or is full.
pub fn append_rows(
    writer: &mut TensorWriter,
    name: &str,
    rows: &OwnedMatrix,
) -> Result<(), ArtifactError> {
    let view = rows.as_view();
    let planes = planes(view.format(), view.columns());
    planes
        .into_iter()
        .zip(plane_bytes(rows))
        .try_for_each(|((suffix, ..), bytes)| writer.append(&format!("{name}{suffix}"), bytes))
}

/// Location of a packed matrix in a [`TensorFile`], checked once so that viewing it is free.
#[derive(Debug, Clone)]
pub struct StoredMatrix {
    format: Format,
    rows: usize,
    columns: usize,
    planes: Vec<Range<usize>>,
}

impl StoredMatrix {
    /// Finds the `[rows, columns]` matrix called `name` and checks types, shapes and alignment.
    ///
    /// # Errors
    ///
    /// A plane is missing, has another type or shape, or is not aligned.
    pub fn find(
        file: &TensorFile,
        name: &str,
        format: Format,
        rows: usize,
        columns: usize,
    ) -> Result<Self, ArtifactError> {
        let start = file.bytes().as_ptr() as usize;
        let mut ranges = Vec::new();
        for (suffix, dtype, per_row) in planes(format, columns) {
            let tensor = format!("{name}{suffix}");
            let bytes = file.expect(&tensor, dtype, &[rows, per_row])?;
            let element = dtype.bitsize() / 8;
            if !(bytes.as_ptr() as usize).is_multiple_of(element) {
                return Err(ArtifactError::Unaligned {
                    path: file.path().to_owned(),
                    tensor,
                });
            }
            let offset = bytes.as_ptr() as usize - start;
            ranges.push(offset..offset + bytes.len());
        }
        Ok(Self {
            format,
            rows,
            columns,
            planes: ranges,
        })
    }

    /// Returns the matrix as a view of `file`, the file it was found in.
    ///
    /// # Panics
    ///
    /// If `file` is another file than the one the matrix was found in.
    pub fn view<'a>(&self, file: &'a TensorFile) -> Matrix<'a> {
        fn cast<'a, Element: Pod>(file: &'a TensorFile, range: &Range<usize>) -> &'a [Element] {
            bytemuck::cast_slice(&file.bytes()[range.clone()])
        }
        let data = match self.format {
            Format::F32 => MatrixData::F32(cast::<f32>(file, &self.planes[0])),
            Format::F16 => MatrixData::F16(cast::<f16>(file, &self.planes[0])),
            Format::Bf16 => MatrixData::Bf16(cast::<bf16>(file, &self.planes[0])),
            Format::Q8_0 => MatrixData::Q8_0 {
                quants: cast::<i8>(file, &self.planes[0]),
                scales: cast::<f16>(file, &self.planes[1]),
            },
            Format::Q4K => MatrixData::Q4K {
                quants: cast::<u8>(file, &self.planes[0]),
                scales: cast::<[f16; 2]>(file, &self.planes[1]),
                factors: cast::<[u8; 2]>(file, &self.planes[2]),
            },
            Format::Q4_0 => MatrixData::Q4_0 {
                quants: cast::<u8>(file, &self.planes[0]),
                scales: cast::<f16>(file, &self.planes[1]),
            },
        };
        Matrix::new(self.rows, self.columns, data)
            .expect("planes were checked when the matrix was found")
    }

    /// Size of all planes in bytes.
    pub fn bytes(&self) -> usize {
        self.planes.iter().map(Range::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor_writer::{fill_tensors, write_tensors};

    proptest! {
        #[test]
        fn a_matrix_reads_back_as_packed(rows in 1usize..5, columns in 1usize..300, format in 0usize..Format::ALL.len(), seed in 0u64..9) {
            let format = Format::ALL[format];
            let mut random = crate::random::Random::new(seed);
            let values: Vec<f32> = (0..rows * columns).map(|_| random.normal() as f32).collect();
            let matrix = powerinfer_tensor::pack(format, rows, columns, &values);
            let folder = tempfile::tempdir().unwrap();
            let (whole, by_rows) = (folder.path().join("whole"), folder.path().join("by-rows"));
            let mut tensors = BTreeMap::new();
            insert_matrix(&mut tensors, "matrix", &matrix);
            write_tensors(&whole, None, &tensors).unwrap();
            let mut shapes = TensorShapes::new();
            declare_matrix(&mut shapes, "matrix", format, rows, columns);
            fill_tensors(&by_rows, None, &shapes, |writer| {
                values.chunks(columns).try_for_each(|row| {
                    append_rows(writer, "matrix", &powerinfer_tensor::pack(format, 1, columns, row))
                })
            })
            .unwrap();
            prop_assert_eq!(std::fs::read(&whole).unwrap(), std::fs::read(&by_rows).unwrap());
            let file = TensorFile::open(&whole).unwrap();
            let stored = StoredMatrix::find(&file, "matrix", format, rows, columns).unwrap();
            let (mut got, mut want) = (vec![0.0; columns], vec![0.0; columns]);
            for row in 0..rows {
                stored.view(&file).dequantise_row(row, &mut got);
                matrix.as_view().dequantise_row(row, &mut want);
                prop_assert_eq!(&got, &want);
            }
            prop_assert!(StoredMatrix::find(&file, "matrix", format, rows + 1, columns).is_err());
        }
    }
}
