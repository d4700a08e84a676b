//! The file `full`: the server has refused samples because the log has no room.
//!
//! Room comes only from a published version, after which segments are removed. A trainer that waits for
//! samples before it publishes would wait for ever, because none are stored. It may be in another process,
//! so a file tells it. The file is never synced, because a later request writes it again.

use std::fs;
use std::io;
use std::path::Path;

use super::LogError;

/// The name of the file. It has the limit in bytes, as text.
const FULL: &str = "full";

/// The limit of a log that is full, in bytes; `None` if it has room, as far as is known.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn full_at(dir: &Path) -> Result<Option<u64>, LogError> {
    let path = dir.join(FULL);
    match fs::read_to_string(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        // The file may be read while it is written.
        text => Ok(text.map_err(|e| LogError::io(&path, e))?.trim().parse().ok()),
    }
}

/// Tells trainers that the log is full, or that it has room. Returns whether that succeeded.
pub(super) fn show_full(dir: &Path, full: Option<u64>) -> bool {
    let path = dir.join(FULL);
    let shown = match full {
        Some(limit) => fs::write(&path, limit.to_string()),
        None => fs::remove_file(&path),
    };
    match shown {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("{}: {error}: trainers do not know whether the log is full", path.display());
            false
        }
        _ => true,
    }
}
