//! Which log this is. A cursor counts the samples of one log. The log of another host, or one that was
//! deleted and began again, has segments of the same names, and the cursor must not skip their samples. So
//! each log has a random id, and a cursor has that of its log.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::Path;

use super::LogError;
use crate::store::atomic_write;
use crate::store::disk::Disk;

/// The file of the id: 32 hexadecimal digits.
const ID: &str = "id";
const ID_DIGITS: usize = 32;

/// The id of a log; `None` for a log of a program that knew no ids, and for a damaged file.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn id_of(dir: &Path) -> Result<Option<String>, LogError> {
    let path = dir.join(ID);
    let bytes = match fs::read(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(|e| LogError::io(&path, e))?,
    };
    let whole = bytes.len() == ID_DIGITS && bytes.iter().all(u8::is_ascii_hexdigit);
    Ok(String::from_utf8(bytes).ok().filter(|_| whole))
}

/// Gives a log an id if it has none. A log without segments gets a new one, because its files may have been
/// deleted, and its numbers begin again. No cursor can have the id that it had before.
pub(super) fn identify(disk: &dyn Disk, dir: &Path, is_empty: bool) -> Result<(), LogError> {
    if !is_empty && id_of(dir)?.is_some() {
        return Ok(());
    }
    let random = || RandomState::new().build_hasher().finish();
    let id = format!("{:016x}{:016x}", random(), random());
    Ok(atomic_write::replace(disk, &dir.join(ID), |file, path| disk.append(file, path, id.as_bytes()))?)
}
