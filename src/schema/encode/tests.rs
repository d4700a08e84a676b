//! Encoding never panics, and its errors name the feature and sample.

use proptest::prelude::*;

use super::*;
use crate::schema::preset::{self, ArchKind};
use crate::schema::{Hash, Transform};

/// Two dense values; a hashed one-hot, a one-hot of ids, a hashed multi-hot of at most 3.
fn schema() -> Schema {
    let mut schema = preset::criteo(ArchKind::Dlrm, 4, 100);
    schema.dense.truncate(2);
    schema.dense[1].transform = Transform::Standardize { mean: 1.0, std: 2.0 };
    schema.features.truncate(3);
    schema.features[1].hash = None;
    schema.features[2].arity = Arity::MultiHot { max: 3 };
    schema
}

fn text(lists: &[&[&str]]) -> RawFeature {
    let mut column = RawFeature::text();
    let RawValues::Text { bytes, ends } = &mut column.values else { unreachable!() };
    for list in lists {
        for value in *list {
            bytes.extend_from_slice(value.as_bytes());
            ends.push(bytes.len() as u32);
        }
        column.offsets.push(ends.len() as u32);
    }
    column
}

fn raw() -> RawBatch {
    RawBatch {
        samples: 2,
        dense: vec![-3.0, 5.0, 1.0, 1.0],
        features: vec![
            text(&[&["05db9164"], &[""]]),
            RawFeature { offsets: vec![0, 1, 2], values: RawValues::Ids(vec![7, 123_456]) },
            text(&[&[], &["a", "b"]]),
        ],
        labels: None,
    }
}

fn refused(change: impl FnOnce(&mut RawBatch)) -> String {
    let (mut raw, mut out) = (raw(), Batch::default());
    change(&mut raw);
    let refusal = schema().encode(&raw, &mut out).unwrap_err().to_string();
    assert_eq!((out.samples, out.dense.len()), (0, 0));
    refusal
}

#[test]
fn dense_values_are_transformed_strings_hashed_and_ids_copied() {
    let (schema, mut out) = (schema(), Batch::empty(3));
    schema.encode(&raw(), &mut out).unwrap();
    assert_eq!(out.samples, 2);
    assert_eq!(out.dense, [0.0, 2.0, 1.0f32.ln_1p(), 0.0]);
    let hash = Hash { seed: 0, modulus: 100 };
    assert_eq!(out.features[0].ids, [hash.id(b"05db9164"), hash.id(b"")]);
    assert_eq!(out.features[1].ids, [7, 123_456]);
    assert!(out.features[2].sample(0).is_empty());
    assert_eq!(out.features[2].sample(1), [hash.id(b"a"), hash.id(b"b")]);
}

#[test]
fn a_reused_batch_holds_only_the_last_input() {
    let (schema, mut used, mut fresh) = (schema(), Batch::default(), Batch::default());
    let mut big = raw();
    big.dense = vec![9.0; 4];
    big.features[2] = text(&[&["x", "y", "z"], &["w"]]);
    schema.encode(&big, &mut used).unwrap();
    schema.encode(&raw(), &mut used).unwrap();
    schema.encode(&raw(), &mut fresh).unwrap();
    assert_eq!(used, fresh);
}

