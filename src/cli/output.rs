//! Files that a command writes: checked before its work, which may take hours.

use std::fmt::Display;
use std::fs::{File, remove_file};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::anyhow;

use super::InputError;
use super::terminal::ClosedOutput;
use super::training_flags::is_pipe;

/// Checks that a file can be written, and that it is none of the files that the command reads. An existing
/// file keeps its contents.
///
/// # Errors
/// What is wrong, with the flag and the path.
pub(crate) fn check<'p>(
    flag: &str,
    path: &Path,
    inputs: impl IntoIterator<Item = &'p PathBuf>,
) -> anyhow::Result<()> {
    if is_pipe(path) {
        return Ok(());
    }
    let wrong = |reason: &str| refused(flag, path, reason);
    if let Some(input) = inputs.into_iter().find(|input| is_same(path, input)) {
        return Err(wrong(&format!("would replace {}, which is read", input.display())).into());
    }
    if path.is_dir() {
        return Err(wrong("is a directory").into());
    }
    let new = !path.exists();
    if new && path.is_symlink() {
        return Err(wrong("is a link to a file that does not exist").into());
    }
    // Opening for appending changes nothing.
    let opened = File::options().append(true).create(true).open(path);
    let checked = opened.and_then(|_| if new { remove_file(path) } else { Ok(()) });
    Ok(checked.map_err(|e| wrong(&e.to_string()))?)
}

/// The error of a file that the user must name differently, or make writable.
pub(crate) fn refused(flag: &str, path: &Path, reason: impl Display) -> InputError {
    InputError(anyhow!("{flag}: {}: {reason}", path.display()))
}

/// Whether a path leads to standard output.
pub(crate) fn is_stdout(path: &Path) -> bool {
    is_same(path, Path::new("/dev/stdout"))
}

/// The error of a file that cannot be written. Standard output may be the file, and its reader may close it.
pub(crate) fn unwritten(flag: &str, path: &Path, error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::BrokenPipe && is_stdout(path) {
        return ClosedOutput.into();
    }
    anyhow::Error::from(error).context(format!("{flag}: {}", path.display()))
}

/// Whether two paths lead to one file.
fn is_same(one: &Path, other: &Path) -> bool {
    match (one.metadata(), other.metadata()) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_read_or_cannot_be_written_is_refused_and_another_one_is_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("in"), "samples").unwrap();
        std::os::unix::fs::symlink(at("in"), at("link")).unwrap();
        std::fs::write(at("old"), "scores").unwrap();
        let inputs = [at("other"), at("in")];
        let refusal = |name: &str| check("--out", &at(name), &inputs).unwrap_err().to_string();
        for name in ["in", "link"] {
            assert!(refusal(name).ends_with("in, which is read"), "{}", refusal(name));
        }
        assert!(refusal("").ends_with("is a directory"));
        assert!(refusal("missing/out").starts_with("--out: "));
        std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
        assert!(refusal("dangling").ends_with("is a link to a file that does not exist"));
        assert!(at("dangling").is_symlink());
        check("--out", &at("old"), &inputs).unwrap();
        check("--out", &at("new"), &inputs).unwrap();
        assert_eq!(std::fs::read_to_string(at("old")).unwrap(), "scores");
        assert!(!at("new").exists());
    }
}
