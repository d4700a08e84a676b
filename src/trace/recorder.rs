//! Records a server's batches: samples the accesses and writes them on a thread of its own.
//!
//! **A request never waits.** Sampled accesses enter a queue that is bounded in bytes. If the queue is full,
//! new accesses are dropped and counted. The writing thread collects queued accesses into a block, and writes
//! the block when it is full or a second old.
//!
//! **Files** have ascending numbers. After each start, the first block goes to a new file. When the files
//! together reach the limit, the oldest are removed. A file is written under a temporary name until
//! its header is whole.
//!
//! **If a write fails**, accesses are dropped and counted, but no request fails. The partial block is cut
//! off, so that later blocks can follow. The next attempt waits 1 s, and twice as long after each further
//! failure, at most 1 min. So a full disk does not fill with useless files.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::Sampler;
use super::format::{self, BLOCK_HEAD_BYTES, Header};
use crate::bounded_thread::BoundedThread;
use crate::metrics::ModelMetrics;
use crate::schema::{Lookup, Schema, TableSchema};
use crate::types::{Batch, TableId};

/// A block is written when it has this many bytes.
const BLOCK_BYTES: usize = 64 << 10;
/// Bytes that may wait in the queue.
const WAITING_BYTES: usize = 4 << 20;
/// Memory of one [`EncodedAccesses`] in the queue, without its payload.
const PART_BYTES: usize = 64;
/// How long accesses wait for a block to fill.
const MAX_BLOCK_AGE: Duration = Duration::from_secs(1);
/// The wait after a first failed write, and the longest wait.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// How long the end of a model waits for the disk.
const END_WAIT: Duration = Duration::from_secs(10);
/// A file takes at most `1 / FILES` of the limit for all files.
const FILES: u64 = 4;
/// A file's name before and after its number.
const PREFIX: &str = "trace-";
const SUFFIX: &str = ".fltrace";
/// Suffix of the name of a file until its header is written.
const UNFINISHED: &str = ".tmp";

/// What to record and where.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecorderOptions {
    /// The folder of the files; created if missing.
    pub folder: PathBuf,
    /// The share of all rows whose accesses are recorded, above 0, at most 1.
    pub rate: f64,
    /// Limit of all files together.
    pub max_bytes: u64,
}

/// Records batches. Dropping it writes what is queued and ends the thread.
pub(crate) struct Recorder {
    sampler: Sampler,
    lookups: Vec<Lookup>,
    tables: Vec<TableSchema>,
    waiting: Arc<AtomicUsize>,
    metrics: Arc<ModelMetrics>,
    sender: Option<Sender<EncodedAccesses>>,
    thread: BoundedThread,
}

/// Accesses of one batch, encoded.
struct EncodedAccesses {
    payload: Vec<u8>,
    accesses: u32,
}

impl EncodedAccesses {
    fn cost(&self) -> usize {
        self.payload.len() + PART_BYTES
    }
}

impl Recorder {
    /// Starts the writing thread, which creates the folder. If it cannot, it drops and counts accesses.
    ///
    /// # Errors
    /// When the thread cannot be created.
    pub(crate) fn start(
        schema: &Schema,
        options: &RecorderOptions,
        metrics: Arc<ModelMetrics>,
    ) -> io::Result<Self> {
        let files = RecordingFiles::new(options, Header::of(schema, options.rate).bytes());
        let waiting = Arc::new(AtomicUsize::new(0));
        let (sender, receiver) = mpsc::channel();
        let mut writer = Writer::new(files, metrics.clone());
        let waits = waiting.clone();
        let thread = BoundedThread::start("trace-write", move || writer.run(&receiver, &waits))?;
        Ok(Self {
            sampler: Sampler::new(options.rate),
            lookups: schema.lookups(),
            tables: schema.tables.clone(),
            waiting,
            metrics,
            sender: Some(sender),
            thread,
        })
    }

