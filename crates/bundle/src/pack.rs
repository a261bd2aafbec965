//! Packing: makes a bundle from a checkpoint, neuron orders, predictors and a plan.

use std::{collections::BTreeMap, fs, ops::Range, path::Path};

use powerinfer_artifact::{
    ArtifactError, Digest, Header, Progress, TensorFile,
    document::Document,
    matrix_planes::{append_rows, declare_matrix, insert_matrix},
    placement_inputs::{self, LayerInputs},
    plan::{Plan, Policy},
    predictor_file::{self, PredictorFile},
    progress::Silent,
    tensor_file::Dtype,
    tensor_writer::{TensorShapes, TensorSource, TensorWriter, fill_tensors, write_tensors},
    write::{PartialFolder, write_file},
};
use powerinfer_model::{Checkpoint, LayerWeight, ModelError, Weight};
use powerinfer_tensor::{Format, Transposed, repack_q4_k, transpose};

use crate::{
    Bundle, BundleError, FORMAT, IntegrityCheck, Manifest,
    manifest::{MANIFEST, PLAN, PLAN_FORMAT, PLAN_VERSION, WEIGHTS, contents, version_of},
    weights::{Layout, is_permutation, name, order_name, stored_format, stored_shape},
};

/// Inputs of [`pack`].
pub struct PackInputs<'a> {
    /// Model to pack.
    pub checkpoint: &'a Checkpoint,
    /// Per layer, neuron indices in descending order of activation frequency.
    pub orders: &'a [Vec<u32>],
    /// Predictors, if any.
    pub predictors: Option<&'a PredictorFile>,
    /// Placement.
    pub plan: Plan,
    /// Planner inputs of each layer, without which the bundle cannot be re-planned.
    pub placement_inputs: Option<&'a [LayerInputs]>,
    /// Format of the weights.
    pub quant: Format,
    /// Names of files to copy from the checkpoint if they exist.
    pub companions: &'a [&'a str],
    /// Digests of the inputs, by name.
    pub inputs: BTreeMap<String, Digest>,
    /// Request recorded in the header as [`REQUEST`].
    pub request: serde_json::Value,
    /// Seed recorded in the header.
    pub seed: u64,
}

impl<'a> PackInputs<'a> {
    /// Inputs of a bundle without optional content: no predictors, placement inputs, companions, input digests or request, and
    /// seed 0.
    pub fn new(
        checkpoint: &'a Checkpoint,
        orders: &'a [Vec<u32>],
        plan: Plan,
        quant: Format,
    ) -> Self {
        Self {
            checkpoint,
            orders,
            predictors: None,
            plan,
            placement_inputs: None,
            quant,
            companions: &[],
            inputs: BTreeMap::new(),
            request: serde_json::Value::Null,
            seed: 0,
        }
    }
}

/// Header setting with the request; an equal request gives an equal bundle.
pub const REQUEST: &str = "request";

/// Writes the bundle into the folder `out` atomically and opens it.
///
/// # Errors
///
/// An order is not a permutation, the checkpoint cannot be read, a weight is beyond the format, or the folder cannot be
/// written.
pub fn pack(
    inputs: &PackInputs<'_>,
    out: &Path,
    progress: &dyn Progress,
) -> Result<Bundle, BundleError> {
    pack_with(inputs, None, out, progress, |_| Ok(()))
}

/// Packs a model as it is into the folder `out`: float32, every neuron computed on the CPU, and room for `context` tokens.
/// Files of the checkpoint with the names `companions` are copied.
///
/// # Errors
///
/// The errors of [`pack`].
pub fn pack_plain(
    checkpoint: &Checkpoint,
    context: usize,
    companions: &[&str],
    out: &Path,
) -> Result<Bundle, BundleError> {
    let config = checkpoint.config();
    let (layers, neurons) = (config.layer_count, config.ffn_size);
    let context = context.min(config.context_length);
    let order: Vec<u32> = (0..neurons as u32).collect();
    let (orders, plan) = (
        vec![order; layers],
        Plan::unplaced(layers, neurons, Policy::Dense, context),
    );
    let inputs = PackInputs {
        companions,
        ..PackInputs::new(checkpoint, &orders, plan, Format::F32)
    };
    pack(&inputs, out, &Silent)
}

