//! The parameters of a request: each is taken by name, and what is left is unknown.

use std::collections::BTreeMap;

use powerinfer_runtime::SamplingSettings;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::error::ApiError;

/// Parameters of OpenAI's APIs that change nothing of what is generated.
const WITHOUT_EFFECT: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
];

/// Maximum number of texts of a request, for all prompts together.
pub(crate) const MAX_TEXTS: usize = 2048;

/// Maximum number of tokens of all prompts of a request.
pub(crate) const MAX_PROMPT_TOKENS: usize = 1 << 20;

/// Maximum bytes of JSON of `logit_bias`.
const MAX_BIAS_BYTES: usize = 64 << 10;

/// The JSON object of a request. Each value stays text until it is taken, so memory is needed only for the parameters' own types.
#[derive(Debug, Default, serde::Deserialize)]
pub(crate) struct Parameters(BTreeMap<String, Box<RawValue>>);

impl Parameters {
    /// Parses the body of a request.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        serde_json::from_slice(body).map_err(|error| match error.is_data() {
            true => ApiError::invalid("the body is not a JSON object"),
            false => ApiError::invalid(format!("the body is not JSON: {error}")),
        })
    }

    /// Whether the parameter `name` has a value.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| value.get() != "null")
    }

    /// Takes the parameter `name`; `null` counts as absent.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        self.take_sized(name, usize::MAX)
    }

    /// Takes the parameter `name`, of up to `most` bytes of JSON; `null` counts as absent.
    pub(crate) fn take_sized<T: DeserializeOwned>(
        &mut self,
        name: &str,
        most: usize,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.0.remove(name) else {
            return Ok(None);
        };
        let json = value.get();
        if json.len() > most {
            let message = format!("it has {} bytes, and may have {most}", json.len());
            return Err(ApiError::invalid_value(name, message));
        }
        serde_json::from_str(json).map_err(|error| {
            // The position is relative to the value.
            let error = error.to_string();
            let message = error.split(" at line ").next().unwrap_or(&error);
            ApiError::invalid_value(name, message)
        })
    }

    /// Takes the parameter `name`, which must lie in a range.
    pub(crate) fn take_within<T: DeserializeOwned + PartialOrd + std::fmt::Display>(
        &mut self,
        name: &str,
        range: std::ops::RangeInclusive<T>,
    ) -> Result<Option<T>, ApiError> {
        let value = self.take(name)?;
        match value {
            Some(value) if !range.contains(&value) => Err(ApiError::invalid_value(
                name,
                format!(
                    "{value} is not between {} and {}",
                    range.start(),
                    range.end()
                ),
            )),
            value => Ok(value),
        }
    }

    /// Refuses parameters of OpenAI's API that are not supported; `null`, `false`, `none`,
    /// `auto` and empty lists ask for nothing.
    pub(crate) fn refuse(&mut self, names: &[&str]) -> Result<(), ApiError> {
        for name in names {
            let asks = self.0.remove(*name).is_some_and(|value| {
                let is_empty_list = |list: &str| {
                    list.strip_suffix(']')
                        .is_some_and(|list| list.trim().is_empty())
                };
                match value.get() {
                    "null" | "false" | "\"\"" | "\"none\"" | "\"auto\"" => false,
                    value => !value.strip_prefix('[').is_some_and(is_empty_list),
                }
            });
            if asks {
                return Err(ApiError::unsupported(name));
            }
        }
        Ok(())
    }

    /// Refuses what has not been taken.
    pub(crate) fn finish(mut self) -> Result<(), ApiError> {
        self.0
            .retain(|name, _| !WITHOUT_EFFECT.contains(&name.as_str()));
        match self.0.keys().next() {
            Some(name) => Err(ApiError::unknown(name)),
            None => Ok(()),
        }
    }

    /// Drops the parameters in `names`.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        self.0.retain(|name, _| !names.contains(&name.as_str()));
    }

    /// Takes the settings of sampling, in OpenAI's names and in those of llama.cpp and vLLM for what OpenAI has not;
    /// `model` are the model's own, whose tokens are `vocabulary`.
    pub(crate) fn sampling(
        &mut self,
        model: &SamplingSettings,
        vocabulary: usize,
    ) -> Result<SamplingSettings, ApiError> {
        let temperature = self.take_within("temperature", 0.0..=2.0)?;
        let top_p: Option<f32> = self.take_within("top_p", 0.0..=1.0)?;
        // vLLM's −1 is all tokens.
        let top_k = self.take_within::<i64>("top_k", -1..=i64::from(u32::MAX))?;
        let llama_penalty = self.take_within("repeat_penalty", 0.01..=10.0)?;
        let penalty = self.take_within("repetition_penalty", 0.01..=10.0)?;
        let biases: Option<BTreeMap<String, f32>> =
            self.take_sized("logit_bias", MAX_BIAS_BYTES)?;
        let mut logit_bias = BTreeMap::new();
        for (token, bias) in biases.into_iter().flatten() {
            let id = token.parse().ok();
            let Some(id) = id.filter(|id: &u32| (*id as usize) < vocabulary) else {
                let message = format!("`{token}` is not a token's id, below {vocabulary}");
                return Err(ApiError::invalid_value("logit_bias", message));
            };
            if !(-100.0..=100.0).contains(&bias) {
                let message = format!("{bias} is not between -100 and 100");
                return Err(ApiError::invalid_value("logit_bias", message));
            }
            logit_bias.insert(id, bias);
        }
        Ok(SamplingSettings {
            temperature: temperature.unwrap_or(model.temperature),
            top_k: top_k.map_or(model.top_k, |count| usize::try_from(count).unwrap_or(0)),
            // The smallest set of tokens that has any probability is the most probable one.
            top_p: top_p.map_or(model.top_p, |top_p| top_p.max(f32::MIN_POSITIVE)),
            min_p: self.take_within("min_p", 0.0..=1.0)?.unwrap_or(model.min_p),
            repeat_penalty: penalty.or(llama_penalty).unwrap_or(model.repeat_penalty),
            presence_penalty: self
                .take_within("presence_penalty", -2.0..=2.0)?
                .unwrap_or_default(),
            frequency_penalty: self
                .take_within("frequency_penalty", -2.0..=2.0)?
                .unwrap_or_default(),
            logit_bias,
            // Negative seeds are seeds too.
            seed: self.take::<i64>("seed")?.unwrap_or(0) as u64,
            ..model.clone()
        })
    }
}

/// One value or a list of them.
#[derive(Debug, serde::Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany<T> {
    /// One value.
    One(T),
    /// A list.
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    /// The values.
    pub(crate) fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(value) => vec![value],
            Self::Many(values) => values,
        }
    }
}
