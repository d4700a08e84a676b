//! Lines of a byte stream, borrowed from one buffer: no allocation per line, and no copy unless a line spans
//! two reads. A line that is longer than the limit is dropped while it is read, so memory stays bounded.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memchr;

/// The first bytes of a file that some programs for tables write.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Bytes of one read.
const CHUNK_BYTES: usize = 256 << 10;

/// One line, without its line feed, without a carriage return before it, and without a byte order mark at the
/// beginning of the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line<'a> {
    Text(&'a [u8]),
    /// The line was longer than the limit.
    TooLong,
}

/// Splits a source into lines.
pub(crate) struct Lines {
    source: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    /// The part of the buffer that was read and not yet returned.
    unread: Range<usize>,
    limit: usize,
    number: u64,
    ended: bool,
    /// An error that was found while no line was asked for.
    failed: Option<io::Error>,
    /// Whether the beginning of the next line was dropped, because the line is too long.
    dropped: bool,
    found: Found,
}

/// What was found last.
enum Found {
    /// Where the line is in the buffer.
    Line(Range<usize>),
    TooLong,
    End,
}

impl Lines {
    pub(crate) fn new(source: Box<dyn Read + Send>, limit: usize) -> Self {
        let buffer = vec![0; CHUNK_BYTES.min(limit.saturating_add(2)).max(16)];
        Self {
            source,
            buffer,
            unread: 0..0,
            limit,
            number: 0,
            ended: false,
            failed: None,
            dropped: false,
            found: Found::End,
        }
    }

    /// The number of the line that was returned last, counted from 1.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The next line; `None` at the end. The last line may end without a line feed. After an error of the
    /// source that is not final, the next call goes on where this one ended.
    pub(crate) fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        self.found = self.find()?;
        self.number += u64::from(!matches!(self.found, Found::End));
        Ok(self.line())
    }

    /// The line that was found last; `None` at the end, and after [`Self::at_end`] has read more bytes.
    pub(crate) fn line(&self) -> Option<Line<'_>> {
        let line = match &self.found {
            Found::Line(range) => &self.buffer[range.clone()],
            Found::TooLong => return Some(Line::TooLong),
            Found::End => return None,
        };
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let marked = if self.number == 1 { line.strip_prefix(BYTE_ORDER_MARK) } else { None };
        let line = marked.unwrap_or(line);
        Some(if line.len() > self.limit { Line::TooLong } else { Line::Text(line) })
    }

    /// Whether no byte follows the last line. An error of the source is kept for the next line.
    pub(crate) fn at_end(&mut self) -> bool {
        if self.unread.is_empty() && !self.ended && self.failed.is_none() {
            self.failed = self.fill().err();
        }
        self.unread.is_empty() && self.ended
    }

    /// Finds the next line.
    fn find(&mut self) -> io::Result<Found> {
        let mut searched = 0;
        loop {
            let unread = &self.buffer[self.unread.clone()];
            if let Some(at) = memchr(b'\n', &unread[searched..]) {
                let begin = self.unread.start;
                let end = begin + searched + at;
                self.unread.start = end + 1;
                return Ok(self.unless_dropped(begin..end));
            }
            searched = unread.len();
            if self.ended {
                let rest = self.unread.clone();
                self.unread = 0..0;
                let ended = rest.is_empty() && !self.dropped;
                return Ok(if ended { Found::End } else { self.unless_dropped(rest) });
            }
            if searched > self.limit + 1 {
                self.dropped = true;
                self.unread = 0..0;
                searched = 0;
            }
            self.fill()?;
        }
    }

    /// A line whose end was found here.
    fn unless_dropped(&mut self, range: Range<usize>) -> Found {
        if std::mem::take(&mut self.dropped) { Found::TooLong } else { Found::Line(range) }
    }

    /// Moves the unread part to the front and reads more behind it. Grows the buffer if one line fills it.
    fn fill(&mut self) -> io::Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.found = Found::End;
        self.buffer.copy_within(self.unread.clone(), 0);
        self.unread = 0..self.unread.len();
        if self.unread.end == self.buffer.len() {
            self.buffer.resize(2 * self.buffer.len(), 0);
        }
        loop {
            match self.source.read(&mut self.buffer[self.unread.end..]) {
                Ok(0) => self.ended = true,
                Ok(got) => self.unread.end += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests;
