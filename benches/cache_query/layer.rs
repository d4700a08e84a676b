//! An embedding layer that reads its rows through a cache.

use std::time::Instant;

use flechette::cache::{CacheOptions, CacheShape, FlatCache, HostRows, Query, Source};
use flechette::model::{InputRows, Model, Tape};
use flechette::schema::Lookup;
use flechette::store::Table;
use flechette::types::{Batch, TableId};

use crate::baseline::{self, Group, PerTable, Scratch};
use crate::harness::Options;
use crate::traffic::Traffic;

/// Number of batches that are generated and then repeated.
const BATCHES: usize = 64;
/// Batches that run before the measurement, to fill the cache.
const WARMING: usize = 192;

/// How a layer reads its rows.
pub enum Way {
    /// One query over all tables; rows are read in place.
    Flat,
    /// One query over all tables; the row of each hit is copied during the query.
    Coupled,
    /// One query per table; the row of each hit is copied during the query.
    Apart,
}

/// A layer whose cache is warm, with its batches.
pub struct Layer {
    pub traffic: Traffic,
    pub lookups: Vec<Lookup>,
    pub model: Model<f32>,
    pub tables: Vec<Table>,
    batches: Vec<Batch>,
    cache: Cache,
}

enum Cache {
    Flat { cache: FlatCache, way: Way, _host: Vec<HostRows> },
    PerTable(PerTable),
}

impl Layer {
    /// A row of the tables in memory.
    pub fn row(&self, table: TableId, id: u64) -> Option<&[u8]> {
        self.tables[table.index()].row(id)
    }

    /// As in the engine, with a cache for this share of the rows.
    pub fn flat(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::over(traffic, fraction, Way::Flat, false)
    }

    /// Copies hits during the query.
    pub fn coupled(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::over(traffic, fraction, Way::Coupled, false)
    }

    /// Copies hits during the query, and has one query per table.
    pub fn apart(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::over(traffic, fraction, Way::Apart, false)
    }

    /// As in the engine, with pointers to all rows whose copies are not in the cache.
    pub fn pointed(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::over(traffic, fraction, Way::Flat, true)
    }

    /// One static cache per table, each for this share of the table's rows.
    pub fn per_table(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::new(traffic, Cache::PerTable(PerTable::new(&traffic.shapes(), fraction)?))
    }

    fn over(traffic: &Traffic, fraction: f64, way: Way, pointed: bool) -> anyhow::Result<Self> {
        let pointers = if pointed { traffic.rows * traffic.tables as u64 } else { 0 };
        let options = CacheOptions { pointers, ..CacheOptions::default() };
        let shape = CacheShape::for_options(fraction, traffic.shapes(), &options)?;
        let cache = FlatCache::new(&shape, &options)?;
        cache.set_pointers(pointers);
        let tables = (0..traffic.tables as u32).filter(|_| pointed);
        let host = tables.map(|t| cache.host_rows(TableId(t))).collect::<Result<_, _>>()?;
        Self::new(traffic, Cache::Flat { cache, way, _host: host })
    }

    fn new(traffic: &Traffic, cache: Cache) -> anyhow::Result<Self> {
        let schema = traffic.schema();
        let layer = Self {
            traffic: *traffic,
            lookups: schema.lookups(),
            model: Model::new(&schema),
            tables: traffic.tables()?,
            batches: traffic.batches(BATCHES),
            cache,
        };
        let mut runner = layer.runner();
        for _ in 0..WARMING {
            runner.next();
        }
        drop(runner);
        Ok(layer)
    }

    /// A runner with its own buffers, for one thread.
    pub fn runner(&self) -> Runner<'_> {
        let tape = self.model.scoring_tape();
        Runner { layer: self, query: Query::default(), scratch: Scratch::default(), tape, next: 0 }
    }
}

/// A thread's buffers and its next batch.
pub struct Runner<'l> {
    layer: &'l Layer,
    query: Query,
    scratch: Scratch,
    tape: Tape<f32>,
    next: usize,
}

impl Runner<'_> {
    /// Runs the next batch. Returns the number of its ids.
    pub fn next(&mut self) -> u64 {
        let layer = self.layer;
        let batch = &layer.batches[self.next % BATCHES];
        self.next += 1;
        let lookups = layer.lookups.len();
        let groups: Vec<Group<'_>> = match &layer.cache {
            Cache::Flat { cache, way: Way::Flat, .. } => {
                flat(layer, cache, batch, &mut self.query, &mut self.tape);
                Vec::new()
            }
            Cache::Flat { cache, way: Way::Coupled, .. } => {
                vec![Group { cache, lookups: (0..lookups).collect(), alone: false }]
            }
            Cache::Flat { cache, way: Way::Apart, .. } => {
                (0..lookups).map(|l| Group { cache, lookups: vec![l], alone: false }).collect()
            }
            Cache::PerTable(caches) => {
                let each = caches.caches().enumerate();
                each.map(|(l, cache)| Group { cache, lookups: vec![l], alone: true }).collect()
            }
        };
        if !groups.is_empty() {
            baseline::copied(layer, batch, &groups, &mut self.scratch, &mut self.tape);
        }
        (layer.traffic.samples * layer.traffic.tables) as u64
    }
}

/// The steps of the engine for a batch, up to the input rows.
fn flat(layer: &Layer, cache: &FlatCache, batch: &Batch, query: &mut Query, tape: &mut Tape<f32>) {
    query.clear();
    let mut starts = Vec::with_capacity(layer.lookups.len());
    for lookup in &layer.lookups {
        let ids = batch.features[lookup.feature].ids.iter().copied();
        starts.push(query.push(lookup.table, ids).start);
    }
    let pin = cache.pin();
    let Ok(found) = pin.lookup(query) else { unreachable!("ids are below the tables' rows") };
    for miss in found.misses() {
        if let Some(row) = layer.row(miss.table, miss.id) {
            let _ = pin.insert(miss, row);
        }
    }
    let uniques = found.uniques();
    write(layer, batch, tape, |l, i| match found.source(uniques[starts[l] + i]) {
        Source::Row(row) => Some(row),
        Source::Pointer(p) => layer.row(found.pointed()[p].table, found.pointed()[p].id),
        Source::Miss(m) => layer.row(found.misses()[m].table, found.misses()[m].id),
    });
}

/// Writes the pooled vectors of a batch to the tape, in the chunks of the engine. `row(l, i)` is the row of
/// occurrence `i` of lookup `l`.
pub fn write<'r>(
    layer: &Layer,
    batch: &Batch,
    tape: &mut Tape<f32>,
    row: impl Fn(usize, usize) -> Option<&'r [u8]>,
) {
    let inputs = InputRows { dense_width: 0, lookups: &layer.lookups, batch };
    let (size, row) = (layer.model.scoring_chunk(batch.samples, 1), &row);
    for first in (0..batch.samples).step_by(size) {
        tape.samples = size.min(batch.samples - first);
        inputs.write(first, tape, |l| move |i| row(l, i));
        std::hint::black_box(&mut *tape);
    }
}

/// Bytes per second of one thread that reads memory sequentially: the best of several passes.
pub fn sequential_read(options: &Options) -> f64 {
    let memory = vec![1u64; 64 << 20];
    let pass = |_| {
        let began = Instant::now();
        std::hint::black_box(memory.iter().fold(0u64, |sum, x| sum.wrapping_add(*x)));
        (memory.len() * 8) as f64 / began.elapsed().as_secs_f64()
    };
    (0..options.pairs.max(3)).map(pass).fold(0.0, f64::max)
}
