//! A file as a stream of plain bytes. Gzip and zstd are recognised by their first bytes, not by the file's
//! name. A file may have several gzip members or zstd frames end to end, as `cat` and parallel compressors
//! write them. A file that ends inside a member or frame is an error.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use flate2::bufread::MultiGzDecoder;
use rustix::fs::{OFlags, fcntl_setfl};
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::input_file::InputFile;
use super::{DatasetError, Stop};

/// Bytes read from the disk at once.
const CHUNK_BYTES: usize = 128 << 10;
/// A zstd decoder keeps as many bytes of output as a frame's window. The tool `zstd` has the same limit.
const WINDOW_BYTES: u64 = 128 << 20;
/// Bytes of zstd output that are decoded ahead.
const DECODED_BYTES: usize = 128 << 10;

/// Opens a file, and decompresses it if necessary.
///
/// # Errors
/// [`DatasetError`]. The cause is [`io::ErrorKind::WouldBlock`] if the reader was told to stop.
pub(crate) fn open(path: &Path, stop: &Stop) -> Result<Box<dyn Read + Send>, DatasetError> {
    let mut waiting = WaitingFile::open(path.to_owned(), &Arc::default(), stop)?;
    match waiting.first_bytes()? {
        Some(first) => Ok(waiting.bytes(first)),
        None => Err(DatasetError::Open { path: path.to_owned(), cause: io::ErrorKind::WouldBlock.into() }),
    }
}

/// A file that was opened, and whose first bytes are waited for. A pipe stays open meanwhile: if it were
/// closed in a pause, who writes to it would be ended by SIGPIPE.
pub(crate) struct WaitingFile {
    path: PathBuf,
    file: InputFile,
}

impl WaitingFile {
    /// Opens a file. Bytes read from disk are added to `total`.
    ///
    /// # Errors
    /// [`DatasetError`].
    pub(crate) fn open(path: PathBuf, total: &Arc<AtomicU64>, stop: &Stop) -> Result<Self, DatasetError> {
        // Otherwise a pipe would be opened only when it has a writer. `InputFile` waits for that, and can be
        // told to stop.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let opened = File::options().read(true).custom_flags(flags).open(&path);
        let opened = opened.and_then(|file| {
            fcntl_setfl(&file, OFlags::empty())?;
            let is_dir = file.metadata()?.is_dir();
            Ok((InputFile::new(file, total.clone(), stop.clone())?, is_dir))
        });
        match opened {
            Ok((_, true)) => Err(DatasetError::Directory { path }),
            Ok((file, false)) => Ok(Self { path, file }),
            Err(cause) => Err(DatasetError::Open { path, cause }),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the first bytes. `None` if the reader was told to stop before they were read.
    ///
    /// # Errors
    /// [`DatasetError::Open`].
    pub(crate) fn first_bytes(&mut self) -> Result<Option<FirstBytes>, DatasetError> {
        match self.file.magic() {
            Ok(magic) => Ok(Some(FirstBytes(magic))),
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(cause) => Err(DatasetError::Open { path: self.path.clone(), cause }),
        }
    }

    /// The bytes of the file, decompressed if necessary.
    pub(crate) fn bytes(self, FirstBytes(magic): FirstBytes) -> Box<dyn Read + Send> {
        let Self { mut file, .. } = self;
        match Compression::of(&magic) {
            Compression::None => Box::new(Cursor::new(magic).chain(file)),
            Compression::Gzip => {
                let whole = Cursor::new(magic).chain(file);
                Box::new(MultiGzDecoder::new(BufReader::with_capacity(CHUNK_BYTES, whole)))
            }
            Compression::Zstd => {
                // The decoder cannot go on after an error of its source.
                let stop = file.only_interrupts().clone();
                let source = BufReader::with_capacity(CHUNK_BYTES, Cursor::new(magic).chain(file));
                let mut decoder = FrameDecoder::new();
                decoder.set_max_window_size(WINDOW_BYTES);
                Box::new(Zstd { source, decoder, in_frame: false, stop })
            }
        }
    }
}

/// The first bytes of a file, which say how it is compressed.
pub(crate) struct FirstBytes(Vec<u8>);

enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// RFC 1952 section 2.3.1; RFC 8878 sections 3.1.1 and 3.1.2 (skippable frames may come first).
    fn of(magic: &[u8]) -> Self {
        match magic {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => Self::Zstd,
            _ => Self::None,
        }
    }
}

/// All frames of a zstd stream, with their checksums verified.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
    /// What ends the wait of the source.
    stop: Stop,
}

impl<R: BufRead> Zstd<R> {
    /// Moves to the next frame that is not skippable; false at the end of the stream.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => {
                    self.in_frame = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut self.source.by_ref().take(length), &mut io::sink())?;
                    if skipped < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(FrameDecoderError::WindowSizeTooBig { requested, max }) => {
                    let reason = format!("a zstd frame has a window of {requested} bytes, limit {max}");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
                }
                Err(_) => return Err(self.failed()),
            }
        }
        Ok(false)
    }

    /// The decoder's own errors name its internals, so they are not shown.
    fn failed(&self) -> io::Error {
        if self.stop.requested() {
            return io::ErrorKind::WouldBlock.into();
        }
        io::Error::new(io::ErrorKind::InvalidData, "the zstd data is truncated or damaged")
    }

    fn verify_checksum(&self) -> io::Result<()> {
        let (stored, computed) =
            (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum());
        if stored.is_some() && stored != computed {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the checksum of a zstd frame differs"));
        }
        Ok(())
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.in_frame && !self.next_frame()? {
                return Ok(0);
            }
            let got = self.decoder.read(buffer).map_err(|_| self.failed())?;
            if got > 0 || buffer.is_empty() {
                return Ok(got);
            }
            if self.decoder.is_finished() {
                self.verify_checksum()?;
                self.in_frame = false;
            } else {
                let ahead = BlockDecodingStrategy::UptoBytes(DECODED_BYTES);
                let decoded = self.decoder.decode_blocks(&mut self.source, ahead);
                decoded.map_err(|_| self.failed())?;
            }
        }
    }
}

#[cfg(test)]
mod tests;
