//! Scoring with the trained rows, for validation between epochs.

use super::Pipeline;
use crate::trainer::TrainError;
use crate::trainer::casting::Casting;
use crate::trainer::train_state::TrainState;
use crate::types::{Batch, TableId};

impl Pipeline {
    /// Writes the logit of every sample to `logits`. Rows are those of the working file, so they are current
    /// after [`Self::flush`].
    ///
    /// # Errors
    /// [`TrainError::Batch`] for a batch that does not fit the schema, and [`TrainError::Store`].
    pub(crate) fn logits(
        &self,
        state: &mut TrainState,
        batch: &Batch,
        logits: &mut Vec<f32>,
    ) -> Result<(), TrainError> {
        let (schema, lookups) = (state.schema.clone(), state.lookups.clone());
        crate::model::check_shape(&schema, batch)?;
        let mut casting = Casting::default();
        casting.fill(&schema, &lookups, batch)?;
        let mut records = Vec::new();
        for (t, casted) in (0..).zip(casting.tables()) {
            let words = self.sizes.tables[t as usize].words;
            let mut of_table = vec![0.0; casted.rows().len() * words];
            self.store.read(TableId(t), casted.rows(), &mut of_table)?;
            records.push(of_table);
        }
        state.forward(batch, &lookups, |l| {
            let lookup = &lookups[l];
            let (table, dim) = (lookup.table.index(), lookup.dim);
            let (places, records) = (casting.places(l, lookup), &records[table]);
            let words = self.sizes.tables[table].words;
            // The place of an absent id is past the end of the records, so it gives no row.
            move |occurrence| {
                let record = records.get(places[occurrence] as usize * words..)?;
                Some(bytemuck::cast_slice(record.get(..dim)?))
            }
        })?;
        state.read_logits(logits);
        Ok(())
    }
}
