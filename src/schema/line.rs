//! Finds the line of a `model.toml` for an error.
//!
//! The text is parsed again into a tree with spans. A path such as `tables[3].rows` is followed as far as the
//! text has its keys, so a missing key is reported at its table.

use toml::de::{DeTable, DeValue};

/// The line of a byte offset, counted from 1.
pub(crate) fn line_of(text: &str, byte: usize) -> usize {
    1 + text.as_bytes().iter().take(byte).filter(|&&b| b == b'\n').count()
}

/// The byte offset of the deepest part of `path` that the text has.
pub(crate) fn locate(text: &str, path: &str) -> usize {
    let Ok(document) = DeTable::parse(text) else { return 0 };
    let document = document.into_inner();
    let mut table = Some(&document);
    let mut byte = 0;
    for step in path.split('.') {
        let (key, index) = match step.trim_end_matches(']').split_once('[') {
            Some((key, index)) => (key, index.parse::<usize>().ok()),
            None => (step, None),
        };
        let Some((span, value)) = table.and_then(|t| t.iter().find(|(k, _)| k.get_ref() == key)) else {
            break;
        };
        byte = span.span().start;
        table = value.get_ref().as_table();
        if let (Some(index), DeValue::Array(array)) = (index, value.get_ref()) {
            let Some(element) = array.get(index) else { break };
            byte = element.span().start;
            table = element.get_ref().as_table();
        }
    }
    byte
}
