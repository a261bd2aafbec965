//! Closed schemas: as in llama.cpp and Ollama, objects with `properties` permit no other keys.

use serde_json::{Map, Value};

/// Keywords whose values map names to schemas.
const NAMED: [&str; 5] = [
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
];

/// Keywords whose values are data, not schemas.
const DATA: [&str; 4] = ["const", "enum", "default", "examples"];

/// Keywords that combine schemas.
const COMBINING: [&str; 5] = ["allOf", "anyOf", "oneOf", "$ref", "if"];

/// Sets `additionalProperties` to false in each object that has `properties` but not this keyword.
///
/// A schema whose objects get their keys from several places, such as `allOf`, stays as it is: each place would forbid the
/// keys of the others.
pub(crate) fn close_objects(schema: &mut Value) {
    let mut combines = false;
    visit(schema, &mut |object| {
        let has_properties = object.contains_key("properties");
        combines |= has_properties && COMBINING.iter().any(|key| object.contains_key(*key));
        let parts = object.get("allOf").and_then(Value::as_array);
        combines |= parts.is_some_and(|parts| parts.len() > 1);
    });
    if combines {
        return;
    }
    visit(schema, &mut |object| {
        if object.contains_key("properties") {
            object
                .entry("additionalProperties")
                .or_insert(Value::Bool(false));
        }
    });
}

/// Calls `act` for `schema` and the schemas in it.
fn visit(schema: &mut Value, act: &mut impl FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Array(parts) => parts.iter_mut().for_each(|part| visit(part, act)),
        Value::Object(object) => {
            act(object);
            for (key, value) in object.iter_mut() {
                match value {
                    Value::Object(schemas) if NAMED.contains(&key.as_str()) => {
                        schemas.values_mut().for_each(|schema| visit(schema, act));
                    }
                    value if !DATA.contains(&key.as_str()) => visit(value, act),
                    _ => {}
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn closed(mut schema: Value) -> Value {
        close_objects(&mut schema);
        schema
    }

    #[test]
    fn objects_with_properties_take_no_other_keys_unless_they_say_so() {
        let inner = json!({ "properties": { "properties": { "type": "string" } } });
        let schema = json!({
            "properties": { "list": { "items": inner }, "any": { "type": "object" } },
            "$defs": { "open": { "properties": {}, "additionalProperties": true } },
            "default": inner,
        });
        let mut expected = schema.clone();
        expected["additionalProperties"] = json!(false);
        expected["properties"]["list"]["items"]["additionalProperties"] = json!(false);
        assert_eq!(closed(schema), expected);
    }

    #[test]
    fn combined_schemas_stay_as_they_are() {
        let part = |name: &str| json!({ "properties": { name: { "type": "string" } } });
        for schema in [
            json!({ "allOf": [part("a"), part("b")] }),
            json!({ "properties": { "a": {} }, "anyOf": [part("b"), part("c")] }),
            json!({ "items": { "properties": { "a": {} }, "$ref": "#/$defs/b" }, "$defs": { "b": part("b") } }),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
        let choice = closed(json!({ "anyOf": [part("a"), part("b")] }));
        assert_eq!(choice["anyOf"][1]["additionalProperties"], false);
    }
}
