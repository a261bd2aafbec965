//! The parameters of a request: each is taken by name, and what is left is unknown.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive};

use powerinfer_artifact::json;
use powerinfer_runtime::SamplingSettings;
use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use super::{error::ApiError, plain_words};

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
        json::from_slice(body).map_err(|error| {
            if error.is_data() {
                ApiError::invalid("the body is not a JSON object")
            } else {
                ApiError::invalid(format!("the body is not JSON: {error}"))
            }
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
        serde_json::from_str(json)
            .map_err(|error| ApiError::invalid_value(name, plain_words::of(&error)))
    }

    /// Takes the parameter `name`, which must lie in a range.
    pub(crate) fn take_within<T: DeserializeOwned + PartialOrd + std::fmt::Display>(
        &mut self,
        name: &str,
        range: RangeInclusive<T>,
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

    /// Takes the whole number `name`, which must be within a range and may be written as `50.0`.
    pub(crate) fn take_whole(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let value = self.take_within(name, Whole(*range.start())..=Whole(*range.end()))?;
        Ok(value.map(|Whole(value)| value))
    }

    /// Takes the count `name`, which must be within a range.
    pub(crate) fn take_count(
        &mut self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ApiError> {
        let range = *range.start() as i64..=*range.end() as i64;
        let count = self.take_whole(name, range)?;
        Ok(count.and_then(|count| usize::try_from(count).ok()))
    }

    /// Takes a number of tokens, at least `least`. The inner `None`, written as −1, means as many as the context can hold.
    pub(crate) fn take_limit(
        &mut self,
        name: &str,
        least: i64,
    ) -> Result<Option<Option<usize>>, ApiError> {
        let limit = self.take(name)?;
        match limit {
            None => Ok(None),
            Some(Whole(-1)) => Ok(Some(None)),
            Some(Whole(limit)) if limit >= least => Ok(Some(usize::try_from(limit).ok())),
            Some(limit) => {
                let message =
                    format!("{limit} is invalid: give at least {least}, or -1 for no limit");
                Err(ApiError::invalid_value(name, message))
            }
        }
    }

    /// Refuses unsupported parameters of OpenAI's API; values that [ask for nothing](Asks), `none` and
    /// `auto` are accepted.
    pub(crate) fn refuse(&mut self, names: &[&str]) -> Result<(), ApiError> {
        for name in names {
            let Asks(asks) = self.take(name)?.unwrap_or_default();
            if asks {
                return Err(ApiError::unsupported(name));
            }
        }
        Ok(())
    }

    /// Refuses the parameters `names`, which belong elsewhere; the message `to` says where.
    pub(crate) fn redirect(&self, names: &[&str], to: &str) -> Result<(), ApiError> {
        match names.iter().find(|name| self.has(name)) {
            Some(name) => Err(ApiError::invalid_value(name, to)),
            None => Ok(()),
        }
    }

    /// Refuses parameters that have not been taken, except nulls.
    pub(crate) fn finish(mut self) -> Result<(), ApiError> {
        self.0.retain(|name, value| {
            value.get() != "null" && !WITHOUT_EFFECT.contains(&name.as_str())
        });
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
        let top_k = self.take_whole("top_k", -1..=i64::from(u32::MAX))?;
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
            seed: self.take_whole("seed", i64::MIN..=i64::MAX)?.unwrap_or(0) as u64,
            ..model.clone()
        })
    }
}

/// A whole number.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
struct Whole(i64);

impl fmt::Display for Whole {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeVisitor;
        impl Visitor<'_> for WholeVisitor {
            type Value = Whole;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a whole number")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Whole, E> {
                Ok(Whole(value))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Whole, E> {
                let whole = i64::try_from(value).map(Whole);
                whole.map_err(|_| E::invalid_value(de::Unexpected::Unsigned(value), &self))
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Whole, E> {
                if value.fract() == 0.0 && value.abs() < 2f64.powi(53) {
                    Ok(Whole(value as i64))
                } else {
                    Err(E::invalid_value(de::Unexpected::Float(value), &self))
                }
            }
        }
        deserializer.deserialize_any(WholeVisitor)
    }
}

/// Whether a value asks for anything. Null, `false`, 0, `"none"`, `"auto"` and an empty text, list or object do not.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Asks(pub(crate) bool);

impl<'de> Deserialize<'de> for Asks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AsksVisitor;
        impl<'de> Visitor<'de> for AsksVisitor {
            type Value = Asks;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a value")
            }

            fn visit_unit<E: de::Error>(self) -> Result<Asks, E> {
                Ok(Asks(false))
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Asks, E> {
                Ok(Asks(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Asks, E> {
                Ok(Asks(value != 0))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Asks, E> {
                Ok(Asks(value != 0))
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Asks, E> {
                Ok(Asks(value != 0.0))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Asks, E> {
                Ok(Asks(!["", "none", "auto"].contains(&text)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Asks, A::Error> {
                let mut asks = false;
                while items.next_element::<IgnoredAny>()?.is_some() {
                    asks = true;
                }
                Ok(Asks(asks))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Asks, A::Error> {
                let mut asks = false;
                while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    asks = true;
                }
                Ok(Asks(asks))
            }
        }
        deserializer.deserialize_any(AsksVisitor)
    }
}

/// One text or a list of them.
#[derive(Debug)]
pub(crate) struct Texts(pub(crate) Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextsVisitor;
        impl<'de> Visitor<'de> for TextsVisitor {
            type Value = Texts;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text or a list of texts")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Texts, A::Error> {
                let mut texts = Vec::new();
                while let Some(text) = items.next_element()? {
                    texts.push(text);
                }
                Ok(Texts(texts))
            }
        }
        deserializer.deserialize_any(TextsVisitor)
    }
}
