use super::*;
use crate::store::open_latest;
use crate::store::tests::{Sample, chain, entries};

/// The numbers of the versions on disk.
fn numbers(models: &Path) -> Vec<u64> {
    versions(models, "m").unwrap().iter().map(|version| version.0).collect()
}

#[test]
fn the_newest_full_versions_and_the_deltas_after_the_oldest_of_them_stay() {
    let (dir, _) = chain::chain();
    let models = dir.path();
    assert_eq!(retain(models, "m", 1).unwrap(), [], "a chain needs its full version");
    compact(models, "m", Version(3), Version(3)).unwrap();
    assert_eq!(retain(models, "m", 2).unwrap(), []);
    assert_eq!(retain(models, "m", 1).unwrap(), [1, 2, 3].map(Version));
    assert_eq!(numbers(models), [4]);
    assert_eq!(entries(models), 1, "files are left");
    Sample::of(2).write(models, "m").unwrap();
    assert_eq!(numbers(models), [4, 5], "no number is used again");
}

#[test]
fn a_version_that_a_reader_has_open_is_not_removed() {
    let (dir, samples) = chain::chain();
    let models = dir.path();
    let read = open(models, "m", Version(2), Purpose::Serve).unwrap();
    compact(models, "m", Version(3), Version(3)).unwrap();
    assert_eq!(retain(models, "m", 1).unwrap(), [Version(3)]);
    samples[1].assert_is(&read);
    drop(read);
    assert_eq!(retain(models, "m", 1).unwrap(), [1, 2].map(Version));
}

#[test]
fn what_a_version_builds_on_stays_while_a_reader_is_opening_it() {
    let (dir, _) = chain::chain();
    let models = dir.path();
    // A reader locks the newest version of a chain first.
    let newest = File::open(models.join("m/3")).unwrap();
    newest.lock_shared().unwrap();
    compact(models, "m", Version(3), Version(3)).unwrap();
    assert_eq!(retain(models, "m", 1).unwrap(), []);
    open(models, "m", Version(3), Purpose::Serve).unwrap();
    drop(newest);
    assert_eq!(retain(models, "m", 1).unwrap(), [1, 2, 3].map(Version));
}

#[test]
fn a_version_whose_tables_are_read_without_their_store_is_not_removed() {
    let (dir, _) = chain::chain();
    let models = dir.path();
    let mut tables = open(models, "m", Version(2), Purpose::Train).unwrap().store.into_tables();
    tables.truncate(1);
    compact(models, "m", Version(3), Version(3)).unwrap();
    assert_eq!(retain(models, "m", 1).unwrap(), [Version(3)]);
    drop(tables);
    assert_eq!(retain(models, "m", 1).unwrap(), [1, 2].map(Version));
}

#[test]
fn a_version_that_a_label_names_stays_with_what_it_builds_on() {
    let (dir, _) = chain::chain();
    let models = dir.path();
    compact(models, "m", Version(3), Version(3)).unwrap();
    let set = [
        ("stable".to_owned(), VersionSelector::Version(Version(2))),
        ("canary".to_owned(), VersionSelector::Latest),
    ];
    labels::save(models, "m", &set.into()).unwrap();
    assert_eq!(retain(models, "m", 1).unwrap(), [Version(3)]);
    labels::save(models, "m", &BTreeMap::new()).unwrap();
    assert_eq!(retain(models, "m", 1).unwrap(), [1, 2].map(Version));
}

#[test]
fn what_a_labelled_version_may_build_on_stays_while_the_version_is_being_copied() {
    let (dir, _) = chain::chain();
    let models = dir.path();
    compact(models, "m", Version(3), Version(3)).unwrap();
    let highest = VersionSelector::Version(Version(u64::MAX));
    let set = [("old".to_owned(), VersionSelector::Version(Version(3))), ("none".to_owned(), highest)];
    labels::save(models, "m", &set.into()).unwrap();
    let model = models.join("m");
    for missing in ["3", "2", "3/MANIFEST.json"] {
        let [path, aside] = [missing, ".copied"].map(|name| model.join(name));
        fs::rename(&path, &aside).unwrap();
        assert_eq!(retain(models, "m", 1).unwrap(), [], "without {missing}");
        fs::rename(&aside, &path).unwrap();
    }
    open(models, "m", Version(3), Purpose::Serve).unwrap();
    labels::save(models, "m", &BTreeMap::new()).unwrap();
    assert_eq!(retain(models, "m", 1).unwrap(), [1, 2, 3].map(Version));
}

