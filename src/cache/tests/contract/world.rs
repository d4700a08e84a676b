//! The tables of a test, their rows in each version, and batches of their ids.

use crate::cache::{AdmissionOption, CacheOptions, CacheShape, Switched, TableShape};
use crate::compute::gather_pool as host;
use crate::mem::mix64;
use crate::schema::{Lookup, Pooling};
use crate::types::{Batch, Element, Jagged, TableId};

use super::Subject;

/// The tables and options of a cache, and the lookups of a batch.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub tables: Vec<TableShape>,
    pub lookups: Vec<Lookup>,
    pub features: usize,
    pub dense_width: usize,
    pub stride: usize,
    pub bytes: usize,
    pub options: CacheOptions,
}

/// Maximum samples and ids of a batch in a test.
pub(crate) const MAX_SAMPLES: usize = 64;
pub(crate) const MAX_IDS: usize = 4096;

impl World {
    /// A table of `rows` rows for each dim, and a feature for each table.
    pub(crate) fn new(rows: u64, dims: &[usize], bytes: usize) -> Self {
        let element = |t: usize| Element::ALL[t % 3];
        let table = |(t, &dim): (usize, &usize)| TableShape { rows, row_bytes: element(t).row_bytes(dim) };
        let tables: Vec<_> = dims.iter().enumerate().map(table).collect();
        let (dense_width, mut column) = (2, 3);
        let mut lookups = Vec::new();
        for (t, &dim) in dims.iter().enumerate() {
            let pooling = if t % 2 == 0 { Pooling::Sum } else { Pooling::Mean };
            let (table, element) = (TableId(t as u32), element(t));
            lookups.push(Lookup { feature: t, table, dim, element, pooling, column });
            column += dim;
        }
        let least = CacheShape::from_fraction(0.0, tables.clone()).bytes;
        let (features, stride, bytes) = (dims.len(), column, least + bytes);
        let options =
            CacheOptions { admission: AdmissionOption::ALL, background: false, ..CacheOptions::default() };
        Self { tables, lookups, features, dense_width, stride, bytes, options }
    }

    /// The same world with other options. The memory for rows stays as large.
    pub(crate) fn with(mut self, options: impl FnOnce(&mut CacheOptions)) -> Self {
        let least =
            |world: &Self| CacheShape::for_options(0.0, world.tables.clone(), &world.options).unwrap().bytes;
        let before = least(&self);
        options(&mut self.options);
        self.bytes = self.bytes - before + least(&self);
        self
    }

    /// Adds a lookup of the last feature in the first table.
    pub(crate) fn with_a_shared_feature(mut self) -> Self {
        let last = self.lookups[self.lookups.len() - 1];
        let first = self.lookups[0];
        self.lookups.push(Lookup { feature: last.feature, column: self.stride, ..first });
        self.stride += first.dim;
        self
    }

    /// Allows `pointers` pointers, and adds the memory for them.
    pub(crate) fn with_pointers(mut self, pointers: u64) -> Self {
        self.options.pointers = pointers;
        self.bytes += (pointers as usize).div_ceil(6) * 128;
        self
    }

    pub(crate) fn shape(&self) -> CacheShape {
        CacheShape { bytes: self.bytes, tables: self.tables.clone() }
    }

    /// A batch of one id per bag: sample `s` of feature `f` has `ids[f][s]`.
    pub(crate) fn one_hot(&self, ids: &[Vec<u64>]) -> Batch {
        let samples = ids[0].len();
        let column = |ids: &Vec<u64>| Jagged { offsets: (0..=samples as u32).collect(), ids: ids.clone() };
        let dense = (0..samples * self.dense_width).map(|i| i as f32).collect();
        Batch { samples, dense, features: ids.iter().map(column).collect(), ..Batch::default() }
    }

    /// A batch of bags of 0 to 4 ids below `spread`, including duplicates and absent ids.
    pub(crate) fn bags(&self, samples: usize, spread: u64, draw: &mut u64) -> Batch {
        let mut next = |limit: u64| {
            *draw = draw.wrapping_add(1);
            mix64(*draw) % limit
        };
        let mut batch = Batch::empty(self.features);
        batch.samples = samples;
        batch.dense = (0..samples * self.dense_width).map(|_| next(1000) as f32 - 500.0).collect();
        for feature in &mut batch.features {
            for _ in 0..samples {
                let ids: Vec<u64> =
                    (0..next(5)).map(|_| if next(20) == 0 { u64::MAX } else { next(spread) }).collect();
                feature.push(&ids);
            }
        }
        batch
    }

