//! Rotary embedding (RoPE): frequencies of the pairs, after context-extension scaling.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use crate::{
    ModelError,
    keys::{Keys, MAX_HEAD_SIZE},
};

/// Rotary embedding (RoPE, Su et al. 2021): within the first `2·pairs` elements of each head, element i is
/// rotated with element i + pairs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rotary {
    /// Angle per position of each pair.
    pub frequencies: Vec<f64>,
    /// Factor on sines and cosines (YaRN's attention factor); otherwise 1.
    pub magnitude: f32,
}

impl Rotary {
    /// Returns the number of rotated elements per head.
    pub fn width(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Sine and cosine of each pair's angle at `position`, times the magnitude: `[pairs]`.
    pub fn rotations(&self, position: usize) -> impl Iterator<Item = [f32; 2]> {
        self.frequencies.iter().map(move |frequency| {
            // The angle is rounded to float32 before its sine is taken, as in the reference implementation.
            let (sine, cosine) = ((position as f64 * frequency) as f32).sin_cos();
            [sine * self.magnitude, cosine * self.magnitude]
        })
    }

    /// Frequencies θ^(−i/pairs) of a head with `width` rotated elements.
    pub(crate) fn plain(theta: f64, width: usize) -> Self {
        let pairs = width / 2;
        Self {
            frequencies: (0..pairs)
                .map(|pair| theta.powf(-(pair as f64) / pairs as f64))
                .collect(),
            magnitude: 1.0,
        }
    }
}

/// Rotary settings of a family for keys absent from `config.json`.
#[derive(Clone, Copy)]
pub(crate) struct RotaryDefaults {
    pub(crate) theta: f64,
    pub(crate) theta_key: &'static str,
    /// Share of each head that is rotated, and the key that may set it.
    pub(crate) share: f64,
    pub(crate) share_key: Option<&'static str>,
    /// Layer type whose settings are read if `rope_parameters` has an object per layer type.
    pub(crate) by_layer_type: Option<&'static str>,
}

impl RotaryDefaults {
    /// θ = 10,000 under `rope_theta`, whole heads.
    pub(crate) const STANDARD: Self = Self {
        theta: 10_000.0,
        theta_key: "rope_theta",
        share: 1.0,
        share_key: None,
        by_layer_type: None,
    };
}

/// Reads the rotary settings from either layout: top-level keys with `rope_scaling`, or one object
/// `rope_parameters`. Values stated twice must agree.
pub(crate) fn rotary(
    keys: &Keys<'_>,
    head_size: usize,
    context_length: usize,
    defaults: &RotaryDefaults,
) -> Result<Rotary, ModelError> {
    if head_size > MAX_HEAD_SIZE {
        return Err(keys.bad(format!(
            "a head has {head_size} elements, which is more than supported; `hidden_size`, `num_attention_heads` or `head_dim` is wrong"
        )));
    }
    let mut newer = keys.object("rope_parameters")?;
    if let (Some(parameters), Some(kind)) = (&newer, defaults.by_layer_type)
        && let Some(of_type) = parameters.object(kind)?
    {
        newer = Some(of_type);
    }
    let older = keys.object("rope_scaling")?;
    let objects: Vec<&Keys<'_>> = newer.iter().chain(&older).collect();
    let objects_and_top: Vec<&Keys<'_>> =
        [keys].into_iter().chain(objects.iter().copied()).collect();
    let theta = consistent_value(&objects_and_top, &[defaults.theta_key, "rope_theta"])?
        .unwrap_or(defaults.theta);
    let share_key = defaults.share_key.unwrap_or("partial_rotary_factor");
    let share = match consistent_value(&objects_and_top, &[share_key, "partial_rotary_factor"])? {
        Some(share) if defaults.share_key.is_none() && share != 1.0 => {
            let whole = "1, since this family rotates whole heads";
            return Err(keys.unsupported(share_key, &share.to_string(), whole));
        }
        stated => stated.unwrap_or(defaults.share),
    };
    let width = (head_size as f64 * share) as usize;
    if share > 1.0 || width == 0 || !width.is_multiple_of(2) {
        return Err(keys.bad(format!(
            "{width} of a head's {head_size} elements cannot be rotated in pairs"
        )));
    }
    let scaled = objects
        .iter()
        .map(|scaling| scaled(theta, width, scaling, keys, context_length))
        .collect::<Result<Vec<Rotary>, ModelError>>()?;
    match scaled.as_slice() {
        [newer, older] if newer != older => {
            Err(keys.bad("`rope_parameters` and `rope_scaling` contradict each other".to_owned()))
        }
        [rotary, ..] => Ok(rotary.clone()),
        [] => Ok(Rotary::plain(theta, width)),
    }
}

/// Returns the value under any of `names` in any of `objects_and_top`, which must agree.
fn consistent_value(
    objects_and_top: &[&Keys<'_>],
    names: &[&str],
) -> Result<Option<f64>, ModelError> {
    let mut found: Option<(&str, f64)> = None;
    for (keys, name) in objects_and_top
        .iter()
        .flat_map(|keys| names.iter().map(move |name| (keys, *name)))
    {
        match (found, keys.positive(name)?) {
            (Some((first, one)), Some(other)) if one != other => {
                return Err(keys.bad(format!(
                    "`{first}` is {one} and `{name}` {other}; they must be the same"
                )));
            }
            (_, Some(number)) => found = Some((name, number)),
            (_, None) => {}
        }
    }
    Ok(found.map(|(_, number)| number))
}

/// Applies the scaling described by `scaling` to the frequencies.
fn scaled(
    theta: f64,
    width: usize,
    scaling: &Keys<'_>,
    top: &Keys<'_>,
    context_length: usize,
) -> Result<Rotary, ModelError> {
    let kind = match (scaling.text("rope_type")?, scaling.text("type")?) {
        (Some(newer), Some(older)) if newer != older => {
            return Err(scaling.bad(format!(
                "`rope_type` is `{newer}` and `type` is `{older}`; they must be the same"
            )));
        }
        (newer, older) => newer.or(older),
    };
    let rotary = match kind {
        None | Some("default") => Rotary::plain(theta, width),
        Some("linear") => linear(theta, width, factor(scaling)?),
        Some("llama3") => llama3(theta, width, scaling, context_length)?,
        Some(DIVISORS) => with_divisors(theta, width, scaling, "divisors")?,
        Some("yarn") => yarn(theta, width, scaling, context_length)?,
        // The base would change only beyond the model's stated context.
        Some("dynamic") => {
            factor(scaling)?;
            Rotary::plain(theta, width)
        }
        Some("longrope" | "su") => longrope(theta, width, scaling, top, context_length)?,
        Some(other) => {
            return Err(scaling.unsupported(
                "rope_scaling",
                other,
                "default, linear, dynamic, llama3, yarn, longrope",
            ));
        }
    };
    scaling.finish()?;
    Ok(rotary)
}

fn factor(scaling: &Keys<'_>) -> Result<f64, ModelError> {
    scaling
        .positive("factor")?
        .ok_or_else(|| scaling.bad("the key `factor` of `rope_scaling` is missing".to_owned()))
}

/// Internal `rope_type` for the frequency divisors of a GGUF file.
pub(crate) const DIVISORS: &str = "divisors";

/// Divides each frequency by its own divisor, of the list under `key`.
fn with_divisors(
    theta: f64,
    width: usize,
    scaling: &Keys<'_>,
    key: &str,
) -> Result<Rotary, ModelError> {
    let divisors = scaling.numbers(key)?;
    let mut rotary = Rotary::plain(theta, width);
    let count = rotary.frequencies.len();
    if divisors.len() != count || divisors.iter().any(|divisor| *divisor <= 0.0) {
        return Err(scaling.bad(format!(
            "`{key}` has {} numbers for {count} rotary frequencies; there must be one for each, all greater than 0",
            divisors.len()
        )));
    }
    for (frequency, divisor) in rotary.frequencies.iter_mut().zip(divisors) {
        *frequency /= divisor;
    }
    Ok(rotary)
}

/// Position interpolation (Chen et al. 2023).
fn linear(theta: f64, width: usize, factor: f64) -> Rotary {
    let mut rotary = Rotary::plain(theta, width);
    rotary
        .frequencies
        .iter_mut()
        .for_each(|frequency| *frequency /= factor);
    rotary
}

/// Llama 3.1 scaling: divides low frequencies by the factor, keeps high ones and blends in between.
fn llama3(
    theta: f64,
    width: usize,
    scaling: &Keys<'_>,
    context_length: usize,
) -> Result<Rotary, ModelError> {
    let factor = factor(scaling)?;
    let low = scaling.positive("low_freq_factor")?.unwrap_or(1.0);
    let high = scaling.positive("high_freq_factor")?.unwrap_or(4.0);
    let original = scaling
        .size("original_max_position_embeddings")?
        .unwrap_or(context_length) as f64;
    if high <= low {
        return Err(scaling.bad(format!(
            "`high_freq_factor` {high} is not above `low_freq_factor` {low}"
        )));
    }
    let mut rotary = Rotary::plain(theta, width);
    for frequency in &mut rotary.frequencies {
        let rotations = original * *frequency / TAU;
        let blend = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
        *frequency = (1.0 - blend) * *frequency / factor + blend * *frequency;
    }
    Ok(rotary)
}

/// YaRN (Peng et al. 2023, §3.2): interpolation below `beta_slow` rotations over the original context, none
/// above `beta_fast`, a linear ramp in between.
fn yarn(
    theta: f64,
    width: usize,
    scaling: &Keys<'_>,
    context_length: usize,
) -> Result<Rotary, ModelError> {
    let factor = factor(scaling)?;
    let original = scaling
        .size("original_max_position_embeddings")?
        .unwrap_or(context_length) as f64;
    let fast = scaling.positive("beta_fast")?.unwrap_or(32.0);
    let slow = scaling.positive("beta_slow")?.unwrap_or(1.0);
    let magnitude = |scale: f64| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * scale * factor.ln() + 1.0
        }
    };
    let scales = (
        scaling.number("mscale")?.filter(|scale| *scale != 0.0),
        scaling
            .number("mscale_all_dim")?
            .filter(|scale| *scale != 0.0),
    );
    let stated = scaling.positive("attention_factor")?;
    let attention = match (stated, scales) {
        (Some(stated), _) => stated,
        (None, (Some(scale), Some(all))) => magnitude(scale) / magnitude(all),
        (None, _) => magnitude(1.0),
    };
    // Index of the pair with the given number of rotations over the original context.
    let pair_of =
        |rotations: f64| width as f64 * (original / (rotations * TAU)).ln() / (2.0 * theta.ln());
    let (mut first, mut last) = (pair_of(fast), pair_of(slow));
    if scaling.flag("truncate", true)? {
        (first, last) = (first.floor(), last.ceil());
    }
    let (first, mut last) = (first.max(0.0), last.min(width as f64 - 1.0));
    if first == last {
        last += 0.001; // avoids a ramp of length 0
    }
    let mut rotary = Rotary::plain(theta, width);
    rotary.magnitude = attention as f32;
    for (pair, frequency) in rotary.frequencies.iter_mut().enumerate() {
        let interpolation = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
        *frequency = interpolation * *frequency / factor + (1.0 - interpolation) * *frequency;
    }
    Ok(rotary)
}

