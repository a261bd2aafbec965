//! Predictors of the original PowerInfer: located, checked, read and refused.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/torch.rs"]
mod torch;

use std::path::{Path, PathBuf};

use powerinfer_import::{OriginalPredictor, OriginalPredictors, PredictedSizes};
use torch::{Element, save};

const SIZES: PredictedSizes = PredictedSizes {
    layers: 3,
    hidden: 4,
    neurons: 6,
};

/// Matrix of multiples of 0.5, which all float types represent exactly.
fn values(count: usize, layer: usize) -> Vec<f32> {
    (0..count)
        .map(|index| (index % 7) as f32 * 0.5 - layer as f32)
        .collect()
}

/// Contents of a layer's file with a predictor of `rank`.
fn layer_file(layer: usize, rank: usize, prefix: &str) -> Vec<u8> {
    let (fc1, fc2) = (values(rank * 4, layer), values(6 * rank, layer));
    let names = ["fc1.weight", "fc2.weight"].map(|name| format!("{prefix}{name}"));
    let tensors = [
        (&names[0][..], [rank, 4], &fc1[..]),
        (&names[1][..], [6, rank], &fc2[..]),
    ];
    save(&tensors, Element::F16)
}

/// Folder with a predictor in every layer, of ranks 1, 2 and 3.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for layer in 0..3 {
        let path = folder.path().join(format!("model_{layer}.pt"));
        std::fs::write(path, layer_file(layer, layer + 1, "")).unwrap();
    }
    folder
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden/gguf")
        .join(name)
}

