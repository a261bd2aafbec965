//! Metadata values of a GGUF file, and a cursor that checks lengths before it allocates.

/// Metadata value; numbers are widened.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Non-negative integer type.
    Unsigned(u64),
    /// Signed integer type.
    Signed(i64),
    /// `f32` or `f64`.
    Float(f64),
    /// Boolean.
    Bool(bool),
    /// UTF-8 string.
    Text(String),
    /// Values of one type other than array.
    Array(Vec<Value>),
}

impl Value {
    /// Returns a non-negative integer.
    pub(crate) fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(number) => Some(*number),
            Self::Signed(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// Returns a number of any type.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Float(number) => Some(*number),
            Self::Unsigned(number) => Some(*number as f64),
            Self::Signed(number) => Some(*number as f64),
            _ => None,
        }
    }

    /// Returns a string.
    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a Boolean.
    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    /// Returns the items of an array.
    pub(crate) fn as_array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    /// Appends the value with its type to `out`: integers in 32 bits if they fit, or in 64 if `wide`; floats in 32.
    pub(super) fn write(&self, wide: bool, out: &mut Vec<u8>) {
        let kind = match self.kind() {
            Kind::U32 if wide => Kind::U64,
            kind => kind,
        };
        out.extend((kind as u32).to_le_bytes());
        if let Self::Array(items) = self {
            // Of unequal widths, the widest.
            let kinds = items.iter().map(Self::kind);
            let kind = kinds.max_by_key(|kind| *kind as u32).unwrap_or(Kind::Text);
            out.extend((kind as u32).to_le_bytes());
            out.extend((items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| item.write_one(kind, out));
        } else {
            self.write_one(kind, out);
        }
    }

    fn write_one(&self, kind: Kind, out: &mut Vec<u8>) {
        match (self, kind) {
            (Self::Unsigned(number), Kind::U32) => out.extend((*number as u32).to_le_bytes()),
            (Self::Unsigned(number), _) => out.extend(number.to_le_bytes()),
            (Self::Signed(number), Kind::I32) => out.extend((*number as i32).to_le_bytes()),
            (Self::Signed(number), _) => out.extend(number.to_le_bytes()),
            (Self::Float(number), _) => out.extend((*number as f32).to_le_bytes()),
            (Self::Bool(truth), _) => out.push((*truth).into()),
            (Self::Text(text), _) => write_text(text, out),
            (Self::Array(_), _) => unreachable!("arrays are read and written without nesting"),
        }
    }

    /// Type in which the value is written.
    fn kind(&self) -> Kind {
        match self {
            Self::Unsigned(number) if u32::try_from(*number).is_ok() => Kind::U32,
            Self::Unsigned(_) => Kind::U64,
            Self::Signed(number) if i32::try_from(*number).is_ok() => Kind::I32,
            Self::Signed(_) => Kind::I64,
            Self::Float(_) => Kind::F32,
            Self::Bool(_) => Kind::Bool,
            Self::Text(_) => Kind::Text,
            Self::Array(_) => Kind::Array,
        }
    }

    /// Reads a value with its type; the error describes the problem.
    pub(super) fn read(cursor: &mut Cursor) -> Result<Self, String> {
        let kind = Kind::from_id(cursor.u32()?)?;
        if kind != Kind::Array {
            return Self::read_one(cursor, kind);
        }
        let kind = Kind::from_id(cursor.u32()?)?;
        let count = cursor.count(kind.min_bytes())?;
        cursor.items_left = cursor
            .items_left
            .checked_sub(count)
            .ok_or_else(|| format!("its {count} items exceed the limit of 2^24 in a file"))?;
        // Collecting results grows with what was read, so a count alone allocates nothing.
        let items = (0..count).map(|_| Self::read_one(cursor, kind));
        Ok(Self::Array(items.collect::<Result<_, _>>()?))
    }

    fn read_one(cursor: &mut Cursor, kind: Kind) -> Result<Self, String> {
        Ok(match kind {
            Kind::U8 => Self::Unsigned(u8::from_le_bytes(cursor.array()?).into()),
            Kind::U16 => Self::Unsigned(u16::from_le_bytes(cursor.array()?).into()),
            Kind::U32 => Self::Unsigned(cursor.u32()?.into()),
            Kind::U64 => Self::Unsigned(cursor.u64()?),
            Kind::I8 => Self::Signed(i8::from_le_bytes(cursor.array()?).into()),
            Kind::I16 => Self::Signed(i16::from_le_bytes(cursor.array()?).into()),
            Kind::I32 => Self::Signed(i32::from_le_bytes(cursor.array()?).into()),
            Kind::I64 => Self::Signed(i64::from_le_bytes(cursor.array()?)),
            Kind::F32 => Self::Float(f32::from_le_bytes(cursor.array()?).into()),
            Kind::F64 => Self::Float(f64::from_le_bytes(cursor.array()?)),
            Kind::Bool => match cursor.array()? {
                [0] => Self::Bool(false),
                [1] => Self::Bool(true),
                [other] => return Err(format!("a Boolean is {other}, neither 0 nor 1")),
            },
            Kind::Text => Self::Text(cursor.text()?),
            // Refusing nested arrays bounds the recursion.
            Kind::Array => {
                return Err("it is an array of arrays, which is not supported".to_owned());
            }
        })
    }
}

