//! What is written reads back to the bit, in plain safetensors files, and stays readable while it is open.
//! What cannot be written leaves no files.

use std::fs;

use proptest::prelude::*;

use super::two_versions::{files_of, two_versions};
use super::{Sample, entries};
use crate::rowlog::Uniform;
use crate::store::{self, EmbeddingStore, PlainMemory, Purpose, StateShape, StoreError, Table};
use crate::types::{Element, TableId, Version};

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
                for state in states {
                    let values = state.rows_mut().unwrap();
                    fill(values);
                    values.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = -0.0);
                }
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
fn published_files_are_read_only() {
    let (dir, _) = two_versions();
    for path in files_of(&dir.path().join("m/2")) {
        assert!(fs::metadata(&path).unwrap().permissions().readonly(), "{}", path.display());
    }
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

    let copy: EmbeddingStore = store.copied(&PlainMemory).unwrap();
    assert_eq!((copy.version(), copy.bytes()), (Version(1), store.bytes()));
    let mut tables = copy.into_tables();
    tables[1].row_mut(39).unwrap().fill(7.0);
    assert_eq!(tables[1].row(39), Some(bytemuck::cast_slice(&[7.0_f32; 2])));
    assert_eq!(store.row(TableId(1), 39), first.tables[1].row(39));
}
