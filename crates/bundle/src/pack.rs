//! Makes a bundle out of a checkpoint, an order of neurons, predictors and a plan.

use std::{collections::BTreeMap, ops::Range, path::Path};

use powerinfer_artifact::{
    Digest, Header, Progress, TensorFile,
    document::Document,
    matrix_planes::{append_rows, declare_matrix, insert_matrix},
    placement_inputs::{self, LayerInputs},
    plan::{Plan, Policy},
    predictor_file::{self, PredictorFile},
    tensor_file::Dtype,
    tensor_writer::{TensorShapes, TensorSource, TensorWriter, fill_tensors, write_tensors},
    write::{PartialFolder, write_file},
};
use powerinfer_model::{Checkpoint, LayerWeight, ModelError, Weight};
use powerinfer_tensor::{Format, Transposed, repack_q4_k, transpose};

use crate::{
    Bundle, BundleError, FORMAT, Manifest, VERSION, Verification,
    manifest::{MANIFEST, PLAN, PLAN_FORMAT, PLAN_VERSION, WEIGHTS, sealed},
    weights::{Layout, is_permutation, name, order_name, stored_format, stored_shape},
};

/// What goes into a bundle.
pub struct PackInputs<'a> {
    /// The weights.
    pub checkpoint: &'a Checkpoint,
    /// Per layer, neurons from the hottest to the coldest.
    pub orders: &'a [Vec<u32>],
    /// The predictors, where there are any.
    pub predictors: Option<&'a PredictorFile>,
    /// Where everything lives.
    pub plan: Plan,
    /// Per layer, what placing the bundle again takes; without it, it never will be.
    pub placing: Option<&'a [LayerInputs]>,
    /// Format of the weights.
    pub quant: Format,
    /// Files of the checkpoint to carry along where they exist.
    pub companions: &'a [&'a str],
    /// Digests of what the bundle was made from, by name.
    pub inputs: BTreeMap<String, Digest>,
    /// What was asked for, recorded in the header as [`REQUEST`].
    pub request: serde_json::Value,
    /// Seed recorded in the header.
    pub seed: u64,
}

/// The header's setting that says what was asked for: the same again would give the same bundle.
pub const REQUEST: &str = "request";

/// Writes the bundle into the folder `out`, all or nothing, and opens it.
pub fn pack(
    inputs: &PackInputs<'_>,
    out: &Path,
    progress: &dyn Progress,
) -> Result<Bundle, BundleError> {
    let checkpoint = inputs.checkpoint;
    let config = checkpoint.config();
    for (layer, order) in inputs.orders.iter().enumerate() {
        if order.len() != config.ffn_size || !is_permutation(order) {
            return Err(BundleError::NotAPermutation {
                path: out.to_owned(),
                layer,
            });
        }
    }
    let header = |format: &str, version| {
        let mut header = Header::new(format, version, checkpoint.identity().clone(), inputs.seed)
            .with_setting("quant", inputs.quant.to_string())
            .with_setting(REQUEST, inputs.request.clone());
        header.inputs = inputs.inputs.clone();
        header
    };
    let folder = PartialFolder::open(out, MANIFEST)?;
    folder.clear()?; // packing is quick beside profiling; it starts afresh

    let mut files = BTreeMap::new();
    let mut record = |name: &str| -> Result<(), BundleError> {
        files.insert(name.to_owned(), Digest::of_file(&folder.path().join(name))?);
        Ok(())
    };
    write_weights(inputs, &folder.path().join(WEIGHTS), progress)?;
    record(WEIGHTS)?;
    if let Some(predictors) = inputs.predictors {
        write_predictors(
            inputs,
            predictors,
            &folder.path().join(predictor_file::FILE),
        )?;
        record(predictor_file::FILE)?;
    }
    if let Some(layers) = inputs.placing {
        let header = header(placement_inputs::FORMAT, placement_inputs::VERSION);
        placement_inputs::write(&folder.path().join(placement_inputs::FILE), &header, layers)?;
        record(placement_inputs::FILE)?;
    }
    for companion in inputs.companions {
        if let Some(bytes) = checkpoint.files().read(companion)? {
            write_file(&folder.path().join(companion), &bytes)?;
            record(companion)?;
        }
    }
    let plan = Document {
        header: header(PLAN_FORMAT, PLAN_VERSION),
        body: inputs.plan.clone(),
    };
    plan.write(&folder.path().join(PLAN))?;
    record(PLAN)?;
    let manifest = Manifest {
        config: config.clone(),
        quant: inputs.quant.to_string(),
        predictors: inputs.predictors.is_some(),
        certificate: false,
        placing: inputs.placing.is_some(),
        files,
        seal: None,
    };
    sealed(Document {
        header: header(FORMAT, VERSION),
        body: manifest,
    })
    .write(&folder.path().join(MANIFEST))?;
    folder.finish()?;
    Bundle::open(out, Verification::Quick)
}

