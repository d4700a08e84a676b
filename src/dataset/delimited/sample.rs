//! A line becomes a sample of a batch. A line is appended whole or not at all: everything that can fail is
//! parsed before a text column changes.

use crate::dataset::fields::{Row, is_number, number, shown};
use crate::dataset::layout::{Columns, DenseField};
use crate::types::{RawBatch, RawValues};

/// Appends one line with the right number of fields. On an error the batch is unchanged.
pub(super) fn append(
    row: &Row<'_>,
    columns: &Columns,
    out: &mut RawBatch,
    labels: &mut Vec<f32>,
) -> Result<(), String> {
    let label = match columns.label.map(|i| row.field(i)) {
        None => None,
        Some(b"0") => Some(0.0),
        Some(b"1") => Some(1.0),
        Some(other) => return Err(format!("expected label 0 or 1, got {}", shown(other))),
    };
    for field in &columns.features {
        let Some(list) = field.list else { continue };
        let ids = list.count(row.field(field.index));
        if ids > list.max as usize {
            return Err(format!("field {}: expected at most {} ids, got {ids}", field.index + 1, list.max));
        }
    }
    let before = out.dense.len();
    for &DenseField { index, trained } in &columns.dense {
        let text = row.field(index);
        let refused =
            |expected: &str| format!("field {}: expected {expected}, got {}", index + 1, shown(text));
        let value = match number(text) {
            None if is_number(text) => Err(refused("a finite number up to 3.4e38")),
            None => Err(refused("a number")),
            Some(value) => match trained.filter(|range| !range.has(value)) {
                None => Ok(value),
                Some(range) => {
                    Err(refused(&format!("a number up to {:.1e} after the transform", range.limit)))
                }
            },
        };
        let value = value.inspect_err(|_| out.dense.truncate(before))?;
        out.dense.push(value);
    }
    for (column, field) in out.features.iter_mut().zip(&columns.features) {
        let RawValues::Text { bytes, ends } = &mut column.values else { continue };
        let mut push = |id: &[u8]| {
            bytes.extend_from_slice(id);
            ends.push(bytes.len() as u32);
        };
        match (row.field(field.index), field.list) {
            (id, None) => push(id),
            ([], Some(_)) => {}
            (ids, Some(list)) => ids.split(|&byte| byte == list.separator).for_each(push),
        }
        column.offsets.push(ends.len() as u32);
    }
    labels.extend(label);
    out.samples += 1;
    Ok(())
}