    /// The expected output of a batch.
    pub(crate) fn expected(&self, batch: &Batch, version: u64) -> Vec<f32> {
        self.pooled(batch, |lookup, id| self.row(lookup.table, id, version))
    }

    /// Checks a batch's output against its rows in a version.
    pub(crate) fn assert_is(&self, matrix: &[f32], batch: &Batch, version: u64) {
        let expected = self.expected(batch, version);
        assert_eq!(matrix.len(), expected.len());
        for (i, (got, expected)) in matrix.iter().zip(&expected).enumerate() {
            let (sample, column) = (i / self.stride, i % self.stride);
            // Column `dense_width` lies between the dense values and the first lookup, and nothing writes it.
            let same = got.to_bits() == expected.to_bits() || column == self.dense_width;
            assert!(
                same,
                "sample {sample} column {column}: expected {expected}, got {got} {:x}",
                got.to_bits()
            );
        }
    }

    /// The output of a batch whose rows are given by `row`, for each lookup and id.
    pub(crate) fn pooled(&self, batch: &Batch, row: impl Fn(&Lookup, u64) -> Option<Vec<u8>>) -> Vec<f32> {
        let mut out = vec![0.0; batch.samples * self.stride];
        for s in 0..batch.samples {
            let dense = &batch.dense[s * self.dense_width..][..self.dense_width];
            out[s * self.stride..][..self.dense_width].copy_from_slice(dense);
        }
        for lookup in &self.lookups {
            let feature = &batch.features[lookup.feature];
            let rows: Vec<Option<Vec<u8>>> = feature.ids.iter().map(|&id| row(lookup, id)).collect();
            let rows: Vec<Option<&[u8]>> = rows.iter().map(Option::as_deref).collect();
            let pool = host::PoolLookup {
                offsets: &feature.offsets,
                dim: lookup.dim,
                element: lookup.element,
                mean: lookup.pooling == Pooling::Mean,
                column: lookup.column,
            };
            host::gather_pool(&pool, &rows, &mut out, self.stride);
        }
        out
    }

    /// The bytes of a row in a version: every value encodes the table, the id and the version that changed
    /// the row last. `None` for an absent id.
    pub(crate) fn row(&self, table: TableId, id: u64, version: u64) -> Option<Vec<u8>> {
        let lookup = self.lookups.iter().find(|l| l.table == table).unwrap();
        let made = (1..=version).rev().take(5).find(|&v| changes(v, id)).unwrap_or(0);
        let value = |i: usize| {
            let name = id << 30 | u64::from(table.0) << 20 | i as u64;
            ((mix64(name ^ mix64(made)) >> 48) as f32 - 32768.0) / 16.0
        };
        let values: Vec<f32> = (0..lookup.dim).map(value).collect();
        let mut row = vec![0; lookup.element.row_bytes(lookup.dim)];
        lookup.element.encode(&values, &mut row).unwrap();
        (id < self.tables[table.index()].rows).then_some(row)
    }

    /// All rows of a table in a version, concatenated.
    pub(crate) fn all_rows(&self, table: TableId, version: u64) -> Vec<u8> {
        (0..self.tables[table.index()].rows).flat_map(|id| self.row(table, id, version).unwrap()).collect()
    }

    /// Switches a cache to a version with all rows that it changes.
    pub(crate) fn switch(&self, subject: &impl Subject, version: u64) -> Switched {
        let ids = |t: usize| (0..self.tables[t].rows).filter(|&id| changes(version, id));
        let row = |t, id| (TableId(t as u32), id, self.row(TableId(t as u32), id, version).unwrap());
        let rows: Vec<_> = (0..self.tables.len()).flat_map(|t| ids(t).map(move |id| row(t, id))).collect();
        let rows: Vec<_> = rows.iter().map(|(table, id, row)| (*table, *id, &row[..])).collect();
        subject.switch(version, &rows).unwrap()
    }

    /// The number of occurrences in a batch whose ids are not absent.
    pub(crate) fn present(&self, batch: &Batch) -> u64 {
        let of = |l: &Lookup| {
            let rows = self.tables[l.table.index()].rows;
            batch.features[l.feature].ids.iter().filter(|id| **id < rows).count() as u64
        };
        self.lookups.iter().map(of).sum()
    }
}

/// Whether a version changes a row. Each version changes every fifth row.
pub(crate) fn changes(version: u64, id: u64) -> bool {
    version > 0 && id % 5 == version % 5
}
