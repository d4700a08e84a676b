//! Standard error, for the log and for messages of commands. If its reader stops reading, a pipe becomes
//! full, and every thread that writes would wait: those of the network too. So lines are then dropped, and
//! counted for when it is read again.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::sync::EvenPoisoned;

/// How long the first line waits for room, in seconds. Later ones do not wait until there is room again.
const WAIT_SECONDS: i64 = 1;

/// A pipe with any room takes this many bytes without a wait (`PIPE_BUF` of Linux).
const PIECE: usize = 4096;

/// How many lines were dropped since the last one that was written. Locked while a line is written, so that
/// lines are not mixed.
static DROPPED: Mutex<u64> = Mutex::new(0);

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

fn write_line(out: &impl AsFd, line: &[u8], dropped: &mut u64) -> io::Result<()> {
    if *dropped > 0 && has_room(out, 0)? {
        let note = format!("{dropped} lines were dropped here, because standard error was not read\n");
        write_piece(out, note.as_bytes())?;
        *dropped = 0;
    }
    let wait = if *dropped > 0 { 0 } else { WAIT_SECONDS };
    for piece in line.chunks(PIECE) {
        if !has_room(out, wait)? {
            *dropped += 1;
            return Ok(());
        }
        write_piece(out, piece)?;
    }
    Ok(())
}

fn has_room(out: &impl AsFd, seconds: i64) -> io::Result<bool> {
    let wait = Timespec { tv_sec: seconds, tv_nsec: 0 };
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
        let (mut dropped, mut lines) = (0, 0);
        while dropped == 0 {
            write_line(&write, b"a line of the log\n", &mut dropped).unwrap();
            lines += 1;
        }
        for _ in 0..1000 {
            write_line(&write, b"dropped\n", &mut dropped).unwrap();
        }
        assert_eq!(dropped, 1001);
        // Room for a whole piece.
        read.read_exact(&mut [0; 2 * PIECE]).unwrap();
        write_line(&write, b"the last line\n", &mut dropped).unwrap();
        drop(write);
        let mut rest = String::new();
        read.read_to_string(&mut rest).unwrap();
        assert_eq!(dropped, 0);
        let end = "1001 lines were dropped here, because standard error was not read\nthe last line\n";
        assert!(rest.ends_with(end), "{rest}");
        assert!(lines > 1000 && !rest.contains("dropped\ndropped"), "{lines}");
    }
}
