//! Reads the log of learned samples while a server appends to it.
//!
//! The samples are those of the requests, in the order of the log. Only durable samples are read, so a cursor
//! never counts a sample that a crash can lose. A request may have ids and the next one strings for the same
//! feature, so strings are hashed here, as `Schema::encode` would.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use super::{DatasetError, FileAt, FileRun, Reader, Stop};
use crate::learnlog::{Checksum, Durable, LogError, Segment, name_of, number_of, schema_sum, segments};
use crate::schema::Schema;
use crate::types::{RawBatch, RawFeature};

/// How often the log is looked at while no sample is there.
const POLL: Duration = Duration::from_millis(50);

/// A log to train on.
#[derive(Clone, Debug)]
pub(crate) struct Learned {
    /// The directory of the log.
    pub dir: PathBuf,
    /// Whether the reader ends at the end of the log. Otherwise it waits there for more samples.
    pub until_end: bool,
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
    name: Arc<str>,
    /// Samples that were handed out.
    samples: u64,
}

impl LearnedReader {
    /// Reads from a place, or from the first segment. Nothing is opened before the first read.
    ///
    /// # Errors
    /// When the place is not in a segment.
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
            if last {
                return Ok(None);
            }
            self.next = Some(segment.number + 1);
            self.open = None;
        }
    }

    /// Opens the next durable segment. Returns whether there is one.
    fn open_next(&mut self, durable: Durable) -> Result<bool, DatasetError> {
        let dir = &self.learned.dir;
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
        self.open = Some(Open { segment, name: name_of(number).into(), samples: 0 });
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

    /// Counts a sample that is handed out, or skipped.
    fn count(&mut self, samples: usize) {
        self.taken += samples;
        let Some(Open { name, samples: of_file, .. }) = &mut self.open else { return };
        *of_file += samples as u64;
        FileRun::count(&mut self.runs, name, samples, *of_file);
    }

    fn left(&self) -> usize {
        self.request.samples - self.taken
    }

    /// Gives the batch the columns of the schema, without samples.
    fn begin(&mut self, out: &mut RawBatch) {
        self.runs.clear();
        out.clear();
        out.features.clear();
        out.features.resize_with(self.schema.features.len(), RawFeature::ids);
        out.labels = Some(Vec::new());
    }
}

impl Reader for LearnedReader {
    fn read(&mut self, max_samples: usize, out: &mut RawBatch) -> Result<usize, DatasetError> {
        match self.begun.take() {
            None => self.begin(out),
            Some(begun) => *out = begun,
        }
        while out.samples < max_samples && !out.is_full() {
            if self.left() > 0 {
                out.push_sample(&self.request, self.taken);
                self.count(1);
            } else if !self.next_request()? {
                if self.learned.until_end {
                    break;
                }
                if self.stop.requested() {
                    self.begun = Some(std::mem::take(out));
                    return Ok(0);
                }
                sleep(POLL);
            }
        }
        Ok(out.samples)
    }

    /// Skips without waiting: the samples before a cursor are durable. They are all in one segment.
    fn skip(&mut self, samples: u64) -> Result<u64, DatasetError> {
        let mut left = samples;
        while left > 0 && (self.left() > 0 || self.next_request()?) {
            let now = left.min(self.left() as u64);
            self.count(now as usize);
            left -= now;
        }
        Ok(samples - left)
    }

    fn skipped(&self) -> u64 {
        0
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
        Self { dir: dir.to_owned(), until_end }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
