//! Comma- and tab-separated values with a header.

use std::io::Read;

use csv::{ErrorKind, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

use crate::{
    Format, Unusable, record,
    sink::{Sink, Stop},
    unpack::{Limited, MAX_RECORD},
};

/// Reads one record per row; rows that do not match the header are counted as unusable.
pub(crate) fn read(from: impl Read, delimiter: u8, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let from = Limited::new(from, MAX_RECORD);
    let left = from.left();
    let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(from);
    let names: Vec<String> = match reader.headers() {
        Ok(header) => header.iter().map(str::to_owned).collect(),
        Err(error) => return Err(unusable(error).into()),
    };
    if !names.iter().any(|name| record::is_known(name)) {
        return Err(Unusable::Keys(names).into());
    }
    let mut row = StringRecord::new();
    loop {
        left.set(MAX_RECORD);
        let document = match reader.read_record(&mut row) {
            Ok(false) => return Ok(()),
            Ok(true) => {
                let fields = names.iter().zip(&row);
                let fields = fields.filter(|(name, _)| record::is_known(name));
                let fields = fields.map(|(name, cell)| (name.clone(), Value::from(cell)));
                record::document(Value::Object(fields.collect::<Map<_, _>>()))
            }
            Err(error) if error.is_io_error() => return Err(unusable(error).into()),
            Err(error) => Err(unusable(error)),
        };
        sink.take(document)?;
    }
}

fn unusable(error: csv::Error) -> Unusable {
    let reason = error.to_string();
    match error.into_kind() {
        ErrorKind::Io(error) => error.into(),
        ErrorKind::Utf8 { .. } => Unusable::NotUtf8,
        _ => Unusable::Invalid {
            format: Format::Csv,
            reason,
        },
    }
}