/// Numbers that are packed and written at a time.
const PIECE: usize = 1 << 20;

/// Streams every weight through memory: matrices whose rows move, one at a time; the others, among
/// them tables larger than any layer, a few rows at a time.
fn write_weights(
    inputs: &PackInputs<'_>,
    path: &Path,
    progress: &dyn Progress,
) -> Result<(), BundleError> {
    let config = inputs.checkpoint.config();
    let weights = config.weights();
    let mut shapes = TensorShapes::new();
    let mut total = 0;
    for weight in &weights {
        let layout = Layout::planned(*weight, &inputs.plan.layers);
        let (rows, columns) = stored_shape(config, *weight, layout);
        let format = stored_format(config, *weight, inputs.quant);
        let name = name(*weight, layout);
        declare_matrix(&mut shapes, &name, format, rows, columns);
        total += rows * columns;
    }
    for (layer, order) in inputs.orders.iter().enumerate() {
        shapes.insert(order_name(layer), (Dtype::U32, vec![order.len()]));
    }
    progress.begin("packing", total as u64, "weights");
    fill_tensors(path, None, &shapes, |writer| {
        for weight in weights {
            write_weight(inputs, weight, writer, progress)?;
        }
        for (layer, order) in inputs.orders.iter().enumerate() {
            let bytes: Vec<u8> = order
                .iter()
                .flat_map(|neuron| neuron.to_le_bytes())
                .collect();
            writer.append(&order_name(layer), &bytes)?;
        }
        Ok::<_, BundleError>(())
    })?;
    progress.end();
    Ok(())
}

/// Gives some rows of a weight as they are stored, one after the other.
type ReadRows<'a> = dyn Fn(Range<usize>) -> Result<Vec<f32>, ModelError> + 'a;