#[test]
fn a_batch_of_another_shape_is_refused_by_name() {
    let ids = |ids: Vec<u64>| RawValues::Ids(ids);
    assert!(refused(|r| r.dense.push(1.0)).contains("2 samples x 2 values, got 5"));
    assert!(
        refused(|r| r.dense[3] = f32::NAN).contains("\"I2\", sample 1: expected a finite number, got NaN")
    );
    assert!(refused(|r| r.dense[2] = f32::NEG_INFINITY).contains("\"I1\", sample 1"));
    assert!(refused(|r| r.features.truncate(2)).contains("expected 3 columns, got 2"));
    assert!(refused(|r| r.samples = usize::MAX).contains("dense"));
    assert!(refused(|r| r.features[1].offsets.truncate(2)).contains("\"C2\": expected an offset"));
    assert!(refused(|r| r.features[2].offsets = vec![]).contains("\"C3\": expected an offset"));
    assert!(refused(|r| r.features[2].offsets = vec![1, 1, 2]).contains("first offset must be 0, got 1"));
    assert!(
        refused(|r| r.features[2].offsets = vec![0, 2, 1]).contains("offset 2 is 1, expected at least 2")
    );
    assert!(
        refused(|r| r.features[1].offsets = vec![0, 0, 2]).contains("sample 0: expected exactly 1 id, got 0")
    );
    assert!(
        refused(|r| r.features[2].offsets = vec![0, 0, 4])
            .contains("sample 1: expected at most 3 ids, got 4")
    );
    assert!(refused(|r| r.features[1].values = ids(vec![1])).contains("need 2 values, got 1"));
    assert!(refused(|r| r.features[1] = text(&[&["a"], &["b"]])).contains("\"C2\": got strings"));
    let ends = |r: &mut RawBatch, new: [u32; 2]| {
        let RawValues::Text { ends, .. } = &mut r.features[0].values else { unreachable!() };
        ends.copy_from_slice(&new);
    };
    assert!(refused(|r| ends(r, [9, 9])).contains("8 bytes of text, at string 0"));
    assert!(refused(|r| ends(r, [8, 7])).contains("8 bytes of text, at string 1"));
    assert!(refused(|r| ends(r, [7, 7])).contains("8 bytes of text, at string 2"));
}

#[test]
fn a_value_that_overflows_its_transform_is_refused() {
    let mut schema = schema();
    schema.dense[1].transform = Transform::Standardize { mean: 0.0, std: 1e-30 };
    let mut raw = raw();
    raw.dense[1] = 1e30;
    let refusal = schema.encode(&raw, &mut Batch::default()).unwrap_err().to_string();
    assert!(refusal.contains("\"I2\", sample 0") && refusal.contains("after its transform"), "{refusal}");
}

#[test]
fn the_first_absent_id_of_a_table_with_default_error_is_found() {
    let mut schema = schema();
    let mut batch = Batch::empty(3);
    schema.encode(&raw(), &mut batch).unwrap();
    assert!(schema.check_absent(&batch).is_ok());
    schema.tables[1].default = AbsentDefault::Error;
    let refusal = schema.check_absent(&batch).unwrap_err().to_string();
    assert_eq!(
        refusal,
        "feature \"C2\": id 123456 is not in table \"C2\", which has 100 rows and default error"
    );
    batch.features[1].ids[1] = 99;
    assert!(schema.check_absent(&batch).is_ok());
}

fn columns() -> impl Strategy<Value = RawFeature> {
    let small = || prop::collection::vec(0..6u32, 0..5);
    let text = (prop::collection::vec(any::<u8>(), 0..6), small())
        .prop_map(|(bytes, ends)| RawValues::Text { bytes, ends });
    let ids = prop::collection::vec(any::<u64>(), 0..5).prop_map(RawValues::Ids);
    (small(), prop_oneof![text, ids]).prop_map(|(offsets, values)| RawFeature { offsets, values })
}

proptest! {
    #[test]
    fn no_batch_makes_encoding_panic_and_encoded_batches_have_the_schemas_shape(
        samples in prop_oneof![0..4usize, Just(usize::MAX)],
        dense in prop::collection::vec(any::<f32>(), 0..8),
        features in prop::collection::vec(columns(), 0..5),
    ) {
        let raw = RawBatch { samples, dense, features, labels: None };
        let (schema, mut out) = (schema(), Batch::default());
        if schema.encode(&raw, &mut out).is_ok() {
            prop_assert_eq!(out.dense.len(), out.samples * 2);
            for column in &out.features {
                prop_assert_eq!(column.offsets.len(), out.samples + 1);
                prop_assert_eq!(*column.offsets.last().unwrap() as usize, column.ids.len());
            }
        }
    }
}
