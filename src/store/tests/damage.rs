//! A version with a damaged file is refused with the name of the file, and the version before is used.

use std::fs;

use super::Sample;
use super::two_versions::{assert_refused_by_name, files_of, replace, two_versions};
use crate::store::{self, Candidates, Purpose, StoreError, open_highest};
use crate::types::Version;

#[test]
fn a_version_with_any_flipped_byte_is_refused_and_the_version_before_is_used() {
    let (dir, first) = two_versions();
    for path in files_of(&dir.path().join("m/2")) {
        let good = fs::read(&path).unwrap();
        // In short files every byte; in long files the bytes near both ends, and every 61st.
        let positions = (0..good.len())
            .filter(|at| good.len() < 1024 || *at < 64 || at % 61 == 0 || at + 64 > good.len());
        for at in positions {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            replace(&path, &bad);
            assert_refused_by_name(dir.path(), &first, &path, &format!("byte {at}"));
        }
        replace(&path, &good);
    }
    assert_eq!(
        store::open_latest(dir.path(), "m", Purpose::Serve).unwrap().opened.store.version(),
        Version(2)
    );
}

#[test]
fn a_version_with_a_file_of_another_length_is_refused_and_the_version_before_is_used() {
    let (dir, first) = two_versions();
    for path in files_of(&dir.path().join("m/2")) {
        let good = fs::read(&path).unwrap();
        let lengths = (0..good.len()).filter(|at| *at < 16 || at % 127 == 0 || at + 16 > good.len());
        for length in lengths {
            replace(&path, &good[..length]);
            assert_refused_by_name(dir.path(), &first, &path, &format!("{length} bytes"));
        }
        replace(&path, &[good.as_slice(), b" "].concat());
        assert_refused_by_name(dir.path(), &first, &path, "one byte more");
        fs::remove_file(&path).unwrap();
        assert_refused_by_name(dir.path(), &first, &path, "no file");
        fs::create_dir(&path).unwrap();
        assert_refused_by_name(dir.path(), &first, &path, "a directory");
        fs::remove_dir(&path).unwrap();
        fs::write(&path, &good).unwrap();
    }
    assert_eq!(
        store::open_latest(dir.path(), "m", Purpose::Serve).unwrap().opened.store.version(),
        Version(2)
    );
}

#[test]
fn each_kind_of_damage_has_its_message() {
    let (dir, _) = two_versions();
    let path = dir.path().join("m/2/tables/t1.safetensors");
    let good = fs::read(&path).unwrap();
    let open = || store::open(dir.path(), "m", Version(2), Purpose::Serve).unwrap_err();

    replace(&path, &good[..100]);
    let error = open();
    assert!(matches!(error, StoreError::Size { expected, got: 100, .. } if expected == good.len() as u64));
    assert!(error.to_string().contains("t1.safetensors: truncated: expected"), "{error}");
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    replace(&path, &bad);
    assert!(matches!(open(), StoreError::Checksum { expected, got, .. } if expected != got));
    fs::remove_file(&path).unwrap();
    assert!(matches!(open(), StoreError::MissingFile { path: missing } if missing == path));
}

#[test]
fn without_a_good_version_the_error_lists_every_refusal() {
    let (dir, _) = two_versions();
    fs::remove_file(dir.path().join("m/1/dense.safetensors")).unwrap();
    fs::remove_file(dir.path().join("m/2/MANIFEST.json")).unwrap();
    fs::write(dir.path().join("m/3"), "a file").unwrap();
    fs::create_dir(dir.path().join("m/7")).unwrap();
    let error = store::open_latest(dir.path(), "m", Purpose::Serve).unwrap_err().to_string();
    for part in
        ["version 7", "version 3", "m/3: not a directory", "m/2/MANIFEST.json: missing file", "m/1/dense"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    // The next number is above all existing ones, good or not.
    assert_eq!(Sample::of(3).write(dir.path(), "m").unwrap(), Version(8));
    assert_eq!(
        store::open_latest(dir.path(), "m", Purpose::Serve).unwrap().opened.store.version(),
        Version(8)
    );
}

#[test]
fn a_version_that_the_caller_does_not_accept_is_skipped() {
    let (dir, first) = two_versions();
    let versions = store::versions(dir.path(), "m").unwrap();
    let candidates = Candidates { models: dir.path(), name: "m", versions: &versions };
    let latest = open_highest(candidates, Purpose::Serve, |opened| match opened.metadata["seed"].as_str() {
        "2" => Err("deep.0.weight: expected [3, 6], got [3, 5]".to_owned()),
        _ => Ok(()),
    });
    let latest = latest.unwrap();
    first.assert_is(&latest.opened);
    assert!(
        matches!(&latest.refused[0].reason, StoreError::NotAccepted { reason } if reason.contains("[3, 6]"))
    );
}