/// Checks that the predictors at `path` are refused with a message that contains all `parts`.
#[track_caller]
fn refused(path: &Path, sizes: PredictedSizes, parts: &[&str]) {
    let predictors = OriginalPredictors::open(path, sizes);
    let read = predictors.and_then(|predictors| {
        (0..predictors.layer_count()).try_for_each(|layer| predictors.read(layer).map(drop))
    });
    let message = read.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn a_folder_has_one_file_per_layer() {
    let folder = folder();
    let predictors = OriginalPredictors::open(folder.path(), SIZES).unwrap();
    assert_eq!(predictors.threshold(), 0.0);
    assert_eq!(predictors.layer_count(), 3);
    for layer in 0..3 {
        let rank = layer + 1;
        let expected = OriginalPredictor {
            rank,
            fc1: values(rank * 4, layer),
            fc2: values(6 * rank, layer),
        };
        assert_eq!(predictors.read(layer).unwrap(), expected);
    }
}

#[test]
fn tensor_names_may_have_a_module_prefix() {
    let folder = folder();
    let plain = OriginalPredictors::open(folder.path(), SIZES).unwrap();
    let plain = plain.read(1).unwrap();
    for prefix in ["module.", "model.layers.1."] {
        std::fs::write(folder.path().join("model_1.pt"), layer_file(1, 2, prefix)).unwrap();
        let predictors = OriginalPredictors::open(folder.path(), SIZES).unwrap();
        assert_eq!(predictors.read(1).unwrap(), plain);
    }
}

#[test]
fn the_stated_threshold_is_used() {
    let folder = folder();
    let digest = |threshold: &str| {
        std::fs::write(folder.path().join("config.json"), threshold).unwrap();
        let predictors = OriginalPredictors::open(folder.path(), SIZES).unwrap();
        (predictors.threshold(), predictors.digest().unwrap())
    };
    let (threshold, without) = digest("{}");
    assert_eq!(threshold, 0.0);
    let (threshold, with) = digest(r#"{"sparse_threshold": -0.25}"#);
    assert_eq!(threshold, -0.25);
    assert_ne!(with, without);
    for bad in ["\"much\"", "1e300", "null"] {
        let config = format!(r#"{{"sparse_threshold": {bad}}}"#);
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        refused(folder.path(), SIZES, &["config.json", "sparse_threshold"]);
    }
}

#[test]
fn layers_are_sorted_by_number_and_complete() {
    let folder = folder();
    let file = |layer: usize| folder.path().join(format!("model_{layer}.pt"));
    std::fs::rename(file(1), file(10)).unwrap();
    let four = PredictedSizes { layers: 4, ..SIZES };
    refused(folder.path(), four, &["no predictor of layers 1, 3;"]);
    std::fs::copy(file(10), file(1)).unwrap();
    refused(folder.path(), SIZES, &["layer 10", "3 layers"]);
}

#[test]
fn matrices_must_fit_the_model_and_each_other() {
    let folder = folder();
    for (sizes, parts) in [
        (
            PredictedSizes { hidden: 5, ..SIZES },
            ["fc1.weight", "[1, 4]", "[1 to 6, 5]"],
        ),
        (
            PredictedSizes {
                neurons: 7,
                ..SIZES
            },
            ["fc2.weight", "[6, 1]", "[7, 1]"],
        ),
    ] {
        refused(
            folder.path(),
            sizes,
            &[&parts[..], &["model_0.pt"]].concat(),
        );
    }
    // Wider than what it predicts.
    let path = folder.path().join("model_2.pt");
    std::fs::write(&path, layer_file(2, 7, "")).unwrap();
    refused(
        folder.path(),
        SIZES,
        &["model_2.pt", "fc1.weight", "[7, 4]", "[1 to 6, 4]"],
    );
    // Of rank 0.
    std::fs::write(&path, layer_file(2, 0, "")).unwrap();
    refused(
        folder.path(),
        SIZES,
        &["model_2.pt", "`fc1.weight`", "is empty"],
    );
}

#[test]
fn unused_tensors_are_refused() {
    let folder = folder();
    let path = folder.path().join("model_0.pt");
    let (fc1, fc2, bias) = (values(4, 0), values(6, 0), values(6, 0));
    let tensors = [
        ("fc1.weight", [1, 4], &fc1[..]),
        ("fc2.weight", [6, 1], &fc2[..]),
        ("fc2.bias", [6, 1], &bias[..]),
    ];
    std::fs::write(&path, save(&tensors, Element::F32)).unwrap();
    refused(
        folder.path(),
        SIZES,
        &["model_0.pt", "`fc2.bias`", "is not part of"],
    );
    std::fs::write(&path, save(&tensors[..1], Element::F32)).unwrap();
    refused(folder.path(), SIZES, &["model_0.pt", "`fc2.weight`"]);
    let twice = [tensors[0], tensors[1], ("a.fc1.weight", [1, 4], &fc1[..])];
    std::fs::write(&path, save(&twice, Element::F32)).unwrap();
    refused(folder.path(), SIZES, &["`fc1.weight`", "is not part of"]);
    let nan = [f32::NAN; 4];
    let tensors = [("fc1.weight", [1, 4], &nan[..]), tensors[1]];
    std::fs::write(&path, save(&tensors, Element::F32)).unwrap();
    refused(folder.path(), SIZES, &["`fc1.weight`", "NaN"]);
}

#[test]
fn a_pickle_that_names_more_than_tensors_is_refused() {
    let folder = folder();
    let mut bytes = layer_file(0, 1, "");
    let module = b"torch._utils";
    let place = bytes
        .windows(module.len())
        .position(|window| window == module);
    bytes[place.unwrap()..][..module.len()].copy_from_slice(b"posix.system");
    let path = folder.path().join("model_0.pt");
    std::fs::write(&path, &bytes).unwrap();
    refused(
        folder.path(),
        SIZES,
        &["model_0.pt", "posix.system", "only tensors"],
    );
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    refused(folder.path(), SIZES, &["model_0.pt", "not a zip"]);
}

#[test]
fn a_gguf_file_with_predictors_is_read() {
    let sizes = PredictedSizes {
        layers: 2,
        hidden: 64,
        neurons: 1024,
    };
    for kind in ["f16", "q4_0"] {
        let path = golden(&format!("tiny.powerinfer.{kind}.gguf"));
        let predictors = OriginalPredictors::open(&path, sizes).unwrap();
        assert_eq!(predictors.threshold(), 0.0);
        let layer = predictors.read(1).unwrap();
        assert_eq!(layer.rank, 32);
        // Made as fc1 = [B; -B], and what becomes of B becomes of -B.
        let (half, rest) = layer.fc1.split_at(16 * 64);
        let opposite = half.iter().zip(rest).all(|(plus, minus)| *plus == -minus);
        assert!(opposite, "{kind}");
        let deeper = PredictedSizes { layers: 3, ..sizes };
        refused(&path, deeper, &["layer 2;"]);
        let shallow = PredictedSizes { layers: 1, ..sizes };
        refused(&path, shallow, &["layer 1", "1 layers"]);
    }
    refused(
        &golden("llama-bpe.f16.gguf"),
        sizes,
        &["blk.0.fc1.weight", "; give a"],
    );
    refused(&golden("quants.json"), sizes, &["quants.json", "GGUF"]);
    // Which of many files is meant is not guessed.
    refused(&golden(""), sizes, &["`model_0.pt`", "GGUF files"]);
    refused(&golden("nowhere"), sizes, &["nowhere", "does not exist"]);
}