    /// Records the sampled accesses of a batch of the schema's shape, in the order in which `plan` reads them
    /// from a data file: sample by sample, each with its lookups in order. Never waits for the disk.
    pub(crate) fn record(&self, batch: &Batch) {
        let mut sampled: Vec<(u32, TableId, u64)> = Vec::new();
        for lookup in &self.lookups {
            let (column, table) = (&batch.features[lookup.feature], &self.tables[lookup.table.index()]);
            for sample in 0..batch.samples {
                let rows = column.sample(sample).iter().filter_map(|&id| table.row_of(id));
                let selected = rows.filter(|&row| self.sampler.selects(lookup.table, row));
                sampled.extend(selected.map(|row| (sample as u32, lookup.table, row)));
            }
        }
        // A stable sort keeps the order of the lookups.
        sampled.sort_by_key(|access| access.0);
        let mut part = EncodedAccesses { payload: Vec::new(), accesses: 0 };
        for (_, table, row) in sampled {
            format::push_access(&mut part.payload, table, row);
            part.accesses += 1;
            if part.payload.len() >= BLOCK_BYTES {
                self.send(std::mem::replace(&mut part, EncodedAccesses { payload: Vec::new(), accesses: 0 }));
            }
        }
        if part.accesses > 0 {
            self.send(part);
        }
    }

    fn send(&self, part: EncodedAccesses) {
        let (cost, accesses) = (part.cost(), u64::from(part.accesses));
        let waiting = self.waiting.fetch_add(cost, Ordering::Relaxed);
        let sent = waiting + cost <= WAITING_BYTES
            && self.sender.as_ref().is_some_and(|sender| sender.send(part).is_ok());
        if !sent {
            self.waiting.fetch_sub(cost, Ordering::Relaxed);
            self.metrics.trace.dropped.increment(accesses);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.sender = None;
        if !self.thread.wait(END_WAIT) {
            tracing::warn!("trace: the last accesses are not written after {} s", END_WAIT.as_secs());
        }
    }
}

/// The state of the writing thread.
struct Writer {
    files: RecordingFiles,
    block: Vec<u8>,
    accesses: u32,
    failed: Option<Failed>,
    metrics: Arc<ModelMetrics>,
}

/// The state after a failed write: when to try again, and how long the wait before that is.
#[derive(Clone, Copy)]
struct Failed {
    retry_at: Instant,
    wait: Duration,
}

impl Writer {
    fn new(files: RecordingFiles, metrics: Arc<ModelMetrics>) -> Self {
        Self { files, block: Vec::new(), accesses: 0, failed: None, metrics }
    }

    fn run(&mut self, parts: &Receiver<EncodedAccesses>, waiting: &AtomicUsize) {
        let mut due = Instant::now() + MAX_BLOCK_AGE;
        loop {
            match parts.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(part) => {
                    waiting.fetch_sub(part.cost(), Ordering::Relaxed);
                    self.block.extend_from_slice(&part.payload);
                    self.accesses += part.accesses;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.write(),
            }
            if self.block.len() >= BLOCK_BYTES || Instant::now() >= due {
                self.write();
                due = Instant::now() + MAX_BLOCK_AGE;
            }
        }
    }

    fn write(&mut self) {
        if self.accesses == 0 {
            return;
        }
        let written = match self.failed {
            Some(failed) if Instant::now() < failed.retry_at => false,
            _ => self.try_write(),
        };
        let trace = &self.metrics.trace;
        let count = if written { &trace.recorded } else { &trace.dropped };
        count.increment(u64::from(self.accesses));
        self.block.clear();
        self.accesses = 0;
    }

