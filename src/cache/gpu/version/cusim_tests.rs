//! The steps of a switch one by one, with evictions, insertions and reads between them.

use super::super::{ContextShape, GpuCache, GpuCacheError, LookupContext};
use super::*;
use crate::cache::{AdmissionOption, CacheOptions, CacheShape, TableShape};
use crate::device::cusim::SimDriver;
use crate::schema::{Lookup, Pooling};
use crate::types::{Batch, Element, Jagged};

const DIMS: [usize; 2] = [64, 1];

/// The value of all elements of a row.
fn value(table: usize, id: u64, version: u64) -> f32 {
    (version * 10_000 + table as u64 * 1000 + id) as f32
}

/// Two tables of 500 rows. Traffic on the small rows alone fills the index but not the pool.
fn cache(bytes: usize) -> (GpuCache<SimDriver>, LookupContext<SimDriver>) {
    let tables = DIMS.map(|dim| TableShape { rows: 500, row_bytes: 4 * dim }).to_vec();
    let options =
        CacheOptions { admission: AdmissionOption::ALL, background: false, ..CacheOptions::default() };
    let driver = Arc::new(SimDriver::new(1, 1 << 30).unwrap());
    let cache = GpuCache::new(&CacheShape { bytes, tables }, &options, driver).unwrap();
    let lookup = |t: usize| Lookup {
        feature: t,
        table: TableId(t as u32),
        dim: DIMS[t],
        element: Element::F32,
        pooling: Pooling::Sum,
        column: t * DIMS[0],
    };
    let shape = ContextShape {
        features: 2,
        lookups: (0..2).map(lookup).collect(),
        dense_width: 0,
        stride: DIMS.iter().sum(),
        max_samples: 64,
        max_ids: 128,
        staging_bytes: None,
        copy_bytes: 0,
    };
    let context = cache.context(&shape).unwrap();
    (cache, context)
}

/// Reads rows of a table and checks that they have the values of the batch's version. Version 1 changes the
/// ids below `changed`. Returns how many rows were missing.
fn read(
    (cache, context): (&GpuCache<SimDriver>, &mut LookupContext<SimDriver>),
    table: usize,
    ids: std::ops::Range<u64>,
    changed: u64,
) -> usize {
    let version_of = |id: u64, version: Version| if id < changed { version.0 } else { 0 };
    let mut features = vec![Jagged { offsets: vec![0; ids.clone().count() + 1], ids: vec![] }; 2];
    features[table] =
        Jagged { offsets: (0..=ids.clone().count() as u32).collect(), ids: ids.clone().collect() };
    let batch = Batch { samples: ids.clone().count(), features, ..Batch::default() };
    let mut missed = 0;
    let matrix = cache.embed(context, &batch, |missing| {
        missed = missing.len();
        for m in 0..missed {
            let id = missing.row(m).row();
            let row = value(table, id, version_of(id, missing.version()));
            bytemuck::cast_slice_mut(missing.bytes_mut(m)).fill(row);
        }
        Ok::<_, GpuCacheError>(())
    });
    let firsts: Vec<f32> =
        matrix.unwrap().iter().skip(table * DIMS[0]).step_by(DIMS[0] + DIMS[1]).copied().collect();
    let expected: Vec<f32> = ids.map(|id| value(table, id, version_of(id, context.version()))).collect();
    assert_eq!(firsts, expected);
    missed
}

/// The overlay of version 1, which changes the first eight rows of the second table.
fn overlay(cache: &GpuCache<SimDriver>) -> (Arc<VersionOverlay>, Arc<OverlayTable<SimDriver>>) {
    let rows: Vec<[f32; 1]> = (0..8).map(|id| [value(1, id, 1)]).collect();
    let changed = rows.iter().enumerate();
    let changed = changed.map(|(id, row)| NewRow::of((TableId(1), id as u64, bytemuck::bytes_of(row))));
    let (overlay, table) = Carrier::new(&cache.shared).unwrap().carry(changed).unwrap();
    assert_eq!(overlay.switched(), Switched { changed: 8, carried: 8 });
    (Arc::new(overlay), Arc::new(table))
}

/// Reads other rows until every earlier entry of the index is evicted.
fn crowd(cache: &GpuCache<SimDriver>, context: &mut LookupContext<SimDriver>) {
    for _ in 0..2 {
        for start in (20..500).step_by(60) {
            read((cache, context), 1, start..start + 60, 8);
            cache.settle().unwrap();
        }
    }
}

#[test]
fn a_row_evicted_from_the_index_is_found_in_the_overlay_while_that_exists() {
    let (cache, mut context) = cache(8 << 10);
    read((&cache, &mut context), 1, 0..8, 8);
    cache.settle().unwrap();
    let (overlay, table) = overlay(&cache);
    cache.shared.make_current(Version(1), &table);
    assert_eq!(read((&cache, &mut context), 1, 0..8, 8), 0);
    cache.shared.merge(&overlay).unwrap();
    crowd(&cache, &mut context);
    assert_eq!(read((&cache, &mut context), 1, 0..8, 8), 0, "found in the overlay only");
    cache.shared.withdraw_overlay(Version(1));
    assert_eq!(read((&cache, &mut context), 1, 0..8, 8), 8, "found nowhere");
}

#[test]
fn a_row_that_does_not_fit_in_the_index_is_found_in_the_overlay_while_that_exists() {
    let (cache, mut context) = cache(8 << 10);
    read((&cache, &mut context), 1, 0..8, 8);
    cache.settle().unwrap();
    let (overlay, table) = overlay(&cache);
    cache.shared.make_current(Version(1), &table);
    crowd(&cache, &mut context);
    let before = cache.stats().rejected_full;
    cache.shared.merge(&overlay).unwrap();
    assert!(cache.stats().rejected_full > before, "the index is full");
    crowd(&cache, &mut context);
    assert_eq!(read((&cache, &mut context), 1, 0..8, 8), 0, "found in the overlay only");
    cache.shared.withdraw_overlay(Version(1));
    crowd(&cache, &mut context);
    assert_eq!(read((&cache, &mut context), 1, 0..8, 8), 8, "found nowhere");
    let stats = cache.stats();
    let evictions: u64 = stats.tables.iter().map(|table| table.evictions).sum();
    assert_eq!(stats.entries, stats.inserted - evictions);
}
