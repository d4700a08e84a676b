//! Chains of a full version and deltas: they read like full versions, and a damaged link is refused by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::forged::forge;
use super::two_versions::replace;
use super::{Sample, entries};
use crate::config::TableMemory;
use crate::rowlog::{First, WorkingFile, WorkingTable};
use crate::store::disk::SystemDisk;
use crate::store::{
    self, Base, Checkpoint, Contents, DenseTensor, LastDeltaRows, Numbering, Opened, PlainMemory, Purpose,
    RecordLayout, RowBytes, StateShape, StoreError, TableRows,
};
use crate::types::{Element, RowId, TableId, Version};
use proptest::prelude::*;

/// The rows that a delta changes, by table.
type Changed = Vec<BTreeSet<u64>>;

impl Sample {
    /// Writes the rows `changed` of this sample as a delta of `base`.
    fn write_delta(&self, models: &Path, base: Base, changed: &Changed) -> Result<Base, StoreError> {
        self.write_delta_with(models, base, changed, Some(Checkpoint::default()))
    }

    fn write_delta_with(
        &self,
        models: &Path,
        base: Base,
        changed: &Changed,
        checkpoint: Option<Checkpoint<'_>>,
    ) -> Result<Base, StoreError> {
        let ids: Vec<Vec<u64>> = changed.iter().map(|rows| rows.iter().copied().collect()).collect();
        let layout = |table: &store::Table| {
            let name = |name: &str| if name == "sum" { "sum" } else { "step" };
            let states = table.states().iter().map(|s| StateShape::new(name(s.shape().name), s.width()));
            RecordLayout { dim: table.dim(), states: states.collect() }
        };
        let layouts: Vec<RecordLayout<'static>> = self.tables.iter().map(layout).collect();
        // The changed rows of all tables, as a source of records.
        let zeros = |t: usize, rows: &Vec<u64>| WorkingTable {
            rows: rows.len() as u64,
            record: layouts[t].clone(),
            first: First::Version(
                store::Table::zeroed(&PlainMemory, rows.len() as u64, layouts[t].dim, &layouts[t].states)
                    .unwrap(),
            ),
            order: None,
        };
        let dir = tempfile::tempdir().unwrap();
        let tables = ids.iter().enumerate().map(|(t, rows)| zeros(t, rows)).collect();
        let source = WorkingFile::create(dir.path(), tables).unwrap();
        for (t, rows) in ids.iter().enumerate() {
            for (at, &row) in rows.iter().enumerate() {
                let table = &self.tables[t];
                let states = (0..table.states().len()).flat_map(|state| table.state(state, row));
                let record: Vec<f32> = table.row_values(row).unwrap().iter().chain(states).copied().collect();
                source.write(TableId(t as u32), &[at as u64], &record).unwrap();
            }
        }
        let tables = ids.iter().enumerate();
        let contents = Contents {
            model_toml: &toml::to_string(&self.schema).unwrap(),
            numbering: Numbering::DeltaOf(base),
            dense: self
                .dense
                .iter()
                .map(|(name, shape, values)| DenseTensor { name: name.clone(), shape: shape.clone(), values })
                .collect(),
            tables: tables.map(|(t, rows)| TableRows::Changed(rows, &source, TableId(t as u32))).collect(),
            checkpoint,
            metadata: self.metadata.clone(),
            ..Contents::default()
        };
        store::publish(&SystemDisk, models, "m", &contents).map(|written| written.base)
    }

    /// Takes the rows `changed` and the dense weights of another sample.
    fn change(&mut self, from: &Self, changed: &Changed) {
        for (t, rows) in changed.iter().enumerate() {
            for &row in rows {
                let dim = self.tables[t].dim();
                let (to, states) = self.tables[t].parts_mut().unwrap();
                let to = &mut to[row as usize * dim..][..dim];
                to.copy_from_slice(from.tables[t].row_values(row).unwrap());
                for (s, state) in states.iter_mut().enumerate() {
                    let width = state.width();
                    let to = &mut state.rows_mut().unwrap()[row as usize * width..][..width];
                    to.copy_from_slice(from.tables[t].state(s, row));
                }
            }
        }
        self.dense.clone_from(&from.dense);
        self.metadata.clone_from(&from.metadata);
    }
}

