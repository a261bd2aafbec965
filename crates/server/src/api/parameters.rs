//! The parameters of a request: each is taken by name, and what is left is unknown.

use std::collections::BTreeMap;

use powerinfer_runtime::SamplingSettings;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

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

/// The JSON object of a request.
#[derive(Debug)]
pub(crate) struct Parameters(Map<String, Value>);

impl Parameters {
    /// Parses the body of a request.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::invalid("the body is not a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the body is not JSON: {error}"))),
        }
    }

    /// Parameters that are part of another one.
    pub(crate) fn of(fields: Map<String, Value>) -> Self {
        Self(fields)
    }

    /// Whether the parameter `name` has a value.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null())
    }

    /// Takes the parameter `name`; `null` counts as absent.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|error| ApiError::invalid_value(name, error)),
        }
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
            let asks = match self.0.remove(*name) {
                None | Some(Value::Null | Value::Bool(false)) => false,
                Some(Value::Array(list)) => !list.is_empty(),
                Some(Value::String(text)) => !matches!(text.as_str(), "" | "none" | "auto"),
                Some(_) => true,
            };
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
    /// `model` are the model's own.
    pub(crate) fn sampling(
        &mut self,
        model: &SamplingSettings,
    ) -> Result<SamplingSettings, ApiError> {
        let temperature = self.take_within("temperature", 0.0..=2.0)?;
        let top_p: Option<f32> = self.take_within("top_p", 0.0..=1.0)?;
        // vLLM's −1 is all tokens.
        let top_k = self.take_within::<i64>("top_k", -1..=i64::from(u32::MAX))?;
        let llama_penalty = self.take_within("repeat_penalty", 0.01..=10.0)?;
        let penalty = self.take_within("repetition_penalty", 0.01..=10.0)?;
        let biases: Option<BTreeMap<String, f32>> = self.take("logit_bias")?;
        let mut logit_bias = BTreeMap::new();
        for (token, bias) in biases.into_iter().flatten() {
            let id = token.parse().map_err(|_| {
                ApiError::invalid_value("logit_bias", format!("`{token}` is not a token's id"))
            })?;
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
