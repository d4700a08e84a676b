//! Reads the log of learned samples while a server appends to it.
//!
//! The samples are those of the requests, in the order of the log. Only durable samples are read, so a cursor
//! never counts a sample that a crash can lose. A request may have ids and the next one strings for the same
//! feature, so strings are hashed here, as `Schema::encode` would.

use std::iter::repeat_n;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{DataFile, DatasetError, FileAt, FileRun, Reader, Stop};
use crate::learnlog::{
    Checksum, Durable, LogError, Segment, full_at, id_of, name_of, number_of, schema_sum, segments,
};
use crate::pace::give_way;
use crate::schema::Schema;
use crate::types::{RawBatch, RawKind};

/// How often the log is looked at while no sample is there.
const POLL: Duration = Duration::from_millis(50);

/// A log that is removed loses its files one after the other. So a reader that waits for samples takes a file
/// for lost only after this time.
const LOST_AFTER: Duration = Duration::from_secs(10);

/// A log to train on.
#[derive(Clone, Debug)]
pub(crate) struct Learned {
    /// The directory of the log.
    pub dir: PathBuf,
    /// Whether the reader ends at the end of the log. Otherwise it waits there for more samples.
    pub until_end: bool,
    /// What the reader waits for.
    pub shortage: Shortage,
    /// A reader that waits takes a file for lost after this time.
    pub lost_after: Duration,
}

/// Whether a reader waits for samples that will not come, because the log is full and has no room before a
/// version was trained on what it has. Clones are of the same reader.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shortage {
    /// The limit of the log in bytes; 0 if the reader does not wait for room.
    limit: Arc<AtomicU64>,
}

impl Shortage {
    /// The limit of the log that is full.
    #[must_use]
    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|&limit| limit > 0)
    }

    pub(crate) fn set(&self, limit: Option<u64>) {
        self.limit.store(limit.unwrap_or(0), Ordering::Relaxed);
    }
}

/// Reads a log.
pub(crate) struct LearnedReader {
    learned: Learned,
    schema: Schema,
    checksum: Checksum,
    stop: Stop,
    /// How far the log was durable when this was last looked at.
    durable: Option<Durable>,
    open: Option<Open>,
    /// The segment to read next; `None`: the first.
    next: Option<u64>,
    /// Since when that segment, or the id of the log, is missing.
    missing: Option<Instant>,
    /// The id of the log whose segment was opened last.
    log: Option<String>,
    /// The samples of a request, and how many of them were handed out.
    request: RawBatch,
    taken: usize,
    runs: Vec<FileRun>,
    /// The beginning of a batch that was not handed out, because the reader was stopped.
    begun: Option<RawBatch>,
}

/// The segment that is read.
struct Open {
    segment: Segment,
    file: Arc<DataFile>,
    /// Samples that were handed out.
    samples: u64,
}

impl LearnedReader {
    /// Reads from a position, or from the first segment. Nothing is opened before the first read.
    ///
    /// # Errors
    /// When the position is not in a segment.
    pub(crate) fn open(
        learned: Learned,
        from: Option<&FileAt>,
        schema: &Schema,
        stop: Stop,
    ) -> Result<Self, DatasetError> {
        let number = |file: &FileAt| {
            let wrong = || LogError::Name { path: learned.dir.join(&file.name) };
            number_of(&file.name).ok_or_else(wrong)
        };
        Ok(Self {
            next: from.map(number).transpose()?,
            learned,
            checksum: schema_sum(schema),
            schema: schema.clone(),
            stop,
            missing: None,
            log: None,
            durable: None,
            open: None,
            request: RawBatch::default(),
            taken: 0,
            runs: Vec::new(),
            begun: None,
        })
    }

    /// Reads the next request. Returns whether there is one now.
    fn next_request(&mut self) -> Result<bool, DatasetError> {
        (self.request.samples, self.taken) = (0, 0);
        loop {
            if let Some(read) = self.read_request()? {
                return Ok(read);
            }
            let seen = self.durable;
            self.durable = Durable::read(&self.learned.dir)?;
            // Looked at after `durable`, which may be that of another log.
            if let Some(Open { segment, .. }) = &self.open
                && !segment.is_at_path()?
            {
                let path = segment.path.display();
                tracing::warn!("{path}: was removed: training goes on with the first sample of the new log");
                self.begin_again();
                continue;
            }
            if self.durable.is_none() || self.durable == seen {
                return Ok(false);
            }
        }
    }