fn changed() -> impl Strategy<Value = Changed> {
    [3_u64, 40, 7, 9].map(|rows| proptest::collection::btree_set(0..rows, 0..rows as usize)).to_vec()
}

/// A full version 1 and deltas 2 and 3.
pub(crate) fn chain() -> (tempfile::TempDir, [Sample; 3]) {
    let dir = tempfile::tempdir().unwrap();
    let mut samples = [Sample::of(1), Sample::of(1), Sample::of(1)];
    let mut base = Base { version: Version(1), ..first_base(dir.path(), &samples[0]) };
    for n in 1..3 {
        let changed = [1, 20, 3, 4].map(|rows| (0..rows).map(|row| row * 2 / (n as u64)).collect()).to_vec();
        for later in &mut samples[n..] {
            later.change(&Sample::of(n as u64 + 1), &changed);
        }
        base = samples[n].write_delta(dir.path(), base, &changed).unwrap();
    }
    assert_eq!(base.version, Version(3));
    (dir, samples)
}

/// Writes a full version 1 and returns what a delta names as its base.
fn first_base(models: &Path, sample: &Sample) -> Base {
    assert_eq!(sample.write(models, "m").unwrap(), Version(1));
    base_of(models, 1)
}

fn base_of(models: &Path, version: u64) -> Base {
    let (_, xxh3_128) = store::link::read_manifest(&models.join(format!("m/{version}"))).unwrap();
    Base { version: Version(version), xxh3_128 }
}

fn open(models: &Path, version: u64) -> Result<Opened, StoreError> {
    store::open(models, "m", Version(version), Purpose::Serve)
}

fn bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

const MEMORIES: &[TableMemory] = &[TableMemory::Auto, TableMemory::Ram, TableMemory::Mapped];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn each_version_of_a_chain_reads_back_to_the_bit(
        deltas in proptest::collection::vec(changed(), 1..4),
        memory in proptest::sample::select(MEMORIES),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut now = Sample::of(1);
        let mut base = first_base(dir.path(), &now);
        let mut served = store::open(dir.path(), "m", Version(1), Purpose::ServeFrom(memory)).unwrap();
        for (n, changed) in deltas.iter().enumerate() {
            now.change(&Sample::of(n as u64 + 2), changed);
            base = now.write_delta(dir.path(), base, changed).unwrap();
            let version = Version(n as u64 + 2);
            prop_assert_eq!(base.version, version);
            now.assert_is_at(dir.path(), "m", version);
            // A server opens only what is new.
            served = store::open_beside(dir.path(), "m", version, &[&served.store]).unwrap();
            now.assert_is(&served);
            let RowBytes { ram, mapped } = served.store.row_memory();
            let expected = match memory {
                TableMemory::Ram => mapped == 0,
                TableMemory::Mapped => ram == 0,
                TableMemory::Auto => true,
            };
            prop_assert!(expected && ram + mapped > 0, "{memory:?}: {ram} bytes in memory, {mapped} mapped");
            // The chain as one full version.
            let copy = tempfile::tempdir().unwrap();
            let trained = store::open(dir.path(), "m", version, Purpose::Train).unwrap();
            let contents = Contents {
                model_toml: &trained.model_toml,
                tables: trained.store.tables().iter().map(TableRows::from).collect(),
                dense: trained.dense.iter().map(|(name, tensor)| DenseTensor {
                    name: name.clone(),
                    shape: tensor.shape().to_vec(),
                    values: tensor.values(),
                }).collect(),
                checkpoint: Some(Checkpoint::default()),
                metadata: trained.metadata.clone(),
                ..Contents::default()
            };
            store::write(copy.path(), "m", &contents).unwrap();
            now.assert_is_at(copy.path(), "m", Version(1));
            let copied: Vec<_> =
                trained.store.tables().iter().map(|table| table.copied(&PlainMemory).unwrap()).collect();
            for (copy, now) in copied.iter().zip(&now.tables) {
                prop_assert_eq!(copy.as_bytes(), now.as_bytes());
                for (copy, now) in copy.states().iter().zip(now.states()) {
                    prop_assert_eq!(bytes(copy.as_slice()), bytes(now.as_slice()));
                }
            }
        }
        // A server goes back to each earlier version.
        let mut then = Sample::of(1);
        for (n, changed) in deltas.iter().enumerate() {
            let version = Version(n as u64 + 1);
            then.assert_is(&store::open_beside(dir.path(), "m", version, &[&served.store]).unwrap());
            then.change(&Sample::of(n as u64 + 2), changed);
        }
    }
}

