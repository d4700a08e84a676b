//! A file as a stream of plain bytes. Gzip and zstd are recognised by their first bytes, not by the file's
//! name. A file may have several gzip members or zstd frames end to end, as `cat` and parallel compressors
//! write them. A file that ends inside a member or frame is an error.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
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

/// Opens a file, and decompresses it if necessary. Bytes read from disk are added to `total`.
///
/// # Errors
/// [`DatasetError`]. The cause is [`io::ErrorKind::WouldBlock`] when `stop` was set while a pipe had no data;
/// the file can be opened again after a pause.
pub(crate) fn open(
    path: &Path,
    total: &Arc<AtomicU64>,
    stop: &Stop,
) -> Result<Box<dyn Read + Send>, DatasetError> {
    let refused = |cause| DatasetError::Open { path: path.to_owned(), cause };
    // Otherwise a pipe would be opened only when it has a writer. `InputFile` waits for that, and can be told
    // to stop.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(refused)?;
    fcntl_setfl(&file, OFlags::empty()).map_err(|errno| refused(errno.into()))?;
    if file.metadata().map_err(refused)?.is_dir() {
        return Err(DatasetError::Directory { path: path.to_owned() });
    }
    let mut file = InputFile::new(file, total.clone(), stop.clone()).map_err(refused)?;
    let magic = file.magic().map_err(refused)?;
    let compression = Compression::of(&magic);
    if compression == Compression::Zstd {
        // The decoder cannot go on after an error of its source.
        file.only_interrupts();
    }
    let whole = Cursor::new(magic).chain(file);
    Ok(match compression {
        Compression::None => Box::new(whole),
        Compression::Gzip => Box::new(MultiGzDecoder::new(BufReader::with_capacity(CHUNK_BYTES, whole))),
        Compression::Zstd => Box::new(Zstd {
            source: BufReader::with_capacity(CHUNK_BYTES, whole),
            decoder: FrameDecoder::new(),
            in_frame: false,
            stop: stop.only_interrupts(),
        }),
    })
}

#[derive(Debug, PartialEq, Eq)]
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
            let header = self.frame_header()?;
            // A decoder that is used again accepts only windows up to 100 MiB, and a new one any (ruzstd
            // 0.8).
            self.decoder = FrameDecoder::new();
            match self.decoder.reset(header.chain(&mut self.source)) {
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
                Err(_) => return Err(self.failed()),
            }
        }
        Ok(false)
    }

    /// Reads the header of a frame, or the beginning of a skippable one (RFC 8878 sections 3.1.1.1, 3.1.2).
    ///
    /// # Errors
    /// Also when the window is above the limit.
    fn frame_header(&mut self) -> io::Result<Cursor<Vec<u8>>> {
        let mut header = Vec::with_capacity(18);
        let mut read =
            |bytes: usize, header: &mut Vec<u8>| self.source.by_ref().take(bytes as u64).read_to_end(header);
        read(5, &mut header)?;
        if let [0x28, 0xb5, 0x2f, 0xfd, descriptor] = header[..] {
            let single_segment = descriptor & 0x20 != 0;
            let dictionary_id = [0, 1, 2, 4][usize::from(descriptor & 3)];
            let content_size = [usize::from(single_segment), 2, 4, 8][usize::from(descriptor >> 6)];
            read(usize::from(!single_segment) + dictionary_id + content_size, &mut header)?;
            let window = match header.get(5) {
                Some(window) if !single_segment => {
                    let base = 1 << (10 + (window >> 3));
                    base + base / 8 * u64::from(window & 7)
                }
                // The window is the whole content.
                _ => {
                    let size = header.get(5 + dictionary_id..).unwrap_or_default();
                    let size = size.iter().rev().fold(0, |size, byte| size << 8 | u64::from(*byte));
                    if content_size == 2 { size + 256 } else { size }
                }
            };
            if window > WINDOW_BYTES {
                let reason = format!("a zstd frame has a window of {window} bytes, limit {WINDOW_BYTES}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
            }
        }
        Ok(Cursor::new(header))
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
