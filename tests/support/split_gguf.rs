//! Splits GGUF files as `llama-gguf-split` does.

/// Layout of a GGUF file before its data: its metadata and tensor table.
struct Head {
    metadata: std::ops::Range<usize>,
    keys: u64,
    /// Each tensor's table entry without the offset, and its data.
    tensors: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Reads numbers and texts from a GGUF file.
struct Reader<'a> {
    bytes: &'a [u8],
    place: usize,
}

impl Reader<'_> {
    fn number(&mut self, bytes: usize) -> u64 {
        let mut number = [0; 8];
        number[..bytes].copy_from_slice(&self.bytes[self.place..][..bytes]);
        self.place += bytes;
        u64::from_le_bytes(number)
    }

    fn skip_text(&mut self) {
        self.place += self.number(8) as usize;
    }

    fn skip_value(&mut self, kind: u64) {
        match kind {
            0 | 1 | 7 => self.place += 1,
            2 | 3 => self.place += 2,
            4..=6 => self.place += 4,
            10..=12 => self.place += 8,
            8 => self.skip_text(),
            9 => {
                let kind = self.number(4);
                for _ in 0..self.number(8) {
                    self.skip_value(kind);
                }
            }
            other => panic!("type {other}"),
        }
    }
}

impl Head {
    fn read(bytes: &[u8]) -> Self {
        let mut reader = Reader { bytes, place: 8 };
        let (count, keys) = (reader.number(8), reader.number(8));
        let start = reader.place;
        for _ in 0..keys {
            reader.skip_text();
            let kind = reader.number(4);
            reader.skip_value(kind);
        }
        let metadata = start..reader.place;
        let mut entries = Vec::new();
        for _ in 0..count {
            let start = reader.place;
            reader.skip_text();
            reader.place += reader.number(4) as usize * 8 + 4;
            let entry = bytes[start..reader.place].to_vec();
            entries.push((entry, reader.number(8) as usize));
        }
        let data = &bytes[reader.place.next_multiple_of(32)..];
        let end = |index: usize| entries.get(index + 1).map_or(data.len(), |next| next.1);
        let tensors = entries.iter().enumerate();
        let tensors = tensors
            .map(|(index, (entry, offset))| (entry.clone(), data[*offset..end(index)].to_vec()));
        Self {
            metadata,
            keys,
            tensors: tensors.collect(),
        }
    }
}

/// Encodes a key and a number of the type `kind`.
pub(crate) fn entry(key: &str, kind: u32, number: u32) -> Vec<u8> {
    let bytes = if kind == 2 { 2 } else { 4 };
    let mut entry = (key.len() as u64).to_le_bytes().to_vec();
    entry.extend(key.as_bytes());
    entry.extend(kind.to_le_bytes());
    entry.extend(&number.to_le_bytes()[..bytes]);
    entry
}

/// Writes a file of metadata and tensors.
fn write(magic: &[u8], keys: u64, metadata: &[u8], tensors: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut out = magic.to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend(keys.to_le_bytes());
    out.extend(metadata);
    let mut offset = 0u64;
    for (entry, data) in tensors {
        out.extend(entry);
        out.extend(offset.to_le_bytes());
        offset += data.len() as u64;
    }
    out.resize(out.len().next_multiple_of(32), 0);
    tensors.iter().for_each(|(_, data)| out.extend(data));
    out
}

/// Returns the file `bytes` with additional metadata `entries`.
pub(crate) fn with_entries(bytes: &[u8], entries: &[Vec<u8>]) -> Vec<u8> {
    let head = Head::read(bytes);
    let metadata = [&bytes[head.metadata], &entries.concat()].concat();
    let keys = head.keys + entries.len() as u64;
    write(&bytes[..8], keys, &metadata, &head.tensors)
}

/// Splits the file `bytes` into parts with the given numbers of tensors; the last part has the remaining ones. The parts
/// state `stated` tensors more than there are.
pub(crate) fn split(bytes: &[u8], tensors: &[usize], stated: u32) -> Vec<Vec<u8>> {
    let head = Head::read(bytes);
    let (count, total) = (tensors.len() as u32 + 1, head.tensors.len() as u32);
    let mut left = &head.tensors[..];
    let parts = (0..count).map(|number| {
        let own = tensors.get(number as usize).copied().unwrap_or(left.len());
        let (own, rest) = left.split_at(own);
        left = rest;
        let of_split = [
            entry("split.no", 2, number),
            entry("split.count", 2, count),
            entry("split.tensors.count", 5, total + stated),
        ];
        let metadata = match number {
            0 => [&bytes[head.metadata.clone()], &of_split.concat()].concat(),
            _ => of_split.concat(),
        };
        let keys = if number == 0 { head.keys + 3 } else { 3 };
        write(&bytes[..8], keys, &metadata, own)
    });
    parts.collect()
}