/// Like [`pack`], but writes the new bundle to another folder and replaces the contents of `out` only once `accept` has passed it. `packed`
/// may be the folder of a bundle that was packed from the same checkpoint. If its weights are the same, they are reused.
///
/// # Errors
///
/// Fails as [`pack`] and `accept` do; `out` is unchanged then.
pub fn pack_with<E: From<BundleError>>(
    inputs: &PackInputs<'_>,
    packed: Option<&Path>,
    out: &Path,
    progress: &dyn Progress,
    accept: impl FnOnce(Bundle) -> Result<(), E>,
) -> Result<Bundle, E> {
    let folder = write_all(inputs, packed, out, progress)?;
    accept(Bundle::open(folder.path(), IntegrityCheck::Quick)?)?;
    folder.finish().map_err(BundleError::from)?;
    Ok(Bundle::open(out, IntegrityCheck::Quick)?)
}

/// Writes all files of a bundle that is to be in `out`.
fn write_all(
    inputs: &PackInputs<'_>,
    packed: Option<&Path>,
    out: &Path,
    progress: &dyn Progress,
) -> Result<PartialFolder, BundleError> {
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
    let folder = PartialFolder::open(out, contents(inputs.companions))?;
    folder.clear()?; // packing is fast, so it starts over

    let mut files = BTreeMap::new();
    let mut record = |name: &str| -> Result<(), BundleError> {
        files.insert(name.to_owned(), Digest::of_file(&folder.path().join(name))?);
        Ok(())
    };
    let packed = packed.map(|folder| folder.join(WEIGHTS));
    write_weights(
        inputs,
        packed.as_deref(),
        &folder.path().join(WEIGHTS),
        progress,
    )?;
    record(WEIGHTS)?;
    if let Some(predictors) = inputs.predictors {
        write_predictors(
            inputs,
            predictors,
            &folder.path().join(predictor_file::FILE),
        )?;
        record(predictor_file::FILE)?;
    }
    if let Some(layers) = inputs.placement_inputs {
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
        placement_inputs: inputs.placement_inputs.is_some(),
        files,
        seal: None,
    };
    Document {
        header: header(FORMAT, version_of(config)),
        body: manifest,
    }
    .sealed()
    .write(&folder.path().join(MANIFEST))?;
    Ok(folder)
}

/// Elements that are packed and written at a time.
const CHUNK: usize = 1 << 20;

