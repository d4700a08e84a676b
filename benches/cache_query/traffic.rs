//! FLECHE's synthetic traffic, and a store for it. `cache_query` and `device_query` share this module.

use flechette::cache::TableShape;
use flechette::schema::Schema;
use flechette::schema::preset::{ArchKind, SyntheticShape, synthetic};
use flechette::store::{PlainMemory, Table};
use flechette::types::Batch;

use crate::harness::{Draw, PowerLaw};

/// The accesses: one id per feature and sample.
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
    /// FLECHE's synthetic workload (section 6.1) has 40 tables of 250,000 rows, dim 32 and alpha 1.2. This
    /// one has a quarter of the rows, so that all layers of a setting fit in memory together.
    pub const FLECHE: Self = Self { tables: 40, rows: 62_500, dim: 32, samples: 4096, alpha: 1.2 };

    /// Batches of this traffic, identical in every run.
    pub fn batches(&self, count: usize) -> Vec<Batch> {
        let mut draw = Draw::new(7);
        let law = PowerLaw::new(self.alpha, self.rows);
        // The factor scatters hot ranks over the table.
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

    /// The tables' shapes.
    pub fn shapes(&self) -> Vec<TableShape> {
        vec![TableShape { rows: self.rows, row_bytes: 4 * self.dim }; self.tables]
    }

    /// A model of these tables.
    pub fn schema(&self) -> Schema {
        let shape = SyntheticShape { tables: self.tables, rows: self.rows, dense: 0, multi_hot: None };
        synthetic(ArchKind::Dcn, self.dim, shape)
    }

    /// The tables' rows, in memory.
    pub fn tables(&self) -> anyhow::Result<Vec<Table>> {
        let table = |t: usize| -> anyhow::Result<Table> {
            let mut table = Table::zeroed(&PlainMemory, self.rows, self.dim, &[])?;
            let values = table.rows_mut().into_iter().flatten().enumerate();
            values.for_each(|(i, x)| *x = ((i + t) % 97) as f32 * 0.01);
            Ok(table)
        };
        (0..self.tables).map(table).collect()
    }

    /// Bytes moved per id: its row is read, and as many bytes of output are written.
    pub fn bytes_per_id(&self) -> f64 {
        2.0 * 4.0 * self.dim as f64
    }
}