/// Appends the length of a string and its bytes.
pub(super) fn write_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Unsigned(number as u64)
    }
}

impl From<f32> for Value {
    fn from(number: f32) -> Self {
        Self::Float(number.into())
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl<Item: Into<Value>> From<Vec<Item>> for Value {
    fn from(items: Vec<Item>) -> Self {
        Self::Array(items.into_iter().map(Into::into).collect())
    }
}

/// Types of metadata values, in the order of their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    fn from_id(number: u32) -> Result<Self, String> {
        Ok(match number {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::Text,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            other => return Err(format!("its type {other} is unknown")),
        })
    }

    /// Minimum size of a value in bytes.
    fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
            Self::Text => 8,   // its length
            Self::Array => 12, // its type and length
        }
    }
}

/// Reader of little-endian numbers and strings with bounds checks.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
    /// Remaining number of array items. A vocabulary of a million tokens has four million; without a limit, arrays
    /// of bytes would take many times the file's size in memory.
    items_left: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            position: 0,
            items_left: 1 << 24,
        }
    }

    /// Returns the number of bytes read.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.position..];
        let taken = rest.get(..count).ok_or_else(|| {
            let place = self.position;
            format!("{count} bytes are expected at byte {place}, beyond the end of the file")
        })?;
        self.position += count;
        Ok(taken)
    }

    pub(super) fn array<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH], String> {
        let mut array = [0; LENGTH];
        array.copy_from_slice(self.take(LENGTH)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a count of items of at least `min_bytes` each, which must fit into the rest of the file.
    pub(super) fn count(&mut self, min_bytes: usize) -> Result<usize, String> {
        let count = self.u64()?;
        let rest = self.bytes.len() - self.position;
        usize::try_from(count)
            .ok()
            .filter(|count| *count <= rest / min_bytes)
            .ok_or_else(|| {
                let needed = if min_bytes == 1 { "bytes" } else { "items" };
                format!("{count} {needed} are declared, but only {rest} bytes are left")
            })
    }

    pub(super) fn text(&mut self) -> Result<String, String> {
        let length = self.count(1)?;
        let bytes = self.take(length)?.to_vec();
        String::from_utf8(bytes).map_err(|_| "a string is not UTF-8".to_owned())
    }
}

/// Quotes a key or name for a message: truncated, and with control characters escaped.
pub(super) fn quoted(name: &str) -> String {
    const LONGEST: usize = 80;
    let quoted: String = name.escape_debug().take(LONGEST).collect();
    let more = if name.chars().nth(LONGEST).is_some() {
        "…"
    } else {
        ""
    };
    format!("`{quoted}{more}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(kind: u32, bytes: &[u8]) -> Result<Value, String> {
        let bytes = [&kind.to_le_bytes(), bytes].concat();
        Value::read(&mut Cursor::new(&bytes))
    }

    #[test]
    fn every_type_is_read() {
        let text = [&3u64.to_le_bytes()[..], "né".as_bytes()].concat();
        for (kind, bytes, value) in [
            (0, &[200][..], Value::Unsigned(200)),
            (1, &[200], Value::Signed(-56)),
            (2, &[1, 2], Value::Unsigned(513)),
            (3, &[0, 128], Value::Signed(-32768)),
            (4, &u32::MAX.to_le_bytes(), Value::Unsigned(4_294_967_295)),
            (5, &(-7i32).to_le_bytes(), Value::Signed(-7)),
            (6, &1e-5f32.to_le_bytes(), Value::Float(f64::from(1e-5f32))),
            (7, &[1], Value::Bool(true)),
            (8, &text, Value::Text("né".to_owned())),
            (10, &u64::MAX.to_le_bytes(), Value::Unsigned(u64::MAX)),
            (11, &i64::MIN.to_le_bytes(), Value::Signed(i64::MIN)),
            (12, &0.1f64.to_le_bytes(), Value::Float(0.1)),
        ] {
            assert_eq!(read(kind, bytes).unwrap(), value, "type {kind}");
            assert!(read(kind, &bytes[1..]).is_err(), "type {kind} cut off");
            let mut array = kind.to_le_bytes().to_vec();
            array.extend(2u64.to_le_bytes());
            array.extend([bytes, bytes].concat());
            let expected = Value::Array(vec![value.clone(), value]);
            assert_eq!(read(9, &array).unwrap(), expected, "array of {kind}");
            array.pop();
            assert!(read(9, &array).is_err(), "array of {kind} cut off");
        }
    }

    #[test]
    fn values_are_read_as_written() {
        let texts = vec!["a".to_owned(), "né".to_owned()];
        for value in [
            Value::Unsigned(200),
            Value::Unsigned(u64::MAX),
            Value::Signed(-7),
            Value::Signed(i64::MIN),
            Value::Float(f64::from(1e-5f32)),
            Value::Bool(true),
            Value::from("né"),
            Value::from(texts),
            Value::from(vec![1usize, 1 << 40]),
            Value::from(vec![0.5f32, -1.0]),
            Value::Array(Vec::new()),
        ] {
            let mut bytes = Vec::new();
            for wide in [false, true] {
                bytes.clear();
                value.write(wide, &mut bytes);
                let mut cursor = Cursor::new(&bytes);
                assert_eq!(Value::read(&mut cursor).unwrap(), value);
                assert_eq!(cursor.position(), bytes.len());
                let is_long = value == Value::Unsigned(200) && wide;
                assert_eq!(
                    is_long,
                    bytes[0] == Kind::U64 as u8 && bytes.len() == 12 && bytes[4] == 200
                );
            }
        }
    }

    #[test]
    fn accessors_return_values_of_their_type() {
        assert_eq!(Value::Unsigned(3).as_u64(), Some(3));
        assert_eq!(Value::Signed(3).as_u64(), Some(3));
        assert_eq!(Value::Signed(-3).as_u64(), None);
        assert_eq!(Value::Float(0.5).as_f64(), Some(0.5));
        assert_eq!(Value::Unsigned(3).as_f64(), Some(3.0));
        assert_eq!(Value::Bool(true).as_bool(), Some(true));
        assert_eq!(Value::Unsigned(1).as_bool(), None);
        assert_eq!(Value::Text("a".to_owned()).as_text(), Some("a"));
        let array = Value::Array(vec![Value::Bool(false)]);
        assert_eq!(array.as_array(), Some(&[Value::Bool(false)][..]));
        assert_eq!(array.as_text(), None);
    }

    #[test]
    fn too_many_items_are_refused() {
        let count = (1usize << 24) + 1;
        let mut bytes = 0u32.to_le_bytes().to_vec();
        bytes.extend((count as u64).to_le_bytes());
        bytes.resize(bytes.len() + count, 0);
        let message = read(9, &bytes).unwrap_err();
        assert!(message.contains("16777217 items"), "{message}");
    }

    #[test]
    fn names_in_messages_are_short_and_printable() {
        assert_eq!(quoted("a.weight"), "`a.weight`");
        assert_eq!(quoted("\u{1b}[2J"), "`\\u{1b}[2J`");
        assert!(quoted(&"x".repeat(5000)).len() < 100);
    }
}
