//! The rows that deltas changed, in front of the base rows of a table.

use std::sync::Arc;

use super::{State, Table};
use crate::mem::OutOfHostMemory;
use crate::store::bytes::Bytes;
use crate::store::overlay::{DeltaRows, Overlay};
use crate::store::{PlainMemory, RowSource, StoreError};
use crate::types::{Element, TableId, Version};

impl Table {
    /// Puts the rows of more deltas in front, oldest first. They have the table's element type and states.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the overlay cannot be allocated.
    pub(crate) fn add_deltas(
        &mut self,
        newer: impl Iterator<Item = DeltaRows>,
    ) -> Result<(), OutOfHostMemory> {
        let newer: Vec<_> = newer.map(Arc::new).collect();
        let overlay = match (&self.overlay, &newer[..]) {
            (_, []) => return Ok(()),
            (Some(overlay), [one]) => overlay.with(one.clone())?,
            _ => Overlay::new(self.deltas().iter().cloned().chain(newer).collect())?,
        };
        self.overlay = Some(Arc::new(overlay));
        Ok(())
    }

    /// The table as it was in an earlier version of its chain. It shares the rows.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the overlay cannot be allocated.
    pub(in crate::store) fn up_to(&self, version: Version) -> Result<Self, OutOfHostMemory> {
        let older = self.deltas().iter().filter(|delta| delta.version <= version);
        let older: Vec<_> = older.cloned().collect();
        let overlay = match older.len() {
            0 => None,
            all if all == self.deltas().len() => self.overlay.clone(),
            _ => Some(Arc::new(Overlay::new(older)?)),
        };
        Ok(Self { overlay, ..self.clone() })
    }

    /// Puts changed rows in front that are not in a file: those of a source's table, in the order of `rows`.
    /// `version` is the version that they will be written in.
    ///
    /// # Errors
    /// Those of the source, and [`OutOfHostMemory`] when the rows cannot be copied.
    pub(crate) fn add_changed(
        &mut self,
        version: Version,
        rows: &[u64],
        source: &dyn RowSource,
        table: TableId,
    ) -> Result<(), StoreError> {
        let floats = |width: usize| Bytes::zeroed(&PlainMemory, rows.len() * width * size_of::<f32>());
        let mut keys = Bytes::zeroed(&PlainMemory, size_of_val(rows))?;
        keys.as_mut_slice().unwrap_or_default().copy_from_slice(bytemuck::cast_slice(rows));
        let states = self.states.iter();
        let states = states.map(|s| Ok(State::new(s.name.clone(), s.width, floats(s.width)?)));
        let mut delta = DeltaRows {
            version,
            keys,
            weight: floats(self.dim)?,
            states: states.collect::<Result<_, OutOfHostMemory>>()?,
        };
        let record = self.record_layout().width();
        source.for_each_chunk(table, &mut |first, records| {
            let columns = [(&mut delta.weight, self.dim)].into_iter();
            let columns = columns.chain(delta.states.iter_mut().map(|s| (&mut s.data, s.width)));
            let mut begin = 0;
            for (bytes, width) in columns {
                let to =
                    bytes.floats_mut().unwrap_or_default()[first as usize * width..].chunks_exact_mut(width);
                for (to, record) in to.zip(records.chunks_exact(record)) {
                    to.copy_from_slice(&record[begin..begin + width]);
                }
                begin += width;
            }
            Ok(())
        })?;
        Ok(self.add_deltas([delta].into_iter())?)
    }

    /// The changed rows of each delta in front of the base, oldest first.
    pub(crate) fn deltas(&self) -> &[Arc<DeltaRows>] {
        self.overlay.as_deref().map_or(&[], Overlay::deltas)
    }

    /// The elements of the rows that no delta is in front of, or of the deltas in front of them; and their
    /// states. Rows that are not f32 are left out.
    pub(crate) fn newest_floats(&self) -> impl Iterator<Item = &[f32]> {
        let base = self.overlay.is_none().then_some((&*self.weight, &**self.states));
        let deltas = self.deltas().iter().map(|delta| (&delta.weight, &*delta.states));
        let is_f32 = self.element == Element::F32;
        base.into_iter().chain(deltas).flat_map(move |(weight, states)| {
            let weight = is_f32.then(|| weight.floats());
            weight.into_iter().chain(states.iter().map(State::as_slice))
        })
    }
}
