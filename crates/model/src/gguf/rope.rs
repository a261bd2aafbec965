//! Rotary settings as GGUF states them: a base, and a scaling or a divisor per frequency.

use serde_json::Value as Json;

use super::writer::Metadata;
use crate::Rotary;

/// Rotary settings of a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rope {
    /// Base of the frequencies.
    pub(super) theta: f64,
    /// Rotated elements per head.
    pub(super) width: usize,
    /// Scaling of the frequencies.
    pub(super) scaling: Scaling,
}

/// Scaling of the frequencies.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scaling {
    /// None.
    Plain,
    /// Division by one factor.
    Linear(f32),
    /// YaRN with the usual constants.
    Yarn { factor: f32, original: usize },
    /// Division of each frequency by its own divisor.
    Divisors(Vec<f32>),
}

/// Largest relative difference of frequencies that are meant to be the same: the base is stated in float32.
pub(super) const TOLERANCE: f64 = 1e-5;

fn are_close(a: f64, b: f64) -> bool {
    (a - b).abs() <= TOLERANCE * b.abs()
}

impl Rope {
    /// Settings that give the frequencies of `rotary`. A `config.json`, if there is one, states the base and the
    /// original context of YaRN.
    pub(super) fn new(rotary: &Rotary, config: Option<&Json>, context_length: usize) -> Self {
        let (frequencies, width) = (&rotary.frequencies, rotary.width());
        let stated = config.map(objects).unwrap_or_default();
        let theta = stated
            .iter()
            .find_map(|object| {
                let bases = ["rope_theta", "rotary_emb_base"];
                bases.iter().find_map(|key| object.get(key)?.as_f64())
            })
            .or_else(|| {
                // Of plain and of linearly scaled frequencies; of others, any base does.
                let [first, second, ..] = frequencies[..] else {
                    return None;
                };
                Some((first / second).powi(frequencies.len() as i32))
            });
        let theta = f64::from(theta.unwrap_or(10_000.0) as f32);
        let plain = Rotary::plain(theta, width).frequencies;
        let ratios: Vec<f64> = plain.iter().zip(frequencies).map(|(p, f)| p / f).collect();
        let is_even = ratios.iter().all(|ratio| are_close(*ratio, ratios[0]));
        let yarn = stated
            .iter()
            .find_map(|object| yarn(object, context_length));
        let scaling = match yarn {
            Some(yarn) => yarn,
            None if is_even && are_close(ratios[0], 1.0) => Scaling::Plain,
            None if is_even => Scaling::Linear(ratios[0] as f32),
            None => Scaling::Divisors(ratios.iter().map(|ratio| *ratio as f32).collect()),
        };
        Self {
            theta,
            width,
            scaling,
        }
    }

    /// Divisors of the frequencies, which are a tensor.
    pub(super) fn divisors(&self) -> &[f32] {
        match &self.scaling {
            Scaling::Divisors(divisors) => divisors,
            _ => &[],
        }
    }
}

impl Scaling {
    /// Appends the keys that state the scaling.
    pub(super) fn describe(&self, architecture: &str, metadata: &mut Metadata) {
        let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
        match self {
            Self::Plain | Self::Divisors(_) => {}
            Self::Linear(factor) => {
                metadata.push(key("type"), "linear");
                metadata.push(key("factor"), *factor);
            }
            Self::Yarn { factor, original } => {
                metadata.push(key("type"), "yarn");
                metadata.push(key("factor"), *factor);
                metadata.push(key("original_context_length"), *original);
            }
        }
    }
}

/// The objects of a `config.json` that may state rotary settings.
fn objects(config: &Json) -> Vec<&Json> {
    let nested = ["rope_parameters", "rope_scaling"].map(|key| config.get(key));
    let nested = nested
        .into_iter()
        .flatten()
        .filter(|object| object.is_object());
    [config].into_iter().chain(nested).collect()
}

/// Reads the settings of YaRN from an object that has them.
fn yarn(object: &Json, context_length: usize) -> Option<Scaling> {
    let kind = object.get("rope_type").or(object.get("type"))?.as_str()?;
    let original = object.get("original_max_position_embeddings");
    let original = original.and_then(Json::as_u64);
    (kind == "yarn").then_some(Scaling::Yarn {
        factor: object.get("factor")?.as_f64()? as f32,
        original: original.map_or(context_length, |length| length as usize),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_are_recovered_from_frequencies() {
        for theta in [10_000.0, 500_000.0, 1e6, 5e6] {
            for width in [16, 64, 128] {
                let mut rotary = Rotary::plain(theta, width);
                let plain = Rope::new(&rotary, None, 4096);
                assert_eq!((plain.theta, plain.width), (theta, width));
                assert_eq!(plain.scaling, Scaling::Plain);
                rotary
                    .frequencies
                    .iter_mut()
                    .for_each(|frequency| *frequency /= 4.0);
                let linear = Rope::new(&rotary, None, 4096);
                assert_eq!(
                    (linear.theta, linear.scaling),
                    (theta, Scaling::Linear(4.0))
                );
                rotary.frequencies[2] /= 8.0;
                let stated = json!({ "rope_theta": theta });
                let divided = Rope::new(&rotary, Some(&stated), 4096);
                assert_eq!(divided.divisors()[..3], [4.0, 4.0, 32.0]);
            }
        }
    }
}
