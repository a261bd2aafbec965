//! Reads Parquet files in a worker process, because the libraries panic on some invalid files and allocate far too much
//! memory on others.

use std::{
    fs::File,
    io::{Cursor, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use polars_arrow::array::{
    Array, BinaryViewArray, FixedSizeListArray, ListArray, StructArray, Utf8ViewArray,
};
use polars_arrow::datatypes::Field;
use polars_buffer::Buffer;
use polars_parquet::read::{
    BasicDecompressor, PageReader, RowGroupMetadata, column_iter_to_arrays, infer_schema,
    read_metadata,
};
use powerinfer_guard::{
    panics::caught,
    worker::{KeptWorker, Work},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    Format, Unusable, record,
    sink::{Sink, Stop},
};

/// Time limit for reading a batch.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Bytes of text after which a batch ends.
const BATCH: usize = 16 << 20;

/// Approximate bytes of a record without its text.
const RECORD: usize = 128;

/// Size limit of a column in a row group, in bytes.
const MAX_CHUNK: u64 = 512 << 20;

/// Position of the next row: its row group, and its index in that group.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Place {
    group: usize,
    row: usize,
}

#[derive(Serialize, Deserialize)]
struct Request {
    path: PathBuf,
    from: Place,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    /// Records, and the position of the next one if there are more.
    Records(Vec<Value>, Option<Place>),
    /// No column has a known name; these are the columns of the file.
    Columns(Vec<String>),
    /// The file is invalid, for this reason.
    Invalid(String),
}

/// Work of reading a batch of rows, to be passed to [`work_as_worker`](powerinfer_guard::worker::work_as_worker).
pub const WORK: Work = ("read-parquet", |request| {
    let answer = serde_json::from_slice(request)
        .map_err(|error| error.to_string())
        .and_then(|request| caught(|| batch(&request))?)
        .unwrap_or_else(Answer::Invalid);
    serde_json::to_vec(&answer).expect("records are plain JSON")
});

static WORKER: KeptWorker = KeptWorker::new(WORK);

/// Reads one record per row of the file at `path`.
pub(crate) fn read(path: &Path, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let invalid = |reason: String| Unusable::Invalid {
        format: Format::Parquet,
        reason,
    };
    let mut next = Some(Place::default());
    while let Some(from) = next {
        let path = path.to_owned();
        let request = serde_json::to_vec(&Request { path, from });
        let request = request.map_err(|error| invalid(error.to_string()))?;
        let answer = WORKER.ask(&request, TIME_LIMIT);
        let answer = answer.map_err(|error| invalid(error.to_string()))?;
        let answer = serde_json::from_slice(&answer).map_err(|error| invalid(error.to_string()))?;
        match answer {
            Answer::Records(records, place) => {
                next = place;
                for record in records {
                    sink.take(record::document(record))?;
                }
            }
            Answer::Columns(names) => return Err(Unusable::Keys(names).into()),
            Answer::Invalid(reason) => return Err(invalid(reason).into()),
        }
    }
    Ok(())
}

/// Reads the next rows, all from one row group.
fn batch(request: &Request) -> Result<Answer, String> {
    let Place { group, row } = request.from;
    let mut file = File::open(&request.path).map_err(|error| error.to_string())?;
    let metadata = read_metadata(&mut file).map_err(|error| error.to_string())?;
    let schema = infer_schema(&metadata).map_err(|error| error.to_string())?;
    let fields = schema.iter_values();
    let fields: Vec<&Field> = fields
        .filter(|field| record::is_known(&field.name))
        .collect();
    if fields.is_empty() {
        let names = schema.iter_names().map(|name| name.to_string());
        return Ok(Answer::Columns(names.collect()));
    }
    let Some(rows) = metadata.row_groups.get(group) else {
        return Ok(Answer::Records(Vec::new(), None));
    };
    let columns = fields
        .into_iter()
        .map(|field| column(&mut file, rows, field));
    let columns = columns.collect::<Result<Vec<_>, String>>()?;
    let mut records = Vec::new();
    let mut bytes = 0;
    // The row count in the metadata may be wrong.
    let lengths = columns
        .iter()
        .map(|(_, arrays)| arrays.iter().map(|array| array.len()).sum());
    let count = lengths.max().unwrap_or(0usize).min(rows.num_rows());
    for index in row..count {
        let cells = columns.iter().map(|(name, arrays)| {
            let cell = cell(arrays, index);
            bytes += size(&cell);
            (name.clone(), cell)
        });
        records.push(Value::Object(cells.collect::<Map<_, _>>()));
        bytes += RECORD;
        if bytes > BATCH {
            let row = index + 1;
            return Ok(Answer::Records(records, Some(Place { group, row })));
        }
    }
    let group = group + 1;
    let next = (group < metadata.row_groups.len()).then_some(Place { group, row: 0 });
    Ok(Answer::Records(records, next))
}

/// Reads name and values of the column `field` in a row group.
fn column(
    file: &mut File,
    rows: &RowGroupMetadata,
    field: &Field,
) -> Result<(String, Vec<Box<dyn Array>>), String> {
    let chunks = rows.columns_under_root_iter(&field.name);
    let (mut columns, mut types) = (Vec::new(), Vec::new());
    for chunk in chunks.into_iter().flatten() {
        let range = chunk.byte_range();
        let length = range.end.saturating_sub(range.start);
        if length > MAX_CHUNK {
            return Err(format!(
                "column `{}` has more than {} MiB in a row group; write smaller ones",
                field.name,
                MAX_CHUNK >> 20
            ));
        }
        let mut bytes = Vec::new();
        let seek = file.seek(SeekFrom::Start(range.start));
        let read = seek.and_then(|_| file.take(length).read_to_end(&mut bytes));
        if read.map_err(|error| error.to_string())? as u64 != length {
            return Err("it is truncated".to_owned());
        }
        let bytes = Cursor::new(Buffer::from(bytes));
        let pages = PageReader::new(bytes, chunk, Vec::new(), MAX_CHUNK as usize);
        columns.push(BasicDecompressor::new(pages, Vec::new()));
        types.push(&chunk.descriptor().descriptor.primitive_type);
    }
    let read = column_iter_to_arrays(columns, types, field.clone(), None);
    let (arrays, _) = read.map_err(|error| error.to_string())?;
    Ok((field.name.to_string(), arrays))
}

/// Returns the value of a row in consecutive arrays.
fn cell(arrays: &[Box<dyn Array>], mut row: usize) -> Value {
    for array in arrays {
        if row < array.len() {
            return value(&**array, row);
        }
        row -= array.len();
    }
    Value::Null
}

/// Converts strings, lists and structs to JSON; everything else becomes null.
fn value(array: &dyn Array, row: usize) -> Value {
    if array.is_null(row) {
        return Value::Null;
    }
    let items = |items: Box<dyn Array>| {
        let values = (0..items.len()).map(|item| value(&*items, item));
        Value::Array(values.collect())
    };
    let any = array.as_any();
    if let Some(texts) = any.downcast_ref::<Utf8ViewArray>() {
        Value::from(texts.value(row))
    } else if let Some(texts) = any.downcast_ref::<BinaryViewArray>() {
        std::str::from_utf8(texts.value(row)).map_or(Value::Null, Value::from)
    } else if let Some(lists) = any.downcast_ref::<ListArray<i64>>() {
        items(lists.value(row))
    } else if let Some(lists) = any.downcast_ref::<FixedSizeListArray>() {
        items(lists.value(row))
    } else if let Some(fields) = any.downcast_ref::<StructArray>() {
        let columns = fields.fields().iter().zip(fields.values());
        let cells = columns.map(|(field, values)| (field.name.to_string(), value(&**values, row)));
        Value::Object(cells.collect())
    } else {
        Value::Null
    }
}

/// Returns the number of bytes of text in `value`.
fn size(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(fields) => fields.values().map(size).sum(),
        _ => 0,
    }
}
