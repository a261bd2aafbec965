//! Writes files in the format of `torch.save`: a zip of a pickle and one storage per tensor.

use half::f16;

/// Number type of a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
}

/// A tensor: name, rows and columns, values row by row.
pub(crate) type Tensor<'a> = (&'a str, [usize; 2], &'a [f32]);

/// A file with a dictionary of `tensors`.
pub(crate) fn save(tensors: &[Tensor<'_>], element: Element) -> Vec<u8> {
    let storages = tensors.iter().map(|(_, _, values)| match element {
        Element::F32 => values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        Element::F16 => values
            .iter()
            .flat_map(|value| f16::from_f32(*value).to_le_bytes())
            .collect(),
    });
    let mut entries = vec![("model/data.pkl".to_owned(), pickle(tensors, element))];
    for (index, storage) in storages.enumerate() {
        entries.push((format!("model/data/{index}"), storage));
    }
    zip(&entries)
}

/// `OrderedDict` of `_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())`.
fn pickle(tensors: &[Tensor<'_>], element: Element) -> Vec<u8> {
    const EMPTY_DICTIONARY: &[u8] = b"ccollections\nOrderedDict\n)R";
    let class: &[u8] = match element {
        Element::F32 => b"ctorch\nFloatStorage\n",
        Element::F16 => b"ctorch\nHalfStorage\n",
    };
    let text = |text: &str| {
        [
            b"X",
            &(text.len() as u32).to_le_bytes()[..],
            text.as_bytes(),
        ]
        .concat()
    };
    let number = |number: usize| [b"J", &(number as u32).to_le_bytes()[..]].concat();
    let mut bytes = [b"\x80\x02", EMPTY_DICTIONARY, b"("].concat();
    for (index, (name, [rows, columns], values)) in tensors.iter().enumerate() {
        for part in [
            &text(name)[..],
            b"ctorch._utils\n_rebuild_tensor_v2\n((",
            &text("storage"),
            class,
            &text(&index.to_string()),
            &text("cpu"),
            &number(values.len()),
            b"tQK\x00",
            &number(*rows),
            &number(*columns),
            b"\x86",
            &number(*columns),
            b"K\x01\x86\x89",
            EMPTY_DICTIONARY,
            b"tR",
        ] {
            bytes.extend(part);
        }
    }
    bytes.extend(b"u.");
    bytes
}

/// A zip of uncompressed entries.
fn zip(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in entries {
        let offset = bytes.len() as u32;
        let length = (content.len() as u32).to_le_bytes();
        // Version needed, flags, method, time, date, checksum, both lengths, lengths of name and
        // of what follows it.
        let about = [
            &[20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0][..],
            &checksum(content).to_le_bytes(),
            &length,
            &length,
            &(name.len() as u16).to_le_bytes(),
            &[0, 0],
        ]
        .concat();
        bytes.extend([b"PK\x03\x04", &about[..], name.as_bytes(), content].concat());
        directory.extend([b"PK\x01\x02\x14\0", &about[..], &[0; 10]].concat());
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let start = bytes.len() as u32;
    let count = (entries.len() as u16).to_le_bytes();
    bytes.extend(&directory);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    bytes.extend(count);
    bytes.extend(count);
    bytes.extend((directory.len() as u32).to_le_bytes());
    bytes.extend(start.to_le_bytes());
    bytes.extend([0, 0]);
    bytes
}

/// CRC-32 as used in zip files.
fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |checksum, byte| {
        (0..8).fold(checksum ^ u32::from(*byte), |checksum, _| {
            (checksum >> 1) ^ (0xedb8_8320 & (checksum & 1).wrapping_neg())
        })
    })
}