/// Writes all weights: matrices with permuted rows one at a time, others, such as large embeddings, in
/// chunks of rows. If the file `packed` has the same weights, it is linked or copied instead.
fn write_weights(
    inputs: &PackInputs<'_>,
    packed: Option<&Path>,
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
    if let Some(packed) = packed.filter(|packed| has_layout(packed, &shapes, inputs.orders)) {
        let linked = fs::hard_link(packed, path).or_else(|_| fs::copy(packed, path).map(drop));
        return Ok(linked.map_err(ArtifactError::write(path))?);
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

/// Whether the tensors of `file` have these shapes and neuron orders. If it was packed from the same checkpoint, its weights are then the
/// same, too.
fn has_layout(file: &Path, shapes: &TensorShapes, orders: &[Vec<u32>]) -> bool {
    let Ok(file) = TensorFile::open(file) else {
        return false;
    };
    let is_there = |(name, (dtype, shape)): (&String, &(Dtype, Vec<usize>))| {
        file.expect(name, *dtype, shape).is_ok()
    };
    let is_ordered = |(layer, order): (usize, &Vec<u32>)| {
        let expected = order.iter().flat_map(|neuron| neuron.to_le_bytes());
        let found = file.find(&order_name(layer));
        found.is_some_and(|found| found.bytes.iter().copied().eq(expected))
    };
    file.names().len() == shapes.len()
        && shapes.iter().all(is_there)
        && orders.iter().enumerate().all(is_ordered)
}

/// Reads a range of a weight's rows as the bundle stores them, row-major.
type ReadRows<'a> = dyn Fn(Range<usize>) -> Result<Vec<f32>, ModelError> + 'a;

/// Packs one weight, with neurons in the layer's order.
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
            // A bias is stored as one row with one element per neuron.
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
    let rows_per_chunk = (CHUNK / columns.max(1)).clamp(1, rows);
    for start in (0..rows).step_by(rows_per_chunk) {
        let chunk = start..rows.min(start + rows_per_chunk);
        let count = chunk.len();
        let values = read(chunk)?;
        if let Some(index) = format.first_beyond(&values) {
            let row = start + index / columns;
            return Err(BundleError::Beyond {
                tensor: name(weight, layout),
                row: match neurons_are_rows(weight, layout) {
                    Some(layer) => inputs.orders[layer][row] as usize,
                    None => row,
                },
                column: index % columns,
                value: values[index],
                format,
            });
        }
        let packed = powerinfer_tensor::pack(format, count, columns, &values);
        append_rows(writer, &name(weight, layout), &packed)?;
        progress.advance((count * columns) as u64)?;
    }
    Ok(())
}

/// The layer of a matrix whose rows are neurons, in the layer's order.
fn neurons_are_rows(weight: Weight, layout: Layout) -> Option<usize> {
    match (weight, layout) {
        (Weight::Layer(layer, LayerWeight::Gate | LayerWeight::Up), Layout::ByOutput)
        | (Weight::Layer(layer, LayerWeight::Down), Layout::ByInput) => Some(layer),
        _ => None,
    }
}

/// Writes a matrix by output without requantising if the checkpoint has it in Q4_K; returns whether it
/// does.
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
    let rows_per_chunk = (CHUNK / columns.max(1)).clamp(1, rows);
    for chunk in order.chunks(rows_per_chunk) {
        let Some(blocks) = inputs.checkpoint.read_q4_k(weight, chunk)? else {
            return Ok(false);
        };
        let packed = repack_q4_k(chunk.len(), columns, &blocks);
        if let Some(row) = packed.row_with_damaged_scale() {
            return Err(BundleError::DamagedScale {
                tensor: name(weight, Layout::ByOutput),
                row: chunk[row] as usize,
            });
        }
        append_rows(writer, &name(weight, Layout::ByOutput), &packed)?;
        progress.advance((chunk.len() * columns) as u64)?;
    }
    Ok(true)
}

/// Role of a layer's predictor tensor in a bundle.
enum Role {
    /// One row per neuron, permuted with the neurons.
    PerNeuron,
    /// Independent of the order of neurons.
    Shared,
    /// B, which bundles store transposed.
    Transposed,
    /// Gate signs.
    Signs,
    /// Used by the planner only.
    Statistics,
}

impl Role {
    /// Returns the role of the tensor called `name` within its layer.
    fn new(name: &str) -> Self {
        let mut parts = name.split('.');
        match (parts.next(), parts.next()) {
            (Some("predictor"), Some("a")) | (Some("threshold"), Some("offset")) => Self::Shared,
            (Some("predictor"), Some("b")) => Self::Transposed,
            (Some("threshold"), Some("kept")) => Self::Statistics,
            (Some("sign_bit"), _) => Self::Signs,
            _ => Self::PerNeuron,
        }
    }
}

