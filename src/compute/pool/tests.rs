use super::*;
use crate::types::Element;

const ROW: [u32; 4] = [1, 2, 3, 4];

fn lookup(dim: u32, column: u32) -> PoolLookup {
    PoolLookup { offsets_at: 0, occurrences_at: 0, dim, column, pooling: 0, element: 0 }
}

/// Two samples with one dense value and one lookup of dim 4. The first bag has two ids, the second is empty.
fn pool<'a>(lookups: &'a [PoolLookup], rows: &'a [&'a [u32]]) -> Pool<'a> {
    Pool {
        samples: 2,
        dense_width: 1,
        stride: 5,
        lookups,
        offsets: &[0, 2, 2],
        occurrences: &[0, 1],
        rows,
        dense: &[0.5, 0.25],
    }
}

#[test]
fn a_lookup_has_the_size_of_the_kernels_struct() {
    assert_eq!(size_of::<PoolLookup>(), 24);
}

#[test]
fn the_scan_rounds_each_segment_up_to_whole_warps() {
    let lookups = [lookup(17, 1), lookup(4, 18)];
    assert_eq!(pool(&lookups, &[]).scan(), [0, 2, 3, 4]);
}

#[test]
fn a_correct_pool_passes_the_check() {
    pool(&[lookup(4, 1)], &[&ROW, &[]]).check().unwrap();
}

#[test]
fn every_violated_assumption_of_the_kernel_is_refused_by_name() {
    let rows: [&[u32]; 2] = [&ROW, &[]];
    let refusal = |pool: Pool| pool.check().unwrap_err().to_string();
    let good = [lookup(4, 1)];
    let correct = pool(&good, &rows);

    assert!(refusal(Pool { dense: &[0.5], ..correct }).contains("dense: expected 2, got 1"));
    assert!(refusal(Pool { dense_width: 6, ..correct }).contains("dense width: limit 5, got 6"));
    assert!(refusal(Pool { offsets: &[0, 2], ..correct }).contains("number of offsets: expected 3, got 2"));
    assert!(
        refusal(Pool { offsets: &[0, 2, 1], ..correct }).contains("least next offset: expected 2, got 1")
    );
    assert!(
        refusal(Pool { occurrences: &[0], ..correct }).contains("number of occurrences: expected 2, got 1")
    );
    assert!(
        refusal(Pool { occurrences: &[0, 2], ..correct }).contains("unique row below: expected 2, got 2")
    );
    assert!(
        refusal(Pool { rows: &[&ROW, &ROW[1..]], ..correct }).contains("bytes of a row: expected 16, got 12")
    );
    assert!(refusal(pool(&[lookup(4, 2)], &rows)).contains("stride: expected 5, got 6"));
    assert!(refusal(pool(&[lookup(4, 0)], &rows)).contains("first free column: expected 1, got 0"));
    assert!(refusal(pool(&[lookup(0, 1)], &rows)).contains("least dim: expected 1, got 0"));
    assert!(refusal(pool(&[PoolLookup { pooling: 2, ..lookup(4, 1) }], &rows)).contains("pooling code"));
    assert!(refusal(pool(&[PoolLookup { element: 3, ..lookup(4, 1) }], &rows)).contains("element code"));
    let f16 = [PoolLookup { element: Element::F16.code(), ..lookup(4, 1) }];
    assert!(refusal(pool(&f16, &rows)).contains("bytes of a row: expected 8, got 16"));
    assert!(refusal(pool(&[lookup(4, 1); MAX_LOOKUPS + 1], &rows)).contains("lookups: limit 8190, got 8191"));
}

#[test]
fn too_many_elements_for_a_launch_are_refused() {
    let lookups = [lookup(1 << 16, 0)];
    let huge = Pool { samples: 1 << 16, dense_width: 0, stride: 1 << 16, ..pool(&lookups, &[]) };
    assert!(huge.check().unwrap_err().to_string().contains("elements of one lookup: limit"));
}