#[test]
fn a_later_version_shares_the_base_rows_of_the_served_one() {
    let (dir, samples) = chain();
    let first = open(dir.path(), 1).unwrap();
    // Damage that only a second read of the base would find.
    replace(&dir.path().join("m/1/tables/t1.safetensors"), b"");
    assert!(open(dir.path(), 3).is_err());
    let third = store::open_beside(dir.path(), "m", Version(3), &[&first.store]).unwrap();
    samples[2].assert_is(&third);
}

#[test]
fn rows_of_the_last_delta_are_found_in_any_order_and_no_others() {
    let (dir, _) = chain();
    for version in 1..4 {
        let store = open(dir.path(), version).unwrap().store;
        let rows_of =
            |t: usize| (0..store.tables()[t].rows() + 2).map(move |row| RowId::new(TableId(t as u32), row));
        let ascending: Vec<_> = (0..store.tables().len()).flat_map(rows_of).collect();
        let descending = ascending.iter().rev().copied().collect();
        let twice = ascending.iter().chain(&ascending).copied().collect();
        let far = ascending.iter().step_by(3).chain(ascending.iter().step_by(2)).copied().collect();
        for rows in [ascending.clone(), descending, twice, far] {
            let (mut last, mut found) = (LastDeltaRows::new(&store), 0);
            for row in rows {
                let changed = store.tables()[row.table().index()].deltas().last();
                let changed = changed.is_some_and(|delta| delta.keys().contains(&row.row()));
                let expected = store.row(row.table(), row.row()).filter(|_| changed);
                assert_eq!(last.row(row), expected, "version {version}, {row:?}");
                found += u32::from(changed);
            }
            assert_eq!(found > 0, version > 1);
        }
    }
}

#[test]
fn an_earlier_version_shares_the_rows_of_the_served_one_and_no_table_is_read() {
    let (dir, samples) = chain();
    let opened = [1, 2, 3].map(|version| open(dir.path(), version).unwrap());
    let [first, second, third] = opened.each_ref().map(|opened| &opened.store);
    // Two versions are loaded; the nearest one of the chain is used.
    let later = store::open_beside(dir.path(), "m", Version(3), &[first, second]).unwrap();
    // Damage that only reading the tables would find.
    for version in 1..4 {
        for table in fs::read_dir(dir.path().join(format!("m/{version}/tables"))).unwrap() {
            let path = table.unwrap().path();
            replace(&path, &vec![0; fs::metadata(&path).unwrap().len() as usize]);
        }
    }
    for loaded in [third, &later.store] {
        for (version, fresh) in [(1, first), (2, second), (3, third)] {
            let earlier = store::open_beside(dir.path(), "m", Version(version), &[loaded]).unwrap();
            samples[version as usize - 1].assert_is(&earlier);
            assert!(earlier.store.shares_base_rows(loaded));
            assert_eq!(loaded.changed_since(&earlier.store), third.changed_since(fresh));
            assert_eq!(earlier.store.base(), fresh.base());
        }
    }
    // A copy of the third version has no rows of the second one.
    let copy = third.rows_copied(&PlainMemory).unwrap();
    let error = store::open_beside(dir.path(), "m", Version(2), &[&copy]).unwrap_err();
    assert!(matches!(error, StoreError::Checksum { .. }), "{error}");
    // The next start would not find this version.
    fs::remove_file(dir.path().join("m/2/tables/t3.safetensors")).unwrap();
    let error = store::open_beside(dir.path(), "m", Version(2), &[third]).unwrap_err();
    assert!(matches!(error, StoreError::MissingFile { .. }), "{error}");
}

#[test]
fn rows_in_memory_stay_when_their_files_are_cut_short() {
    let (dir, samples) = chain();
    let opened = store::open(dir.path(), "m", Version(3), Purpose::ServeFrom(TableMemory::Ram)).unwrap();
    for version in 1..4 {
        for table in fs::read_dir(dir.path().join(format!("m/{version}/tables"))).unwrap() {
            let path = table.unwrap().path();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
            fs::OpenOptions::new().write(true).truncate(true).open(path).unwrap();
        }
    }
    samples[2].assert_is(&opened);
}

