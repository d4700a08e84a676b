//! Reading ahead: one thread reads and encodes batches while another thread trains on earlier batches or
//! scores them.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use super::TrainError;
use super::pipeline::clocks::{Clocks, StageName};
use super::pipeline::item::{BufferPool, PreparedBatch};
use super::pipeline::jitter::Jitter;
use super::pipeline::{Data, start};
use crate::dataset::Stop;
use crate::schema::{Lookup, Schema};
use crate::types::RawBatch;

/// Groups of batches that may be queued between reading and training.
pub(crate) const WAITING_GROUPS: usize = 4;

/// Batches that were read, or the error that ended the reading.
pub(crate) type BatchGroup = Result<Vec<PreparedBatch>, TrainError>;

/// Reads and encodes the batches of some data, in order. By default batches must have labels, get no casted
/// index, and are handed over one at a time.
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

/// Ends the reader when this is dropped, because training has failed or panicked. The thread that reads may
/// wait for a file or a sample that comes late or never, and the error would not be seen until then.
pub(crate) struct EndReader(Option<Stop>);

impl EndReader {
    pub(crate) fn of(read_ahead: &ReadAhead<'_, '_>) -> Self {
        Self(read_ahead.data.reader.stop())
    }

    /// Nothing was wrong.
    pub(crate) fn has_ended(mut self) {
        self.0 = None;
    }

    pub(crate) fn end(&self) {
        self.0.iter().for_each(Stop::fail);
    }
}

impl Drop for EndReader {
    fn drop(&mut self) {
        self.end();
    }
}

impl<'d, 's> ReadAhead<'d, 's> {
    pub(crate) fn new(schema: &'s Schema, data: Data<'d>) -> Self {
        let (jitter, raw) = (Jitter::new(None, 0), RawBatch::default());
        Self { schema, data, needs_labels: true, lookups: None, group: 1, jitter, raw, samples: 0 }
    }

    /// Also accepts batches without labels. Their list of labels is empty.
    pub(crate) fn unlabelled_too(self) -> Self {
        Self { needs_labels: false, ..self }
    }

    /// Also builds the casted index of each batch, for these lookups.
    pub(crate) fn casting(self, lookups: &'s [Lookup]) -> Self {
        Self { lookups: Some(lookups), ..self }
    }

    /// Hands over batches in groups of `group`, because waking a thread for each small batch costs more than
    /// reading ahead gains.
    pub(crate) fn in_groups(self, group: usize) -> Self {
        Self { group, ..self }
    }

    /// Sleeps at random before a batch is read.
    pub(crate) fn with_jitter(self, jitter: Jitter) -> Self {
        Self { jitter, ..self }
    }

    /// Calls `each` with every batch in order, while another thread reads the next batches. Up to `waiting`
    /// groups are queued.
    ///
    /// # Errors
    /// The [`TrainError`] of reading, after `each` was called with all earlier batches; or the error of
    /// `each`.
    pub(crate) fn for_each(
        self,
        waiting: usize,
        mut each: impl FnMut(&PreparedBatch) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let (pool, clocks) = (&BufferPool::default(), &Clocks::default());
        thread::scope(|scope| {
            let reader = EndReader::of(&self);
            let (loaded, groups) = sync_channel(waiting);
            start(scope, "load", move || self.run(&loaded, pool, clocks))?;
            for group in groups {
                for batch in group? {
                    each(&batch)?;
                    pool.give(batch);
                }
            }
            reader.has_ended();
            Ok(())
        })
    }

    /// Reads all batches into buffers of the pool and sends them. Ends early when the receiver is dropped,
    /// because training has failed.
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
        // No whole batch waits for samples that may come late.
        let group = if self.data.reader.may_wait() { 1 } else { self.group };
        while batches.len() < group {
            let mut batch = pool.take();
            if !self.next(&mut batch)? {
                return Ok(false);
            }
            batches.push(batch);
        }
        Ok(true)
    }

    /// Reads the next batch into `prepared`. Returns whether there was one.
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
        prepared.position.runs.clear();
        prepared.position.runs.extend_from_slice(self.data.reader.runs());
        prepared.position.share = self.data.reader.share();
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
