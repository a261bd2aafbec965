//! Finds the document in a record, by the record's keys.

use powerinfer_text::Message;
use serde_json::{Map, Value};

use crate::{Document, Unusable};

/// Keys whose value is a text.
const TEXTS: [&str; 2] = ["text", "content"];
/// Keys whose value is a conversation, which is a list of messages.
const CONVERSATIONS: [&str; 2] = ["messages", "conversations"];
/// Keys of the two parts of a document.
const PARTS: [&str; 2] = ["prompt", "completion"];

/// Limits for keys listed in a message: their number, and the characters of each.
const LISTED: (usize, usize) = (8, 32);

/// Returns whether the column or key `name` may contain a document.
pub(crate) fn is_known(name: &str) -> bool {
    let mut known = TEXTS.iter().chain(&CONVERSATIONS).chain(&PARTS);
    known.any(|known| *known == name)
}

/// Formats the known keys for messages.
pub(crate) fn known_keys() -> String {
    let [text, content] = TEXTS;
    let [messages, conversations] = CONVERSATIONS;
    let [prompt, completion] = PARTS;
    format!(
        "`{text}`, `{content}`, `{messages}`, `{conversations}`, or `{prompt}` with `{completion}`"
    )
}

/// Formats the first few of `keys` for messages.
pub(crate) fn listed(keys: &[String]) -> String {
    let (count, length) = LISTED;
    let shown = keys.iter().take(count).map(|key| {
        let short: String = key.chars().take(length).collect();
        format!("`{short}`")
    });
    let mut shown: Vec<String> = shown.collect();
    match keys.len() {
        0 => return "(none)".to_owned(),
        all if all > count => shown.push("…".to_owned()),
        _ => {}
    }
    shown.join(", ")
}

/// Extracts the document from a record.
pub(crate) fn document(record: Value) -> Result<Document, Unusable> {
    match record {
        Value::String(text) => text_document(text),
        Value::Object(fields) => of_fields(fields),
        other => Err(Unusable::Kind(kind(&other))),
    }
}

fn of_fields(mut fields: Map<String, Value>) -> Result<Document, Unusable> {
    let keys = || fields.keys().cloned().collect();
    if let Some(key) = TEXTS
        .iter()
        .find(|key| fields.get(**key).is_some_and(Value::is_string))
    {
        let text = fields.remove(*key);
        return text_document(string(text));
    }
    for key in CONVERSATIONS {
        if let Some(messages) = fields.get(key).and_then(list) {
            return conversation(&messages);
        }
    }
    match PARTS.map(|key| fields.get(key)) {
        [Some(Value::String(prompt)), Some(Value::String(completion))] => {
            text_document(format!("{prompt}{completion}"))
        }
        [Some(Value::Array(prompt)), Some(Value::Array(completion))] => {
            conversation(&[&prompt[..], completion].concat())
        }
        _ => Err(Unusable::Keys(keys())),
    }
}

fn string(value: Option<Value>) -> String {
    match value {
        Some(Value::String(text)) => text,
        _ => String::new(),
    }
}

fn text_document(text: String) -> Result<Document, Unusable> {
    if text.trim().is_empty() {
        Err(Unusable::Empty)
    } else {
        Ok(Document::Text(text))
    }
}

/// Returns the items of a list, which a column of strings may contain as JSON.
fn list(value: &Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(items) => Some(items.clone()),
        Value::String(text) => serde_json::from_str(text).ok(),
        _ => None,
    }
}

fn conversation(messages: &[Value]) -> Result<Document, Unusable> {
    let messages: Option<Vec<Message>> = messages.iter().map(message).collect();
    match messages {
        None => Err(Unusable::Messages),
        Some(messages) if messages.is_empty() => Err(Unusable::Empty),
        Some(messages) => Ok(Document::Chat(messages)),
    }
}

/// Parses a message with `role` and `content`, or ShareGPT's `from` and `value`.
fn message(message: &Value) -> Option<Message> {
    let role = message.get("role").or_else(|| message.get("from"))?;
    let role = match role.as_str()? {
        "human" => "user",
        "gpt" | "chatgpt" | "bing" | "bard" => "assistant",
        role => role,
    };
    let content = message.get("content").or_else(|| message.get("value"))?;
    let content = match content {
        Value::String(text) => text.clone(),
        // A message may have several parts; parts without text, such as images, are left out.
        Value::Array(parts) => {
            let texts = parts.iter().map(|part| part.get("text")?.as_str());
            texts.collect::<Option<Vec<_>>>()?.concat()
        }
        _ => return None,
    };
    Some(Message {
        role: role.to_owned(),
        content,
    })
}

/// Describes the type of `value` for messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