#[test]
fn a_missing_or_damaged_link_makes_every_later_version_unusable() {
    for (what, damage, refused_by_manifests) in [
        (
            "2/MANIFEST.json: missing file",
            (|m| fs::remove_file(m.join("2/MANIFEST.json")).unwrap()) as fn(&Path),
            vec![2, 3],
        ),
        (
            "1/MANIFEST.json: missing file",
            |m| fs::remove_file(m.join("1/MANIFEST.json")).unwrap(),
            vec![1, 2, 3],
        ),
        ("1/tables/t0.safetensors: truncated", |m| replace(&m.join("1/tables/t0.safetensors"), b""), vec![]),
        ("2: no such directory", |m| fs::remove_dir_all(m.join("2")).unwrap(), vec![3]),
    ] {
        let (dir, samples) = chain();
        let model = dir.path().join("m");
        damage(&model);
        let error = open(dir.path(), 3).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        let listed =
            store::listing::list(dir.path(), "m", &BTreeMap::new(), store::listing::Check::Manifests)
                .unwrap();
        let last = listed.last().and_then(|last| last.refusal.as_ref());
        assert!(last.is_none_or(|refusal| refusal.to_string() == error), "{last:?}: {error}");
        let refused = listed.iter().filter(|listed| listed.refusal.is_some());
        assert_eq!(
            refused.map(|listed| listed.version.0).collect::<Vec<_>>(),
            refused_by_manifests,
            "{what}"
        );
        if what.starts_with('2') {
            assert!(error.starts_with(&*model.join("3/MANIFEST.json").to_string_lossy()), "{error}");
            let latest = store::open_latest(dir.path(), "m", Purpose::Serve).unwrap();
            samples[0].assert_is(&latest.opened);
        }
    }
}

#[test]
fn a_delta_whose_base_was_replaced_is_refused_with_both_checksums() {
    let (dir, _) = chain();
    let model = dir.path().join("m");
    fs::remove_dir_all(model.join("3")).unwrap();
    fs::remove_dir_all(model.join("2")).unwrap();
    fs::remove_dir_all(model.join("state")).unwrap();
    Sample::of(9).write(dir.path(), "m").unwrap();
    let (other, _) = chain();
    let [expected, got] = [other.path(), dir.path()].map(|models| base_of(models, 2).xxh3_128);
    assert_ne!(expected, got);
    fs::rename(other.path().join("m/3"), model.join("3")).unwrap();
    let error = open(dir.path(), 3).unwrap_err();
    assert!(matches!(error, StoreError::BaseDiffers { base: Version(2), .. }), "{error}");
    let delta = model.join("3/MANIFEST.json");
    let message =
        format!("{}: base: expected version 2 with checksum {expected}, got checksum {got}", delta.display());
    assert_eq!(error.to_string(), message);
}

#[test]
fn a_delta_that_another_writer_overtook_is_not_published() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample::of(1);
    let base = first_base(dir.path(), &sample);
    sample.write(dir.path(), "m").unwrap();
    let error = sample.write_delta(dir.path(), base, &vec![BTreeSet::new(); 4]).unwrap_err().to_string();
    assert!(error.ends_with("m: made from version 1, but the highest version is 2"), "{error}");
    assert!(!dir.path().join("m/3").exists());
    assert_eq!(entries(dir.path()), 2, "no staging directory is left");
}

#[test]
fn without_a_checkpoint_in_every_link_training_gets_the_served_rows() {
    let dir = tempfile::tempdir().unwrap();
    let mut now = Sample::of(1);
    let base = first_base(dir.path(), &now);
    let changed = vec![[1].into(), [5].into(), [2].into(), [3].into()];
    now.change(&Sample::of(2), &changed);
    now.write_delta_with(dir.path(), base, &changed, None).unwrap();
    let opened = store::open(dir.path(), "m", Version(2), Purpose::Train).unwrap();
    now.assert_is(&opened);
    assert_eq!(opened.store.tables()[2].element(), Element::F16);
}