/// Returns the context up to which LongRoPE uses its short divisors; `None` for other scalings.
pub(crate) fn long_rope_context(keys: &Keys<'_>) -> Result<Option<usize>, ModelError> {
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(scaling) = keys.object(key)? else {
            continue;
        };
        let kind = scaling.text("rope_type")?.or(scaling.text("type")?);
        if matches!(kind, Some("longrope" | "su")) {
            return original_context(&scaling, keys);
        }
    }
    Ok(None)
}

/// Reads LongRoPE (Ding et al. 2024): each frequency has one divisor for short contexts and another for long ones. Only the
/// divisors for short contexts are supported. [`long_rope_context`] therefore limits the context.
fn longrope(
    theta: f64,
    width: usize,
    scaling: &Keys<'_>,
    top: &Keys<'_>,
    context_length: usize,
) -> Result<Rotary, ModelError> {
    scaling.numbers("long_factor")?;
    let mut rotary = with_divisors(theta, width, scaling, "short_factor")?;
    let original = original_context(scaling, top)?.unwrap_or(context_length) as f64;
    let factor = match scaling.positive("factor")? {
        Some(factor) => factor,
        None => context_length as f64 / original,
    };
    let attention = match scaling.positive("attention_factor")? {
        Some(stated) => stated,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    rotary.magnitude = attention as f32;
    Ok(rotary)
}

/// Reads `original_max_position_embeddings`, which is next to the LongRoPE settings or at the top level.
fn original_context(scaling: &Keys<'_>, top: &Keys<'_>) -> Result<Option<usize>, ModelError> {
    const KEY: &str = "original_max_position_embeddings";
    Ok(top.size(KEY)?.or(scaling.size(KEY)?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(text: &str) -> Result<Rotary, ModelError> {
        let map = serde_json::from_str(text).unwrap();
        let keys = Keys::new(Path::new("config.json"), &map);
        let rotary = rotary(&keys, 8, 4096, &RotaryDefaults::STANDARD)?;
        keys.finish()?;
        Ok(rotary)
    }

    #[test]
    fn both_layouts_are_equivalent() {
        let older = read(r#"{"rope_theta":5e5,"rope_scaling":{"type":"linear","factor":4.0}}"#);
        let newer =
            read(r#"{"rope_parameters":{"rope_theta":5e5,"rope_type":"linear","factor":4.0}}"#);
        assert_eq!(older.unwrap(), newer.unwrap());
        let plain = read("{}").unwrap();
        assert_eq!(plain.frequencies, [1.0, 0.1, 0.01, 0.001]);
        let both = read(
            r#"{"rope_theta":1e4,"rope_scaling":{"rope_type":"default","type":"default"},
                "rope_parameters":{"rope_theta":1e4,"partial_rotary_factor":1.0}}"#,
        );
        assert_eq!(both.unwrap(), plain);
    }

    #[test]
    fn high_frequencies_are_kept_and_low_ones_interpolated() {
        for kind in [
            r#"{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":1024}"#,
            r#"{"rope_type":"yarn","factor":8.0,"original_max_position_embeddings":1024}"#,
        ] {
            let scaled = read(&format!(r#"{{"rope_scaling":{kind}}}"#)).unwrap();
            assert_eq!(scaled.frequencies[0], 1.0);
            assert!((scaled.frequencies[3] - 0.001 / 8.0).abs() < 1e-12);
            assert_eq!(scaled.magnitude > 1.0, kind.contains("yarn"));
        }
    }

    #[test]
    fn long_rope_divides_by_its_short_factors_and_ends_the_context() {
        let text = r#"{"original_max_position_embeddings":1024,"rope_scaling":{"type":"longrope",
            "short_factor":[1.0,2.0,4.0,8.0],"long_factor":[1.0,9.0,9.0,9.0]}}"#;
        let rotary = read(text).unwrap();
        assert_eq!(rotary.frequencies, [1.0, 0.05, 0.0025, 0.000_125]);
        // The context is extended by 4: √(1 + ln 4 / ln 1024).
        assert!((f64::from(rotary.magnitude) - 1.2f64.sqrt()).abs() < 1e-6);
        let map = serde_json::from_str(text).unwrap();
        let keys = Keys::new(Path::new("config.json"), &map);
        assert_eq!(long_rope_context(&keys).unwrap(), Some(1024));
        let short = text.replace("[1.0,2.0,4.0,8.0]", "[1.0,2.0]");
        let message = read(&short).unwrap_err().to_string();
        assert!(
            message.contains("`short_factor` has 2 numbers"),
            "{message}"
        );
    }

    #[test]
    fn unsupported_and_contradictory_settings_are_refused_by_name() {
        for (text, named) in [
            (r#"{"rope_scaling":{"type":"mrope","factor":2.0}}"#, "mrope"),
            (r#"{"rope_scaling":{"rope_type":"linear"}}"#, "factor"),
            (
                r#"{"rope_scaling":{"type":"linear","factor":2.0,"long_factor":[1.0]}}"#,
                "long_factor",
            ),
            (r#"{"rope_theta":-1.0}"#, "rope_theta"),
            (r#"{"rope_scaling":"linear"}"#, "rope_scaling"),
            (r#"{"partial_rotary_factor":0.5}"#, "partial_rotary_factor"),
            (
                r#"{"rope_parameters":{"partial_rotary_factor":0.5}}"#,
                "partial_rotary_factor",
            ),
            (
                r#"{"rope_theta":1e6,"rope_parameters":{"rope_theta":1e4}}"#,
                "`rope_theta` is 1000000 and `rope_theta` 10000",
            ),
            (
                r#"{"rope_scaling":{"type":"linear","rope_type":"yarn","factor":2.0}}"#,
                "`rope_type` is `yarn` and `type` is `linear`",
            ),
            (
                r#"{"rope_scaling":{"type":"linear","factor":2.0},"rope_parameters":{"rope_type":"default"}}"#,
                "`rope_parameters` and `rope_scaling` contradict",
            ),
        ] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }
}
