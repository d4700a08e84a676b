//! An embedding layer over a cache, and the traffic it is run on.

use std::time::Instant;

use flechette::cache::{CacheOptions, CacheShape, FlatCache, HostRows, Query, Source, TableShape};
use flechette::model::{InputRows, Model, Tape};
use flechette::schema::Lookup;
use flechette::schema::preset::{Kind, SyntheticShape, synthetic};
use flechette::store::{EmbeddingStore, PlainMemory, Table};
use flechette::types::{Batch, TableId, Version};

use crate::baseline::{self, Group, PerTable, Scratch};
use crate::harness::{Draw, Options, PowerLaw};

/// Batches that come in turn.
const BATCHES: usize = 64;
/// Batches that fill a cache before it is measured.
const WARMING: usize = 192;

/// What is asked for. One id a feature and sample.
#[derive(Clone, Copy)]
pub struct Traffic {
    pub tables: usize,
    pub rows: u64,
    pub dim: usize,
    pub samples: usize,
    /// Exponent of the power law.
    pub alpha: f64,
}

impl Traffic {
    /// FLECHE's synthetic workload (section 6.1): 40 tables of 250,000 rows of 32, alpha 1.2. A quarter of the
    /// rows, so that all layers of a setting fit this machine beside each other.
    pub const FLECHE: Self = Self { tables: 40, rows: 62_500, dim: 32, samples: 4096, alpha: 1.2 };

    fn batches(&self, count: usize) -> Vec<Batch> {
        let mut draw = Draw::new(7);
        let law = PowerLaw::new(self.alpha, self.rows);
        // An odd factor scatters ranks over the table.
        let mut id = |table: u64| (law.rank(&mut draw) + table).wrapping_mul(2_654_435_761) % self.rows;
        let batch = |_| {
            let mut batch = Batch::empty(self.tables);
            batch.samples = self.samples;
            for (t, column) in batch.features.iter_mut().enumerate() {
                (0..self.samples).for_each(|_| column.push(&[id(t as u64)]));
            }
            batch
        };
        (0..count).map(batch).collect()
    }
}

/// How a layer gets its rows.
pub enum Way {
    /// One lookup over all tables, rows read where they lie.
    Flat,
    /// The same, and each hit's row is copied out as it is looked up.
    Coupled,
    /// A lookup a table, each with a copy.
    Apart,
}

/// A layer, warm.
pub struct Layer {
    pub traffic: Traffic,
    pub lookups: Vec<Lookup>,
    pub model: Model<f32>,
    pub store: EmbeddingStore,
    batches: Vec<Batch>,
    cache: Cache,
}

enum Cache {
    Flat { cache: FlatCache, way: Way, _host: Vec<HostRows> },
    PerTable(PerTable),
}

impl Layer {
    /// As the engine does it, with a cache of this share of the rows.
    pub fn flat(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::over(traffic, fraction, Way::Flat, false)
    }

    /// With hits copied out within the lookup.
    pub fn coupled(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::over(traffic, fraction, Way::Coupled, false)
    }

    /// With a lookup a table besides.
    pub fn apart(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::over(traffic, fraction, Way::Apart, false)
    }

    /// As the engine does it, with pointers to all rows that are not in the pool.
    pub fn pointed(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        Self::over(traffic, fraction, Way::Flat, true)
    }

    /// A static cache a table, of the same share each.
    pub fn per_table(traffic: &Traffic, fraction: f64) -> anyhow::Result<Self> {
        let shapes = shapes(traffic);
        Self::new(traffic, Cache::PerTable(PerTable::new(&shapes, fraction)?))
    }

    fn over(traffic: &Traffic, fraction: f64, way: Way, pointed: bool) -> anyhow::Result<Self> {
        let pointers = if pointed { traffic.rows * traffic.tables as u64 } else { 0 };
        let options = CacheOptions { pointers, ..CacheOptions::default() };
        let shape = CacheShape::for_options(fraction, shapes(traffic), &options)?;
        let cache = FlatCache::new(&shape, &options)?;
        cache.set_pointers(pointers);
        let tables = (0..traffic.tables as u32).filter(|_| pointed);
        let host = tables.map(|t| cache.host_rows(TableId(t))).collect::<Result<_, _>>()?;
        Self::new(traffic, Cache::Flat { cache, way, _host: host })
    }