/// Writes the predictors with their outputs in the order of the neurons.
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
    let mut transposed: Vec<(usize, Transposed)> = Vec::new();
    for layer in 0..config.layer_count {
        // Finding the tensors checks their shapes before rows are permuted.
        let (hidden, neurons) = (config.hidden_size, config.ffn_size);
        if let Some(stored) = predictors.find(layer, hidden, neurons)? {
            let b = stored.b.view(predictors.tensors());
            transposed.push((layer, transpose(&b, &inputs.orders[layer])));
        }
        predictors.signs(layer, hidden, neurons)?;
        predictors.scores(layer, hidden, neurons)?;
        // Signs are large and follow from the gate: they are stored only for layers that use them.
        if !signs_of(layer)
            && let Some(summary) = summaries.get_mut(layer)
        {
            summary.sign_bit = None;
        }
        let prefix = format!("layers.{layer}.");
        for tensor in file.names() {
            let Some(name) = tensor.strip_prefix(&prefix) else {
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
            let source = match Role::new(name) {
                Role::Shared => TensorSource::borrowed(dtype, shape, view.bytes),
                Role::PerNeuron => rows_of_neurons(),
                Role::Signs if signs_of(layer) => rows_of_neurons(),
                Role::Transposed | Role::Signs | Role::Statistics => continue,
            };
            tensors.insert(tensor, source);
        }
    }
    for (layer, Transposed { units, scales }) in &transposed {
        let name = |tensor| predictor_file::tensor_name(*layer, tensor);
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

/// Converts a range of rows to an order.
fn indices(rows: Range<usize>) -> Vec<u32> {
    rows.map(|row| row as u32).collect()
}

/// Permutes rows: row `i` of the result is row `order[i]` of `values`.
fn permute_rows(values: &[f32], columns: usize, order: &[u32]) -> Vec<f32> {
    order
        .iter()
        .flat_map(|row| &values[*row as usize * columns..][..columns])
        .copied()
        .collect()
}

/// Transposes selected columns: row `i` of the result, of length `rows`, is column `order[i]` of
/// `values [rows, columns]`.
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
    fn weights_are_packed_again_only_if_they_differ() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models");
        let checkpoint = Checkpoint::open(&golden.join("llama-relu-gqa")).unwrap();
        let config = checkpoint.config();
        let folder = tempfile::tempdir().unwrap();
        let ascending: Vec<u32> = (0..config.ffn_size as u32).collect();
        let descending: Vec<u32> = ascending.iter().rev().copied().collect();
        let plan = || Plan::unplaced(config.layer_count, config.ffn_size, Policy::Dense, 16);
        let ascending = vec![ascending; config.layer_count];
        let descending = vec![descending; config.layer_count];
        let inputs = |orders, quant| PackInputs::new(&checkpoint, orders, plan(), quant);
        let first = folder.path().join("first");
        drop(pack(&inputs(&ascending, Format::F16), &first, &Silent).unwrap());
        for (orders, quant, is_same) in [
            (&ascending[..], Format::F16, true),
            (&descending, Format::F16, false),
            (&ascending, Format::Q8_0, false),
        ] {
            let inputs = inputs(orders, quant);
            let [alone, after] = ["alone", "after"].map(|name| folder.path().join(name));
            drop(pack(&inputs, &alone, &Silent).unwrap());
            let accept = |_| Ok::<_, BundleError>(());
            drop(pack_with(&inputs, Some(&first), &after, &Silent, accept).unwrap());
            let read = |folder: &Path| fs::read(folder.join(WEIGHTS)).unwrap();
            assert_eq!(read(&after), read(&alone), "{quant}");
            assert_eq!(read(&after) == read(&first), is_same, "{quant}");
            // Another file system has no hard links to these files.
            if let Ok(elsewhere) = tempfile::tempdir_in("/dev/shm") {
                let copy = elsewhere.path().join("copy");
                drop(pack_with(&inputs, Some(&first), &copy, &Silent, accept).unwrap());
                assert_eq!(read(&copy), read(&alone), "{quant}");
            }
            // A folder without a bundle is ignored.
            drop(pack_with(&inputs, Some(folder.path()), &after, &Silent, accept).unwrap());
            assert_eq!(read(&after), read(&alone), "{quant}");
        }
    }

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