/// Packs one weight, its neurons in their order.
fn write_weight(
    inputs: &PackInputs<'_>,
    weight: Weight,
    writer: &mut TensorWriter,
    progress: &dyn Progress,
) -> Result<(), BundleError> {
    let config = inputs.checkpoint.config();
    let layout = Layout::planned(weight, &inputs.plan.layers);
    let (rows, columns) = stored_shape(config, weight, layout);
    let format = stored_format(config, weight, inputs.quant);
    if format == Format::Q4K
        && layout == Layout::ByOutput
        && write_q4_k(inputs, weight, writer, progress)?
    {
        return Ok(());
    }
    let read: Box<ReadRows<'_>> = match (weight, layout) {
        (Weight::Layer(layer, LayerWeight::Gate | LayerWeight::Up), Layout::ByInput) => {
            let values = inputs.checkpoint.read(weight)?;
            let values = permute_rows(&values, rows, &inputs.orders[layer]);
            Box::new(move |rows| Ok(columns_as_rows(&values, columns, &indices(rows))))
        }
        (
            Weight::Layer(
                layer,
                LayerWeight::Gate | LayerWeight::Up | LayerWeight::GateBias | LayerWeight::UpBias,
            ),
            _,
        ) => {
            let values = inputs.checkpoint.read(weight)?;
            let order = &inputs.orders[layer];
            // A bias is stored as one row, of one number a neuron.
            let (width, per_row) = if rows == 1 {
                (1, columns)
            } else {
                (columns, 1)
            };
            Box::new(move |rows| {
                let neurons = &order[rows.start * per_row..rows.end * per_row];
                Ok(permute_rows(&values, width, neurons))
            })
        }
        (Weight::Layer(layer, LayerWeight::Down), _) => {
            let values = inputs.checkpoint.read(weight)?;
            let order = &inputs.orders[layer];
            Box::new(move |rows| Ok(columns_as_rows(&values, columns, &order[rows])))
        }
        (_, Layout::ByInput) => {
            let values = inputs.checkpoint.read(weight)?;
            Box::new(move |rows| Ok(columns_as_rows(&values, columns, &indices(rows))))
        }
        _ => Box::new(move |rows| inputs.checkpoint.read_rows(weight, rows)),
    };
    let per_piece = (PIECE / columns.max(1)).clamp(1, rows);
    for start in (0..rows).step_by(per_piece) {
        let piece = start..rows.min(start + per_piece);
        let count = piece.len();
        let packed = powerinfer_tensor::pack(format, count, columns, &read(piece)?);
        append_rows(writer, &name(weight, layout), &packed)?;
        progress.advance((count * columns) as u64)?;
    }
    Ok(())
}

/// Writes a matrix by output with its neurons in their order and the checkpoint's own numbers, where
/// that has them in Q4_K; says whether it does.
fn write_q4_k(
    inputs: &PackInputs<'_>,
    weight: Weight,
    writer: &mut TensorWriter,
    progress: &dyn Progress,
) -> Result<bool, BundleError> {
    let (rows, columns) = stored_shape(inputs.checkpoint.config(), weight, Layout::ByOutput);
    let order = match weight {
        Weight::Layer(layer, LayerWeight::Gate | LayerWeight::Up) => inputs.orders[layer].clone(),
        _ => indices(0..rows),
    };
    let per_piece = (PIECE / columns.max(1)).clamp(1, rows);
    for piece in order.chunks(per_piece) {
        let Some(blocks) = inputs.checkpoint.read_q4_k(weight, piece)? else {
            return Ok(false);
        };
        let packed = repack_q4_k(piece.len(), columns, &blocks);
        append_rows(writer, &name(weight, Layout::ByOutput), &packed)?;
        progress.advance((piece.len() * columns) as u64)?;
    }
    Ok(true)
}

/// What a layer's tensor is to a bundle.
enum Role {
    /// As long as the layer has neurons: its rows move with them.
    PerNeuron,
    /// The same whatever the order of neurons.
    Shared,
    /// B, which a bundle has by units and not by neurons.
    Turned,
    /// Signs of gates.
    Signs,
    /// Only of use for placing.
    Statistics,
}

impl Role {
    /// The role of the tensor called `part` within its layer.
    fn of(part: &str) -> Self {
        let mut names = part.split('.');
        match (names.next(), names.next()) {
            (Some("predictor"), Some("a")) | (Some("threshold"), Some("offset")) => Self::Shared,
            (Some("predictor"), Some("b")) => Self::Turned,
            (Some("threshold"), Some("kept")) => Self::Statistics,
            (Some("sign_bit"), _) => Self::Signs,
            _ => Self::PerNeuron,
        }
    }
}

