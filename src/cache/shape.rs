//! How `cache.bytes` is divided between index and pool, and how a share of a model becomes bytes.
//!
//! Rows of different sizes cost one index entry each, so how many entries a byte of pool needs depends
//! on the mix. The division assumes the model's own mix: as many entries as fit when each row is of the
//! tables' mean size, weighted by their rows. Where the traffic's mix differs, pool or index is full
//! first, and eviction heeds both.

use super::index::{self, BUCKET_BYTES, LOAD, Location, SLOTS};
use super::key::RowKeys;
use super::policy::Fill;
use super::policy::frequency::{MISS_BYTES, Sketch};
use super::policy::rank::Ranks;
use super::slab::SlabShape;
use super::{AdmissionOption, CacheError, CacheOptions, EvictionOption, WATERMARKS};
use crate::types::{FlatKey, ROW_ALIGN, TableId};

/// The least number of buckets: a key's two are then mostly two.
const MIN_BUCKETS: usize = 2;
/// Slabs a row size gets at least, where the pool is large enough: the finer, the less is lost in
/// slabs that are partly used.
const SLABS_PER_CLASS: usize = 64;
/// The largest slab, unless one row is larger.
const MAX_SLAB_BYTES: usize = 1 << 20;
/// Offsets of locations reach this far.
const MAX_POOL_BYTES: usize = Location::OFFSETS as usize * 4;

/// One table, as the cache sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Ids are below this.
    pub rows: u64,
    /// Bytes a row, above 0 and a multiple of [`ROW_ALIGN`].
    pub row_bytes: usize,
}

/// Bytes of the tag before a row that may share its index key with others: the row's own key.
pub(crate) const TAG_BYTES: usize = size_of::<u64>();

/// How much memory a cache may take, and for which tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Bound of index and pool together: `cache.bytes`.
    pub bytes: usize,
    /// The model's tables, by their ids.
    pub tables: Vec<TableShape>,
}

impl CacheShape {
    /// A cache with room for this share (0 to 1) of every table's rows, index included:
    /// `cache.fraction`. So many rows are held without crossing the high watermark, whatever their
    /// order; a rare key (one in ten thousand or less) whose two buckets are both full puts out another.
    #[must_use]
    pub fn from_fraction(fraction: f64, tables: Vec<TableShape>) -> Self {
        let share = |table: &TableShape| TableShape {
            rows: (table.rows as f64 * fraction.clamp(0.0, 1.0)).ceil() as u64,
            row_bytes: table.row_bytes,
        };
        let held: Vec<TableShape> = tables.iter().map(share).collect();
        let (row_bytes, minimum) = minimum(&tables);
        if row_bytes.is_empty() {
            return Self { bytes: minimum, tables };
        }
        let rows = |t: &TableShape| (t.rows as usize).saturating_mul(t.row_bytes);
        let rows = held.iter().map(rows).fold(0, usize::saturating_add);
        let mut shape = Self { bytes: rows.max(minimum), tables };
        // The division has roundings of its own, so it is asked, and not inverted.
        while shape.layout().is_ok_and(|layout| !layout.holds(&held)) {
            shape.bytes += shape.bytes / 128 + 512;
        }
        shape
    }

    /// The least shape that holds this share of every table's rows in a cache of these options.
    ///
    /// # Errors
    /// [`CacheError`] where the tables' rows have no keys of the width.
    pub fn for_options(
        fraction: f64,
        tables: Vec<TableShape>,
        options: &CacheOptions,
    ) -> Result<Self, CacheError> {
        let rows: Vec<u64> = tables.iter().map(|t| t.rows).collect();
        let keys = RowKeys::new(&rows, options.key_width)?;
        let slots = slots(&tables, &keys);
        let rest = Self::from_fraction(fraction, slots.clone()).bytes;
        Ok(Self { bytes: with_policies(rest, &slots, options), tables })
    }

    /// Divides the bytes among all that a cache of these options has.
    pub(crate) fn plan(&self, keys: &RowKeys, options: &CacheOptions) -> Result<Plan, CacheError> {
        let slots = slots(&self.tables, keys);
        let sketch_bytes = sketch_bytes(self.bytes, &slots, options);
        let more_buckets = pointer_buckets(options.pointers);
        let ranked = ranked(self.bytes, &slots, options);
        let policies = sketch_bytes + Ranks::bytes_of(ranked);
        let apart = policies.saturating_add(more_buckets.saturating_mul(BUCKET_BYTES));
        let inner = Self { bytes: self.bytes.saturating_sub(apart), tables: slots };
        let mut layout = inner.layout().map_err(|error| match error {
            CacheError::TooSmall { minimum, sizes, .. } => {
                let minimum = with_policies(minimum, &inner.tables, options);
                CacheError::TooSmall { got: self.bytes, minimum, sizes }
            }
            error => error,
        })?;
        layout.buckets = (layout.buckets + more_buckets).min(u32::MAX as usize);
        Ok(Plan { layout, slots: inner.tables, sketch_bytes, ranked })
    }

