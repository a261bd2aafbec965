//! Reads the fields of a protocol buffer message.

/// Value of a field; integers are as stored, fixed ones in little-endian order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    Integer(u64),
    Fixed32([u8; 4]),
    Fixed64([u8; 8]),
    Bytes(&'a [u8]),
}

/// Reads the fields of a message in order.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn read(&mut self) -> Result<(u64, Value<'a>), String> {
        let key = self.integer()?;
        let value = match key & 7 {
            0 => Value::Integer(self.integer()?),
            1 => Value::Fixed64(self.array()?),
            2 => {
                let length = self.integer()?;
                let length = usize::try_from(length).map_err(|_| too_short(length))?;
                Value::Bytes(self.bytes(length)?)
            }
            5 => Value::Fixed32(self.array()?),
            other => return Err(format!("a field has the wire type {other}")),
        };
        match key >> 3 {
            0 => Err("a field has the number 0".to_owned()),
            number => Ok((number, value)),
        }
    }

    /// Reads a varint: seven bits per byte, the lowest first.
    fn integer(&mut self) -> Result<u64, String> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err("an integer has more than ten bytes".to_owned())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.bytes(N)?;
        Ok(bytes.try_into().expect("the length is N"))
    }

    fn bytes(&mut self, length: usize) -> Result<&'a [u8], String> {
        let (bytes, rest) = self
            .rest
            .split_at_checked(length)
            .ok_or_else(|| too_short(length as u64))?;
        self.rest = rest;
        Ok(bytes)
    }
}

fn too_short(length: u64) -> String {
    format!("it ends within a field of {length} bytes")
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.read();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}
