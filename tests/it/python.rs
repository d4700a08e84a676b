//! A Python interpreter with the packages that tests need.

use std::process::Command;
use std::sync::OnceLock;

/// The path of the interpreter, or the reason why there is none. The first call of a run may install
/// packages.
pub fn python() -> Result<String, String> {
    static FOUND: OnceLock<Result<String, String>> = OnceLock::new();
    FOUND.get_or_init(find).clone()
}

fn find() -> Result<String, String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/.ci/python");
    let output = Command::new(script).output();
    let output = output.map_err(|error| format!(".ci/python cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "no Python with the packages of .ci/python: {}",
        errors.lines().last().unwrap_or("no message")
    ))
}
