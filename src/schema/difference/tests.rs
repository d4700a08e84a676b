use super::*;
use crate::schema::preset::{ArchKind, criteo};
use crate::types::Element;

fn schema() -> Schema {
    criteo(ArchKind::Dlrm, 16, 100)
}

fn difference(change: impl FnOnce(&mut Schema)) -> String {
    let mut got = schema();
    change(&mut got);
    schema().first_difference(&got).unwrap_or_default()
}

#[test]
fn equal_schemas_have_no_difference() {
    assert_eq!(schema().first_difference(&schema()), None);
}

#[test]
fn the_first_difference_is_named_with_both_values() {
    let table = schema().tables[2].name.clone();
    let rows = difference(|schema| schema.tables[2].rows = 7);
    assert_eq!(rows, format!("tables[{table:?}].rows: expected 100, got 7"));
    let element = difference(|schema| schema.tables[2].element = Element::F16);
    assert!(element.starts_with(&format!("tables[{table:?}].element: expected ")), "{element}");
    assert!(element.contains("f16"), "{element}");
    let renamed = difference(|schema| schema.features[1].name = "other".to_owned());
    assert!(
        renamed.starts_with("features[1].name: expected ") && renamed.ends_with("got \"other\""),
        "{renamed}"
    );
    let fewer = difference(|schema| drop(schema.dense.pop()));
    assert!(fewer.starts_with("dense[12]: expected \"") && fewer.ends_with("got nothing"), "{fewer}");
}

#[test]
fn another_architecture_is_a_difference() {
    let other = criteo(ArchKind::Dcnv2, 16, 100);
    assert!(schema().first_difference(&other).unwrap().starts_with("architecture."));
}
