use super::*;
use crate::schema::preset::{self, ArchKind, SyntheticShape};
use crate::types::Jagged;
use proptest::prelude::*;

/// A trace of these accesses: pairs of a table below 3 and a row.
pub(crate) fn trace(accesses: &[(u32, u64)]) -> Trace {
    let shape = SyntheticShape { tables: 3, rows: 1000, dense: 0, multi_hot: None };
    let mut builder = TraceBuilder::new(&preset::synthetic(ArchKind::Dcn, 4, shape));
    for &(table, row) in accesses {
        builder.push(TableId(table), row).unwrap();
    }
    builder.finish(1.0)
}

pub(crate) fn accesses(most: usize) -> impl Strategy<Value = Vec<(u32, u64)>> {
    // Squared, so that small rows are hotter.
    let row = (0u64..16).prop_map(|r| r * r / 7);
    prop::collection::vec((0u32..3, row), 1..most)
}

proptest! {
    #[test]
    fn keys_are_numbers_of_the_used_rows(wanted in accesses(200)) {
        let trace = trace(&wanted);
        let tables = trace.table_of_keys();
        let got: Vec<_> =
            trace.accesses.iter().map(|&k| (tables[k as usize], trace.rows[k as usize])).collect();
        prop_assert_eq!(&got, &wanted);
        let distinct: std::collections::HashSet<_> = wanted.iter().collect();
        prop_assert_eq!(trace.keys() as usize, distinct.len());
        for (t, table) in trace.tables.iter().enumerate() {
            prop_assert_eq!(table.accesses as usize, wanted.iter().filter(|a| a.0 as usize == t).count());
        }
    }
}

#[test]
fn accesses_are_in_order_of_samples_and_absent_ids_access_only_a_default_row() {
    let shape = SyntheticShape { tables: 2, rows: 10, dense: 0, multi_hot: Some(3) };
    let mut schema = preset::synthetic(ArchKind::Deepfm, 4, shape);
    schema.tables[1].default = crate::schema::AbsentDefault::Row(9);
    let batch = Batch {
        samples: 2,
        features: vec![
            Jagged { offsets: vec![0, 2, 3], ids: vec![4, 11, 5] },
            Jagged { offsets: vec![0, 0, 2], ids: vec![70, 2] },
        ],
        ..Batch::default()
    };
    let mut builder = TraceBuilder::new(&schema);
    builder.append(&batch).unwrap();
    let trace = builder.finish(1.0);
    let tables = trace.table_of_keys();
    let name = |t: u32| trace.tables[t as usize].name.as_str();
    let got: Vec<_> =
        trace.accesses.iter().map(|&k| (name(tables[k as usize]), trace.rows[k as usize])).collect();
    let names: Vec<&str> = schema.tables.iter().map(|t| t.name.as_str()).collect();
    let [deep0, deep1] = [names[0], names[1]];
    let wide = |f: usize| schema.features[f].wide_table.as_deref().unwrap();
    let wanted =
        vec![(deep0, 4), (wide(0), 4), (deep0, 5), (deep1, 9), (deep1, 2), (wide(0), 5), (wide(1), 2)];
    assert_eq!(got, wanted);
    // The ids 11 and 70 are past the end of both tables of their feature.
    assert_eq!((trace.samples, trace.absent), (2, 4));
}
