use super::super::simulate::simulate;
use super::super::trace::tests::{accesses, trace};
use super::*;
use proptest::prelude::*;

fn demand(replica_reads_per_s: Option<f64>) -> Demand {
    Demand {
        scores_per_s: 1e6,
        rows_per_score: 26.0,
        replica_scores_per_s: 60_000.0,
        replica_reads_per_s,
        table_bytes: 1e13,
        scale: 1.0,
    }
}

#[test]
fn an_example_by_hand() {
    // A fifth of 26 million lookups/s misses: 5.2 million rows/s. Half of these rows have 64 bytes, which
    // divide a page. The other half have 96 bytes, so they touch (96 - 32) / 4096 pages more than one.
    let misses = Misses { share: 0.2, pages: 0.1 * pages(64) + 0.1 * pages(96) };
    let need = demand(Some(500_000.0)).need(misses);
    assert!((need.missed_rows_per_s - 5_200_000.0).abs() < 1e-3, "{need:?}");
    assert!((need.disk_reads_per_s - 5_240_625.0).abs() < 1e-3, "{need:?}");
    assert_eq!((need.replicas_by_compute, need.replicas_by_disk, need.replicas()), (17, 11, 17));
    let need = demand(Some(100_000.0)).need(misses);
    assert_eq!((need.replicas_by_disk, need.replicas()), (53, 53));
    let need = demand(None).need(misses);
    assert_eq!((need.disk_reads_per_s, need.replicas_by_disk, need.replicas()), (0.0, 0, 17));
    assert_eq!(demand(None).replica_memory(1e9), 1e13 + 1e9);
    assert_eq!(demand(Some(1.0)).replica_memory(1e9), 1e9);
}

proptest! {
    #[test]
    fn a_row_touches_as_many_pages_as_rows_laid_out_one_after_the_other_do(row_bytes in 1usize..20_000) {
        // After this many rows the layout repeats.
        let rows = PAGE_BYTES;
        let touched = |row: usize| {
            let begin = row * row_bytes;
            (begin + row_bytes - 1) / PAGE_BYTES - begin / PAGE_BYTES + 1
        };
        let mean = (0..rows).map(touched).sum::<usize>() as f64 / rows as f64;
        prop_assert!((pages(row_bytes) - mean).abs() < 1e-9, "{} {mean}", pages(row_bytes));
    }

    #[test]
    fn more_cache_never_needs_more_replicas_or_reads(
        wanted in accesses(200), reads in 1.0f64..1e7, in_memory: bool,
    ) {
        let trace = trace(&wanted);
        let demand = demand((!in_memory).then_some(reads));
        let mut before: Option<Need> = None;
        for size in simulate(&trace, &[0.0, 0.1, 0.3, 0.6, 1.0], 0) {
            // A larger cache holds all rows of a smaller one with this policy.
            let need = demand.need(Misses::of(&trace, size.flat.of(SimulatedPolicy::Lru)));
            if let Some(before) = before {
                prop_assert!(need.replicas() <= before.replicas(), "{need:?} {before:?}");
                prop_assert!(need.disk_reads_per_s <= before.disk_reads_per_s + 1e-6);
            }
            before = Some(need);
        }
    }

    #[test]
    fn all_replicas_together_do_what_is_wanted(
        scores in 1.0f64..1e8, replica_scores in 1.0f64..1e6, reads in 1.0f64..1e7, share in 0.0f64..=1.0,
    ) {
        let demand = Demand {
            scores_per_s: scores, replica_scores_per_s: replica_scores, ..demand(Some(reads))
        };
        let need = demand.need(Misses { share, pages: share * pages(96) });
        let replicas = need.replicas() as f64;
        prop_assert!(replicas * replica_scores >= scores * (1.0 - 1e-12));
        prop_assert!(replicas * reads >= need.disk_reads_per_s * (1.0 - 1e-12));
        let fewer = replicas - 1.0;
        let too_few = fewer * replica_scores < scores || fewer * reads < need.disk_reads_per_s;
        prop_assert!(too_few, "{need:?}");
    }
}
