//! The task files of `datasets/demo`.

use std::{fs::File, io::Write, path::Path};

use anyhow::Context;
use flate2::{Compression, write::GzEncoder};
use powerinfer_datasets::minipython::Split;

use crate::minipython;

/// Tasks of `split` in its file.
fn count(split: Split) -> usize {
    match split {
        // The most that `profile` reads by itself is 147,456 tokens, some 1,700 tasks.
        Split::Calibration => 2500,
        Split::HeldOut => 1500,
    }
}

/// The content of the file of `split`: one task per line, as JSON.
fn lines(split: Split) -> serde_json::Result<String> {
    let generated = match split {
        Split::Calibration => minipython::Split::Calibration,
        Split::HeldOut => minipython::Split::HeldOut,
    };
    let mut lines = String::new();
    for task in minipython::tasks(generated, split.default_seed()).take(count(split)) {
        lines.push_str(&serde_json::to_string(&task)?);
        lines.push('\n');
    }
    Ok(lines)
}

/// Writes the file of each split to `folder`.
pub(crate) fn write(folder: &Path) -> anyhow::Result<()> {
    for split in Split::ALL {
        let path = folder.join(split.name()).with_extension("jsonl.gz");
        let write = || -> anyhow::Result<()> {
            let mut file = GzEncoder::new(File::create(&path)?, Compression::best());
            file.write_all(lines(split)?.as_bytes())?;
            file.finish()?;
            Ok(())
        };
        write().with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn the_files_are_what_the_generator_gives() {
        for split in Split::ALL {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../demo")
                .join(split.name())
                .with_extension("jsonl.gz");
            let mut content = String::new();
            GzDecoder::new(File::open(&path).unwrap())
                .read_to_string(&mut content)
                .unwrap();
            let generated = lines(split).unwrap();
            let first = content.lines().zip(generated.lines());
            for (in_file, generated) in first {
                assert_eq!(in_file, generated, "{}", path.display());
            }
            assert_eq!(content.len(), generated.len(), "{}", path.display());
        }
    }
}
