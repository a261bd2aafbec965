//! State for resuming an interrupted profile: the counts so far, and the hidden states that are the input of the next layer.
//! Hidden states are always on disk; memory holds one sequence of them.

use std::path::{Path, PathBuf};

use powerinfer_artifact::{
    Header, TensorFile,
    digest::DigestBuilder,
    tensor_file::Dtype,
    tensor_writer::{TensorShapes, TensorWriter, fill_tensors},
    write::matches,
};

use crate::{Counts, ExpertActivity, LayerActivity, ProfileError, activity::Reuse};

const FORMAT: &str = "powerinfer-profile-state";
/// Names of the files; `#` stands for a number.
pub(crate) const STATES: &str = "state-#-#.safetensors";
const HIDDEN: &str = "hidden";
const PLACE: &str = "place";
const DIGEST: &str = "digest";

/// Position of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResumePoint {
    /// First sequence of the round.
    pub(crate) start: usize,
    /// End of the round's sequences, exclusive.
    pub(crate) end: usize,
    /// Next layer; the number of layers if the round is finished.
    pub(crate) layer: usize,
}

/// Saved state of a run.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) place: ResumePoint,
    /// Activity of each layer over its finished rounds.
    pub(crate) activities: Vec<LayerActivity>,
    /// Input of the next layer, `[tokens, hidden]` for the whole round; `None` before the first layer and after the last.
    pub(crate) hidden: Option<HiddenFile>,
}

/// Hidden states on disk.
#[derive(Debug)]
pub(crate) struct HiddenFile {
    file: TensorFile,
    hidden_size: usize,
}

impl HiddenFile {
    /// Hidden states of `tokens` tokens from token `first`.
    pub(crate) fn read(&self, first: usize, tokens: usize) -> Vec<f32> {
        let row = self.hidden_size * size_of::<f32>();
        let view = self.file.find(HIDDEN);
        let bytes = view.map_or(&[][..], |view| view.bytes);
        let values = bytes[first * row..(first + tokens) * row]
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        self.file.release(HIDDEN); // each sequence is read once
        values
    }
}

fn path(folder: &Path, place: ResumePoint) -> PathBuf {
    folder.join(format!(
        "state-{:08}-{:04}.safetensors",
        place.end, place.layer
    ))
}

/// State files in `folder`, furthest progress first.
fn states(folder: &Path) -> Vec<PathBuf> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| matches(STATES, &name.to_string_lossy()))
        })
        .collect();
    paths.sort();
    paths.reverse();
    paths
}

/// Tensors of a layer.
const PARTS: [&str; 4] = ["numbers", "counts", "norms", "experts"];

/// Bytes of a digest in text form.
const DIGEST_LENGTH: usize = 67;

/// Whether the state file matches its digest.
fn is_whole(file: &TensorFile, layers: usize) -> bool {
    let mut digest = DigestBuilder::default();
    let bytes = |name: &str| file.find(name).map_or(&[][..], |view| view.bytes);
    digest.add(bytes(PLACE));
    digest.add(bytes(HIDDEN));
    file.release(HIDDEN);
    for layer in 0..layers {
        for part in PARTS {
            digest.add(bytes(&format!("{layer:04}.{part}")));
        }
    }
    digest.finish().to_string().as_bytes() == bytes(DIGEST)
}

/// Names and shapes of a layer's tensors.
fn shapes_of(shapes: &mut TensorShapes, layer: usize, sizes: Sizes) {
    let Sizes {
        neurons,
        sources,
        experts,
        ..
    } = sizes;
    let mut insert = |part: &str, dtype, shape| {
        shapes.insert(format!("{layer:04}.{part}"), (dtype, shape));
    };
    insert("numbers", Dtype::U64, vec![8 + sources]);
    insert("counts", Dtype::U64, vec![3 + sources, neurons]);
    insert("norms", Dtype::F32, vec![neurons]);
    if let Some(experts) = experts {
        insert("experts", Dtype::U64, vec![experts + 4, experts]);
    }
}

