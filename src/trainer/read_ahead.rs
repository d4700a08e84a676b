//! Reading ahead: one thread reads and encodes the batches of some data while another trains on them or
//! scores them.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use super::TrainError;
use super::pipeline::clocks::{Clocks, StageName};
use super::pipeline::item::{BufferPool, PreparedBatch};
use super::pipeline::jitter::Jitter;
use super::pipeline::{Data, start};
use crate::schema::{Lookup, Schema};
use crate::types::RawBatch;

/// Groups of batches that may wait between reading and training.
pub(crate) const WAITING_GROUPS: usize = 4;

/// Some batches that were read, or the error that ended the reading.
pub(crate) type BatchGroup = Result<Vec<PreparedBatch>, TrainError>;

/// Reads and encodes the batches of some data, in order. By default batches need labels, are not cast, and
/// are handed over one at a time.
pub(crate) struct ReadAhead<'d, 's> {
    schema: &'s Schema,
    data: Data<'d>,
    needs_labels: bool,
    lookups: Option<&'s [Lookup]>,
    group: usize,
    jitter: Jitter,
    raw: RawBatch,
    /// Samples read so far.
    samples: u64,
}

impl<'d, 's> ReadAhead<'d, 's> {
    pub(crate) fn new(schema: &'s Schema, data: Data<'d>) -> Self {
        let (jitter, raw) = (Jitter::new(None, 0), RawBatch::default());
        Self { schema, data, needs_labels: true, lookups: None, group: 1, jitter, raw, samples: 0 }
    }

    /// Batches without labels are read too; their list of labels is empty.
    pub(crate) fn unlabelled_too(self) -> Self {
        Self { needs_labels: false, ..self }
    }

    /// Batches are also cast for these lookups.
    pub(crate) fn casting(self, lookups: &'s [Lookup]) -> Self {
        Self { lookups: Some(lookups), ..self }
    }

    /// Batches are handed over in groups of `group`: to wake a thread for each small batch costs more than
    /// reading ahead gains.
    pub(crate) fn in_groups(self, group: usize) -> Self {
        Self { group, ..self }
    }

    /// The reader sleeps at random.
    pub(crate) fn with_jitter(self, jitter: Jitter) -> Self {
        Self { jitter, ..self }
    }

    /// Calls `each` with every batch in order, while a thread reads the next ones. Up to `waiting` groups
    /// wait.
    ///
    /// # Errors
    /// [`TrainError`] of the data, once the batches before it were used; or the error of `each`.
    pub(crate) fn for_each(
        self,
        waiting: usize,
        mut each: impl FnMut(&PreparedBatch) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let (pool, clocks) = (&BufferPool::default(), &Clocks::default());
        thread::scope(|scope| {
            let (loaded, groups) = sync_channel(waiting);
            start(scope, "load", move || self.run(&loaded, pool, clocks))?;
            for group in groups {
                for batch in group? {
                    each(&batch)?;
                    pool.give(batch);
                }
            }
            Ok(())
        })
    }

    /// Reads all batches into buffers of the pool and sends them. It ends early when the receiver is gone:
    /// training has failed then.
    pub(crate) fn run(
        mut self,
        loaded: &SyncSender<BatchGroup>,
        pool: &BufferPool<PreparedBatch>,
        clocks: &Clocks,
    ) {
        loop {
            let mut batches = Vec::with_capacity(self.group);
            let more = clocks.time(StageName::Load, || self.fill(&mut batches, pool));
            let sent = batches.is_empty() || loaded.send(Ok(batches)).is_ok();
            match more {
                Ok(true) if sent => {}
                Ok(_) => return,
                Err(error) => return drop(loaded.send(Err(error))),
            }
        }
    }

    /// Reads a group. Returns whether there may be more batches.
    fn fill(
        &mut self,
        batches: &mut Vec<PreparedBatch>,
        pool: &BufferPool<PreparedBatch>,
    ) -> Result<bool, TrainError> {
        while batches.len() < self.group {
            let mut batch = pool.take();
            if !self.next(&mut batch)? {
                return Ok(false);
            }
            batches.push(batch);
        }
        Ok(true)
    }

    /// Reads the next batch over this one. Returns whether there was one.
    fn next(&mut self, prepared: &mut PreparedBatch) -> Result<bool, TrainError> {
        if self.data.steps == 0 {
            return Ok(false);
        }
        self.jitter.sleep();
        self.data.steps -= 1;
        let read = self.data.reader.read(self.data.batch, &mut self.raw)?;
        if read == 0 {
            return Ok(false);
        }
        self.schema.encode(&self.raw, &mut prepared.batch)?;
        match &self.raw.labels {
            Some(labels) => prepared.labels.clone_from(labels),
            None if self.needs_labels => return Err(TrainError::NoLabels { sample: self.samples }),
            None => prepared.labels.clear(),
        }
        self.samples += read as u64;
        self.lookups.map_or(Ok(()), |lookups| prepared.prepare(self.schema, lookups))?;
        Ok(true)
    }
}
