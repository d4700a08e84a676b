//! Standard error, for the log and for messages of commands. If its reader stops reading, a pipe becomes
//! full, and every thread that writes would wait: those of the network too. So lines are then dropped, and
//! counted for when it is read again.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::sync::EvenPoisoned;

/// How long a line waits for room.
const WAIT: Duration = Duration::from_secs(1);

/// No line waits for room so soon after one was dropped. Otherwise a reader that is slow, and makes room now
/// and then, would stop every thread again and again.
const NO_WAIT: Duration = Duration::from_secs(60);

/// A pipe with any room takes this many bytes without a wait (`PIPE_BUF` of Linux).
const PIECE: usize = 4096;

/// The lines that were dropped.
struct Dropped {
    /// Since the last line that was written.
    lines: u64,
    last: Option<Instant>,
}

impl Dropped {
    /// How long the next line waits for room.
    fn next_wait(&self, now: Instant) -> Duration {
        let is_soon = self.last.is_some_and(|last| now.duration_since(last) < NO_WAIT);
        if is_soon { Duration::ZERO } else { WAIT }
    }
}

/// Locked while a line is written, so that lines are not mixed.
static DROPPED: Mutex<Dropped> = Mutex::new(Dropped { lines: 0, last: None });

/// Writes a line with each call.
pub(crate) struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut dropped = DROPPED.lock().even_poisoned();
        let written = write_line(&io::stderr(), line, &mut dropped);
        written.map(|()| line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_line(out: &impl AsFd, line: &[u8], dropped: &mut Dropped) -> io::Result<()> {
    if dropped.lines > 0 && has_room(out, Duration::ZERO)? {
        let lines = dropped.lines;
        let note = format!("{lines} lines were dropped here, because standard error was not read\n");
        write_piece(out, note.as_bytes())?;
        dropped.lines = 0;
    }
    let wait = dropped.next_wait(Instant::now());
    for piece in line.chunks(PIECE) {
        if !has_room(out, wait)? {
            (dropped.lines, dropped.last) = (dropped.lines + 1, Some(Instant::now()));
            return Ok(());
        }
        write_piece(out, piece)?;
    }
    Ok(())
}

fn has_room(out: &impl AsFd, wait: Duration) -> io::Result<bool> {
    let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut [PollFd::new(out, PollFlags::OUT)], Some(&wait)) {
        Ok(ready) => Ok(ready > 0),
        // A signal: the log is not worth another wait.
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn write_piece(out: &impl AsFd, mut piece: &[u8]) -> io::Result<()> {
    while !piece.is_empty() {
        match rustix::io::write(out, piece) {
            Ok(written) => piece = &piece[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, pipe};

    use super::*;

    #[test]
    fn lines_for_a_pipe_that_is_not_read_are_dropped_and_counted() {
        let (mut read, write) = pipe().unwrap();
        let (mut dropped, mut lines) = (Dropped { lines: 0, last: None }, 0);
        while dropped.lines == 0 {
            write_line(&write, b"a line of the log\n", &mut dropped).unwrap();
            lines += 1;
        }
        for _ in 0..1000 {
            write_line(&write, b"dropped\n", &mut dropped).unwrap();
        }
        assert_eq!(dropped.lines, 1001);
        // Room for a whole piece.
        read.read_exact(&mut [0; 2 * PIECE]).unwrap();
        write_line(&write, b"the last line\n", &mut dropped).unwrap();
        assert_eq!(dropped.lines, 0);
        // The reader is slow, so lines do not wait for it.
        let last = dropped.last.unwrap();
        assert_eq!(
            [0, 59, 60].map(|s| dropped.next_wait(last + Duration::from_secs(s)).as_secs()),
            [0, 0, 1]
        );
        drop(write);
        let mut rest = String::new();
        read.read_to_string(&mut rest).unwrap();
        let end = "1001 lines were dropped here, because standard error was not read\nthe last line\n";
        assert!(rest.ends_with(end), "{rest}");
        assert!(lines > 1000 && !rest.contains("dropped\ndropped"), "{lines}");
    }
}
