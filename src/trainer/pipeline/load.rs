//! Load: reads and encodes batches, beside those that train.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use super::super::TrainError;
use super::Data;
use super::clocks::{Clocks, StageName};
use super::item::{PreparedBatch, Spare};
use super::jitter::Jitter;
use crate::schema::Schema;
use crate::types::RawBatch;

/// The batches of some data, in order.
pub(crate) struct Load<'a> {
    schema: Arc<Schema>,
    data: Data<'a>,
    jitter: Jitter,
    raw: RawBatch,
    /// Samples that were read.
    samples: u64,
}

impl<'a> Load<'a> {
    /// From the first batch on.
    pub(crate) fn new(schema: Arc<Schema>, data: Data<'a>, jitter: Jitter) -> Self {
        Self { schema, data, jitter, raw: RawBatch::default(), samples: 0 }
    }

    /// Reads the next batch over this one, and says whether there was one.
    ///
    /// # Errors
    /// [`TrainError`] for data that cannot be read, encoded or trained on.
    pub(crate) fn next(&mut self, cast: &mut PreparedBatch) -> Result<bool, TrainError> {
        let Self { schema, data, jitter, raw, samples } = self;
        if data.steps == 0 {
            return Ok(false);
        }
        jitter.sleep();
        data.steps -= 1;
        let read = data.reader.read(data.batch, raw)?;
        if read == 0 {
            return Ok(false);
        }
        schema.encode(raw, &mut cast.batch)?;
        let labels = raw.labels.as_ref().ok_or(TrainError::NoLabels { sample: *samples })?;
        cast.labels.clone_from(labels);
        *samples += read as u64;
        Ok(true)
    }

    /// Reads all of them, over `spare` ones.
    pub(crate) fn run(
        mut self,
        loaded: &SyncSender<Result<PreparedBatch, TrainError>>,
        spare: &Spare<PreparedBatch>,
        clocks: &Clocks,
    ) {
        loop {
            let mut cast = spare.take();
            let next = match clocks.time(StageName::Load, || self.next(&mut cast)) {
                Ok(true) => Ok(cast),
                Ok(false) => return,
                Err(error) => Err(error),
            };
            let last = next.is_err();
            // Nobody waits when training failed first.
            if loaded.send(next).is_err() || last {
                return;
            }
        }
    }
}