fn append(
    writer: &mut TensorWriter,
    digest: &mut DigestBuilder,
    layer: usize,
    activity: &LayerActivity,
) -> Result<(), ProfileError> {
    let reuse = activity.locality.iter();
    let numbers = [activity.tokens, activity.first_half.tokens]
        .into_iter()
        .chain(reuse.flat_map(|reuse| [reuse.reused, reuse.active]))
        .chain(activity.sources.iter().map(|source| source.tokens));
    let sources = activity.sources.iter().map(|source| &source.active);
    let counts = [
        &activity.active,
        &activity.first_half.active,
        &activity.magnitude_sum,
    ]
    .into_iter()
    .chain(sources)
    .flatten();
    let integers = |values: &mut dyn Iterator<Item = u64>| -> Vec<u8> {
        values.flat_map(u64::to_le_bytes).collect()
    };
    let experts = activity.experts.as_ref();
    let norms = activity.down_norms.iter();
    let norms: Vec<u8> = norms.flat_map(|norm| norm.to_le_bytes()).collect();
    let parts = [
        Some(integers(&mut { numbers })),
        Some(integers(&mut counts.copied())),
        Some(norms),
        experts.map(|experts| integers(&mut experts.to_numbers().into_iter())),
    ];
    for (part, bytes) in PARTS.into_iter().zip(parts) {
        let Some(bytes) = bytes else { continue };
        digest.add(&bytes);
        writer.append(&format!("{layer:04}.{part}"), &bytes)?;
    }
    Ok(())
}

/// Reads the tensors of [`append`].
fn read(file: &TensorFile, layer: usize, sizes: Sizes) -> Option<LayerActivity> {
    let Sizes {
        neurons,
        sources,
        experts,
        ..
    } = sizes;
    let expect = |part: &str, dtype, shape: &[usize]| {
        file.expect(&format!("{layer:04}.{part}"), dtype, shape)
            .ok()
    };
    let integers = |bytes: &[u8]| -> Vec<u64> {
        let words = bytes.as_chunks::<8>().0;
        words.iter().map(|b| u64::from_le_bytes(*b)).collect()
    };
    let numbers = integers(expect("numbers", Dtype::U64, &[8 + sources])?);
    let counts = integers(expect("counts", Dtype::U64, &[3 + sources, neurons])?);
    let norms = expect("norms", Dtype::F32, &[neurons])?
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect();
    let row = |index: usize| counts[index * neurons..][..neurons].to_vec();
    let reuse = |window: usize| Reuse {
        reused: numbers[2 + 2 * window],
        active: numbers[3 + 2 * window],
    };
    Some(LayerActivity {
        tokens: numbers[0],
        active: row(0),
        magnitude_sum: row(2),
        down_norms: norms,
        first_half: Counts {
            tokens: numbers[1],
            active: row(1),
        },
        sources: (0..sources)
            .map(|source| Counts {
                tokens: numbers[8 + source],
                active: row(3 + source),
            })
            .collect(),
        locality: [reuse(0), reuse(1), reuse(2)],
        experts: match experts {
            None => None,
            Some(experts) => {
                let counts = expect("experts", Dtype::U64, &[experts + 4, experts])?;
                Some(ExpertActivity::from_numbers(experts, &integers(counts)))
            }
        },
    })
}

/// Receives the hidden states of the sequences, in order.
pub(crate) type HiddenSink<'a> = dyn FnMut(&[f32]) -> Result<(), ProfileError> + 'a;

/// Saves the state at `place` in `folder` and removes earlier ones. `run` passes the hidden states of `tokens` tokens to its
/// argument and returns the counts.
pub(crate) fn save(
    folder: &Path,
    header: &Header,
    sizes: Sizes,
    place: ResumePoint,
    tokens: usize,
    run: impl FnOnce(&mut HiddenSink<'_>) -> Result<Vec<LayerActivity>, ProfileError>,
) -> Result<State, ProfileError> {
    let hidden_size = sizes.hidden;
    let path = path(folder, place);
    let mut shapes = TensorShapes::from([
        (PLACE.to_owned(), (Dtype::U64, vec![3])),
        (DIGEST.to_owned(), (Dtype::U8, vec![DIGEST_LENGTH])),
    ]);
    if tokens > 0 {
        shapes.insert(HIDDEN.to_owned(), (Dtype::F32, vec![tokens, hidden_size]));
    }
    for layer in 0..sizes.layers {
        shapes_of(&mut shapes, layer, sizes);
    }
    let mut activities = Vec::new();
    fill_tensors(&path, Some(&with_format(header)), &shapes, |writer| {
        let mut digest = DigestBuilder::default();
        let numbers = [place.start, place.end, place.layer];
        let numbers: Vec<u8> = numbers
            .into_iter()
            .flat_map(|number| (number as u64).to_le_bytes())
            .collect();
        writer.append(PLACE, &numbers)?;
        digest.add(&numbers);
        activities = run(&mut |hidden| {
            let bytes: Vec<u8> = hidden.iter().flat_map(|v| v.to_le_bytes()).collect();
            digest.add(&bytes);
            Ok(writer.append(HIDDEN, &bytes)?)
        })?;
        for (layer, activity) in activities.iter().enumerate() {
            append(writer, &mut digest, layer, activity)?;
        }
        Ok::<_, ProfileError>(writer.append(DIGEST, digest.finish().to_string().as_bytes())?)
    })?;
    for older in states(folder).into_iter().filter(|older| *older != path) {
        let _ = std::fs::remove_file(older); // a stale file is ignored by `load`
    }
    let hidden = if tokens > 0 {
        let file = TensorFile::open(&path)?;
        Some(HiddenFile { file, hidden_size })
    } else {
        None
    };
    Ok(State {
        place,
        activities,
        hidden,
    })
}

/// Dimensions of the tensors of a state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) neurons: usize,
    pub(crate) sources: usize,
    pub(crate) hidden: usize,
    /// Number of experts per layer; `None` in dense models.
    pub(crate) experts: Option<usize>,
}

