//! Rewords errors of serde for users of the API: no Rust types, and JSON's names for values.

/// Describes what is wrong with the value of a parameter.
pub(super) fn of(error: &serde_json::Error) -> String {
    let error = error.to_string();
    // The position is relative to the value.
    let message = error.split(" at line ").next().unwrap_or(&error);
    for kind in ["invalid type: ", "invalid value: "] {
        if let Some((found, expected)) = message
            .strip_prefix(kind)
            .and_then(|rest| rest.rsplit_once(", expected "))
        {
            return format!(
                "expected {}, found {}",
                expected_value(expected),
                found_value(found)
            );
        }
    }
    // Serde reads a list in place of an object as the values of its keys.
    if message.starts_with("invalid length ") {
        return "expected an object, found a list".to_owned();
    }
    if let Some(rest) = message.strip_prefix("unknown variant ")
        && let Some((found, known)) = rest.split_once(", expected ")
    {
        return format!("expected {known}, found {found}");
    }
    match message.strip_prefix("missing field ") {
        Some(field) => format!("there is no {field}"),
        None => message.to_owned(),
    }
}

fn expected_value(expected: &str) -> String {
    let words = match expected {
        "usize" | "u64" | "u32" => "a whole number from 0 on",
        "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a string" => "a text",
        other if other.starts_with("variant ") => "a text",
        "a sequence" => "a list",
        "a map" => "an object",
        other
            if ["struct ", "enum ", "internally tagged enum "]
                .iter()
                .any(|kind| other.starts_with(kind)) =>
        {
            "an object"
        }
        other => other,
    };
    words.to_owned()
}

fn found_value(found: &str) -> String {
    let words = match found {
        "sequence" => "a list",
        "map" => "an object",
        "null" | "unit value" | "Option value" => "null",
        // For numbers, texts and Booleans, only the quoted value is kept.
        other => ["boolean ", "integer ", "floating point ", "string "]
            .iter()
            .find_map(|kind| other.strip_prefix(kind))
            .unwrap_or(other),
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::{Deserialize, de::DeserializeOwned};

    #[derive(Debug, Deserialize)]
    #[serde(tag = "type", rename_all = "snake_case")]
    enum Tagged {
        #[expect(dead_code, reason = "only its errors are used")]
        Text { format: Inner },
    }

    #[derive(Debug, Deserialize)]
    struct Inner {
        #[expect(dead_code, reason = "only its errors are used")]
        name: String,
    }

    fn words<T: DeserializeOwned + std::fmt::Debug>(json: &str) -> String {
        super::of(&serde_json::from_str::<T>(json).unwrap_err())
    }

    #[test]
    fn errors_name_values_of_json() {
        assert_eq!(
            words::<usize>("-1"),
            "expected a whole number from 0 on, found `-1`"
        );
        assert_eq!(
            words::<u32>("50.5"),
            "expected a whole number from 0 on, found `50.5`"
        );
        assert_eq!(
            words::<i64>("\"a, expected b\""),
            "expected a whole number, found \"a, expected b\""
        );
        assert_eq!(words::<f32>("[1]"), "expected a number, found a list");
        assert_eq!(words::<bool>("null"), "expected true or false, found null");
        assert_eq!(words::<String>("true"), "expected a text, found `true`");
        assert_eq!(words::<Vec<u32>>("{}"), "expected a list, found an object");
        assert_eq!(
            words::<BTreeMap<String, f32>>("[]"),
            "expected an object, found a list"
        );
        assert_eq!(words::<Inner>("1"), "expected an object, found `1`");
        assert_eq!(words::<Inner>("[]"), "expected an object, found a list");
        assert_eq!(words::<Inner>("{}"), "there is no `name`");
        assert_eq!(
            words::<Tagged>("\"text\""),
            "expected an object, found \"text\""
        );
        assert_eq!(words::<Tagged>("{}"), "there is no `type`");
        assert_eq!(
            words::<Tagged>("{\"type\": \"a\"}"),
            "expected `text`, found `a`"
        );
        assert_eq!(
            words::<Tagged>("{\"type\": \"text\", \"format\": 3}"),
            "expected an object, found `3`"
        );
    }
}
