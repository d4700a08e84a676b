//! A column of a request: from a `FeatureColumn`, which is read in place, to a column of the raw batch.

use super::{ConvertError, no_ids, no_text};
use crate::server::received::{Malformed, fields};
use crate::types::RawFeature;

/// Fields of a column.
const NAME: u32 = 1;
const LENGTHS: u32 = 2;
const IDS: u32 = 3;
const STRINGS: u32 = 4;

/// A column as it is read: its name may follow its values.
#[derive(Default)]
pub(super) struct Column {
    pub(super) lengths: Vec<u32>,
    pub(super) ids: Vec<u64>,
    pub(super) text: Vec<u8>,
    /// Where each string ends in the text.
    pub(super) ends: Vec<u32>,
}

impl Column {
    /// Overwrites this with the values of a `FeatureColumn`. Returns its name.
    ///
    /// # Errors
    /// When the bytes are not a `FeatureColumn`.
    pub(super) fn read<'m>(&mut self, message: &'m [u8]) -> Result<&'m str, Malformed> {
        let Self { lengths, ids, text, ends } = self;
        lengths.clear();
        ids.clear();
        text.clear();
        ends.clear();
        let mut name = "";
        for field in fields(message) {
            let field = field?;
            match field.number {
                NAME => name = field.text()?,
                // As generated code reads them, which drops the upper bits of a number that is too large.
                LENGTHS => field.varints(|length| lengths.push(length as u32))?,
                IDS => field.varints(|id| ids.push(id))?,
                STRINGS => {
                    text.extend_from_slice(field.bytes()?);
                    // A message is at most 1 GiB, so the ends fit in 32 bits.
                    ends.push(text.len() as u32);
                }
                _ => {}
            }
        }
        Ok(name)
    }

    /// Moves the values to the raw batch, whose memory is used for the next column.
    ///
    /// # Errors
    /// When the number of samples differs.
    pub(super) fn fill(
        &mut self,
        name: &str,
        samples: usize,
        raw: &mut RawFeature,
    ) -> Result<(), ConvertError> {
        let Self { lengths, ids, text, ends } = self;
        let named = || name.to_owned();
        match (ids.is_empty(), ends.is_empty()) {
            (false, false) => {
                let (ids, strings) = (ids.len(), ends.len());
                return Err(ConvertError::BothValues { name: named(), ids, strings });
            }
            (_, true) => std::mem::swap(ids, no_ids(&mut raw.values)),
            (true, false) => {
                let (raw_text, raw_ends) = no_text(&mut raw.values);
                std::mem::swap(text, raw_text);
                std::mem::swap(ends, raw_ends);
            }
        }
        let values = raw.values.len();
        raw.offsets.clear();
        if lengths.is_empty() {
            if values != samples {
                return Err(ConvertError::ValueCount { name: named(), samples, values });
            }
            raw.offsets.extend(0..=samples as u32);
            return Ok(());
        }
        if lengths.len() != samples {
            return Err(ConvertError::LengthCount { name: named(), samples, got: lengths.len() });
        }
        let sum: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
        if sum != values as u64 {
            return Err(ConvertError::LengthSum { name: named(), values, sum });
        }
        // The sum is the number of values in one message, so no partial sum overflows 32 bits.
        let mut end = 0;
        raw.offsets.push(end);
        raw.offsets.extend(lengths.iter().map(|length| {
            end += length;
            end
        }));
        Ok(())
    }

    /// Its memory.
    pub(super) fn bytes(&self) -> usize {
        let Self { lengths, ids, text, ends } = self;
        text.capacity() + 8 * ids.capacity() + 4 * (lengths.capacity() + ends.capacity())
    }
}
