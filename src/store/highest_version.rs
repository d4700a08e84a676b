//! The highest number that a version of a model has had, so that no number is used twice.
//!
//! The next number is above those of all versions on disk. If the highest version is deleted by hand, the
//! directory no longer shows its number. A server that has loaded it would then mistake a new version of that
//! number for the loaded one. So the file `models/<model>/state/highest_version` keeps the number, as a line
//! of decimal text.
//!
//! It is written without a sync and after the version, because it matters only once that version is gone. A
//! file that is lost or damaged is ignored.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::hot_rows::STATE;
use crate::types::Version;

const FILE: &str = "highest_version";

/// Bytes of the longest number and the end of its line.
const MAX_BYTES: u64 = 21;

/// The number that the file of this model's directory has; `None` if there is none.
pub(crate) fn read(model: &Path) -> Option<Version> {
    let path = path(model);
    let mut text = String::new();
    // Opening a pipe would wait for a writer.
    let file = path.is_file().then(|| File::open(path).ok()).flatten()?;
    file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
    // After the highest of all numbers there is none, so no writer has given it.
    text.trim_end().parse().ok().filter(|&number| number < u64::MAX).map(Version)
}

/// Writes the number of a version, if the file has none or a lower one. A failure is logged.
pub(crate) fn raise(model: &Path, version: Version) {
    if read(model) >= Some(version) {
        return;
    }
    if let Err(error) = write(model, version) {
        let path = path(model);
        tracing::warn!(path = %path.display(), %error, "the highest number of a version is not written");
    }
}

fn write(model: &Path, version: Version) -> io::Result<()> {
    fs::create_dir_all(model.join(STATE))?;
    let text = format!("{version}\n");
    // The old number is overwritten, so that it stays if the disk is full.
    let mut file = OpenOptions::new().create(true).write(true).truncate(false).open(path(model))?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)
}

fn path(model: &Path) -> PathBuf {
    model.join(STATE).join(FILE)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_only_raised_and_a_damaged_file_counts_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path();
        assert_eq!(read(model), None);
        for (written, highest) in [(3, 3), (12, 12), (5, 12), (u64::MAX - 1, u64::MAX - 1)] {
            raise(model, Version(written));
            assert_eq!(read(model), Some(Version(highest)));
        }
        for damaged in ["", "x", "-1", "18446744073709551615", "184467440737095516160", "7 8", "\u{feff}7"] {
            fs::write(path(model), damaged).unwrap();
            assert_eq!(read(model), None, "{damaged:?}");
        }
        raise(model, Version(2));
        assert_eq!(read(model), Some(Version(2)));
    }
}
