//! File names of the parts of a split file.

/// File name of a part, such as `model-00001-of-00003.safetensors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartName<'a> {
    /// Text before the number: the name of the whole file without its extension.
    pub stem: &'a str,
    /// Number of the part, from 1.
    pub number: usize,
    /// Number of parts.
    pub count: usize,
    /// Extension: the text after the last dot.
    pub extension: &'a str,
}

impl<'a> PartName<'a> {
    /// Parses a file name; `None` if it is not the name of a part.
    pub fn parse(name: &'a str) -> Option<Self> {
        const DIGITS: usize = 5;
        let digits = |text: &str| {
            let are_digits = text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
            are_digits.then(|| text.parse().ok()).flatten()
        };
        let (rest, extension) = name.rsplit_once('.')?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let (number, count) = (digits(number)?, digits(count)?);
        let is_part = !stem.is_empty() && (1..=count).contains(&number);
        is_part.then_some(Self {
            stem,
            number,
            count,
            extension,
        })
    }

    /// Returns the file names of all parts, in order.
    pub fn all(self) -> impl Iterator<Item = String> {
        let Self {
            stem,
            count,
            extension,
            ..
        } = self;
        (1..=count).map(move |number| format!("{stem}-{number:05}-of-{count:05}.{extension}"))
    }

    /// Returns whether `other` is the name of a part of the same file.
    pub fn belongs_with(self, other: PartName<'_>) -> bool {
        (self.stem, self.count, self.extension) == (other.stem, other.count, other.extension)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_have_numbers_of_five_digits() {
        let name = "a-b-00002-of-00003.gguf";
        let part = PartName::parse(name).unwrap();
        assert_eq!((part.stem, part.number, part.count), ("a-b", 2, 3));
        assert_eq!(part.extension, "gguf");
        let all: Vec<String> = part.all().collect();
        assert_eq!(all.len(), 3);
        assert_eq!(all[1], name);
        for name in [
            "a.gguf",
            "a-00001-of-00002",
            "a-1-of-2.gguf",
            "-00001-of-00002.gguf",
            "a-00000-of-00002.gguf",
            "a-00003-of-00002.gguf",
            "a-+0001-of-00002.gguf",
            "a-000001-of-000002.gguf",
        ] {
            assert_eq!(PartName::parse(name), None, "{name}");
        }
    }
}
