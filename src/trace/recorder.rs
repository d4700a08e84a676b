//! Takes a server's batches, and writes the sampled accesses on a thread of its own.
//!
//! A request never waits: what is sampled is put in a queue that is bounded in bytes, and what finds it
//! full is dropped and counted. The thread gathers what comes into blocks, writes a block when it is
//! full or a second old, and begins a new file when one is full. Files are numbered upwards, each
//! start takes a new number with its first block, and the oldest are removed, so that all of them together stay within
//! the limit. A disk that fails costs the accesses that were to be written, which are counted, and no
//! request.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Sampler;
use super::format::{self, BLOCK_HEAD_BYTES, Header};
use crate::metrics::ModelMetrics;
use crate::schema::{Lookup, Schema, Table};
use crate::types::{Batch, TableId};

/// Bytes of a block from which on it is written.
const BLOCK_BYTES: usize = 64 << 10;
/// Bytes that may wait to be written, over all batches.
const WAITING_BYTES: usize = 4 << 20;
/// What a part of a batch takes while it waits, besides its bytes.
const PART_BYTES: usize = 64;
/// How long accesses wait for a block to fill.
const PATIENCE: Duration = Duration::from_secs(1);
/// The limit is shared by so many files.
const FILES: u64 = 4;
/// How the files are called, around their numbers.
const NAME: (&str, &str) = ("trace-", ".fltrace");

/// What is recorded, and where to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecorderOptions {
    /// Where the files lie; made when it is not there.
    pub folder: PathBuf,
    /// The share of all rows whose accesses are recorded, above 0, at most 1.
    pub rate: f64,
    /// Most bytes of all files together.
    pub max_bytes: u64,
}

/// Records what it is shown. Writes what waits, and ends, when it is dropped.
pub(crate) struct Recorder {
    sampler: Sampler,
    lookups: Vec<Lookup>,
    tables: Vec<Table>,
    waiting: Arc<AtomicUsize>,
    metrics: Arc<ModelMetrics>,
    sender: Option<Sender<Part>>,
    thread: Option<JoinHandle<()>>,
}

/// Accesses of one batch, encoded.
struct Part {
    payload: Vec<u8>,
    accesses: u32,
}

impl Part {
    fn cost(&self) -> usize {
        self.payload.len() + PART_BYTES
    }
}

impl Recorder {
    /// Makes the folder and starts the thread that writes.
    ///
    /// # Errors
    /// When the folder cannot be made, or the system gives no thread.
    pub(crate) fn start(
        schema: &Schema,
        options: &RecorderOptions,
        metrics: Arc<ModelMetrics>,
    ) -> io::Result<Self> {
        let files = Files::open(options, Header::of(schema, options.rate).bytes())?;
        let waiting = Arc::new(AtomicUsize::new(0));
        let (sender, receiver) = mpsc::channel();
        let mut writer =
            Writer { files, block: Vec::new(), accesses: 0, failed: false, metrics: metrics.clone() };
        let waits = waiting.clone();
        let thread = std::thread::Builder::new()
            .name("trace-write".into())
            .spawn(move || writer.run(&receiver, &waits))?;
        Ok(Self {
            sampler: Sampler::new(options.rate),
            lookups: schema.lookups(),
            tables: schema.tables.clone(),
            waiting,
            metrics,
            sender: Some(sender),
            thread: Some(thread),
        })
    }

    /// Records the sampled accesses of a batch of the schema's shape: sample after sample, of each its
    /// lookups in order, as `plan` takes them from a file. Never waits for the disk.
    pub(crate) fn record(&self, batch: &Batch) {
        let mut sampled: Vec<(u32, TableId, u64)> = Vec::new();
        for lookup in &self.lookups {
            let (column, table) = (&batch.features[lookup.feature], &self.tables[lookup.table.index()]);
            for sample in 0..batch.samples {
                let rows = column.sample(sample).iter().filter_map(|&id| table.row_of(id));
                let taken = rows.filter(|&row| self.sampler.takes(lookup.table, row));
                sampled.extend(taken.map(|row| (sample as u32, lookup.table, row)));
            }
        }
        // Stable, so that lookups stay in their order.
        sampled.sort_by_key(|access| access.0);
        let mut part = Part { payload: Vec::new(), accesses: 0 };
        for (_, table, row) in sampled {
            format::push_access(&mut part.payload, table, row);
            part.accesses += 1;
            if part.payload.len() >= BLOCK_BYTES {
                self.send(std::mem::replace(&mut part, Part { payload: Vec::new(), accesses: 0 }));
            }
        }
        if part.accesses > 0 {
            self.send(part);
        }
    }

