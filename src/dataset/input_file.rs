//! The bytes of one opened file as they are on disk, counted, before they are decompressed.
//!
//! A regular file that ends before the length it had when it was opened was truncated. That is an error,
//! because the rest of its samples would be lost silently. A pipe is waited for in short intervals, so that
//! training can stop while no data comes.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Stop;

/// How long a pipe is waited for before the flag is looked at.
const WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// An opened file.
pub(crate) struct InputFile {
    file: File,
    /// Bytes that it had when it was opened; `None` for a pipe.
    length: Option<u64>,
    read: u64,
    /// Bytes that were read of all files.
    total: Arc<AtomicU64>,
    stop: Stop,
}

impl InputFile {
    /// # Errors
    /// When the file has no metadata.
    pub(crate) fn new(file: File, total: Arc<AtomicU64>, stop: Stop) -> io::Result<Self> {
        let found = file.metadata()?;
        let length = found.is_file().then_some(found.len());
        Ok(Self { file, length, read: 0, total, stop })
    }

    /// Waits until a pipe has data or has ended.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the reader was told to stop. Nothing was read then, and a later
    /// call may succeed.
    pub(crate) fn wait(&self) -> io::Result<()> {
        if self.length.is_some() {
            return Ok(());
        }
        let _waiting = self.stop.begin_wait();
        loop {
            if self.stop.requested() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            match poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&WAIT)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Reads up to the first four bytes.
    pub(crate) fn magic(&mut self) -> io::Result<Vec<u8>> {
        self.wait()?;
        let stop = self.stop.clone();
        // The bytes that were read would be lost in a pause.
        self.only_interrupts();
        let mut magic = Vec::with_capacity(4);
        let read = self.by_ref().take(4).read_to_end(&mut magic);
        self.stop = stop;
        read.map(|_| magic)
    }

    /// From now on only what is final ends the wait for a pipe. Returns what that is.
    pub(crate) fn only_interrupts(&mut self) -> &Stop {
        self.stop = self.stop.only_interrupts();
        &self.stop
    }

    fn count(&mut self, bytes: usize) {
        self.read += bytes as u64;
        self.total.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Read for InputFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Of a file that has only malformed lines, the reader gets no sample after which it would look.
        if self.stop.interrupted() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.wait()?;
        let got = self.file.read(buffer)?;
        if got == 0 && !buffer.is_empty() && self.length.is_some_and(|length| self.read < length) {
            let (read, length) = (self.read, self.length.unwrap_or(0));
            let reason = format!("it has {read} bytes, and had {length} when it was opened");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        self.count(got);
        Ok(got)
    }
}