    /// Divides the bytes between index and pool.
    pub(crate) fn layout(&self) -> Result<Layout, CacheError> {
        let odd = |t: &TableShape| t.row_bytes == 0 || !t.row_bytes.is_multiple_of(ROW_ALIGN);
        if let Some(table) = self.tables.iter().position(odd) {
            return Err(CacheError::RowAlign { table, got: self.tables[table].row_bytes });
        }
        let (row_bytes, minimum) = minimum(&self.tables);
        if self.bytes < minimum || row_bytes.is_empty() {
            return Err(CacheError::TooSmall { got: self.bytes, minimum, sizes: row_bytes.len() });
        }
        let largest = row_bytes[row_bytes.len() - 1];
        let least_pool = row_bytes.len() * SlabShape::slab_cost(&row_bytes, largest);
        let buckets = self.buckets().min((self.bytes - least_pool) / BUCKET_BYTES).max(MIN_BUCKETS);
        let pool = (self.bytes - buckets * BUCKET_BYTES).min(self.pool_bytes_of_all_rows(least_pool));
        let aim = (pool / (row_bytes.len() * SLABS_PER_CLASS)).min(MAX_SLAB_BYTES);
        let slab_bytes = largest * (aim / largest).max(1);
        let slabs = pool / SlabShape::slab_cost(&row_bytes, slab_bytes);
        let slabs = slabs.min(MAX_POOL_BYTES / slab_bytes).min(u32::MAX as usize - 1);
        Ok(Layout { buckets, slabs: SlabShape { row_bytes, slab_bytes, slabs } })
    }

    /// Buckets for as many entries of mean size as fit, or for all rows there are.
    fn buckets(&self) -> usize {
        (entries(self.bytes, 0, &self.tables) / (SLOTS as f64 * LOAD)).ceil().min(u32::MAX.into()) as usize
    }

    /// What a pool of every row takes at most, whatever slabs it is cut into; more is never used.
    fn pool_bytes_of_all_rows(&self, least: usize) -> usize {
        let bytes: f64 = self.tables.iter().map(|t| t.rows as f64 * t.row_bytes as f64).sum();
        let slack = (self.tables.len() * MAX_SLAB_BYTES) as f64;
        (bytes / WATERMARKS.high * 2.0 + slack) as usize + least
    }
}

/// The distinct row sizes in bytes, and the least `cache.bytes` that holds a row of each.
fn minimum(tables: &[TableShape]) -> (Vec<usize>, usize) {
    let mut row_bytes: Vec<usize> = tables.iter().map(|t| t.row_bytes).collect();
    row_bytes.sort_unstable();
    row_bytes.dedup();
    let slab = row_bytes.last().map_or(0, |&largest| SlabShape::slab_cost(&row_bytes, largest));
    let minimum = MIN_BUCKETS * BUCKET_BYTES + row_bytes.len() * slab;
    (row_bytes, minimum)
}

/// What the bytes are spent on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub layout: Layout,
    /// The tables with the tags that their rows bear.
    pub slots: Vec<TableShape>,
    /// Bytes of the admission's sketch.
    pub sketch_bytes: usize,
    /// How many of the rows that the eviction is to rank have a rank.
    pub ranked: usize,
}

impl Plan {
    /// All that the cache takes.
    pub(crate) fn bytes(&self) -> usize {
        self.layout.bytes() + self.sketch_bytes + Ranks::bytes_of(self.ranked)
    }
}

/// The least bytes that leave so many to index and pool, beside what policies and pointers take of them.
fn with_policies(rest: usize, slots: &[TableShape], options: &CacheOptions) -> usize {
    let rest = rest.saturating_add(pointer_buckets(options.pointers).saturating_mul(BUCKET_BYTES));
    let mut bytes = rest;
    // More bytes have more rows ranked and more misses remembered, each with less than its row takes.
    loop {
        let policies = Ranks::bytes_of(ranked(bytes, slots, options)) + sketch_bytes(bytes, slots, options);
        let needed = rest.saturating_add(policies);
        if needed <= bytes {
            return bytes;
        }
        bytes = needed;
    }
}