#[test]
fn a_copy_with_merged_deltas_does_not_know_what_they_changed() {
    let (dir, _) = chain();
    let open = |version| store::open(dir.path(), "m", Version(version), Purpose::Serve).unwrap().store;
    let after = |version, served: &store::EmbeddingStore| {
        store::open_beside(dir.path(), "m", Version(version), &[served]).unwrap().store
    };
    let copy = |store: &store::EmbeddingStore| store.rows_copied(&PlainMemory).unwrap();
    let rows = |newer: &store::EmbeddingStore, older: &store::EmbeddingStore| {
        newer.changed_since(older).map(|rows| rows.len())
    };
    let [first, second] = [1, 2].map(open);
    let [first_copied, second_copied] = [&first, &second].map(copy);
    let of_second = rows(&second, &first);
    assert!(of_second.is_some_and(|rows| rows > 0));
    assert_eq!(rows(&after(2, &first_copied), &first_copied), of_second);
    let third = rows(&open(3), &second);
    assert_eq!(rows(&after(3, &second_copied), &second_copied), third);
    for (newer, older) in [
        (&second_copied, &first),
        (&second_copied, &first_copied),
        (&after(3, &second_copied), &first_copied),
        (&after(3, &second_copied), &second),
    ] {
        assert_eq!(rows(newer, older), None);
    }
}

#[test]
fn a_delta_of_another_schema_is_refused_also_after_a_served_base() {
    let (dir, [.., mut fourth]) = chain();
    fourth.schema.features[0].name = "other".to_owned();
    let third = open(dir.path(), 3).unwrap().store;
    let none = vec![BTreeSet::new(); fourth.tables.len()];
    fourth.write_delta(dir.path(), third.base().unwrap(), &none).unwrap();
    let refused = |base: u64, error: StoreError| {
        let expected = format!("version {base}: features[0].name: expected \"f0\", got \"other\"");
        assert!(error.to_string().ends_with(&expected), "{error}");
    };
    refused(1, open(dir.path(), 4).unwrap_err());
    refused(3, store::open_beside(dir.path(), "m", Version(4), &[&third]).unwrap_err());
}

#[test]
fn keys_in_the_checkpoint_of_a_delta_are_refused() {
    let (dir, _) = chain();
    forge(&dir.path().join("m/2"), |files| {
        let served = files["tables/t1.safetensors"].clone();
        *files.get_mut("checkpoint/tables/t1.safetensors").unwrap() = served;
    });
    assert!(store::open(dir.path(), "m", Version(2), Purpose::Serve).is_ok());
    let error = store::open(dir.path(), "m", Version(2), Purpose::Train).unwrap_err().to_string();
    assert!(error.contains("expected no tensor of this name in the checkpoint of a delta"), "{error}");
}

#[test]
fn the_number_of_a_version_that_was_deleted_by_hand_is_not_used_again() {
    let (dir, samples) = chain();
    let models = dir.path();
    fs::remove_dir_all(models.join("m/3")).unwrap();
    // A server that has loaded version 3 would take another one of that number for it.
    let changed = [1, 20, 3, 4].map(|rows| (0..rows).collect()).to_vec();
    let delta = samples[2].write_delta(models, base_of(models, 2), &changed).unwrap_err();
    assert!(matches!(delta, StoreError::BaseOvertaken { highest: Version(3), .. }), "{delta}");
    let compacted = store::retention::compact(models, "m", Version(2), Version(2)).unwrap();
    assert_eq!(compacted.version, Version(4));
    assert_eq!(store::versions(models, "m").unwrap(), [1, 2, 4].map(Version));
}

#[test]
fn nothing_continues_below_a_version_that_only_could_not_be_read_now() {
    let (dir, _) = chain();
    let models = dir.path();
    let highest =
        || store::open_to_continue(models, "m", Purpose::Train).map(|opened| opened.store.version());
    assert_eq!(highest().unwrap(), Version(3));
    let being_removed = fs::File::open(models.join("m/3")).unwrap();
    being_removed.lock().unwrap();
    assert!(matches!(highest().unwrap_err(), StoreError::Removing { .. }));
    let latest = store::open_latest(models, "m", Purpose::Serve).unwrap();
    assert_eq!(latest.opened.store.version(), Version(2), "it is served meanwhile");
    drop(being_removed);
    // A damaged version does not come back.
    fs::write(models.join("m/3/MANIFEST.json"), "{").unwrap();
    assert_eq!(highest().unwrap(), Version(2));
}