    fn new(traffic: &Traffic, cache: Cache) -> anyhow::Result<Self> {
        let shape = SyntheticShape { tables: traffic.tables, rows: traffic.rows, dense: 0, multi_hot: None };
        let schema = synthetic(Kind::Dcn, traffic.dim, shape);
        let table = |t: usize| -> anyhow::Result<Table> {
            let mut table = Table::zeroed(&PlainMemory, traffic.rows, traffic.dim, &[])?;
            let values = table.rows_mut().into_iter().flatten().enumerate();
            values.for_each(|(i, x)| *x = ((i + t) % 97) as f32 * 0.01);
            Ok(table)
        };
        let tables = (0..traffic.tables).map(table).collect::<anyhow::Result<_>>()?;
        let layer = Self {
            traffic: *traffic,
            lookups: schema.lookups(),
            model: Model::new(&schema),
            store: EmbeddingStore::new(Version(1), tables),
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

    /// Bytes moved for one id: its row read, and its share of the output written.
    pub fn bytes_an_id(&self) -> f64 {
        2.0 * 4.0 * self.traffic.dim as f64
    }

    /// Runs batches, one after the other.
    pub fn runner(&self) -> Runner<'_> {
        let tape = self.model.tape(false);
        Runner { layer: self, query: Query::default(), scratch: Scratch::default(), tape, next: 0 }
    }
}

fn shapes(traffic: &Traffic) -> Vec<TableShape> {
    vec![TableShape { rows: traffic.rows, row_bytes: 4 * traffic.dim }; traffic.tables]
}

/// A thread's scratch and place among the batches.
pub struct Runner<'l> {
    layer: &'l Layer,
    query: Query,
    scratch: Scratch,
    tape: Tape<f32>,
    next: usize,
}

impl Runner<'_> {
    /// The next batch. Returns its ids.
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

/// What the engine does with a batch, but for the model.
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
        if let Some(row) = layer.store.row(miss.table, miss.id) {
            let _ = pin.insert(miss.table, miss.id, row);
        }
    }
    let uniques = found.uniques();
    write(layer, batch, tape, |l, i| match found.source(uniques[starts[l] + i]) {
        Source::Row(row) => Some(row),
        Source::Host(p) => layer.store.row(found.pointed()[p].table, found.pointed()[p].id),
        Source::Miss(m) => layer.store.row(found.misses()[m].table, found.misses()[m].id),
    });
}

/// Pools a batch, a tape's worth of samples at a time. `row` gives the row of a lookup's occurrence.
pub fn write<'r>(
    layer: &Layer,
    batch: &Batch,
    tape: &mut Tape<f32>,
    row: impl Fn(usize, usize) -> Option<&'r [u8]>,
) {
    let inputs = InputRows { dense_width: 0, lookups: &layer.lookups, batch };
    let (size, row) = (layer.model.chunk(), &row);
    for first in (0..batch.samples).step_by(size) {
        tape.samples = size.min(batch.samples - first);
        inputs.write(first, tape, |l| move |i| row(l, i));
        std::hint::black_box(&mut *tape);
    }
}

/// Bytes a second that one thread reads from memory in sequence: the best of some passes.
pub fn sequential_read(options: &Options) -> f64 {
    let memory = vec![1u64; 64 << 20];
    let pass = |_| {
        let began = Instant::now();
        std::hint::black_box(memory.iter().fold(0u64, |sum, x| sum.wrapping_add(*x)));
        (memory.len() * 8) as f64 / began.elapsed().as_secs_f64()
    };
    (0..options.pairs.max(3)).map(pass).fold(0.0, f64::max)
}
