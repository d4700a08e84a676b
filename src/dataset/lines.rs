//! Lines of a byte stream, borrowed from one buffer: no allocation and no copy a line, save where
//! a line straddles two reads. A line longer than the limit is given as such and its bytes are
//! dropped as they come, so that memory stays bounded whatever the file holds.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memchr;

/// Bytes asked of the source at once.
const CHUNK_BYTES: usize = 256 << 10;

/// One line, without its line feed and without a carriage return before it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    /// Its bytes.
    Text(&'a [u8]),
    /// It was longer than the limit.
    TooLong,
}

/// Splits a source into lines.
pub(super) struct Lines {
    source: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    /// What of the buffer was read and not yet given out.
    unread: Range<usize>,
    limit: usize,
    number: u64,
    ended: bool,
}

impl Lines {
    pub(super) fn new(source: Box<dyn Read + Send>, limit: usize) -> Self {
        let buffer = vec![0; CHUNK_BYTES.min(limit.saturating_add(2)).max(16)];
        Self { source, buffer, unread: 0..0, limit, number: 0, ended: false }
    }

    /// The number, from 1, of the line given last.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The next line. The last one needs no line feed; an empty stream has no line.
    pub(super) fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        let Some(range) = self.next_range()? else { return Ok(None) };
        self.number += 1;
        let Some(range) = range else { return Ok(Some(Line::TooLong)) };
        let line = &self.buffer[range];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        Ok(Some(if line.len() > self.limit { Line::TooLong } else { Line::Text(line) }))
    }

    /// Where the next line stands in the buffer; `Some(None)` when it did not fit.
    fn next_range(&mut self) -> io::Result<Option<Option<Range<usize>>>> {
        let mut searched = 0;
        let mut dropped = false;
        loop {
            let unread = &self.buffer[self.unread.clone()];
            if let Some(at) = memchr(b'\n', &unread[searched..]) {
                let begin = self.unread.start;
                let end = begin + searched + at;
                self.unread.start = end + 1;
                return Ok(Some((!dropped).then_some(begin..end)));
            }
            searched = unread.len();
            if self.ended {
                let rest = self.unread.clone();
                self.unread = 0..0;
                return Ok((dropped || !rest.is_empty()).then(|| (!dropped).then_some(rest)));
            }
            if searched > self.limit + 1 {
                dropped = true;
                self.unread = 0..0;
                searched = 0;
            }
            self.fill()?;
        }
    }

    /// Reads more behind what is unread, which is moved to the front first; grows the buffer where
    /// one line fills it.
    fn fill(&mut self) -> io::Result<()> {
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
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    /// Gives `step` bytes a read.
    struct Slow(Cursor<Vec<u8>>, usize);

    impl Read for Slow {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let most = buffer.len().min(self.1);
            self.0.read(&mut buffer[..most])
        }
    }

    fn split(bytes: &[u8], limit: usize, step: usize) -> Vec<Option<Vec<u8>>> {
        let mut lines = Lines::new(Box::new(Slow(Cursor::new(bytes.to_vec()), step)), limit);
        let mut all = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            all.push(match line {
                Line::Text(text) => Some(text.to_vec()),
                Line::TooLong => None,
            });
        }
        assert_eq!(lines.number(), all.len() as u64);
        all
    }

    #[test]
    fn the_last_line_needs_no_line_feed_and_carriage_returns_go() {
        let text = |s: &str| Some(s.as_bytes().to_vec());
        assert_eq!(split(b"a\r\nb\n\nc", 10, 1), [text("a"), text("b"), text(""), text("c")]);
        assert_eq!(split(b"a\n", 10, 9), [text("a")]);
        assert_eq!(split(b"", 10, 9), []);
    }

    #[test]
    fn a_line_past_the_limit_is_told_and_the_next_one_is_read() {
        let long = [b"ok\n".to_vec(), vec![b'x'; 1_000_000], b"\nok".to_vec()].concat();
        let ok = Some(b"ok".to_vec());
        assert_eq!(split(&long, 100, 1 << 16), [ok.clone(), None, ok]);
        assert_eq!(split(&[b'x'; 300], 100, 7), [None]);
        assert_eq!(split(&[b'x'; 100], 100, 7), [Some(vec![b'x'; 100])]);
    }

    #[test]
    fn memory_is_bounded_by_the_limit() {
        let mut lines = Lines::new(Box::new(io::repeat(b'x').take(8 << 20)), 1000);
        assert_eq!(lines.next().unwrap(), Some(Line::TooLong));
        assert!(lines.buffer.len() <= 4096, "{}", lines.buffer.len());
    }

    proptest! {
        #[test]
        fn lines_are_those_of_the_whole_text_however_it_arrives(
            bytes in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), any::<u8>()], 0..200),
            limit in 1..40usize,
            step in 1..50usize,
        ) {
            let whole = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
            let strip = |line: &[u8]| line.strip_suffix(b"\r").unwrap_or(line).to_vec();
            let expected: Vec<_> = if bytes.is_empty() {
                vec![]
            } else {
                whole.split(|&b| b == b'\n').map(strip).map(|l| (l.len() <= limit).then_some(l)).collect()
            };
            prop_assert_eq!(split(&bytes, limit, step), expected);
        }
    }
}