    fn send(&self, part: Part) {
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
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the trace's writing thread panicked");
        }
    }
}

/// The thread that writes.
struct Writer {
    files: Files,
    block: Vec<u8>,
    accesses: u32,
    /// Whether the last write failed, which is logged once.
    failed: bool,
    metrics: Arc<ModelMetrics>,
}

impl Writer {
    fn run(&mut self, parts: &Receiver<Part>, waiting: &AtomicUsize) {
        let mut due = Instant::now() + PATIENCE;
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
                due = Instant::now() + PATIENCE;
            }
        }
    }

    fn write(&mut self) {
        if self.accesses == 0 {
            return;
        }
        let accesses = u64::from(self.accesses);
        let head = format::block_head(&self.block, self.accesses);
        match self.files.append(&head, &self.block) {
            Ok(()) => {
                self.metrics.trace.recorded.increment(accesses);
                self.failed = false;
            }
            Err(error) => {
                self.metrics.trace.dropped.increment(accesses);
                if !self.failed {
                    tracing::warn!("trace: {}: {error}; accesses are dropped", self.files.folder.display());
                }
                self.failed = true;
            }
        }
        self.block.clear();
        self.accesses = 0;
    }
}

/// The files of a recording.
struct Files {
    folder: PathBuf,
    header: Vec<u8>,
    max_bytes: u64,
    /// Where the next block goes. None before the first and after a failure: a new file is begun then.
    open: Option<File>,
    /// Bytes of that file.
    bytes: u64,
}

impl Files {
    fn open(options: &RecorderOptions, header: Vec<u8>) -> io::Result<Self> {
        fs::create_dir_all(&options.folder)?;
        let (folder, max_bytes) = (options.folder.clone(), options.max_bytes);
        Ok(Self { folder, header, max_bytes, open: None, bytes: 0 })
    }

    /// Begins the next file, after the oldest are removed whose place it needs.
    fn begin(&mut self) -> io::Result<()> {
        self.open = None;
        let mut numbered = numbered(&self.folder)?;
        let mut bytes: u64 = numbered.iter().map(|file| file.bytes).sum();
        let next = numbered.last().map_or(1, |file| file.number + 1);
        numbered.reverse();
        while let Some(oldest) = numbered.pop_if(|_| bytes + self.file_bytes() > self.max_bytes) {
            fs::remove_file(&oldest.path)?;
            bytes -= oldest.bytes;
        }
        let path = self.folder.join(format!("{}{next:08}{}", NAME.0, NAME.1));
        let mut file = File::options().write(true).create_new(true).open(path)?;
        file.write_all(&self.header)?;
        self.bytes = self.header.len() as u64;
        self.open = Some(file);
        Ok(())
    }

    /// Most bytes of one file, but for a header that is longer.
    fn file_bytes(&self) -> u64 {
        self.max_bytes / FILES
    }

    fn append(&mut self, head: &[u8; BLOCK_HEAD_BYTES], payload: &[u8]) -> io::Result<()> {
        let block = [head, payload].concat();
        let empty = self.bytes <= self.header.len() as u64;
        let full = !empty && self.bytes + block.len() as u64 > self.file_bytes();
        if full || self.open.is_none() {
            self.begin()?;
        }
        let Some(file) = &mut self.open else { return Ok(()) };
        let written = file.write_all(&block);
        if written.is_err() {
            // Half a block may stand at its end, which only the end of a file may be.
            self.open = None;
        }
        self.bytes += block.len() as u64;
        written
    }
}

struct Numbered {
    number: u64,
    path: PathBuf,
    bytes: u64,
}

/// The recordings in a folder, the oldest first.
fn numbered(folder: &Path) -> io::Result<Vec<Numbered>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number =
            name.to_str().and_then(|name| name.strip_prefix(NAME.0)?.strip_suffix(NAME.1)?.parse().ok());
        if let Some(number) = number {
            found.push(Numbered { number, path: entry.path(), bytes: entry.metadata()?.len() });
        }
    }
    found.sort_by_key(|file| file.number);
    Ok(found)
}

#[cfg(test)]
mod tests;
