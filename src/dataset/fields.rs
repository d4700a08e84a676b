//! The fields of one line: split at the delimiter, unquoted if the format has quotes, parsed as numbers.

use memchr::{memchr, memchr_iter};

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
    /// Finds the fields of a line. With `quotes`, a field may be in double quotes.
    pub(crate) fn split(&mut self, delimiter: u8, quotes: bool, line: &[u8]) {
        self.ends.clear();
        self.unquoted = None;
        if quotes && memchr(b'"', line).is_some() {
            self.unquoted = Some(unquote(delimiter, line, &mut self.ends));
            return;
        }
        self.ends.extend(memchr_iter(delimiter, line));
        self.ends.push(line.len());
    }

    /// The fields of `line`, which must be the line that was split last.
    pub(crate) fn of<'a>(&'a self, line: &'a [u8]) -> Row<'a> {
        Row { bytes: self.unquoted.as_deref().unwrap_or(line), ends: &self.ends }
    }
}

/// A line without its quotes (RFC 4180). Appends the end of each field to `ends`.
fn unquote(delimiter: u8, line: &[u8], ends: &mut Vec<usize>) -> Vec<u8> {
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
    bytes
}

impl<'a> Row<'a> {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn field(&self, i: usize) -> &'a [u8] {
        let begin = if i == 0 { 0 } else { self.ends[i - 1] + 1 };
        &self.bytes[begin..self.ends[i]]
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

/// The beginning of a field, for an error message.
pub(crate) fn shown(field: &[u8]) -> String {
    let head = String::from_utf8_lossy(&field[..field.len().min(32)]);
    if field.len() > 32 { format!("{head:?}...") } else { format!("{head:?}") }
}

#[cfg(test)]
mod tests;
