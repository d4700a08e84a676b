//! Versions on disk: they read back to the bit. A damaged version is refused with the file's name, and the
//! previous version is used.

pub(crate) mod chain;
pub(crate) mod footprint;
pub(crate) mod fuzz;
mod sample;
mod writers;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::config::TableMemory;
use crate::rowlog::Uniform;
use crate::store;
use crate::store::format::Dtype;
use crate::store::{EmbeddingStore, PlainMemory, Purpose, StateShape, StoreError, Table};
use crate::types::{Element, TableId, Version};
use proptest::prelude::*;

pub(crate) use crate::store::crash::entries;
pub(crate) use sample::Sample;

/// Every file of a version, by its path.
fn files_of(version: &Path) -> Vec<PathBuf> {
    let tables = ["t0", "t1", "t2", "t3"].map(|table| format!("tables/{table}.safetensors"));
    let files = ["model.toml", "dense.safetensors", "MANIFEST.json"].map(str::to_owned);
    files.iter().chain(&tables).map(|file| version.join(file)).collect()
}

/// Replaces the bytes of a published file, as a failing disk would.
fn replace(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

fn two_versions() -> (tempfile::TempDir, Sample) {
    let dir = tempfile::tempdir().unwrap();
    let first = Sample::of(1);
    assert_eq!(first.write(dir.path(), "m").unwrap(), Version(1));
    assert_eq!(Sample::of(2).write(dir.path(), "m").unwrap(), Version(2));
    (dir, first)
}

/// Asserts that version 2 is refused with an error that names `file`, and that version 1 is opened.
fn assert_refused_by_name(models: &Path, first: &Sample, file: &Path, what: &str) {
    let latest = store::open_latest(models, "m", Purpose::Serve, |_| Ok(())).unwrap();
    assert_eq!(latest.opened.store.version(), Version(1), "{what}");
    first.assert_is(&latest.opened);
    assert_eq!(latest.refused.len(), 1);
    assert_eq!(latest.refused[0].version, Version(2));
    let reason = latest.refused[0].reason.to_string();
    assert!(reason.starts_with(&*file.to_string_lossy()), "{what}: {reason}");
    let in_memory = store::open(models, "m", Version(2), Purpose::ServeFrom(TableMemory::Ram)).unwrap_err();
    assert_eq!(in_memory.to_string(), reason, "{what}");
}

/// Any bit pattern of an f32.
fn any_floats(len: usize) -> impl Strategy<Value = Vec<f32>> {
    let special = prop_oneof![Just(f32::NAN.to_bits()), Just(0xffc0_1234), Just((-0.0_f32).to_bits())];
    proptest::collection::vec(prop_oneof![4 => any::<u32>(), 1 => special].prop_map(f32::from_bits), len)
}

fn any_sample() -> impl Strategy<Value = Sample> {
    let element = proptest::sample::select(Element::ALL.to_vec());
    let sizes = proptest::collection::vec((1_u64..60, 1_usize..9, element), 1..4);
    let states =
        proptest::sample::subsequence(vec![("sum", true), ("exp_avg", false), ("step", true)], 0..=3);
    let shapes =
        proptest::collection::btree_map("[a-z.0-9]{1,9}", proptest::collection::vec(0_usize..5, 0..4), 0..4);
    let metadata = proptest::collection::btree_map(".{0,6}", ".{0,6}", 0..3);
    (sizes, states, shapes, metadata).prop_flat_map(|(sizes, states, shapes, metadata)| {
        let table: usize = sizes.iter().map(|&(rows, dim, _)| rows as usize * dim).sum();
        let dense: usize = shapes.values().map(|shape| shape.iter().product::<usize>()).sum();
        any_floats(table * 4 + dense).prop_map(move |values| {
            let mut sample = Sample::zeroed(&sizes, &states);
            let mut values = values.into_iter();
            let mut fill = |to: &mut [f32]| to.iter_mut().for_each(|x| *x = values.next().unwrap());
            for (table, (.., element)) in sample.tables.iter_mut().zip(&sizes) {
                let (rows, states) = table.parts_mut().unwrap();
                fill(rows);
                if *element != Element::F32 {
                    // Values that every element type can hold.
                    rows.iter_mut().for_each(|x| *x = x.to_bits() as i32 as f32 * 1e-6);
                } else {
                    // Readers refuse other rows.
                    rows.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = -0.0);
                }
                states.iter_mut().for_each(|state| fill(state.rows_mut().unwrap()));
            }
            for (name, shape) in &shapes {
                let mut values = vec![0.0; shape.iter().product()];
                fill(&mut values);
                sample.dense.push((name.clone(), shape.clone(), values));
            }
            sample.metadata.clone_from(&metadata);
            sample
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_version_reads_back_to_the_bit(sample in any_sample()) {
        let dir = tempfile::tempdir().unwrap();
        let models = dir.path().join("made/on/demand");
        prop_assert_eq!(sample.write(&models, "m").unwrap(), Version(1));
        sample.assert_is_at(&models, "m", Version(1));
        prop_assert_eq!(store::models(&models).unwrap(), vec!["m"]);
    }
}

#[test]
fn the_files_are_plain_safetensors_whose_data_begins_on_a_page() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::of(9);
    sample.write(dir.path(), "m").unwrap();
    let bytes = fs::read(dir.path().join("m/1/tables/t1.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(header % 4096, 0);

    let public = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weight = public.tensor("weight").unwrap();
    assert_eq!((weight.dtype(), weight.shape()), (safetensors::Dtype::F32, &[40, 2][..]));
    assert_eq!(Some(weight.data()), sample.tables[1].as_bytes());
    assert_eq!(weight.data().as_ptr(), bytes[header as usize..].as_ptr(), "weight comes first");

    let bytes = fs::read(dir.path().join("m/1/checkpoint/tables/t1.safetensors")).unwrap();
    let public = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let sum = public.tensor("step").unwrap();
    assert_eq!(sum.shape(), &[40, 1]);
    assert_eq!(sum.data(), bytemuck::cast_slice::<f32, u8>(sample.tables[1].states()[1].as_slice()));

    let bytes = fs::read(dir.path().join("m/1/dense.safetensors")).unwrap();
    let public = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(public.tensor("deep.0.weight").unwrap().shape(), &[3, 5]);
}

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
        store::open_latest(dir.path(), "m", Purpose::Serve, |_| Ok(())).unwrap().opened.store.version(),
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
        store::open_latest(dir.path(), "m", Purpose::Serve, |_| Ok(())).unwrap().opened.store.version(),
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

/// Changes the files of a version and writes a manifest that matches them.
fn forge(version: &Path, change: impl FnOnce(&mut BTreeMap<String, Vec<u8>>)) {
    use store::format::{Checksum, FileEntry, Manifest};
    let (manifest, _) = Manifest::parse(&fs::read(version.join("MANIFEST.json")).unwrap()).unwrap();
    let mut files: BTreeMap<String, Vec<u8>> =
        manifest.files.keys().map(|name| (name.clone(), fs::read(version.join(name)).unwrap())).collect();
    change(&mut files);
    let mut forged = Manifest { files: BTreeMap::new(), ..manifest };
    fs::remove_dir_all(version).unwrap();
    for (name, bytes) in &files {
        let entry = FileEntry { bytes: bytes.len() as u64, xxh3_128: Checksum::of(bytes) };
        forged.files.insert(name.clone(), entry);
        fs::create_dir_all(version.join(name).parent().unwrap()).unwrap();
        fs::write(version.join(name), bytes).unwrap();
    }
    fs::write(version.join("MANIFEST.json"), forged.encode().unwrap().0).unwrap();
}

fn table_bytes(dtype: Dtype, tensors: &[(&str, &[u64])]) -> Vec<u8> {
    let typed: Vec<_> = tensors.iter().map(|&(name, shape)| (name, dtype, shape)).collect();
    let mut bytes = store::format::encode_header(&typed).unwrap();
    let elements: u64 = tensors.iter().map(|(_, shape)| shape.iter().product::<u64>()).sum();
    let width = match dtype {
        Dtype::F32 => 4,
        Dtype::F16 => 2,
        Dtype::U8 => 1,
        Dtype::U64 => 8,
    };
    bytes.resize(bytes.len() + elements as usize * width, 0);
    bytes
}

#[test]
fn rows_of_the_wrong_element_type_are_refused_even_with_valid_checksums() {
    let cases = [
        ("t0", Dtype::F16, [3, 4], "tensor \"weight\": expected dtype F32, got F16"),
        ("t2", Dtype::F32, [7, 5], "tensor \"weight\": expected dtype F16, got F32"),
        ("t3", Dtype::F32, [9, 6], "tensor \"weight\": expected dtype U8, got F32"),
        ("t2", Dtype::F16, [7, 5], "tensor \"weight\": expected shape [7, 6], got shape [7, 5]"),
        ("t3", Dtype::U8, [9, 14], "tensor \"weight\": expected shape [9, 16], got shape [9, 14]"),
    ];
    for (table, dtype, shape, reason) in cases {
        let (dir, first) = two_versions();
        let version = dir.path().join("m/2");
        let file = format!("tables/{table}.safetensors");
        forge(&version, |files| drop(files.insert(file.clone(), table_bytes(dtype, &[("weight", &shape)]))));
        let error = store::open(dir.path(), "m", Version(2), Purpose::Serve).unwrap_err().to_string();
        assert!(error.ends_with(reason), "{error}");
        assert_refused_by_name(dir.path(), &first, &version.join(file), reason);
    }
    let (dir, _) = two_versions();
    forge(&dir.path().join("m/2"), |files| {
        let bytes = table_bytes(Dtype::U8, &[("w", &[3])]);
        drop(files.insert("dense.safetensors".to_owned(), bytes));
    });
    let error = store::open(dir.path(), "m", Version(2), Purpose::Serve).unwrap_err().to_string();
    assert!(error.ends_with("tensor \"w\": expected dtype F32, got U8"), "{error}");
}

#[test]
fn a_row_that_cannot_be_encoded_is_refused_with_table_row_and_element_and_leaves_no_files() {
    let cases = [
        (2, [1.0, f32::NAN], "t2.safetensors: row 6: element 1: expected a finite number, got NaN"),
        (2, [0.0, 7e4], "t2.safetensors: row 6: element 1: 70000 is larger in magnitude than 65504"),
        (3, [1.0, f32::INFINITY], "t3.safetensors: row 6: element 1: expected a finite number, got inf"),
        (3, [f32::MIN, f32::MAX], "t3.safetensors: row 6: elements from"),
    ];
    let (dir, first) = two_versions();
    for (table, bad, reason) in cases {
        let mut sample = Sample::of(3);
        sample.tables[table].row_mut(6).unwrap()[..2].copy_from_slice(&bad);
        let error = sample.write(dir.path(), "m").unwrap_err();
        assert!(matches!(error, StoreError::Row { .. }) && error.to_string().contains(reason), "{error}");
        assert_eq!(store::versions(dir.path(), "m").unwrap(), [Version(1), Version(2)]);
        assert_eq!(entries(dir.path()), 2, "no temporary directory is left");
    }
    first.assert_is(&store::open(dir.path(), "m", Version(1), Purpose::Serve).unwrap());
}

#[test]
fn an_int8_table_takes_a_quarter_of_the_bytes_and_is_copied_unchanged_into_the_next_version() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = Element::ALL.map(|element| {
        let mut sample = Sample::zeroed(&[(5000, 64, element)], &[]);
        Uniform { seed: 1, table_code: 1, bound: 1.0 }.table(64, sample.tables[0].rows_mut().unwrap());
        let version = sample.write(dir.path(), "m").unwrap();
        let opened = store::open(dir.path(), "m", version, Purpose::Serve).unwrap();
        sample.assert_is(&opened);
        // The next version is written from the stored rows, so nothing is rounded twice.
        let again = Sample { tables: opened.store.copied(&PlainMemory).unwrap().into_tables(), ..sample };
        let version = again.write(dir.path(), "m").unwrap();
        let copied = store::open(dir.path(), "m", version, Purpose::Serve).unwrap();
        assert_eq!(copied.store.tables()[0].as_bytes(), opened.store.tables()[0].as_bytes());
        let file = dir.path().join(format!("m/{version}/tables/t0.safetensors"));
        (opened.store.row_bytes(), fs::metadata(file).unwrap().len())
    });
    assert_eq!(bytes.map(|(rows, _)| rows), [5000 * 256, 5000 * 128, 5000 * 72]);
    assert_eq!(bytes.map(|(rows, file)| file - rows), [4096; 3], "a header's page");
}

#[test]
fn encoded_rows_are_not_written_as_another_element_type() {
    let dir = tempfile::tempdir().unwrap();
    let mut sample = Sample::of(1);
    sample.tables[3] = sample.tables[3].encoded(Element::F16, &PlainMemory).unwrap();
    let error = sample.write(dir.path(), "m").unwrap_err().to_string();
    assert!(error.ends_with("t3.safetensors: tensor \"weight\": expected f32 or int8, got f16"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn unknown_tensors_and_files_are_refused_even_with_valid_checksums() {
    type Tensors<'a> = &'a [(&'a str, &'a [u64])];
    let bad: [(Tensors, &str); 6] = [
        (&[("weight", &[3, 5])], "weight"),
        (&[("weight", &[4, 4])], "weight"),
        (&[("weight", &[12])], "weight"),
        (&[("weight", &[3, 4]), ("sum", &[3, 2])], "sum"),
        (&[("weight", &[3, 4]), ("keys", &[3, 1])], "keys"),
        (&[("sum", &[3, 4])], "weight"),
    ];
    for (tensors, named) in bad {
        let (dir, first) = two_versions();
        let version = dir.path().join("m/2");
        forge(&version, |files| {
            drop(files.insert("tables/t0.safetensors".to_owned(), table_bytes(Dtype::F32, tensors)))
        });
        let error = store::open(dir.path(), "m", Version(2), Purpose::Serve).unwrap_err();
        assert!(matches!(&error, StoreError::Tensor { tensor, .. } if tensor == named), "{error}");
        assert_refused_by_name(dir.path(), &first, &version.join("tables/t0.safetensors"), named);
    }

    let (dir, _) = two_versions();
    forge(&dir.path().join("m/2"), |files| drop(files.insert("tables/t9.safetensors".to_owned(), vec![])));
    let error = store::open(dir.path(), "m", Version(2), Purpose::Serve).unwrap_err();
    assert!(matches!(&error, StoreError::UnexpectedFile { file, .. } if file == "tables/t9.safetensors"));

    let (dir, _) = two_versions();
    forge(&dir.path().join("m/2"), |files| drop(files.remove("tables/t1.safetensors")));
    let error = store::open(dir.path(), "m", Version(2), Purpose::Serve).unwrap_err();
    assert!(matches!(error, StoreError::MissingFile { path } if path.ends_with("m/2/tables/t1.safetensors")));

    let (dir, _) = two_versions();
    forge(&dir.path().join("m/2"), |files| drop(files.insert("model.toml".to_owned(), b"what = 1".to_vec())));
    assert!(matches!(
        store::open(dir.path(), "m", Version(2), Purpose::Serve).unwrap_err(),
        StoreError::Schema { .. }
    ));

    let (dir, _) = two_versions();
    forge(&dir.path().join("m/2"), |files| {
        let file = files.get_mut("dense.safetensors").unwrap();
        file[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    });
    let error = store::open(dir.path(), "m", Version(2), Purpose::Serve).unwrap_err();
    assert!(error.to_string().contains("dense.safetensors: header: limit"), "{error}");
}

#[test]
fn without_a_good_version_the_error_lists_every_refusal() {
    let (dir, _) = two_versions();
    fs::remove_file(dir.path().join("m/1/dense.safetensors")).unwrap();
    fs::remove_file(dir.path().join("m/2/MANIFEST.json")).unwrap();
    fs::write(dir.path().join("m/3"), "a file").unwrap();
    fs::create_dir(dir.path().join("m/7")).unwrap();
    let error = store::open_latest(dir.path(), "m", Purpose::Serve, |_| Ok(())).unwrap_err().to_string();
    for part in
        ["version 7", "version 3", "m/3: not a directory", "m/2/MANIFEST.json: missing file", "m/1/dense"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    // The next number is above all existing ones, good or not.
    assert_eq!(Sample::of(3).write(dir.path(), "m").unwrap(), Version(8));
    assert_eq!(
        store::open_latest(dir.path(), "m", Purpose::Serve, |_| Ok(())).unwrap().opened.store.version(),
        Version(8)
    );
}

#[test]
fn a_version_that_the_caller_does_not_accept_is_skipped() {
    let (dir, first) = two_versions();
    let latest = store::open_latest(dir.path(), "m", Purpose::Serve, |opened| match opened.metadata["seed"]
        .as_str()
    {
        "2" => Err("deep.0.weight: expected [3, 6], got [3, 5]".to_owned()),
        _ => Ok(()),
    });
    let latest = latest.unwrap();
    first.assert_is(&latest.opened);
    assert!(
        matches!(&latest.refused[0].reason, StoreError::NotAccepted { reason } if reason.contains("[3, 6]"))
    );
}

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
        store::open_latest(dir.path(), "x", Purpose::Serve, |_| Ok(())),
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

#[test]
fn contents_that_do_not_match_their_schema_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut sample = Sample::of(1);
    sample.dense[0].1 = vec![3, 6];
    let error = sample.write(dir.path(), "m").unwrap_err();
    assert!(matches!(&error, StoreError::Tensor { tensor, .. } if tensor == "deep.0.weight"), "{error}");

    let mut sample = Sample::of(1);
    sample.tables[1] = Table::zeroed(&PlainMemory, 40, 3, &[]).unwrap();
    assert!(matches!(sample.write(dir.path(), "m"), Err(StoreError::Tensor { .. })));
    for state in [("keys", 1), ("sum", 7)] {
        sample.tables[1] = Table::zeroed(&PlainMemory, 40, 2, &[StateShape::new(state.0, state.1)]).unwrap();
        assert!(matches!(sample.write(dir.path(), "m"), Err(StoreError::Tensor { .. })), "{state:?}");
    }
    sample.tables.pop();
    assert!(matches!(sample.write(dir.path(), "m"), Err(StoreError::Tables { expected: 4, got: 3 })));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn an_open_version_stays_readable_when_its_directory_is_removed() {
    let (dir, first) = two_versions();
    let opened = store::open(dir.path(), "m", Version(1), Purpose::Serve).unwrap();
    fs::remove_dir_all(dir.path().join("m")).unwrap();
    first.assert_is(&opened);
    opened.store.prefault();
}

#[test]
fn a_store_finds_rows_by_table_and_id_and_its_copy_is_independent() {
    let (dir, first) = two_versions();
    let store = store::open(dir.path(), "m", Version(1), Purpose::Serve).unwrap().store;
    assert_eq!(store.row(TableId(1), 39), first.tables[1].row(39));
    assert_eq!(store.row(TableId(1), 40), None);
    assert_eq!(store.row(TableId(3), 8).map(<[u8]>::len), Some(8 + 8));
    assert_eq!(store.row(TableId(4), 0), None);
    assert_eq!(store.bytes(), 4 * (3 * 4 + 40 * 2) + 7 * 12 + 9 * 16);

    let mut copy: EmbeddingStore = store.copied(&PlainMemory).unwrap();
    assert_eq!((copy.version(), copy.bytes()), (Version(1), store.bytes()));
    let mut tables = copy.into_tables();
    tables[1].row_mut(39).unwrap().fill(7.0);
    copy = EmbeddingStore::new(Version(1), tables);
    assert_eq!(copy.row(TableId(1), 39), Some(bytemuck::cast_slice(&[7.0_f32; 2])));
    assert_eq!(store.row(TableId(1), 39), first.tables[1].row(39));
}

#[test]
fn published_files_are_read_only() {
    let (dir, _) = two_versions();
    for path in files_of(&dir.path().join("m/2")) {
        assert!(fs::metadata(&path).unwrap().permissions().readonly(), "{}", path.display());
    }
}
