use super::*;
use proptest::prelude::*;

#[test]
fn first_values_are_spread_evenly_within_the_bound() {
    let uniform = Uniform { seed: 7, table_code: table_code("users"), bound: 0.25 };
    let mut rows = vec![0.0; 64 * 4096];
    uniform.table(64, &mut rows);
    assert!(rows.iter().all(|x| x.abs() <= 0.25));
    let mut tenths = [0_u32; 10];
    rows.iter().for_each(|x| tenths[((x + 0.25) * 20.0) as usize] += 1);
    // 26,214 values are expected per tenth of the range. Six standard deviations are 922.
    assert!(tenths.iter().all(|&n| n.abs_diff(26_214) < 922), "{tenths:?}");
}

#[test]
fn filling_a_table_gives_the_same_bytes_on_any_number_of_threads() {
    let uniform = Uniform { seed: 1, table_code: 2, bound: 1.0 };
    let dim = 7;
    let one_by_one: Vec<u32> = (0..30_000)
        .flat_map(|row| {
            let mut out = [0.0; 7];
            uniform.row(row, &mut out);
            out.map(f32::to_bits)
        })
        .collect();
    for threads in [1, 3, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut rows = vec![0.0_f32; 30_000 * dim];
        pool.install(|| uniform.table(dim, &mut rows));
        assert!(rows.iter().map(|x| x.to_bits()).eq(one_by_one.iter().copied()), "{threads} threads");
    }
}

proptest! {
    #[test]
    fn a_row_depends_on_seed_table_and_row(seed: u64, code: u64, row: u64) {
        let values = |seed, table_code, row| {
            let mut out = [0.0_f32; 8];
            Uniform { seed, table_code, bound: 1.0 }.row(row, &mut out);
            out.map(f32::to_bits)
        };
        let here = values(seed, code, row);
        prop_assert_eq!(here, values(seed, code, row));
        prop_assert_ne!(here, values(seed ^ 1, code, row));
        prop_assert_ne!(here, values(seed, code ^ 1, row));
        prop_assert_ne!(here, values(seed, code, row ^ 1));
    }
}
