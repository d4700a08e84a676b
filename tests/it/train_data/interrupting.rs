//! Runs that are interrupted: their input ends with a malformed line, whose report shows that training has
//! begun.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};

use crate::program::flechette_in;

pub fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

/// Waits for the report of a malformed line, which shows that training has begun, and interrupts it. Returns
/// its log.
pub fn interrupt_after_a_skipped_line(child: &mut Child) -> String {
    signal_after_a_skipped_line(child, &["-INT"])
}

/// Waits for the report of a malformed line. Returns the log so far, and its rest.
pub(super) fn until_a_skipped_line(child: &mut Child) -> (String, BufReader<ChildStderr>) {
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut report = String::new();
    while !report.contains("skipped") {
        assert!(log.read_line(&mut report).unwrap() > 0, "{report}");
    }
    (report, log)
}

/// As [`interrupt_after_a_skipped_line`], with these signals.
pub(super) fn signal_after_a_skipped_line(child: &mut Child, signals: &[&str]) -> String {
    let (mut report, mut log) = until_a_skipped_line(child);
    signals.iter().for_each(|name| signal(child, name));
    log.read_to_string(&mut report).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{report}");
    report
}

/// Starts `train` with standard input as a file, which has a text and then a malformed line.
pub(super) fn start_with_input(line: &str, text: &str) -> (Child, ChildStdin) {
    start_with_input_in("true", line, text)
}

/// As [`start_with_input`], in a shell that ran `setup`.
pub(super) fn start_with_input_in(setup: &str, line: &str, text: &str) -> (Child, ChildStdin) {
    let mut child = flechette_in(setup, line);
    let child = child.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(text.as_bytes()).unwrap();
    stdin.write_all(b"not a sample\n").unwrap();
    (child, stdin)
}
