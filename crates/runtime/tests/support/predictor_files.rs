//! Predictor files written for a test.

use std::{collections::BTreeMap, path::Path};

use powerinfer_artifact::{
    Header,
    matrix_planes::insert_matrix,
    plan::Score,
    predictor_file::{
        self, INPUT_SETTING, LAYERS_SETTING, PredictorFile, PredictorInput, PredictorSummary,
        SignBitSummary, WEIGHTS_SETTING, score_names, signs_name, tensor_name,
    },
    tensor_file::Dtype,
    tensor_writer::{TensorSource, write_tensors},
    threshold_curve::{ERRORS, ThresholdCurve, ThresholdLevel},
};
use powerinfer_model::{Checkpoint, LayerWeight, Weight};
use powerinfer_tensor::{Format, OwnedMatrix, SignMatrix, pack, pack_signs};

/// Summary of a layer without a network, whose signs have to agree in so many places and whose
/// thresholds leave nothing out.
pub(crate) fn summary(
    layer: usize,
    agreements: u32,
    score: Score,
    centred: bool,
) -> PredictorSummary {
    let level = ThresholdLevel {
        value: 0.0,
        error: 0.0,
        density: 1.0,
    };
    PredictorSummary {
        sign_bit: Some(SignBitSummary {
            agreements,
            alpha: 1.0,
            bytes: 0,
            recall: 0.0,
            contribution_recall: None,
            precision: 0.0,
            predicted_sparsity: 0.0,
        }),
        thresholds: vec![ThresholdCurve {
            score,
            centred,
            levels: vec![level; ERRORS.len()],
        }],
        ..PredictorSummary::none(layer)
    }
}

/// Adds the signs of the layer's gate.
pub(crate) fn insert_signs(
    tensors: &mut BTreeMap<String, TensorSource<'_>>,
    checkpoint: &Checkpoint,
    layer: usize,
) {
    let config = checkpoint.config();
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let gate = Weight::Layer(layer, LayerWeight::Gate);
    let gate = checkpoint.read(gate).unwrap();
    let words = gate.chunks(hidden).flat_map(pack_signs);
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    let shape = vec![neurons, bytes.len() / neurons];
    let signs = TensorSource::owned(Dtype::U8, shape, bytes);
    tensors.insert(signs_name(layer), signs);
}

/// Writes predictors for `checkpoint` with these settings and the layers' summaries.
pub(crate) fn write_predictors(
    checkpoint: &Checkpoint,
    settings: &[(&str, &str)],
    summaries: &[PredictorSummary],
    tensors: &BTreeMap<String, TensorSource<'_>>,
    folder: &Path,
) -> PredictorFile {
    let identity = checkpoint.identity().clone();
    let header = Header::new(predictor_file::FORMAT, predictor_file::VERSION, identity, 0)
        .with_setting(LAYERS_SETTING, serde_json::to_value(summaries).unwrap());
    let header = settings.iter().fold(header, |header, (name, value)| {
        header.with_setting(name, *value)
    });
    write_tensors(&folder.join(predictor_file::FILE), Some(&header), tensors).unwrap();
    PredictorFile::open(folder).unwrap()
}

/// The numbers of a layer's predictor: `[rank, hidden]`, `[neurons, rank]`, `[neurons]`.
#[derive(Clone)]
pub(crate) struct Network {
    pub(crate) rank: usize,
    pub(crate) a: Vec<f32>,
    pub(crate) b: Vec<f32>,
    pub(crate) bias: Vec<f32>,
}

/// Predictors with threshold 0.
pub(crate) fn write_networks(
    checkpoint: &Checkpoint,
    networks: &[Network],
    weights: Format,
    input: PredictorInput,
    folder: &Path,
) -> PredictorFile {
    let hidden = checkpoint.config().hidden_size;
    let mut matrices = Vec::new();
    let mut summaries = Vec::new();
    for (layer, network) in networks.iter().enumerate() {
        let (rank, neurons) = (network.rank, network.bias.len());
        for (part, format, rows, columns, values) in [
            ("a", weights, rank, hidden, &network.a),
            ("b", weights, neurons, rank, &network.b),
            ("bias", Format::F32, neurons, 1, &network.bias),
        ] {
            let matrix = powerinfer_tensor::pack(format, rows, columns, values);
            matrices.push((tensor_name(layer, part), matrix));
        }
        summaries.push(PredictorSummary {
            rank,
            ..PredictorSummary::none(layer)
        });
    }
    let mut tensors = BTreeMap::new();
    for (name, matrix) in &matrices {
        insert_matrix(&mut tensors, name, matrix);
    }
    let settings = [
        (WEIGHTS_SETTING, weights.name()),
        (INPUT_SETTING, input.name()),
    ];
    write_predictors(checkpoint, &settings, &summaries, &tensors, folder)
}

/// Hidden units of the predictors of [`full_predictors`].
pub(crate) const RANK: usize = 40;

/// Writes predictors with everything that a file can hold: networks with weights of format `weights`, signs and
/// thresholds.
pub(crate) fn full_predictors(
    checkpoint: &Checkpoint,
    weights: Format,
    folder: &Path,
) -> PredictorFile {
    let config = checkpoint.config();
    let (hidden, neurons) = (config.hidden_size, config.ffn_size);
    let ones = |length: usize| {
        let bytes = vec![0.01f32; length].into_iter().flat_map(f32::to_le_bytes);
        TensorSource::owned(Dtype::F32, vec![length], bytes.collect())
    };
    let matrix = |format, rows: usize, columns: usize| {
        pack(format, rows, columns, &vec![0.01; rows * columns])
    };
    let parts: [(&str, OwnedMatrix); 3] = [
        ("a", matrix(weights, RANK, hidden)),
        ("b", matrix(weights, neurons, RANK)),
        ("bias", matrix(predictor_file::BIAS, neurons, 1)),
    ];
    let mut tensors = BTreeMap::new();
    let mut summaries = Vec::new();
    for layer in 0..config.layer_count {
        for (part, matrix) in &parts {
            insert_matrix(&mut tensors, &tensor_name(layer, part), matrix);
        }
        let lengths = [neurons, neurons, neurons, hidden];
        for (name, length) in score_names(layer).into_iter().zip(lengths) {
            tensors.insert(name, ones(length));
        }
        let row = SignMatrix::row_bytes(hidden);
        let signs = TensorSource::owned(Dtype::U8, vec![neurons, row], vec![0; neurons * row]);
        tensors.insert(signs_name(layer), signs);
        summaries.push(PredictorSummary {
            rank: RANK,
            ..summary(layer, 0, Score::Contribution, true)
        });
    }
    let settings = [(WEIGHTS_SETTING, weights.name())];
    write_predictors(checkpoint, &settings, &summaries, &tensors, folder)
}