/// Entries of mean size that fit so many bytes, each with some beside; but not more than for all rows there are.
fn entries(bytes: usize, beside: usize, tables: &[TableShape]) -> f64 {
    let rows: f64 = tables.iter().map(|t| t.rows as f64).sum();
    let row_bytes: f64 = tables.iter().map(|t| t.rows as f64 * t.row_bytes as f64).sum();
    let mean = if rows > 0.0 { row_bytes / rows } else { 0.0 };
    let entry_bytes = BUCKET_BYTES as f64 / (SLOTS as f64 * LOAD);
    (bytes as f64 / (mean + entry_bytes + beside as f64)).min(rows / WATERMARKS.high + 1.0)
}

/// Bytes of the admission's sketch in a cache of so many: it remembers as many misses as there may be entries.
fn sketch_bytes(bytes: usize, slots: &[TableShape], options: &CacheOptions) -> usize {
    match options.admission {
        AdmissionOption::Probability { .. } => 0,
        AdmissionOption::Frequency { .. } => {
            Sketch::bytes_of(entries(bytes, MISS_BYTES, slots).ceil() as usize)
        }
    }
}

/// Of how many rows a cache of so many bytes keeps the ranks: of as many, the most frequent first, as it would hold
/// beside them. Of rows past those it is only known that they are colder.
fn ranked(bytes: usize, slots: &[TableShape], options: &CacheOptions) -> usize {
    let EvictionOption::Lfu(rows) = &options.eviction else { return 0 };
    let entry_bytes = (BUCKET_BYTES as f64 / (SLOTS as f64 * LOAD)) as usize + Ranks::bytes_of(3) / 3;
    let mut used = 0_usize;
    let fits = |(table, _): &&(TableId, u64)| {
        used += entry_bytes + slots.get(table.index()).map_or(0, |slot| slot.row_bytes);
        used <= bytes
    };
    rows.iter().take_while(fits).count()
}

/// The tables with the slots that their rows take, tags included.
fn slots(tables: &[TableShape], keys: &RowKeys) -> Vec<TableShape> {
    let slot = |(t, table): (usize, &TableShape)| {
        let tag = if keys.tagged(TableId(t as u32)) { TAG_BYTES } else { 0 };
        TableShape { rows: table.rows, row_bytes: table.row_bytes + tag }
    };
    tables.iter().enumerate().map(slot).collect()
}

impl RowKeys {
    /// The own key of a row of these tables, if it is one of theirs and so long.
    pub(crate) fn own_key(
        &self,
        tables: &[TableShape],
        (table, id): (TableId, u64),
        bytes: usize,
    ) -> Result<FlatKey, CacheError> {
        let Some(shape) = tables.get(table.index()) else {
            return Err(CacheError::Table { got: table.index(), tables: tables.len() });
        };
        if bytes != shape.row_bytes {
            return Err(CacheError::RowBytes { table: table.index(), got: bytes, expected: shape.row_bytes });
        }
        let past = CacheError::Id { table: table.index(), got: id, rows: shape.rows };
        self.own(table, id).ok_or(past)
    }
}

/// Buckets that so many pointers take.
fn pointer_buckets(pointers: u64) -> usize {
    (pointers as f64 / (SLOTS as f64 * LOAD)).ceil() as usize
}

/// `cache.bytes`, divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub buckets: usize,
    pub slabs: SlabShape,
}

impl Layout {
    /// What it takes, all records included.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets * BUCKET_BYTES + self.slabs.bytes()
    }

    /// Whether all these rows can be in the cache at once without crossing the high watermark.
    fn holds(&self, tables: &[TableShape]) -> bool {
        let entries: u64 = tables.iter().map(|t| t.rows).sum();
        let (mut slabs, mut bytes) = (0, 0);
        for row_bytes in &self.slabs.row_bytes {
            let of_class = tables.iter().filter(|t| t.row_bytes == *row_bytes);
            let rows: u64 = of_class.map(|t| t.rows).sum();
            let slots = self.slabs.slab_bytes / row_bytes;
            slabs += (rows as usize).div_ceil(slots);
            bytes += rows as usize * (self.slabs.slab_bytes / slots);
        }
        let fill = Fill {
            entries: (entries, index::capacity(self.buckets)),
            bytes: (bytes as u64, self.slabs.data_bytes() as u64),
        };
        !fill.crosses(&WATERMARKS) && slabs <= self.slabs.slabs
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
