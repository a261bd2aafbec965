//! JSON Lines, JSON arrays, and sequences of JSON values.

use std::{
    cell::Cell,
    fmt,
    io::{BufRead, BufReader, Read},
    rc::Rc,
};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::Value;

use crate::{
    Format, Unusable, record,
    sink::{Sink, Stop},
    unpack::{Limited, MAX_RECORD},
};

fn invalid(format: Format, error: &serde_json::Error) -> Unusable {
    Unusable::Invalid {
        format,
        reason: error.to_string(),
    }
}

/// Reads one record per line; invalid lines are counted as unusable.
pub(crate) fn read_lines(from: impl Read, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut from)
            .take(MAX_RECORD + 1)
            .read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        if read as u64 > MAX_RECORD {
            return Err(Unusable::TooLong.into());
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        sink.take(match serde_json::from_slice(&line) {
            Ok(value) => record::document(value),
            Err(error) => Err(invalid(Format::JsonLines, &error)),
        })?;
    }
}

/// Reads a sequence of JSON values; each value, or each element of an array, is a record.
pub(crate) fn read_values(from: impl Read, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let from = Limited::new(from, MAX_RECORD);
    let left = from.left();
    let mut from = BufReader::new(from);
    while !is_at_end(&mut from, &left)? {
        let mut records = Records {
            sink,
            left: &left,
            stop: None,
        };
        let mut parser = serde_json::Deserializer::from_reader(&mut from);
        let parsed = records.deserialize(&mut parser);
        match (records.stop.take(), parsed) {
            (Some(stop), _) => return Err(stop),
            (None, Ok(())) => {}
            (None, Err(error)) if error.is_io() => return Err(std::io::Error::from(error).into()),
            (None, Err(error)) => return Err(invalid(Format::Json, &error).into()),
        }
    }
    Ok(())
}

/// Skips white space; returns whether the input ends there.
fn is_at_end(from: &mut impl BufRead, left: &Cell<u64>) -> std::io::Result<bool> {
    loop {
        left.set(MAX_RECORD);
        let bytes = from.fill_buf()?;
        if bytes.is_empty() {
            return Ok(true);
        }
        let spaces = bytes.len() - bytes.trim_ascii_start().len();
        let is_all = spaces == bytes.len();
        from.consume(spaces);
        if !is_all {
            return Ok(false);
        }
    }
}

/// Passes on the records of a value during parsing, so that an array is never held in memory.
struct Records<'a, 'b> {
    sink: &'a mut Sink<'b>,
    left: &'a Rc<Cell<u64>>,
    stop: Option<Stop>,
}

impl Records<'_, '_> {
    fn take<E: Error>(&mut self, value: Value) -> Result<(), E> {
        self.left.set(MAX_RECORD);
        self.sink.take(record::document(value)).map_err(|stop| {
            self.stop = Some(stop);
            E::custom("reading has stopped")
        })
    }
}

impl<'de> DeserializeSeed<'de> for &mut Records<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Records<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an array of records, or a record")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(value) = elements.next_element()? {
            self.take(value)?;
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<(), A::Error> {
        let value = Value::deserialize(MapAccessDeserializer::new(fields))?;
        self.take(value)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.take(Value::String(text.to_owned()))
    }
}