/// Loads the furthest state that a run with the same `header` left in `folder`; `None` if there is none. `tokens` returns the
/// number of tokens of a range of sequences, if it exists.
pub(crate) fn load(
    folder: &Path,
    header: &Header,
    sizes: Sizes,
    tokens: impl Fn(std::ops::Range<usize>) -> Option<usize>,
) -> Option<State> {
    states(folder).into_iter().find_map(|path| {
        let file = TensorFile::open(&path).ok()?;
        if file.header(FORMAT, header.version).ok()? != with_format(header) {
            return None;
        }
        let numbers = file.expect(PLACE, Dtype::U64, &[3]).ok()?;
        let number = |index: usize| {
            let bytes = numbers[8 * index..][..8].try_into().ok()?;
            usize::try_from(u64::from_le_bytes(bytes)).ok()
        };
        let place = ResumePoint {
            start: number(0)?,
            end: number(1)?,
            layer: number(2)?,
        };
        if place.start > place.end || place.layer == 0 || place.layer > sizes.layers {
            return None;
        }
        if !is_whole(&file, sizes.layers) {
            return None;
        }
        let tokens = tokens(place.start..place.end)?;
        let activities = (0..sizes.layers)
            .map(|layer| read(&file, layer, sizes))
            .collect::<Option<_>>()?;
        let hidden = if place.layer < sizes.layers {
            let hidden_size = sizes.hidden;
            let shape = [tokens, hidden_size];
            file.expect(HIDDEN, Dtype::F32, &shape).ok()?;
            Some(HiddenFile { file, hidden_size })
        } else {
            None
        };
        Some(State {
            place,
            activities,
            hidden,
        })
    })
}

fn with_format(header: &Header) -> Header {
    Header {
        format: FORMAT.to_owned(),
        ..header.clone()
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::{Digest, ModelIdentity};

    use super::*;

    #[test]
    fn states_of_mixtures_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let model = ModelIdentity {
            name: "model".to_owned(),
            fingerprint: Digest::from_content(b"model"),
        };
        let header = Header::new("powerinfer-profile", 3, model, 0);
        for experts in [None, Some(3)] {
            let sizes = Sizes {
                layers: 2,
                neurons: 7,
                sources: 1,
                hidden: 4,
                experts,
            };
            let activity = |layer: u64| {
                let mut activity = LayerActivity::new(7, 1);
                activity.tokens = 5 + layer;
                activity.experts = experts.map(|experts| {
                    let numbers: Vec<u64> = (layer..).take((experts + 4) * experts).collect();
                    ExpertActivity::from_numbers(experts, &numbers)
                });
                activity
            };
            let place = ResumePoint {
                start: 0,
                end: 1,
                layer: 2,
            };
            let saved = vec![activity(0), activity(1)];
            save(folder.path(), &header, sizes, place, 0, |_| {
                Ok(saved.clone())
            })
            .unwrap();
            let loaded = load(folder.path(), &header, sizes, |_| Some(0)).unwrap();
            assert_eq!(loaded.activities, saved);
            let other = Sizes {
                experts: Some(2),
                ..sizes
            };
            assert!(load(folder.path(), &header, other, |_| Some(0)).is_none());
        }
    }
}
