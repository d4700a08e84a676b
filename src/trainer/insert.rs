//! Insert: writes the rows that come in to the scratchpad, and those that leave to the store.

use rayon::prelude::*;

use super::TrainError;
use super::collect::Places;
use super::plan::Item;

impl Places<'_> {
    /// Writes what Collect has read.
    ///
    /// # Errors
    /// [`TrainError::Store`], and [`TrainError::Hazard`] where a slot is another stage's at the time.
    pub fn insert(&self, item: &mut Item) -> Result<(), TrainError> {
        self.each_run(&mut item.fills, |slots, list, records| {
            slots.claim(list)?.write(records);
            Ok(())
        })?;
        let jobs = self.pieces(&mut item.evictions);
        self.threads.install(|| {
            jobs.into_par_iter().try_for_each(|(table, rows, records)| self.store.write(table, rows, records))
        })?;
        Ok(())
    }
}