    /// [`Self::next_request`] as far as is known to be durable; `None` at the end of that.
    fn read_request(&mut self) -> Result<Option<bool>, DatasetError> {
        let Some(durable) = self.durable else { return Ok(None) };
        loop {
            if self.open.is_none() && !self.open_next(durable)? {
                return Ok(None);
            }
            let Some(Open { segment, .. }) = &mut self.open else { return Ok(None) };
            let last = segment.number >= durable.segment;
            let end = if last { durable.bytes.max(segment.at) } else { segment.bytes()? };
            if let Some(mut samples) = segment.next(end)? {
                self.hash(&mut samples)?;
                self.request = samples;
                return Ok(Some(true));
            }
            // If the log was removed, so was the next segment.
            if last || !segment.is_at_path()? {
                return Ok(None);
            }
            self.next = Some(segment.number + 1);
            self.open = None;
        }
    }

    /// Begins with the first segment, because the log that was read is no more.
    fn begin_again(&mut self) {
        (self.open, self.next, self.durable) = (None, None, None);
    }

    /// Whether a file of the log that is missing may be there later: the log may be removed just now, and
    /// begin again.
    fn may_come(&mut self) -> bool {
        let since = *self.missing.get_or_insert_with(Instant::now);
        !self.learned.until_end && since.elapsed() < self.learned.lost_after
    }

    /// Opens the next durable segment. Returns whether there is one.
    fn open_next(&mut self, durable: Durable) -> Result<bool, DatasetError> {
        let dir = &self.learned.dir.clone();
        let log = id_of(dir)?;
        if self.log.is_some() && self.log != log {
            if log.is_none() && self.may_come() {
                return Ok(false);
            }
            if log.is_some() {
                // Another log has begun, since the end of the last segment was read.
                self.begin_again();
                self.log = log;
                return Ok(false);
            }
        }
        let numbers = segments(dir)?;
        let first = || numbers.first().copied();
        let Some(number) = self.next.or_else(first).filter(|number| *number <= durable.segment) else {
            return Ok(false);
        };
        if !numbers.contains(&number) {
            // The last segment does not exist yet if its creation was cut short.
            if number == durable.segment && durable.bytes == 0 {
                return Ok(false);
            }
            if self.may_come() {
                return Ok(false);
            }
            return Err(LogError::Missing { path: dir.join(name_of(number)) }.into());
        }
        if number == durable.segment && durable.bytes == 0 {
            return Ok(false);
        }
        let segment = Segment::open(dir, number)?;
        if segment.schema != self.checksum {
            let (path, expected, got) = (segment.path, self.checksum, segment.schema);
            return Err(LogError::Schema { path, expected, got }.into());
        }
        // Looked at after `log` and `durable`, which may be those of another log.
        if !segment.is_at_path()? {
            self.begin_again();
            return Ok(false);
        }
        (self.missing, self.log) = (None, log.clone());
        let file = DataFile { name: name_of(number), log }.into();
        self.open = Some(Open { segment, file, samples: 0 });
        Ok(true)
    }

    /// Replaces strings by their ids.
    fn hash(&self, samples: &mut RawBatch) -> Result<(), DatasetError> {
        for (feature, column) in self.schema.features.iter().zip(&mut samples.features) {
            let reason = |error| DatasetError::LearnedValues { dir: self.learned.dir.clone(), error };
            column.values = feature.ids_of(&column.values).map_err(reason)?;
        }
        Ok(())
    }

    /// Counts samples that are handed out, or skipped.
    fn count(&mut self, samples: usize) {
        self.count_as(samples, samples);
    }

    /// Counts samples; `in_batch` of them are in the batch.
    fn count_as(&mut self, samples: usize, in_batch: usize) {
        self.taken += samples;
        let Some(Open { file, samples: of_file, .. }) = &mut self.open else { return };
        *of_file += samples as u64;
        FileRun::count(&mut self.runs, file, in_batch, *of_file);
    }

    /// Adds the next sample of the request to the batch. A sample that would end the training for good is
    /// left out, because the server has acknowledged it and the log cannot be changed. Servers refuse such
    /// samples, but a log may have them from an earlier program. The rule depends on the sample alone, so a
    /// run that continues leaves out the same samples.
    fn take_sample(&mut self, out: &mut RawBatch) {
        let width = self.schema.dense_width();
        let dense = self.request.dense.get(self.taken * width..(self.taken + 1) * width).unwrap_or_default();
        let Err(reason) = self.schema.check_trainable(self.taken, dense) else {
            out.push_sample(&self.request, self.taken);
            return self.count(1);
        };
        self.count_as(1, 0);
        if let Some(Open { segment, samples, .. }) = &self.open {
            tracing::warn!(
                "{}: sample {samples} is not trained on: its request: {reason}",
                segment.path.display()
            );
        }
    }

