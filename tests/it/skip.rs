//! Reports tests that cannot run on this machine. libtest counts them as passed; `.ci/run` subtracts them.

use std::io::Write;

/// Reports that the calling test does nothing, and why: to standard error, which libtest does not capture
/// from direct writes, and to the file that `$SKIPPED_TESTS_FILE` names.
#[track_caller]
pub(crate) fn skip(reason: &str) {
    report(&test_name(), reason);
}

/// Reports that the calling test runs, but without one of its parts.
#[track_caller]
pub(crate) fn skip_part(reason: &str) {
    report(&format!("{} (in part)", test_name()), reason);
}

/// libtest names a thread after its test, except with a single thread.
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
