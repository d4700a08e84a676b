//! The baselines: caches and lookups that each lack some of FLECHE's techniques.

use flechette::cache::{CacheOptions, CacheShape, FlatCache, Query, Source, TableShape};
use flechette::model::Tape;
use flechette::types::{Batch, TableId};

use crate::layer::{Layer, write};

/// One static cache per table (FLECHE, section 2.2): each table has its own index, pool and bytes.
pub struct PerTable(Vec<FlatCache>);

impl PerTable {
    /// Caches that hold this share of each table's rows.
    pub fn new(tables: &[TableShape], fraction: f64) -> anyhow::Result<Self> {
        let options = CacheOptions::default();
        let cache = |table: &TableShape| {
            let shape = CacheShape::for_options(fraction, vec![*table], &options)?;
            Ok(FlatCache::new(&shape, &options)?)
        };
        Ok(Self(tables.iter().map(cache).collect::<anyhow::Result<_>>()?))
    }

    /// The caches, by table.
    pub fn caches(&self) -> impl Iterator<Item = &FlatCache> {
        self.0.iter()
    }
}

/// A cache and the lookups that it answers in one query.
pub struct Group<'c> {
    pub cache: &'c FlatCache,
    pub lookups: Vec<usize>,
    /// Whether the cache has only the table of these lookups, as its table 0.
    pub alone: bool,
}

/// The buffers of a thread, reused for every batch.
#[derive(Default)]
pub struct Scratch {
    /// One per group.
    pub queries: Vec<Query>,
    /// Copies of the distinct rows of all groups.
    copies: Vec<u8>,
    /// For each occurrence: its distinct row, as an index within its group.
    uniques: Vec<u32>,
    /// For each lookup: where its group begins in `copies`, and where its occurrences begin in `uniques`.
    places: Vec<(usize, usize)>,
}

/// Runs one cache query per group and copies every distinct row, from the cache or from the store. Then pools
/// the copies.
pub fn copied(
    layer: &Layer,
    batch: &Batch,
    groups: &[Group<'_>],
    scratch: &mut Scratch,
    tape: &mut Tape<f32>,
) {
    let row_bytes = 4 * layer.traffic.dim;
    let Scratch { queries, copies, uniques, places } = scratch;
    queries.resize_with(groups.len(), Query::default);
    places.resize(layer.lookups.len(), (0, 0));
    copies.clear();
    uniques.clear();
    for (Group { cache, lookups, alone }, query) in groups.iter().zip(queries) {
        query.clear();
        for &l in lookups {
            let table = if *alone { TableId(0) } else { layer.lookups[l].table };
            let ids = batch.features[layer.lookups[l].feature].ids.iter().copied();
            places[l] = (copies.len(), uniques.len() + query.push(table, ids).start);
        }
        let pin = cache.pin();
        let Ok(found) = pin.lookup(query) else { unreachable!("ids are below the tables' rows") };
        uniques.extend_from_slice(found.uniques());
        for unique in 0..found.rows() as u32 {
            match found.source(unique) {
                Source::Row(row) => copies.extend_from_slice(row),
                Source::Miss(m) => {
                    let miss = found.misses()[m];
                    let table = if *alone { layer.lookups[lookups[0]].table } else { miss.table };
                    let row = layer.row(table, miss.id).unwrap_or(&[]);
                    copies.extend_from_slice(row);
                    let _ = pin.insert(&miss, row);
                }
                Source::Pointer(_) => unreachable!("the caches of the baselines have no pointers"),
            }
        }
    }
    write(layer, batch, tape, |l, i| {
        let (first, start) = places[l];
        let at = first + uniques[start + i] as usize * row_bytes;
        copies.get(at..at + row_bytes)
    });
}
