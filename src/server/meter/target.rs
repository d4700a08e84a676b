//! What a message says about itself before it is decoded: its model and its priority.

use prost::Message;

use super::layout::Field;
use crate::batcher::Priority;
use crate::server::kserve::{InferHead, terms};

/// Longer fields say nothing. The name of a directory is shorter, and so is the parameter `priority`.
const MOST_BYTES: usize = 256;

/// What has been read so far.
#[derive(Default)]
pub(super) struct CallTarget {
    /// The model's name, until it is taken.
    pub model: Option<String>,
    pub priority: Priority,
    /// The field that the next bytes belong to, and its bytes so far, if it says something.
    reading: Option<(Field, Vec<u8>)>,
}

impl CallTarget {
    /// A field of this length begins.
    pub(super) fn begin(&mut self, field: Field, length: usize) {
        if length <= MOST_BYTES {
            self.reading = Some((field, Vec::with_capacity(length)));
        }
    }

    /// Bytes of the field.
    pub(super) fn read(&mut self, bytes: &[u8]) {
        if let Some((_, read)) = &mut self.reading {
            read.extend_from_slice(bytes);
        }
    }

    /// The field is complete.
    pub(super) fn end(&mut self) {
        match self.reading.take() {
            Some((Field::Model, name)) => self.model = String::from_utf8(name).ok(),
            Some((Field::Parameter(..), entry)) => {
                self.priority = priority_of(&entry).unwrap_or(self.priority);
            }
            _ => {}
        }
    }

    /// The priority of a native request.
    pub(super) fn number(&mut self, priority: u64) {
        self.priority = match priority {
            1 => Priority::High,
            2 => Priority::Low,
            _ => Priority::Normal,
        };
    }
}

/// The priority that an entry of the map of parameters gives. The service refuses wrong ones.
fn priority_of(entry: &[u8]) -> Option<Priority> {
    let is_priority = entry.starts_with(b"\x0a\x08priority");
    let length = u8::try_from(entry.len()).ok().filter(|length| is_priority && *length < 0x80)?;
    // The field 4 with this length: a request with only this parameter.
    let request = InferHead::decode([&[4 << 3 | 2, length], entry].concat().as_slice()).ok()?;
    terms::priority(&request).ok()
}
