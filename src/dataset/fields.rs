//! The fields of one line: split at the delimiter, unquoted if the format has quotes (RFC 4180, but a field
//! does not go on in the next line), parsed as numbers.

use memchr::{memchr, memchr_iter};

/// How a line is divided into fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    /// The byte between two fields.
    pub delimiter: u8,
    /// Whether a field may be in double quotes.
    pub quotes: bool,
}

/// Where a line's fields end, and a copy of the line without quotes if it had any.
#[derive(Default)]
pub(crate) struct Fields {
    ends: Vec<usize>,
    unquoted: Option<Vec<u8>>,
}

/// The fields of one line: field `i` ends at `ends[i]`, and one delimiter follows it.
pub(crate) struct Row<'a> {
    bytes: &'a [u8],
    ends: &'a [usize],
}

impl Fields {
    /// Finds the fields of a line.
    ///
    /// # Errors
    /// When a quote is not closed.
    pub(crate) fn split<'a>(
        &'a mut self,
        Division { delimiter, quotes }: Division,
        line: &'a [u8],
    ) -> Result<Row<'a>, String> {
        self.ends.clear();
        self.unquoted = None;
        if quotes && memchr(b'"', line).is_some() {
            let unquoted = unquote(delimiter, line, &mut self.ends);
            self.unquoted = Some(unquoted.ok_or("a double quote is not closed in the line")?);
        } else {
            self.ends.extend(memchr_iter(delimiter, line));
            self.ends.push(line.len());
        }
        Ok(Row { bytes: self.unquoted.as_deref().unwrap_or(line), ends: &self.ends })
    }
}

/// A line without its quotes; `None` if one is not closed. Appends the end of each field to `ends`.
fn unquote(delimiter: u8, line: &[u8], ends: &mut Vec<usize>) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(line.len());
    let mut quoted = false;
    let mut at = 0;
    while let Some(&byte) = line.get(at) {
        at += 1;
        match byte {
            b'"' if quoted && line.get(at) == Some(&b'"') => {
                bytes.push(b'"');
                at += 1;
            }
            b'"' => quoted = !quoted,
            byte if byte == delimiter && !quoted => {
                ends.push(bytes.len());
                bytes.push(delimiter);
            }
            byte => bytes.push(byte),
        }
    }
    ends.push(bytes.len());
    (!quoted).then_some(bytes)
}

impl<'a> Row<'a> {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn field(&self, i: usize) -> &'a [u8] {
        let begin = if i == 0 { 0 } else { self.ends[i - 1] + 1 };
        &self.bytes[begin..self.ends[i]]
    }

    pub(crate) fn fields(&self) -> impl Iterator<Item = &'a [u8]> {
        (0..self.len()).map(|i| self.field(i))
    }
}

/// Parses a finite number. An empty field is 0. Anything else is `None`.
pub(crate) fn number(field: &[u8]) -> Option<f32> {
    let (negative, digits) = match field {
        [] => return Some(0.0),
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    if (1..=18).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit) {
        let value = digits.iter().fold(0i64, |value, &digit| value * 10 + i64::from(digit - b'0'));
        return Some(if negative { -value } else { value } as f32);
    }
    let value: f32 = std::str::from_utf8(field).ok()?.parse().ok()?;
    value.is_finite().then_some(value)
}

/// Whether a field is a number, however large, or infinite.
pub(crate) fn is_number(field: &[u8]) -> bool {
    let value = std::str::from_utf8(field).ok().and_then(|text| text.parse::<f64>().ok());
    value.is_some_and(|value| !value.is_nan())
}

/// Bytes of a value that an error message shows.
const VALUE_BYTES: usize = 32;
/// Bytes of a column's name that an error message shows. More than of a value, because names differ at their
/// ends.
const NAME_BYTES: usize = 80;

/// The beginning of a field in quotes, for an error message.
pub(crate) fn shown(field: &[u8]) -> String {
    quoted(field, VALUE_BYTES)
}

/// The beginning of a column's name in quotes, for an error message. In a file of another format, names can
/// have any characters and any length.
pub(crate) fn shown_name(name: &str) -> String {
    quoted(name.as_bytes(), NAME_BYTES)
}

/// A column's name in a list of names: without quotes if it is short and plain.
pub(crate) fn listed_name(name: &str) -> String {
    let shown = shown_name(name);
    let plain = !name.contains(',') && shown == format!("\"{name}\"");
    if plain { name.to_owned() } else { shown }
}

fn quoted(text: &[u8], longest: usize) -> String {
    let head = String::from_utf8_lossy(&text[..text.len().min(longest)]);
    if text.len() > longest { format!("{head:?}...") } else { format!("{head:?}") }
}

#[cfg(test)]
mod tests;
