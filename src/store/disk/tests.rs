//! The syncs of [`SystemDisk`] reach the kernel. Tests of the writer only record syncs, so they cannot show
//! that.
//!
//! `fsync` on `/dev/null` and on a directory of `/proc` fails with `EINVAL`, because they have nothing to
//! sync. A sync that makes no system call would succeed.

use super::*;

#[track_caller]
fn assert_refused_by_the_kernel(synced: io::Result<()>) {
    assert_eq!(synced.unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn syncing_a_file_calls_fsync() {
    let path = Path::new("/dev/null");
    assert_refused_by_the_kernel(SystemDisk.sync(&File::open(path).unwrap(), path));
    let file = tempfile::NamedTempFile::new().unwrap();
    SystemDisk.sync(file.as_file(), file.path()).unwrap();
}

#[test]
fn syncing_a_directory_calls_fsync() {
    assert_refused_by_the_kernel(SystemDisk.sync_dir(Path::new("/proc/self")));
    SystemDisk.sync_dir(tempfile::tempdir().unwrap().path()).unwrap();
}
