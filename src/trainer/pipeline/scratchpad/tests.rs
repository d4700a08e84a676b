use super::*;
use crate::schema::preset::{self, SyntheticShape};

/// Eight tables of a million rows with the same width, and one table of a hundred rows with another width.
fn uneven() -> Sizes {
    let shape = SyntheticShape { tables: 9, rows: 1_000_000, dense: 0, multi_hot: Some(7) };
    let mut schema = preset::synthetic(crate::schema::preset::ArchKind::Deepfm, 16, shape);
    schema.tables[8].rows = 100;
    schema.tables[8].dim = 3;
    Sizes::of(&schema, OptimizerKind::Sgd)
}

#[test]
fn a_small_share_of_a_small_table_is_still_enough_for_a_sample() {
    let sizes = uneven();
    let small = sizes.sizes.iter().position(|class| class.words == 3).unwrap();
    assert_eq!(sizes.sizes[small], SizeClass { words: 3, rows: 100, sample_rows: 7 });
    for size in [ScratchpadSize::Fraction(0.001), ScratchpadSize::Bytes(4 << 20)] {
        let counts = sizes.counts(&size);
        assert!((7..20).contains(&counts[small]), "{size:?}: {counts:?}");
        assert!(counts.iter().zip(&sizes.sizes).all(|(&count, class)| count as u64 >= class.sample_rows));
    }
    // A sample needs at most all rows of a table.
    let mut tiny = sizes.clone();
    tiny.sizes[small].rows = 5;
    tiny.sizes[small].sample_rows = 5;
    assert_eq!(tiny.counts(&ScratchpadSize::Fraction(0.001))[small], 5);
}

#[test]
fn slots_never_take_more_than_the_given_bytes() {
    let sizes = uneven();
    let all = sizes.bytes(&sizes.counts(&ScratchpadSize::Fraction(1.0)));
    for bytes in (0..40).map(|shift| 1_u64 << shift).chain([all - 1, all, all + 1, u64::MAX]) {
        let counts = sizes.counts(&ScratchpadSize::Bytes(bytes));
        assert!(sizes.bytes(&counts) <= bytes, "{bytes}: {counts:?}");
        assert_eq!(sizes.hold_all(&counts), bytes >= all, "{bytes}: {counts:?}");
    }
}

#[test]
fn a_failed_allocation_names_the_slots_and_the_flag() {
    let sizes = uneven();
    let counts = vec![1 << 31; sizes.sizes.len()];
    let mut huge = sizes.clone();
    huge.sizes.iter_mut().for_each(|class| class.words <<= 20);
    let error = huge.slots(&counts).err().unwrap().to_string();
    let total = huge.bytes(&counts);
    for named in [format!("2147483648 of {} f32", huge.sizes[0].words), format!("take {total} bytes")] {
        assert!(error.contains(&named), "{named} in {error}");
    }
    assert!(error.starts_with("host memory: ") && error.contains("--scratchpad"), "{error}");
}
