//! JSON that people write, in specs, flags and lists of tokens.
//!
//! A byte order mark at the start is skipped. A field that an object holds twice is refused, at any depth: a parser
//! that keeps the last one ignores what it was told.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Reads one JSON value.
///
/// # Errors
/// What is wrong, and at which line and column.
///
/// ```
/// use headflow::json;
/// assert_eq!(json::parse("\u{feff}[1, 2]")?, serde_json::json!([1, 2]));
/// assert!(json::parse(r#"{"length": 6, "length": 9}"#).unwrap_err().to_string().contains("\"length\" is given twice"));
/// # Ok::<(), serde_json::Error>(())
/// ```
pub fn parse(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str::<Unique>(text.strip_prefix('\u{feff}').unwrap_or(text)).map(|unique| unique.0)
}

/// A value whose objects hold each field once.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reading).map(Self)
    }
}

struct Reading;

impl<'de> Visitor<'de> for Reading {
    type Value = Value;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom(format!("{value} is not a finite number")))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Unique(value)) = from.next_element()? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = from.next_key::<String>()? {
            if map.contains_key(&name) {
                return Err(A::Error::custom(format!("the field \"{name}\" is given twice")));
            }
            let Unique(value) = from.next_value()?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is no repetition is read as serde_json reads it, to the bit.
    #[test]
    fn other_values_are_those_of_serde_json() {
        let text = r#" {"a": [null, true, -3, 18446744073709551615, 0.1, 1e-300, "x\n\u00e9", {}], "b": {"a": -0.0}} "#;
        let expected: Value = serde_json::from_str(text).unwrap();
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(parse(&format!("\u{feff}{text}")).unwrap(), expected);
        for broken in ["", "{", "[1,]", "1 2", "{\"a\" 1}", "nul", "1e999", "\u{feff}\u{feff}1"] {
            assert!(parse(broken).is_err() && serde_json::from_str::<Value>(broken).is_err(), "{broken}");
        }
        // As deep as serde_json goes, and no deeper.
        assert!(parse(&("[".repeat(100) + &"]".repeat(100))).is_ok());
        assert!(parse(&("[".repeat(100_000) + &"]".repeat(100_000))).is_err());
    }

    #[test]
    fn repeated_fields_are_refused_at_any_depth() {
        for text in [
            r#"{"a": 1, "a": 1}"#,
            r#"{"a": 1, "b": 2, "a": null}"#,
            r#"[[{"theta": {"nu": [1], "kind": "flip", "nu": [2]}}]]"#,
            r#"{"a": 1, "\u0061": 2}"#,
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains("is given twice at line 1 column"), "{text}: {message}");
        }
        // The same name in different objects is no repetition.
        assert!(parse(r#"{"a": {"a": {"a": 1}}, "b": {"a": 1}}"#).is_ok());
    }
}
