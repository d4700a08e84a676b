use super::*;
use crate::rowlog::Uniform;
use crate::store::PlainMemory;
use crate::store::bytes::{FileBytes, open_regular};

fn declared(rows: u64, dim: usize) -> schema::TableSchema {
    schema::TableSchema { name: "t".to_owned(), rows, dim, ..Default::default() }
}

#[test]
fn rows_and_states_are_read_and_written_by_id_up_to_the_end_of_the_table() {
    let mut table =
        Table::zeroed(&PlainMemory, 5, 3, &[StateShape::new("sum", 3), StateShape::new("step", 1)]).unwrap();
    assert!(table.values().unwrap().iter().all(|&x| x == 0.0));
    table.row_mut(4).unwrap().copy_from_slice(&[1.0, 2.0, 3.0]);
    let (rows, states) = table.parts_mut().unwrap();
    rows[0] = 9.0;
    states[1].rows_mut().unwrap()[4] = 5.0;
    assert_eq!(table.row_values(4).unwrap(), &[1.0, 2.0, 3.0]);
    assert_eq!(table.row_values(0).unwrap(), &[9.0, 0.0, 0.0]);
    assert_eq!(table.row(5), None);
    assert_eq!(table.row(u64::MAX), None);
    assert!(table.row_mut(5).is_none());
    assert_eq!(table.states()[1].as_slice(), &[0.0, 0.0, 0.0, 0.0, 5.0]);
    assert_eq!(table.bytes(), 4 * (15 + 15 + 5));

    let copy = table.copied(&PlainMemory).unwrap();
    assert_eq!(copy.values(), table.values());
    assert_eq!(copy.states()[1].as_slice(), table.states()[1].as_slice());
    copy.prefault();
}

#[test]
fn encoding_a_table_on_any_number_of_threads_encodes_each_row() {
    let (rows, dim) = (30_000, 7);
    let mut table = Table::zeroed(&PlainMemory, rows, dim, &[StateShape::new("sum", 1)]).unwrap();
    Uniform { seed: 1, table_code: 2, bound: 1.0 }.table(dim, table.rows_mut().unwrap());
    for element in Element::ALL {
        let mut one_by_one = vec![0xaa; rows as usize * element.row_bytes(dim)];
        for (id, out) in one_by_one.chunks_exact_mut(element.row_bytes(dim)).enumerate() {
            element.encode(table.row_values(id as u64).unwrap(), out).unwrap();
        }
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let encoded = pool.install(|| table.encoded(element, &PlainMemory)).unwrap();
            assert!(encoded.as_bytes() == Some(&one_by_one[..]), "{element}, {threads} threads");
            assert_eq!(encoded.bytes() as usize, one_by_one.len(), "no state");
            assert_eq!((encoded.element(), encoded.rows(), encoded.dim()), (element, rows, dim));
            let bytes = element.row_bytes(dim);
            assert_eq!(encoded.row(29_999), Some(&one_by_one[29_999 * bytes..]));
            assert_eq!(encoded.row(rows), None);
            encoded.prefault();
        }
    }
}

#[test]
fn the_first_row_that_cannot_be_encoded_is_named() {
    let mut table = Table::zeroed(&PlainMemory, 50_000, 3, &[]).unwrap();
    for row in [49_999, 40_000] {
        table.row_mut(row).unwrap()[1] = 1e6;
        let message = table.encoded(Element::F16, &PlainMemory).unwrap_err().to_string();
        assert!(
            message.starts_with(&format!("row {row}: element 1: 1000000 is larger in magnitude than 65504")),
            "{message}"
        );
        table.encoded(Element::Int8, &PlainMemory).unwrap();
    }
}

#[test]
fn a_failed_allocation_is_an_error() {
    assert!(Table::zeroed(&PlainMemory, u64::MAX, 16, &[]).is_err());
    assert!(Table::zeroed(&PlainMemory, 1 << 56, 16, &[]).is_err());
    let empty = Table::zeroed(&PlainMemory, 0, 16, &[StateShape::new("sum", 1)]).unwrap();
    assert_eq!(empty.row(0), None);
    empty.prefault();
}

#[test]
fn a_mapped_table_is_read_only_and_outlives_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("floats");
    let values = [1.5_f32, f32::NAN, -0.0, 2.0];
    std::fs::write(&path, bytemuck::cast_slice::<f32, u8>(&values)).unwrap();
    let file = FileBytes::map(&open_regular(&path).unwrap()).unwrap();
    let mapped = |bytes| Bytes::of_file(&file, bytes).unwrap();
    let mut table = Table::from_parts(&declared(2, 2), Element::F32, mapped(0..16), vec![]).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(table.row_values(1).unwrap(), &[-0.0, 2.0]);
    assert!(table.rows_mut().is_none());
    assert!(table.row_mut(0).is_none());
    assert!(table.copied(&PlainMemory).unwrap().rows_mut().is_some());

    assert!(Bytes::floats_of_file(&file, 0..17).is_none(), "past the end");
    assert!(Bytes::floats_of_file(&file, 1..5).is_none(), "not aligned");
    assert!(Bytes::floats_of_file(&file, 0..6).is_none(), "not whole");
    assert!(Table::from_parts(&declared(3, 2), Element::F32, mapped(0..16), vec![]).is_none(), "wrong shape");
    assert!(
        Table::from_parts(&declared(1, 3), Element::F32, mapped(1..13), vec![]).is_none(),
        "f32 not aligned"
    );
    let f16 = schema::TableSchema { element: Element::F16, ..declared(2, 4) };
    let mut table = Table::from_parts(&f16, Element::F16, mapped(0..16), vec![]).unwrap();
    assert_eq!(table.row(1), Some(&mapped(0..16).as_slice()[8..]));
    assert!(table.values().is_none() && table.row_values(1).is_none() && table.rows_mut().is_none());
    let mut copy = table.copied(&PlainMemory).unwrap();
    assert!(copy.rows_mut().is_none(), "a table to train on is f32");
    assert_eq!(copy.as_bytes(), table.as_bytes());
    assert!(open_regular(dir.path()).is_err(), "a directory");
}
