//! [`Arena`]: a folder with valid inputs, one file of which at a time is replaced by a mutated one.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use powerinfer_artifact::random::Random;

use crate::{
    mutation::{flip, have_equal_values, mutate},
    requests::BUNDLE,
    target::{Change, Sources, Target},
};

/// A file to mutate, within a folder that is valid with it.
struct Input {
    folder: PathBuf,
    file: String,
    bytes: Vec<u8>,
}

/// Copies of a target's inputs.
pub struct Arena {
    target: &'static Target,
    inputs: Vec<Input>,
}

impl Arena {
    /// Copies the inputs of `target` to `scratch`.
    ///
    /// # Errors
    ///
    /// A file cannot be read or written.
    ///
    /// # Panics
    ///
    /// There are no inputs.
    pub fn new(target: &'static Target, sources: &Sources, scratch: &Path) -> io::Result<Self> {
        let _ = BUNDLE.set(sources.made.join("bundle"));
        let mut inputs = Vec::new();
        let mut copies: Vec<(PathBuf, PathBuf)> = Vec::new();
        for (source, file) in (target.inputs)(sources)? {
            let copied = copies.iter().find(|(from, _)| *from == source);
            let folder = match copied {
                Some((_, folder)) => folder.clone(),
                None => {
                    let folder = scratch.join(copies.len().to_string());
                    copy(&source, &folder)?;
                    copies.push((source, folder.clone()));
                    folder
                }
            };
            let bytes = fs::read(folder.join(&file))?;
            inputs.push(Input {
                folder,
                file,
                bytes,
            });
        }
        assert!(!inputs.is_empty(), "`{}` has no inputs", target.name);
        Ok(Self { target, inputs })
    }

    /// Mutates the input of the try `index`; returns its path and bytes.
    pub fn mutated(&self, seed: u64, index: u64) -> (PathBuf, Vec<u8>) {
        let (input, mut random) = self.choice(seed, index);
        let bytes = match self.target.change {
            Change::Mutation => mutate(&input.file, &input.bytes, &mut random),
            Change::Flip => flip(&input.bytes, &mut random),
        };
        (input.folder.join(&input.file), bytes)
    }

    /// Reads the mutated input of the try `index`; returns whether it is accepted.
    ///
    /// # Errors
    ///
    /// A file cannot be written.
    ///
    /// # Panics
    ///
    /// The target panics, or accepts invalid input.
    pub fn attempt(&self, seed: u64, index: u64) -> io::Result<bool> {
        let (input, mut random) = self.choice(seed, index);
        let (path, bytes) = self.mutated(seed, index);
        fs::write(&path, &bytes)?;
        let is_sealed = random.chance(70);
        let accepted = self.read(input, is_sealed)?;
        fs::write(&path, &input.bytes)?;
        assert!(
            !accepted
                || self.target.change != Change::Flip
                || have_equal_values(&bytes, &input.bytes),
            "a flipped bit of `{}` is not noticed",
            input.file
        );
        Ok(accepted)
    }

    /// Reads `bytes` in place of the first input.
    ///
    /// # Errors
    ///
    /// A file cannot be written.
    ///
    /// # Panics
    ///
    /// The target panics.
    pub fn read_bytes(&self, bytes: &[u8]) -> io::Result<bool> {
        let input = &self.inputs[0];
        fs::write(input.folder.join(&input.file), bytes)?;
        self.read(input, true)
    }

    fn choice(&self, seed: u64, index: u64) -> (&Input, Random) {
        let name = self.target.name.bytes().map(u64::from);
        let own = name.fold(seed, |own, byte| Random::new(own ^ byte).next_bits());
        let mut random = Random::new(own ^ index);
        (&self.inputs[random.below(self.inputs.len())], random)
    }

    /// Reads the folder of `input`, with digests that match it if `is_sealed`.
    fn read(&self, input: &Input, is_sealed: bool) -> io::Result<bool> {
        let sealed = match self.target.seal {
            Some((file, seal)) if is_sealed => {
                let file = file.unwrap_or(&input.file);
                let path = input.folder.join(file);
                let before = fs::read(&path)?;
                seal(&input.folder, &input.file);
                Some((path, before))
            }
            _ => None,
        };
        let result = (self.target.read)(&input.folder, &input.file);
        if let Some((path, before)) = sealed {
            fs::write(path, before)?;
        }
        Ok(result.is_ok())
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &target)?
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}
