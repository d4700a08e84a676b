use super::*;

#[test]
fn a_rate_selects_its_share_of_the_rows_of_every_table() {
    for rate in [0.0, 0.01, 0.3, 1.0] {
        for table in 0..3 {
            let selected =
                (0..100_000).filter(|&row| Sampler::new(rate).selects(TableId(table), row)).count();
            assert!((selected as f64 / 1e5 - rate).abs() < 0.005, "rate {rate}: {selected} of 100000");
        }
    }
}

#[test]
fn a_higher_rate_selects_every_row_of_a_lower_rate() {
    let (low, high) = (Sampler::new(0.1), Sampler::new(0.2));
    assert!((0..10_000).all(|row| !low.selects(TableId(1), row) || high.selects(TableId(1), row)));
}