/// The predictors with their outputs in the order of the neurons.
fn write_predictors(
    inputs: &PackInputs<'_>,
    predictors: &PredictorFile,
    path: &Path,
) -> Result<(), BundleError> {
    let config = inputs.checkpoint.config();
    let file: &TensorFile = predictors.tensors();
    let mut tensors: BTreeMap<String, TensorSource<'_>> = BTreeMap::new();
    let signs_of = |layer: usize| inputs.plan.layers[layer].policy == Policy::SignBit;
    let mut summaries = predictors.layers().to_vec();
    let mut turned: Vec<(usize, Transposed)> = Vec::new();
    for layer in 0..config.layer_count {
        // Finding them checks the shapes before rows are moved.
        let (hidden, neurons) = (config.hidden_size, config.ffn_size);
        if let Some(stored) = predictors.find(layer, hidden, neurons)? {
            let b = stored.b.view(predictors.tensors());
            turned.push((layer, transpose(&b, &inputs.orders[layer])));
        }
        predictors.signs(layer, hidden, neurons)?;
        predictors.scores(layer, hidden, neurons)?;
        // Signs are large, and known from the gate: they come along only where they are used.
        if !signs_of(layer)
            && let Some(summary) = summaries.get_mut(layer)
        {
            summary.sign_bit = None;
        }
        let prefix = format!("layers.{layer}.");
        for tensor in file.names() {
            let Some(part) = tensor.strip_prefix(&prefix) else {
                continue;
            };
            let Some(view) = file.find(&tensor) else {
                continue;
            };
            let (dtype, shape) = (view.dtype, view.shape.to_vec());
            let rows_of_neurons = || {
                let row = view.bytes.len() / config.ffn_size;
                let order = inputs.orders[layer].iter();
                let rows = order.flat_map(|neuron| &view.bytes[*neuron as usize * row..][..row]);
                TensorSource::owned(dtype, shape.clone(), rows.copied().collect())
            };
            let source = match Role::of(part) {
                Role::Shared => TensorSource::borrowed(dtype, shape, view.bytes),
                Role::PerNeuron => rows_of_neurons(),
                Role::Signs if signs_of(layer) => rows_of_neurons(),
                Role::Turned | Role::Signs | Role::Statistics => continue,
            };
            tensors.insert(tensor, source);
        }
    }
    for (layer, Transposed { units, scales }) in &turned {
        let name = |part| predictor_file::tensor_name(*layer, part);
        insert_matrix(&mut tensors, &name("units"), units);
        if !scales.is_empty() {
            let shape = vec![scales.len() / config.ffn_size, config.ffn_size];
            let bytes = scales
                .iter()
                .flat_map(|scale| scale.to_le_bytes())
                .collect();
            let source = TensorSource::owned(Dtype::F32, shape, bytes);
            tensors.insert(name("unit_scales"), source);
        }
    }
    let layers = serde_json::to_value(summaries).expect("summaries are plain JSON");
    let header = predictors
        .header()
        .clone()
        .with_setting(predictor_file::LAYERS_SETTING, layers);
    Ok(write_tensors(path, Some(&header), &tensors)?)
}

/// Rows as they are counted in an order.
fn indices(rows: Range<usize>) -> Vec<u32> {
    rows.map(|row| row as u32).collect()
}

/// Row `i` of the result is row `order[i]` of `values`.
fn permute_rows(values: &[f32], columns: usize, order: &[u32]) -> Vec<f32> {
    order
        .iter()
        .flat_map(|row| &values[*row as usize * columns..][..columns])
        .copied()
        .collect()
}

/// Row `i` of the result, of length `rows`, is column `order[i]` of `values [rows, columns]`.
fn columns_as_rows(values: &[f32], rows: usize, order: &[u32]) -> Vec<f32> {
    let columns = values.len() / rows;
    order
        .iter()
        .flat_map(|column| (0..rows).map(move |row| values[row * columns + *column as usize]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_follow_the_order() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(
            permute_rows(&values, 2, &[2, 0, 1]),
            [5.0, 6.0, 1.0, 2.0, 3.0, 4.0]
        );
        // [2 rows, 3 columns]
        assert_eq!(
            columns_as_rows(&values, 2, &[2, 0, 1]),
            [3.0, 6.0, 1.0, 4.0, 2.0, 5.0]
        );
        assert_eq!(columns_as_rows(&values, 2, &[1]), [2.0, 5.0]);
    }
}
