//! Which names and directories are models and versions, and which are refused.

use std::fs;

use super::Sample;
use super::two_versions::two_versions;
use crate::store::{self, Purpose, StoreError};
use crate::types::Version;

#[test]
fn only_numbers_are_versions_and_only_directories_with_versions_are_models() {
    let (dir, _) = two_versions();
    for name in ["007", "+3", "-1", "3.0", "state", ".4", "99999999999999999999"] {
        fs::create_dir_all(dir.path().join("m").join(name)).unwrap();
    }
    fs::create_dir_all(dir.path().join("no_version/state")).unwrap();
    fs::create_dir_all(dir.path().join(".hidden/1")).unwrap();
    fs::create_dir_all(dir.path().join("lost+found/1")).unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    std::os::unix::fs::symlink("nowhere", dir.path().join("dangling")).unwrap();
    assert_eq!(store::versions(dir.path(), "m").unwrap(), vec![Version(1), Version(2)]);
    assert_eq!(store::models(dir.path()).unwrap(), vec!["m"]);
    // A directory that cannot be read may be a model, and does not hide the others.
    std::os::unix::fs::symlink("unreadable", dir.path().join("unreadable")).unwrap();
    assert_eq!(store::models(dir.path()).unwrap(), vec!["m", "unreadable"]);
    fs::remove_file(dir.path().join("unreadable")).unwrap();

    fs::create_dir(dir.path().join("m").join(u64::MAX.to_string())).unwrap();
    let error = Sample::of(3).write(dir.path(), "m").unwrap_err();
    assert!(matches!(error, StoreError::NumbersExhausted { .. }), "{error}");
}

#[test]
fn a_missing_directory_and_a_file_in_its_place_are_errors_with_the_path() {
    let (dir, sample) = two_versions();
    let nowhere = dir.path().join("nowhere");
    assert!(matches!(store::models(&nowhere), Err(StoreError::MissingDirectory { path }) if path == nowhere));
    assert!(matches!(store::versions(dir.path(), "x"), Err(StoreError::MissingDirectory { .. })));
    assert!(matches!(
        store::open_latest(dir.path(), "x", Purpose::Serve),
        Err(StoreError::MissingDirectory { .. })
    ));
    assert!(matches!(
        store::open(dir.path(), "m", Version(3), Purpose::Serve),
        Err(StoreError::MissingDirectory { .. })
    ));
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(store::models(&file), Err(StoreError::NotADirectory { path }) if path == file));
    assert!(matches!(sample.write(&file, "m"), Err(StoreError::NotADirectory { .. })));
    assert!(
        matches!(sample.write(dir.path(), "file"), Err(StoreError::NotADirectory { path }) if path == file)
    );
}

#[test]
fn names_that_are_paths_are_refused() {
    let (dir, mut sample) = two_versions();
    for name in ["", ".", "..", ".hidden", "a/b", "/etc", "a\\b", "a\0b", &"x".repeat(129)] {
        assert!(
            matches!(sample.write(dir.path(), name), Err(StoreError::Name { what: "model", .. })),
            "{name:?}"
        );
        assert!(matches!(store::versions(dir.path(), name), Err(StoreError::Name { .. })), "{name:?}");
        assert!(
            matches!(store::open(dir.path(), name, Version(1), Purpose::Serve), Err(StoreError::Name { .. })),
            "{name:?}"
        );
    }
    sample.schema.tables[0].name = "../../escape".to_owned();
    sample.schema.features[0].table = "../../escape".to_owned();
    let error = sample.write(dir.path(), "m").unwrap_err();
    assert!(matches!(error, StoreError::Schema { .. }) && error.to_string().contains("escape"), "{error}");
}
