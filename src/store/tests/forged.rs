//! Files that are wrong although their checksums are right: their tensors, element types and names are
//! checked too.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::chain;
use super::two_versions::{assert_refused_by_name, two_versions};
use crate::store::format::Dtype;
use crate::store::{self, Purpose, StoreError};
use crate::types::Version;

/// Changes the files of a version and writes a manifest that matches them.
pub(super) fn forge(version: &Path, change: impl FnOnce(&mut BTreeMap<String, Vec<u8>>)) {
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
fn a_version_with_optimizer_state_that_is_not_finite_is_served_but_not_continued() {
    let (dir, _) = chain::chain();
    forge_infinity(&dir.path().join("m/3"), "checkpoint/tables/t1.safetensors");
    store::open(dir.path(), "m", Version(3), Purpose::Serve).unwrap();
    let error = store::open(dir.path(), "m", Version(3), Purpose::Train).unwrap_err().to_string();
    assert!(error.ends_with("expected finite values, got NaN or infinity"), "{error}");
    let continued = store::open_to_continue(dir.path(), "m", Purpose::Train).unwrap();
    assert_eq!(continued.store.version(), Version(2));
}

/// Makes the last value of a file infinite.
pub(crate) fn forge_infinity(version: &Path, file: &str) {
    forge(version, |files| {
        let bytes = files.get_mut(file).unwrap();
        let end = bytes.len() - 4;
        bytes[end..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    });
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
