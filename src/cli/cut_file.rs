//! Reports a mapped file that is cut short while the process uses it.
//!
//! Reading a mapped page that its file does not have any more, or that the disk cannot read, raises SIGBUS,
//! which ends the process. So a handler first writes one line that names the file. Then the process ends in
//! the same way as without the handler.
//!
//! A handler may interrupt any code, so it only makes plain system calls (signal-safety(7)) and allocates
//! nothing. The kernel's own list of mappings, `/proc/self/maps`, says which file is mapped at an address, so
//! the program keeps no list that a handler could find half changed. An address where no file is mapped is
//! not the handler's concern.
//!
//! To end as without the handler, the handler puts the one before it back (std installs one for stack
//! overflows) and returns. The instruction is executed again and raises the signal again.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::mem::zeroed;
use std::os::fd::AsRawFd;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{SA_SIGINFO, SIGBUS, STDERR_FILENO, c_int, siginfo_t};

/// How long the line may take: standard error may be a full pipe that is not read.
const LINE_MS: c_int = 1000;

/// Longest line. A pipe takes it at once.
const LINE_BYTES: usize = 2048;

/// What the handler needs.
struct Before {
    /// Opened before, because a server may be out of file descriptors.
    maps: File,
    action: libc::sigaction,
}

static BEFORE: OnceLock<Before> = OnceLock::new();

/// From now on, SIGBUS at an address of a mapped file is reported on standard error.
///
/// # Errors
/// When `/proc` is missing, or the system refuses the handler.
pub(crate) fn report() -> io::Result<()> {
    let maps = File::open("/proc/self/maps")?;
    // SAFETY: a `sigaction` of zeros is valid: the default action, with an empty mask and no flags.
    let (mut before, mut action): (libc::sigaction, libc::sigaction) = unsafe { (zeroed(), zeroed()) };
    // SAFETY: `before` is writable, and nothing is installed.
    check(unsafe { libc::sigaction(SIGBUS, null(), &raw mut before) })?;
    if BEFORE.set(Before { maps, action: before }).is_err() {
        return Ok(());
    }
    action.sa_sigaction = on_bus_error as extern "C" fn(_, _, _) as usize;
    // Not on the alternative stack, which may be too small. A stack that overflows raises SIGSEGV.
    action.sa_flags = SA_SIGINFO;
    // SAFETY: the action is a handler of three arguments, as its flag says.
    check(unsafe { libc::sigaction(SIGBUS, &raw const action, null_mut()) })
}

fn check(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_bus_error(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // The handler is installed after `BEFORE` is set.
    let Some(before) = BEFORE.get() else { return };
    // SAFETY: the kernel passes a valid `siginfo_t`, which has an address if the code says so.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code == libc::BUS_ADRERR {
        write_line(&before.maps, address);
    }
    // SAFETY: the action was read from the system. `raise` is allowed in a handler; the signal is blocked
    // until the handler returns.
    unsafe {
        libc::sigaction(signal, &raw const before.action, null_mut());
        if code <= 0 {
            // Another process has sent the signal, so it is not raised again by itself.
            libc::raise(signal);
        }
    }
}

/// Writes the line if a file is mapped at the address.
fn write_line(maps: &File, address: usize) {
    static WRITTEN: AtomicBool = AtomicBool::new(false);
    let mut line = Line::new();
    line.push(b"flechette: SIGBUS: the mapped file ");
    if !push_path(maps, address, &mut line) {
        return;
    }
    line.push(b" was cut short, or the disk cannot read it. ");
    line.push(b"Files in use must not be changed: see docs/files-in-use.md\n");
    // For a path that left no room.
    line.bytes[LINE_BYTES - 1] = b'\n';
    let mut stderr = libc::pollfd { fd: STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: the pointers are valid for these lengths. They are plain system calls.
    unsafe {
        if WRITTEN.swap(true, Ordering::AcqRel) {
            // Another thread writes the line; the process must not end before.
            libc::poll(null_mut(), 0, LINE_MS);
        } else if libc::poll(&raw mut stderr, 1, LINE_MS) == 1 {
            libc::write(STDERR_FILENO, line.bytes.as_ptr().cast(), line.length);
        }
    }
}

/// A line of text. What does not fit is left out.
struct Line {
    bytes: [u8; LINE_BYTES],
    length: usize,
}

impl Line {
    fn new() -> Self {
        Self { bytes: [0; LINE_BYTES], length: 0 }
    }

    fn push(&mut self, text: &[u8]) {
        for &byte in text {
            if let Some(to) = self.bytes.get_mut(self.length) {
                *to = byte;
                self.length += 1;
            }
        }
    }
}

/// Adds the path of the file that is mapped at an address. Returns false if there is none.
fn push_path(maps: &File, address: usize, line: &mut Line) -> bool {
    let (mut search, mut piece, mut at) = (Search::new(address), [0_u8; 1024], 0);
    loop {
        // SAFETY: the pointer is valid for this length, and it is a plain system call.
        let read = unsafe { libc::pread(maps.as_raw_fd(), piece.as_mut_ptr().cast(), piece.len(), at) };
        let Some(read) = usize::try_from(read).ok().filter(|read| *read > 0) else { return search.found };
        at += read as libc::off_t;
        for &byte in piece.iter().take(read) {
            if search.next(byte, line) {
                return search.found;
            }
        }
    }
}

/// Searches the lines of `/proc/self/maps`, such as
/// `7f5e10000000-7f5e10021000 r--p 00000000 fe:00 1234   /path of a file`.
struct Search {
    address: usize,
    /// Of the current line.
    part: LinePart,
    number: usize,
    begin: usize,
    /// Whether the line of the address has a path.
    found: bool,
}

enum LinePart {
    Begin,
    End,
    /// The line of the address, before its path.
    Details,
    Path,
    /// Another line.
    Other,
}

impl Search {
    fn new(address: usize) -> Self {
        Self { address, part: LinePart::Begin, number: 0, begin: 0, found: false }
    }

    /// Takes the next byte. Adds it to `line` if it belongs to the path. Returns whether the line of the
    /// address has ended.
    fn next(&mut self, byte: u8, line: &mut Line) -> bool {
        match (&self.part, byte) {
            (LinePart::Details | LinePart::Path, b'\n') => return true,
            (_, b'\n') => (self.part, self.number) = (LinePart::Begin, 0),
            (LinePart::Begin, b'-') => {
                (self.part, self.begin, self.number) = (LinePart::End, self.number, 0);
            }
            (LinePart::End, b' ') => {
                let within = (self.begin..self.number).contains(&self.address);
                self.part = if within { LinePart::Details } else { LinePart::Other };
            }
            (LinePart::Begin | LinePart::End, digit) => {
                let digit = (digit as char).to_digit(16).unwrap_or(0) as usize;
                self.number = self.number << 4 | digit;
            }
            (LinePart::Details, b'/') => {
                (self.part, self.found) = (LinePart::Path, true);
                line.push(b"/");
            }
            (LinePart::Path, byte) => line.push(&[byte]),
            (LinePart::Details | LinePart::Other, _) => {}
        }
        false
    }
}

#[cfg(test)]
mod tests;
