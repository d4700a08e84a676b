//! Reports tests that cannot run on this machine. libtest counts them as passed; `.ci/run` counts them as
//! not run.

use std::io::Write;

/// Reports that the calling test does nothing, and why. The report goes to standard error, by a direct write
/// that libtest does not capture, and to the file in `$SKIPPED_TESTS_FILE`.
#[track_caller]
pub(crate) fn skip(reason: &str) {
    report(&test_name(), reason);
}

/// Reports that the calling test runs, but without one of its parts.
#[track_caller]
pub(crate) fn skip_part(reason: &str) {
    report(&format!("{} (in part)", test_name()), reason);
}

/// The name of the calling test: libtest names a thread after its test. With a single thread it does not, so
/// the name is the location of the call.
#[track_caller]
fn test_name() -> String {
    let thread = std::thread::current();
    let name = thread.name().filter(|name| *name != "main").map(str::to_owned);
    name.unwrap_or_else(|| std::panic::Location::caller().to_string())
}

fn report(test: &str, reason: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED: {test}: {reason}\n").as_bytes());
    let Some(list) = std::env::var_os("SKIPPED_TESTS_FILE") else { return };
    let list = std::fs::OpenOptions::new().append(true).create(true).open(list);
    list.unwrap().write_all(format!("{test}: {reason}\n").as_bytes()).unwrap();
}
