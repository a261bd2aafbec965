//! Reference engine against the goldens: logits, activations, greedy ids, masked logits.
#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

#[path = "../../../tests/support/golden.rs"]
mod golden;

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use golden::{FAMILIES, Golden, MIXTURES, MODELS, PROMPTS, SPARSE_MODELS, floats};
use powerinfer_artifact::{TensorFile, random::Random};
use powerinfer_model::{LanguageModel, LayerWeight, Weight, greedy_token};
use powerinfer_reference::{FeedForward, FfnObservation, FfnObserver, NoObserver, ReferenceModel};

fn load(golden: &Golden) -> ReferenceModel {
    ReferenceModel::load(&golden.checkpoint()).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Records activations and products.
#[derive(Default)]
struct Recorder(BTreeMap<String, Vec<f32>>);

impl FfnObserver for Recorder {
    fn observe(&mut self, observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>> {
        let layer = observation.layer;
        self.0.insert(
            format!("layers.{layer}.ffn_act"),
            flat(observation.activation),
        );
        self.0.insert(
            format!("layers.{layer}.ffn_prod"),
            flat(observation.product),
        );
        Ok(None)
    }
}

#[test]
fn logits_and_activations_match_transformers() {
    for (name, golden) in Golden::present(&[&MODELS[..], &FAMILIES].concat()) {
        let model = load(&golden);
        for prompt in PROMPTS {
            let mut recorder = Recorder::default();
            let logits = model
                .run(&golden.ids(&format!("{prompt}.input_ids")), &mut recorder)
                .unwrap();
            let what = format!("{name} {prompt}");
            golden.assert_logits(&flat(&logits), prompt, &what);
            for (key, got) in &recorder.0 {
                // The goldens have products of gated models only, and all of them for one prompt.
                if golden.expected.find(&format!("{prompt}.{key}")).is_none() {
                    assert!(prompt != "p17" || key.ends_with("prod"), "{what} {key}");
                    continue;
                }
                golden.assert_close(
                    got,
                    &golden.floats(&format!("{prompt}.{key}")),
                    &format!("{what} {key}"),
                );
            }
        }
    }
}

#[test]
fn experts_and_their_neurons_match_transformers() {
    for (name, golden) in Golden::present(&MIXTURES) {
        let model = load(&golden);
        let experts = model.config().experts.clone().unwrap();
        for prompt in PROMPTS {
            let ids = golden.ids(&format!("{prompt}.input_ids"));
            let mut recorder = Recorder::default();
            let logits = model.run(&ids, &mut recorder).unwrap();
            let what = format!("{name} {prompt}");
            golden.assert_logits(&flat(&logits), prompt, &what);
            for layer in 0..model.config().layer_count {
                let at = |part: &str| format!("{prompt}.layers.{layer}.{part}");
                if let Some(size) = experts.dense_size(layer) {
                    let want = golden.floats(&at("ffn_prod"));
                    let found = &recorder.0[&format!("layers.{layer}.ffn_prod")];
                    let found = found.chunks(model.config().ffn_size);
                    for (found, want) in found.zip(want.chunks(size)) {
                        golden.assert_close(&found[..size], want, &what);
                        assert!(
                            found[size..].iter().all(|product| *product == 0.0),
                            "{what}"
                        );
                    }
                    continue;
                }
                let selected = golden.expected.find(&at("router_ids")).unwrap();
                let selected = selected.bytes.as_chunks::<8>().0.iter();
                let selected = selected.map(|id| u64::from_le_bytes(*id) as usize);
                let weights = golden.floats(&at("router_weights"));
                let products = golden.floats(&at("expert_prod"));
                // Neurons that are not selected are 0.
                let mut want = vec![0.0; ids.len() * model.config().ffn_size];
                let chosen = selected.zip(weights).zip(products.chunks(experts.size));
                for (index, ((expert, weight), products)) in chosen.enumerate() {
                    let token = index / experts.per_token * model.config().ffn_size;
                    let places = experts.neurons_of(expert);
                    for (place, product) in places.zip(products) {
                        want[token + place] = weight * product;
                    }
                }
                let found = &recorder.0[&format!("layers.{layer}.ffn_prod")];
                let routed = experts.count * experts.size;
                for (found, want) in found
                    .chunks(model.config().ffn_size)
                    .zip(want.chunks(model.config().ffn_size))
                {
                    golden.assert_close(&found[..routed], &want[..routed], &what);
                }
            }
        }
    }
}

#[test]
fn greedy_ids_are_exact() {
    for (name, golden) in Golden::present(&[&MODELS[..], &FAMILIES, &MIXTURES].concat()) {
        let mut model = load(&golden);
        for prompt in PROMPTS {
            model.reset();
            let mut logits = model
                .forward_last(&golden.ids(&format!("{prompt}.input_ids")))
                .unwrap();
            for (step, expected) in golden
                .ids(&format!("{prompt}.greedy_ids"))
                .into_iter()
                .enumerate()
            {
                let token = greedy_token(&logits);
                assert_eq!(token, expected, "{name} {prompt} step {step}");
                logits = model.forward_last(&[token]).unwrap();
            }
        }
    }
}

/// Multiplies each product by a mask.
struct Mask(Vec<Tensor>);

impl FfnObserver for Mask {
    fn observe(&mut self, observation: &FfnObservation<'_>) -> candle_core::Result<Option<Tensor>> {
        observation
            .product
            .broadcast_mul(&self.0[observation.layer])
            .map(Some)
    }
}

#[test]
fn masked_logits_match_transformers() {
    for name in SPARSE_MODELS {
        let golden = Golden::open(name);
        let model = load(&golden);
        let layers = model.config().layer_count;
        let sparse = TensorFile::open(&golden.folder.join("sparse.safetensors")).unwrap();
        let mask = |name: String| {
            let view = sparse.find(&name).unwrap();
            let values = view.bytes.iter().map(|byte| f32::from(*byte)).collect();
            Tensor::from_vec(values, view.shape, &Device::Cpu).unwrap()
        };
        for (prompt, masks, logits) in [
            ("p17", "static30", "p17.static30.logits"),
            ("p70", "static30", "p70.static30.logits"),
            ("p17", "p17.token30", "p17.token30.logits"),
            ("p17", "p17.top10", "p17.top10.logits"),
            ("p17", "p17.active", "p17.logits"),
        ] {
            let masks = |layer| mask(format!("{masks}.layers.{layer}.mask"));
            let mut observer = Mask((0..layers).map(masks).collect());
            let got = model
                .run(&golden.ids(&format!("{prompt}.input_ids")), &mut observer)
                .unwrap();
            let want = if sparse.find(logits).is_some() {
                floats(&sparse, logits)
            } else {
                golden.floats(logits)
            };
            golden.assert_close(&flat(&got), &want, &format!("{name} {logits}"));
        }
        let dense = model
            .run(&golden.ids("p17.input_ids"), &mut NoObserver)
            .unwrap();
        golden.assert_close(&flat(&dense), &golden.floats("p17.logits"), "unmasked");
    }
}

/// Products of `tokens` tokens. About a tenth of the blocks of `block` neurons are not 0; the last block of a token may be shorter.
fn products(tokens: usize, neurons: usize, block: usize) -> Tensor {
    let mut random = Random::new(9);
    let mut values = vec![0.0; tokens * neurons];
    for block in values
        .chunks_mut(neurons)
        .flat_map(|row| row.chunks_mut(block))
    {
        if random.chance(10) {
            block.fill_with(|| random.normal() as f32);
        }
    }
    Tensor::from_vec(values, (tokens, neurons), &Device::Cpu).unwrap()
}

#[test]
fn sums_over_selected_experts_equal_those_over_all_neurons() {
    for (name, golden) in Golden::present(&MIXTURES) {
        let checkpoint = golden.checkpoint();
        let experts = checkpoint.config().experts.clone().unwrap();
        let ffn = FeedForward::load(&checkpoint, 0).unwrap();
        let products = products(31, experts.neurons(), experts.size);
        let found = flat(&ffn.down_unbiased(&products).unwrap());
        let weight = Weight::Layer(0, LayerWeight::Down);
        let shape = checkpoint.config().shape(weight);
        let down = Tensor::from_vec(checkpoint.read(weight).unwrap(), shape, &Device::Cpu).unwrap();
        let expected = flat(&products.matmul(&down.t().unwrap()).unwrap());
        let size = expected
            .iter()
            .fold(0.0, |size: f32, value| size.max(value.abs()));
        assert!(size > 0.0, "{name}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-5 * size,
                "{name}: {found}, expected {expected}"
            );
        }
        let narrow = products.narrow(1, 0, experts.neurons() - 1).unwrap();
        assert!(ffn.down_unbiased(&narrow).is_err(), "{name}");
    }
}

#[test]
fn projections_keep_lengths() {
    let (_, golden) = Golden::present(&["llama-silu"]).remove(0);
    let checkpoint = golden.checkpoint();
    let config = checkpoint.config();
    let ffn = FeedForward::load(&checkpoint, 1).unwrap();
    let products = products(40, config.ffn_size, 1);
    let lengths = |ffn: &FeedForward| {
        let outputs = ffn.down_unbiased(&products).unwrap();
        flat(&outputs.sqr().unwrap().sum(1).unwrap().sqrt().unwrap())
    };
    let projected = |size| lengths(&ffn.projected_down(size, 3).unwrap());
    let exact = lengths(&ffn);
    assert_eq!(projected(config.hidden_size), exact, "nothing is projected");
    let size = config.hidden_size / 2;
    let found = projected(size);
    assert_eq!(found, projected(size), "the same seed, the same projection");
    let errors = found.iter().zip(&exact);
    let squares = errors.map(|(found, exact)| f64::from(found / exact - 1.0).powi(2));
    let error = (squares.sum::<f64>() / exact.len() as f64).sqrt();
    let expected = (1.0 / (2.0 * size as f64)).sqrt();
    assert!(
        (0.3..2.0).contains(&(error / expected)),
        "{error}, expected {expected}"
    );
}