    fn left(&self) -> usize {
        self.request.samples - self.taken
    }

    /// Gives the batch the columns of the schema, without samples.
    fn begin(&mut self, out: &mut RawBatch) {
        self.runs.clear();
        out.begin(repeat_n(RawKind::Ids, self.schema.features.len()), true);
    }
}

impl Reader for LearnedReader {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        match self.begun.take() {
            None => self.begin(out),
            Some(begun) => *out = begun,
        }
        let mut waiting = None;
        while out.samples < max_samples && !out.is_full() {
            give_way();
            if self.left() > 0 {
                self.take_sample(out);
            } else if self.next_request()? {
                waiting = None;
                self.learned.shortage.set(None);
            } else if self.learned.until_end {
                break;
            } else if self.stop.requested() {
                self.begun = Some(std::mem::take(out));
                return Ok(0);
            } else {
                let full = full_at(&self.learned.dir)?;
                self.learned.shortage.set(full);
                // The rest of the batch may not come before a version has what there is.
                if full.is_some() && out.samples > 0 {
                    break;
                }
                waiting.get_or_insert_with(|| self.stop.begin_wait());
                sleep(POLL);
            }
        }
        Ok(out.samples)
    }

    /// Skips without waiting: the samples before a cursor are durable. They are all in one segment. An
    /// interrupt ends it.
    fn skip(&mut self, samples: u64) -> Result<u64, DatasetError> {
        let mut left = samples;
        while left > 0 && !self.stop.interrupted() && (self.left() > 0 || self.next_request()?) {
            let now = left.min(self.left() as u64);
            self.count(now as usize);
            left -= now;
        }
        Ok(samples - left)
    }

    fn runs(&self) -> &[FileRun] {
        &self.runs
    }

    fn may_wait(&self) -> bool {
        !self.learned.until_end
    }
}

impl Learned {
    /// The log in this directory.
    #[must_use]
    pub(crate) fn new(dir: &Path, until_end: bool) -> Self {
        Self { dir: dir.to_owned(), until_end, shortage: Shortage::default(), lost_after: LOST_AFTER }
    }

    /// The id of the log; `None` for that of an earlier program.
    ///
    /// # Errors
    /// When it cannot be read.
    fn id(&self) -> Result<Option<String>, DatasetError> {
        Ok(id_of(&self.dir)?)
    }

    /// Why this position, in the log with this id, is not in this log. `None` if it is, or if that is not
    /// known.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub(crate) fn lacks(&self, position: &FileAt, log: Option<&str>) -> Result<Option<String>, DatasetError> {
        let FileAt { name, samples: expected, .. } = position;
        let path = self.dir.join(name);
        if log.is_some() && self.id()?.as_deref() != log {
            return Ok(Some(format!("{}: the version was trained on another log", self.dir.display())));
        }
        let Some((number, durable)) = number_of(name).zip(Durable::read(&self.dir)?) else { return Ok(None) };
        let got = if path.exists() { samples_of(&self.dir, number, durable, *expected)? } else { 0 };
        if got >= *expected {
            return Ok(None);
        }
        let path = path.display();
        // The segments of a version are removed when a later one is published. That one is gone.
        Ok(Some(match number < durable.segment && got == 0 {
            true => format!("{path}: is missing, but a later segment exists"),
            false => format!("{path}: has {got} samples, but the version was trained on {expected}"),
        }))
    }
}

/// Counts the durable samples of a segment. May stop when there are `enough`.
fn samples_of(dir: &Path, number: u64, durable: Durable, enough: u64) -> Result<u64, LogError> {
    if number > durable.segment || number == durable.segment && durable.bytes == 0 {
        return Ok(0);
    }
    let mut segment = Segment::open(dir, number)?;
    let end = if number == durable.segment { durable.bytes } else { segment.bytes()? };
    let mut samples = 0;
    while samples < enough
        && let Some(head) = segment.next_record(end)?
    {
        samples += u64::from(head.samples);
    }
    Ok(samples)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
