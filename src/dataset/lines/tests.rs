use std::io::Cursor;

use proptest::prelude::*;

use super::*;

/// Returns `step` bytes for each read.
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
fn the_last_line_needs_no_line_feed_and_carriage_returns_are_removed() {
    let text = |s: &str| Some(s.as_bytes().to_vec());
    assert_eq!(split(b"a\r\nb\n\nc", 10, 1), [text("a"), text("b"), text(""), text("c")]);
    assert_eq!(split(b"a\n", 10, 9), [text("a")]);
    assert_eq!(split(b"", 10, 9), []);
}

#[test]
fn a_byte_order_mark_is_removed_at_the_beginning_only() {
    let text = |s: &str| Some(s.as_bytes().to_vec());
    assert_eq!(split("\u{feff}a\n\u{feff}b".as_bytes(), 10, 2), [text("a"), text("\u{feff}b")]);
}

#[test]
fn a_line_longer_than_the_limit_is_reported_and_the_next_one_is_read() {
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
    fn lines_do_not_depend_on_the_sizes_of_reads(
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

#[test]
fn the_end_is_known_before_the_next_line_is_asked_for() {
    for step in [1, 3, 100] {
        let text = b"a\nbc\n\nd".to_vec();
        let mut lines = Lines::new(Box::new(Slow(Cursor::new(text), step)), 100);
        let mut ends = Vec::new();
        while lines.next().unwrap().is_some() {
            ends.push(lines.at_end());
        }
        assert_eq!(ends, [false, false, false, true], "{step}");
    }
}

#[test]
fn an_error_behind_a_line_is_that_of_the_next_line() {
    struct Damaged;
    impl Read for Damaged {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::InvalidData.into())
        }
    }
    let mut lines = Lines::new(Box::new(Cursor::new(b"a\n").chain(Damaged)), 100);
    assert_eq!(lines.next().unwrap(), Some(Line::Text(b"a")));
    assert!(!lines.at_end() && !lines.at_end());
    assert_eq!(lines.next().unwrap_err().kind(), io::ErrorKind::InvalidData);
}