    /// Writes the block. Of consecutive failures, only the first is logged.
    fn try_write(&mut self) -> bool {
        let head = format::block_head(&self.block, self.accesses);
        let Err(error) = self.files.append(&head, &self.block) else {
            self.failed = None;
            return true;
        };
        let folder = self.files.folder.display();
        if self.failed.is_none() {
            tracing::warn!("trace: {folder}: {error}; accesses are dropped until a write succeeds");
        }
        let wait = self.failed.map_or(FIRST_RETRY, |failed| (2 * failed.wait).min(LONGEST_RETRY));
        self.failed = Some(Failed { retry_at: Instant::now() + wait, wait });
        false
    }
}

/// The files of a recording.
struct RecordingFiles {
    folder: PathBuf,
    header: Vec<u8>,
    max_bytes: u64,
    /// The file for the next block, if it is open. It ends with a whole block or its header.
    open: Option<OpenFile>,
}

struct OpenFile {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl RecordingFiles {
    fn new(options: &RecorderOptions, header: Vec<u8>) -> Self {
        Self { folder: options.folder.clone(), header, max_bytes: options.max_bytes, open: None }
    }

    /// Begins the next file. First removes the oldest files until a file of full size fits the limit. Creates
    /// the folder, but not the model's directory: the model may have been removed.
    fn begin(&self) -> io::Result<OpenFile> {
        match fs::create_dir(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let mut numbered = numbered(&self.folder)?;
        let mut bytes: u64 = numbered.iter().map(|file| file.bytes).sum();
        let next = numbered.last().map_or(Some(1), |file| file.number.checked_add(1));
        let next = next.ok_or_else(|| io::Error::other("the number of the last trace is the greatest"))?;
        numbered.reverse();
        while let Some(oldest) = numbered.pop_if(|_| bytes + self.file_bytes() > self.max_bytes) {
            fs::remove_file(&oldest.path)?;
            bytes -= oldest.bytes;
        }
        let path = self.folder.join(format!("{PREFIX}{next:08}{SUFFIX}"));
        let unfinished = self.folder.join(format!("{PREFIX}{next:08}{SUFFIX}{UNFINISHED}"));
        let mut file = File::create(&unfinished)?;
        let named = file.write_all(&self.header).and_then(|()| fs::rename(&unfinished, &path));
        if let Err(error) = named {
            // If this fails as well, the next attempt overwrites the file.
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        Ok(OpenFile { file, path, bytes: self.header.len() as u64 })
    }

    /// Most bytes of one file, unless its header and one block take more.
    fn file_bytes(&self) -> u64 {
        self.max_bytes / FILES
    }

    fn append(&mut self, head: &[u8; BLOCK_HEAD_BYTES], payload: &[u8]) -> io::Result<()> {
        let block = [head, payload].concat();
        let (header, limit) = (self.header.len() as u64, self.file_bytes());
        let has_room = |open: &OpenFile| open.bytes <= header || open.bytes + block.len() as u64 <= limit;
        let mut open = match self.open.take().filter(has_room) {
            Some(open) => open,
            None => self.begin()?,
        };
        match open.file.write_all(&block) {
            Ok(()) => {
                open.bytes += block.len() as u64;
                self.open = Some(open);
                Ok(())
            }
            Err(error) => {
                self.open = open.without_partial_block(header);
                Err(error)
            }
        }
    }
}

impl OpenFile {
    /// After a failed write, cuts the file back to its whole blocks. Returns `None` if the next block needs a
    /// new file: a file without blocks is removed, and a file that cannot be cut keeps its partial block,
    /// which readers accept.
    fn without_partial_block(mut self, header: u64) -> Option<Self> {
        if self.bytes <= header {
            // A file with only a header is valid, so a failure does no harm.
            let _ = fs::remove_file(&self.path);
            return None;
        }
        let cut = self.file.set_len(self.bytes).and_then(|()| self.file.seek(SeekFrom::Start(self.bytes)));
        cut.is_ok().then_some(self)
    }
}

struct Numbered {
    number: u64,
    path: PathBuf,
    bytes: u64,
}

/// The access traces in a folder, the oldest first.
fn numbered(folder: &Path) -> io::Result<Vec<Numbered>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok());
        if let Some(number) = number {
            found.push(Numbered { number, path: entry.path(), bytes: entry.metadata()?.len() });
        }
    }
    found.sort_by_key(|file| file.number);
    Ok(found)
}

#[cfg(test)]
mod tests;
