//! The first difference between two schemas: training continues only with the schema of the version.

use toml::{Table, Value};

use super::Schema;

impl Schema {
    /// The first value of `got` that differs, with its path, such as `tables["C3"].rows: expected 100, got
    /// 200`. `None` if the schemas are equal.
    #[must_use]
    pub(crate) fn first_difference(&self, got: &Self) -> Option<String> {
        let tree = |schema: &Self| schema.to_toml().parse::<Table>().map(Value::Table).ok();
        // What `to_toml` writes can be parsed. The fallback names no value, but still refuses.
        match (tree(self), tree(got)) {
            (Some(a), Some(b)) => differ("", &a, &b),
            _ => (self != got).then(|| "schema: differs".to_owned()),
        }
    }
}

fn differ(path: &str, expected: &Value, got: &Value) -> Option<String> {
    match (expected, got) {
        (Value::Table(a), Value::Table(b)) => {
            let mut keys: Vec<_> = a.keys().chain(b.keys()).collect();
            // The kind decides which other keys there are.
            keys.sort_unstable_by_key(|key| (key.as_str() != "kind", key.as_str()));
            keys.dedup();
            let dot = if path.is_empty() { "" } else { "." };
            keys.into_iter().find_map(|key| pair(&format!("{path}{dot}{key}"), a.get(key), b.get(key)))
        }
        (Value::Array(a), Value::Array(b)) => (0..a.len().max(b.len())).find_map(|i| {
            let name = |list: &[Value]| Some(list.get(i)?.get("name")?.as_str()?.to_owned());
            let place = match (name(a), name(b)) {
                (Some(one), Some(other)) if one == other => format!("{path}[{one:?}]"),
                _ => format!("{path}[{i}]"),
            };
            pair(&place, a.get(i), b.get(i))
        }),
        _ => (expected != got).then(|| format!("{path}: expected {expected}, got {got}")),
    }
}

/// The difference of two values of which one may be absent.
fn pair(path: &str, expected: Option<&Value>, got: Option<&Value>) -> Option<String> {
    match (expected, got) {
        (Some(a), Some(b)) => differ(path, a, b),
        (Some(a), None) => Some(format!("{path}: expected {}, got nothing", named(a))),
        (None, Some(b)) => Some(format!("{path}: expected nothing, got {}", named(b))),
        (None, None) => None,
    }
}

/// The name of a feature or table, or the value itself.
fn named(value: &Value) -> String {
    value.get("name").map_or_else(|| value.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests;
