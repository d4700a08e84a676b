//! The files of a version, with and without good checksums.

use std::fs;
use std::path::PathBuf;

use super::chain::chain;
use super::two_versions::replace;
use crate::config::TableMemory;
use crate::fuzz::bytes::{Change, Input, changes, mutated, mutated_tensors};
use crate::fuzz::run;
use crate::store::format::{Checksum, FileEntry, Manifest, encode_header, parse_header};
use crate::store::{self, Opened, Purpose, StoreError};
use crate::types::Version;
use proptest::prelude::*;
use proptest::sample::Index;

/// A version with its files, by their paths in it.
pub(crate) struct Published {
    dir: PathBuf,
    pub files: Vec<(String, Vec<u8>)>,
}

const MANIFEST: &str = "MANIFEST.json";

impl Published {
    pub(crate) fn new(dir: PathBuf) -> Self {
        let (manifest, _) = store::link::read_manifest(&dir).unwrap();
        let names = manifest.files.into_keys().chain([MANIFEST.to_owned()]);
        let files = names.map(|name| (name.clone(), fs::read(dir.join(name)).unwrap())).collect();
        Self { dir, files }
    }

    /// Writes a file, and if wanted the manifest with its length and checksum.
    pub(crate) fn change(&self, name: &str, bytes: &[u8], listed: bool) {
        replace(&self.dir.join(name), bytes);
        if listed && name != MANIFEST {
            let (mut manifest, _) = store::link::read_manifest(&self.dir).unwrap();
            let entry = FileEntry { bytes: bytes.len() as u64, xxh3_128: Checksum::of(bytes) };
            manifest.files.insert(name.to_owned(), entry);
            replace(&self.dir.join(MANIFEST), &manifest.encode().unwrap().0);
        }
    }

    pub(crate) fn restore(&self, name: &str) {
        for (file, bytes) in self.files.iter().filter(|(file, _)| file == name || file == MANIFEST) {
            replace(&self.dir.join(file), bytes);
        }
    }
}

/// Everything in an opened version, as text.
fn contents(opened: &Opened) -> String {
    let mut text = format!("{:?} {:?} {:?}", opened.schema, opened.metadata, opened.cursor);
    for (name, dense) in opened.dense.iter().chain(&opened.dense_states) {
        text += &format!("{name} {:?} {:?} ", dense.shape(), dense.values());
    }
    for table in opened.store.tables() {
        for row in 0..table.rows() {
            let states: Vec<_> = (0..table.states().len()).map(|state| table.state(state, row)).collect();
            text += &format!("{:?} {states:?} ", table.row(row));
        }
    }
    text
}

/// Changes of a tensor file's header, whose length is right again.
pub(crate) fn change_header(file: &mut Vec<u8>, changes: &[Change]) {
    let Some((length, rest)) = file.split_first_chunk() else { return };
    let Some((header, data)) = rest.split_at_checked(u64::from_le_bytes(*length) as usize) else { return };
    let mut header = header.trim_ascii_end().to_vec();
    changes.iter().for_each(|change| change.apply(&mut header, &[]));
    header.resize((8 + header.len()).next_multiple_of(4096) - 8, b' ');
    *file = [&(header.len() as u64).to_le_bytes()[..], &header, data].concat();
}

pub(crate) const WORDS: &[&str] = &[
    "keys",
    "weight",
    "sum",
    "step",
    "F32",
    "F16",
    "U8",
    "U64",
    "[0,0]",
    "[",
    "{}",
    "\"__metadata__\":{},",
    "null",
    "rows",
    "dim",
    "f16",
    "int8",
];

#[test]
fn a_version_with_a_changed_file() {
    let (models, _samples) = chain();
    let versions: Vec<_> = (1..4).map(|n| Published::new(models.path().join(format!("m/{n}")))).collect();
    let open = |version: u64, purpose| -> Result<String, StoreError> {
        store::open(models.path(), "m", Version(version), purpose).map(|opened| contents(&opened))
    };
    let purposes =
        [Purpose::Train, Purpose::ServeFrom(TableMemory::Ram), Purpose::ServeFrom(TableMemory::Mapped)];
    let known: Vec<_> = (1..4).map(|n| purposes.map(|purpose| open(n, purpose).unwrap())).collect();
    let input = (any::<[Index; 3]>(), changes(WORDS), any::<[bool; 2]>());
    run(input, |([version, file, purpose], changes, [listed, header])| {
        let (at, purpose) = (version.index(3), purpose.index(3));
        let version = &versions[at];
        let (name, bytes) = file.get(&version.files);
        let mut bytes = bytes.clone();
        if header && name.ends_with(".safetensors") {
            change_header(&mut bytes, &changes);
        } else {
            changes.iter().for_each(|change| change.apply(&mut bytes, &version.files[0].1));
        }
        version.change(name, &bytes, listed);
        let opened = open(at as u64 + 1, purposes[purpose]);
        version.restore(name);
        let accepted = listed && opened.is_ok();
        match opened {
            Ok(contents) if !listed => {
                assert!(contents == known[at][purpose], "a change of {name} is not noticed")
            }
            Ok(_) => {}
            // The error names a file of the version, or of its base.
            Err(error) => assert!(error.to_string().contains("/m/"), "{error}"),
        }
        accepted
    });
}

#[test]
fn a_manifest_with_a_good_checksum() {
    let (models, _) = chain();
    let manifest = |n: u64| fs::read(models.path().join(format!("m/{n}/{MANIFEST}"))).unwrap();
    let words = &[
        "full",
        "delta",
        "base",
        "training",
        "quality",
        "null",
        "{}",
        "\"auc\":1e999,",
        "..",
        "/",
        "MANIFEST.json",
    ];
    run(mutated([manifest(1), manifest(2)], words), |Input(mut text)| {
        const AFTER: usize = b"\"\n}\n".len();
        if let Some(begin) = text.len().checked_sub(AFTER + Checksum::DIGITS) {
            let digits = begin..begin + Checksum::DIGITS;
            text[digits.clone()].fill(b'0');
            let sum = Checksum::of(&text).to_string();
            text[digits].copy_from_slice(sum.as_bytes());
        }
        let Ok((manifest, _)) = Manifest::parse(&text) else { return false };
        let (again, sum) = manifest.encode().unwrap();
        assert_eq!(Manifest::parse(&again).unwrap(), (manifest, sum));
        true
    });
}

#[test]
fn a_tensor_file() {
    let (models, _) = chain();
    let file = |name: &str| fs::read(models.path().join(format!("m/{name}.safetensors"))).unwrap();
    let seeds = ["1/dense", "1/tables/t2", "1/checkpoint/tables/t1", "3/tables/t3"].map(file);
    run(mutated_tensors(seeds, 4096, WORDS), |Input(file)| {
        let Ok(tensors) = parse_header(&file) else { return false };
        let public = safetensors::SafeTensors::deserialize(&file);
        let mut end = tensors.first().map_or(file.len(), |tensor| tensor.begin as usize);
        for tensor in &tensors {
            assert_eq!(tensor.begin as usize, end);
            end = tensor.end as usize;
            if let Ok(public) = &public {
                assert_eq!(public.tensor(&tensor.name).unwrap().data(), &file[tensor.begin as usize..end]);
            }
        }
        assert_eq!(end, file.len());
        let named: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice())).collect();
        let header = encode_header(&named).unwrap();
        let begin = tensors.first().map_or(file.len(), |tensor| tensor.begin as usize);
        assert_eq!(parse_header(&[&header, &file[begin..]].concat()).unwrap().len(), tensors.len());
        true
    });
}
