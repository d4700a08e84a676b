use super::super::super::trace::tests::{accesses, trace};
use super::*;
use proptest::prelude::*;
use safetensors::tensor::{TensorView, serialize_to_file};
use std::collections::HashMap;

fn ranked(wanted: &[(u32, u64)], floor: u64) -> Ranked {
    Ranked { floor, ..Ranked::of(&trace(wanted)) }
}

proptest! {
    #[test]
    fn a_file_reads_back_equal_and_equal_counts_give_equal_bytes(wanted in accesses(100), floor: u64) {
        let ranked = ranked(&wanted, floor);
        let file = tempfile::NamedTempFile::new().unwrap();
        ranked.write(file.path()).unwrap();
        prop_assert_eq!(&Ranked::read(file.path()).unwrap(), &ranked);
        let once = std::fs::read(file.path()).unwrap();
        ranked.write(file.path()).unwrap();
        prop_assert_eq!(std::fs::read(file.path()).unwrap(), once);
    }

    #[test]
    fn a_damaged_file_is_an_error_or_another_file_and_never_a_panic(
        wanted in accesses(20), at in any::<prop::sample::Index>(), byte: u8, cut: bool,
    ) {
        let file = tempfile::NamedTempFile::new().unwrap();
        ranked(&wanted, 0).write(file.path()).unwrap();
        let mut bytes = std::fs::read(file.path()).unwrap();
        let at = at.index(bytes.len());
        if cut {
            bytes.truncate(at);
            prop_assert!(parse(&bytes).is_err());
        } else {
            bytes[at] = byte;
            let _ = parse(&bytes);
        }
    }
}

#[test]
fn a_row_that_occurs_twice_is_refused_by_name() {
    let mut twice = ranked(&[(0, 1), (0, 1), (0, 2), (1, 2)], 0);
    let file = tempfile::NamedTempFile::new().unwrap();
    let refusal = |ranked: &Ranked| {
        ranked.write(file.path()).unwrap();
        Ranked::read(file.path()).unwrap_err().to_string()
    };
    let (name, row) = (twice.tables[0].name.clone(), twice.tables[0].rows[0]);
    twice.tables[0].rows[1] = row;
    let error = refusal(&twice);
    assert!(error.contains(&format!("table {name:?}: expected distinct rows, got {row} twice")), "{error}");
    twice.tables[0].rows[1] = row + 1;
    assert!(twice.write(file.path()).is_ok() && Ranked::read(file.path()).is_ok());
}

#[test]
fn a_file_of_another_format_is_refused_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "table,row,count").unwrap();
    let error = Ranked::read(file.path()).unwrap_err().to_string();
    assert!(error.starts_with("counts: ") && error.contains("not a safetensors file"), "{error}");
    let about = HashMap::from([("format".to_owned(), "weights".to_owned())]);
    serialize_to_file(Vec::<(&str, TensorView<'_>)>::new(), Some(about), file.path()).unwrap();
    let error = Ranked::read(file.path()).unwrap_err().to_string();
    assert!(error.contains("expected format \"flechette-counts\" 1, got \"weights\""), "{error}");
}

mod fuzz {
    use super::*;
    use crate::fuzz::bytes::{Input, mutated_tensors};
    use crate::fuzz::run;

    #[test]
    fn counts() {
        let ranked = ranked(&[(0, 1), (0, 1), (0, 2), (1, 2)], 0);
        let file = tempfile::NamedTempFile::new().unwrap();
        ranked.write(file.path()).unwrap();
        let seed = std::fs::read(file.path()).unwrap();
        let words = &["format", "version", "floor", "tables", "rows", "counts", "U64", "[2]", "\\\"", "null"];
        run(mutated_tensors([seed], VALUE_BYTES, words), |Input(bytes)| {
            let Ok(ranked) = parse(&bytes) else { return false };
            ranked.write(file.path()).unwrap();
            assert_eq!(Ranked::read(file.path()).unwrap(), ranked);
            true
        });
    }
}