#[test]
fn what_an_interrupted_removal_has_left_is_removed_by_the_next_one() {
    let (dir, _) = chain::chain();
    let models = dir.path();
    let rest = models.join("m/.1.4000000.0.tmp");
    fs::create_dir(&rest).unwrap();
    fs::write(rest.join("model.toml"), "").unwrap();
    assert_eq!(retain(models, "m", 1).unwrap(), []);
    assert!(!rest.exists());
}

#[test]
fn of_some_versions_those_are_removed_that_nothing_needs() {
    let dir = tempfile::tempdir().unwrap();
    let models = dir.path();
    let base = |version: u64| {
        let (_, xxh3_128) = read_manifest(&models.join("m").join(version.to_string())).unwrap();
        Base { version: Version(version), xxh3_128 }
    };
    (1..=5).for_each(|n| assert_eq!(Sample::of(n).write(models, "m").unwrap(), Version(n)));
    let own = [1, 2, 3, 4].map(base);
    let read = open(models, "m", Version(2), Purpose::Serve).unwrap();
    labels::save(models, "m", &[("old".to_owned(), VersionSelector::Version(Version(3)))].into()).unwrap();
    // Another writer has taken the number of a version.
    fs::remove_dir_all(models.join("m/4")).unwrap();
    fs::rename(models.join("m/5"), models.join("m/4")).unwrap();
    assert_eq!(remove_unused(models, "m", &own).unwrap(), [own[0]]);
    drop(read);
    assert_eq!(remove_unused(models, "m", &own).unwrap(), [own[1]]);
    assert_eq!(numbers(models), [3, 4]);
    let (dir, _) = chain::chain();
    let (_, xxh3_128) = read_manifest(&dir.path().join("m/1")).unwrap();
    assert_eq!(remove_unused(dir.path(), "m", &[Base { version: Version(1), xxh3_128 }]).unwrap(), []);
}

#[test]
fn a_compacted_version_has_the_contents_of_the_chain_and_its_files_do_not_need_it() {
    let (dir, samples) = chain::chain();
    let models = dir.path();
    let bytes = chain_bytes(models, "m", Version(3)).unwrap();
    let size = |version: u64| {
        let (manifest, _) = read_manifest(&models.join("m").join(version.to_string())).unwrap();
        manifest.bytes()
    };
    assert_eq!(bytes, ChainBytes { full: size(1), deltas: size(2) + size(3), length: 2 });
    let hidden = compact(models, "m", Version(2), Version(2)).unwrap_err();
    assert!(hidden.to_string().ends_with("made from version 2, but the highest version is 3"), "{hidden}");
    assert_eq!(compact(models, "m", Version(3), Version(3)).unwrap().version, Version(4));
    assert_eq!(chain_bytes(models, "m", Version(4)).unwrap().deltas, 0);
    retain(models, "m", 1).unwrap();
    samples[2].assert_is_at(models, "m", Version(4));
    samples[2].assert_is(&open_latest(models, "m", Purpose::Serve).unwrap().opened);
}

#[test]
fn a_directory_without_a_manifest_is_not_removed() {
    let (dir, _) = chain::chain();
    let models = dir.path();
    fs::remove_file(models.join("m/2/MANIFEST.json")).unwrap();
    Sample::of(4).write(models, "m").unwrap();
    assert_eq!(retain(models, "m", 1).unwrap(), [1, 3].map(Version));
    assert_eq!(numbers(models), [2, 4]);
}

#[test]
fn the_bytes_of_a_chain_whose_inner_version_was_replaced_are_refused() {
    let (dir, _) = chain::chain();
    let models = dir.path();
    chain_bytes(models, "m", Version(3)).unwrap();
    fs::copy(models.join("m/1/MANIFEST.json"), models.join("m/2/MANIFEST.json")).unwrap();
    let error = chain_bytes(models, "m", Version(3)).unwrap_err();
    assert!(matches!(error, StoreError::BaseDiffers { base: Version(2), .. }), "{error}");
}
