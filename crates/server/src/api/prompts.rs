//! The prompts of a completion: a text, a list of texts, a list of token ids, or a list of such lists.

use std::{fmt, sync::Arc};

use powerinfer_text::SpecialTokens;
use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};

use super::{error::ApiError, parameters::MAX_PROMPT_TOKENS};
use crate::{Service, generation::MAX_TEXTS};

/// Prompts of a request; their number is within the limit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompts {
    /// Texts to encode.
    Texts(Vec<String>),
    /// Token ids.
    Ids(Vec<Vec<u32>>),
}

impl Default for Prompts {
    fn default() -> Self {
        Self::Texts(vec![String::new()])
    }
}

/// Token ids by prompt, and their texts if the request has them.
type Encoded = (Vec<Arc<[u32]>>, Vec<String>);

impl Prompts {
    /// Number of prompts.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.len(),
            Self::Ids(lists) => lists.len(),
        }
    }

    /// Encodes the texts. This takes time: call it on a worker.
    pub(crate) fn encode(self, service: &Service) -> Result<Encoded, ApiError> {
        let texts = match self {
            Self::Ids(lists) => {
                return Ok((lists.into_iter().map(Arc::from).collect(), Vec::new()));
            }
            Self::Texts(texts) => texts,
        };
        let (mut prompts, mut tokens) = (Vec::new(), 0);
        for text in &texts {
            let ids = service.encode(text, SpecialTokens::Add)?;
            tokens += ids.len();
            if tokens > MAX_PROMPT_TOKENS {
                return Err(ApiError::invalid_value("prompt", TOO_MANY_TOKENS));
            }
            prompts.push(ids.into());
        }
        Ok((prompts, texts))
    }
}

const TOO_MANY_TOKENS: &str =
    "the prompts together have more than 1048576 tokens; split the request";

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

/// An element of a list.
enum Item {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = Prompts;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a text, a list of texts, token ids, or a list of lists of them")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts::Texts(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts, A::Error> {
        let (mut texts, mut lists, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        let mut tokens = 0;
        while let Some(item) = items.next_element()? {
            match item {
                Item::Text(text) => texts.push(text),
                Item::Id(id) => {
                    ids.push(id);
                    tokens += 1;
                }
                Item::Ids(list) => {
                    tokens += list.len();
                    lists.push(list);
                }
            }
            // Refused before the rest of the list is read.
            if tokens > MAX_PROMPT_TOKENS {
                return Err(de::Error::custom(TOO_MANY_TOKENS));
            }
            if texts.len().max(lists.len()) > MAX_TEXTS {
                let message = format!("there are more than {MAX_TEXTS} prompts; split the request");
                return Err(de::Error::custom(message));
            }
        }
        match (texts.is_empty(), lists.is_empty(), ids.is_empty()) {
            (false, true, true) => Ok(Prompts::Texts(texts)),
            (true, false, true) => Ok(Prompts::Ids(lists)),
            (true, true, false) => Ok(Prompts::Ids(vec![ids])),
            (true, true, true) => Err(de::Error::custom("the list is empty")),
            _ => Err(de::Error::custom(
                "texts, ids and lists of ids cannot be mixed",
            )),
        }
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;
        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = Item;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a text, a token id or a list of them")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Text(text.to_owned()))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Item, E> {
                let id = u32::try_from(id);
                id.map(Item::Id)
                    .map_err(|_| E::custom("a token id has at most 32 bits"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut ids: A) -> Result<Item, A::Error> {
                let mut list = Vec::new();
                while let Some(id) = ids.next_element()? {
                    list.push(id);
                    if list.len() > MAX_PROMPT_TOKENS {
                        return Err(de::Error::custom(TOO_MANY_TOKENS));
                    }
                }
                Ok(Item::Ids(list))
            }
        }
        deserializer.deserialize_any(ItemVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_four_shapes() {
        let parse = |json: &str| serde_json::from_str::<Prompts>(json);
        let texts =
            |texts: &[&str]| Prompts::Texts(texts.iter().map(|text| (*text).to_owned()).collect());
        assert_eq!(parse("\"a\"").unwrap(), texts(&["a"]));
        assert_eq!(parse("[\"a\", \"\"]").unwrap(), texts(&["a", ""]));
        assert_eq!(parse("[1, 2]").unwrap(), Prompts::Ids(vec![vec![1, 2]]));
        assert_eq!(
            parse("[[1], [2, 3]]").unwrap(),
            Prompts::Ids(vec![vec![1], vec![2, 3]])
        );
        for wrong in [
            "[]",
            "1",
            "[1, \"a\"]",
            "[-1]",
            "[4294967296]",
            "[[[1]]]",
            "{}",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn millions_of_prompts_are_refused_after_the_first_few() {
        for item in ["[]", "\"\"", "[1]"] {
            // The rest is not even JSON.
            let json = format!("[{}!", format!("{item},").repeat(MAX_TEXTS + 1));
            let error = serde_json::from_str::<Prompts>(&json).unwrap_err();
            assert!(error.to_string().contains("2048 prompts"), "{error}");
        }
        let ids = format!("[{}!", "1,".repeat(MAX_PROMPT_TOKENS + 1));
        let error = serde_json::from_str::<Prompts>(&ids).unwrap_err();
        assert!(error.to_string().contains("1048576 tokens"), "{error}");
    }
}
