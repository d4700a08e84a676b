//! Keys too narrow for their tables: rows that share a key are distinguished by their tags.

use super::*;

fn narrow(bits: u32) -> CacheOptions {
    CacheOptions { key_width: KeyWidth::new(bits).unwrap(), ..by_hand() }
}

#[test]
fn the_bytes_of_a_fraction_include_tags() {
    for options in [narrow(10), CacheOptions { pointers: 5000, ..narrow(32) }] {
        let tables = vec![table(4000, 3), table(100, 16)];
        let shape = CacheShape::for_options(0.1, tables.clone(), &options).unwrap();
        let cache = FlatCache::new(&shape, &options).unwrap();
        let stats = cache.stats();
        assert!(stats.total_bytes <= shape.bytes as u64, "{stats:?}");
        assert!(stats.pool_bytes >= 400 * 12 + 10 * 64);
    }
}
