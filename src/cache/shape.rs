//! Divides `cache.bytes` between index and pool, and converts a share of a model to bytes.
//!
//! Every row takes one index entry, whatever its size, so the number of entries per byte of pool depends on
//! the mix of row sizes. The division assumes the model's mix: as many entries as fit if each row has the
//! mean size of the tables' rows. If the traffic's mix differs, pool or index fills up first. Eviction
//! watches both.

use super::index::{self, BUCKET_BYTES, LOAD, Location, SLOTS};
use super::key::RowKeys;
use super::policy::frequency::{MISS_BYTES, Sketch};
use super::policy::rank::Ranks;
use super::policy::{Fill, Level};
use super::pool::SlabShape;
use super::{AdmissionOption, CacheError, CacheOptions, EvictionOption, WATERMARKS};
use crate::mem::WORD_BYTES;
use crate::types::{ROW_ALIGN, RowId, TableId};

/// The least number of buckets, so that a key's two buckets mostly differ.
const MIN_BUCKETS: usize = 2;
/// Entries of a bucket that is as full as buckets may be on average.
const ENTRIES_PER_BUCKET: f64 = SLOTS as f64 * LOAD;
/// Bytes of the index per entry.
const ENTRY_BYTES: f64 = BUCKET_BYTES as f64 / ENTRIES_PER_BUCKET;
/// Slabs per row size, if the pool is large enough. With many small slabs, partly used slabs waste less.
const SLABS_PER_CLASS: usize = 64;
/// The largest slab, unless one row is larger.
const MAX_SLAB_BYTES: usize = 1 << 20;
/// Locations address this many bytes.
const MAX_POOL_BYTES: usize = Location::OFFSETS as usize * WORD_BYTES;

/// The shape of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// The number of ids.
    pub rows: u64,
    /// Bytes per row, above 0 and a multiple of [`ROW_ALIGN`].
    pub row_bytes: usize,
}

/// Bytes of the tag before each row of a table: its own key, if it may share its index key with other rows.
#[inline]
pub(crate) fn tag_bytes(keys: &RowKeys, table: TableId) -> usize {
    if keys.tagged(table) { size_of::<u64>() } else { 0 }
}

/// The memory of a cache and the tables that it caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Bound of index, pool and policies together: `cache.bytes`.
    pub bytes: usize,
    /// By [`TableId`].
    pub tables: Vec<TableShape>,
}

impl CacheShape {
    /// A cache with room for this share (0 to 1) of every table's rows, index included: `cache.fraction`. It
    /// holds these rows without crossing the high watermark, in whatever order they are inserted. Rarely (for
    /// one key in ten thousand or less) both buckets of a key are full, and the key replaces another.
    #[must_use]
    pub(crate) fn from_fraction(fraction: f64, tables: Vec<TableShape>) -> Self {
        let share = |table: &TableShape| TableShape {
            rows: (table.rows as f64 * fraction.clamp(0.0, 1.0)).ceil() as u64,
            row_bytes: table.row_bytes,
        };
        let held: Vec<TableShape> = tables.iter().map(share).collect();
        let minimum = Minimum::of(&tables);
        if minimum.row_bytes.is_empty() {
            return Self { bytes: minimum.bytes, tables };
        }
        let rows = |t: &TableShape| (t.rows as usize).saturating_mul(t.row_bytes);
        let rows = held.iter().map(rows).fold(0, usize::saturating_add);
        let mut shape = Self { bytes: rows.max(minimum.bytes), tables };
        // `layout` rounds in several places and cannot be inverted. So growing sizes are tried.
        while shape.layout().is_ok_and(|layout| !layout.holds(&held)) {
            // No size holds more rows than a cache can have; the largest one is then refused for its memory.
            let Some(bytes) = shape.bytes.checked_add(shape.bytes / 128 + 512) else { break };
            shape.bytes = bytes;
        }
        shape
    }

    /// The least shape that holds this share of every table's rows in a cache with these options.
    ///
    /// # Errors
    /// When keys of the option's width cannot tell the tables apart.
    pub fn for_options(
        fraction: f64,
        tables: Vec<TableShape>,
        options: &CacheOptions,
    ) -> Result<Self, CacheError> {
        let rows: Vec<u64> = tables.iter().map(|t| t.rows).collect();
        let keys = RowKeys::new(&rows, options.key_width)?;
        let tagged = tagged_tables(&tables, &keys);
        let rest = Self::from_fraction(fraction, tagged.clone()).bytes;
        let extras = Extras { tables: &tagged, options };
        Ok(Self { bytes: extras.least_bytes_with(rest), tables })
    }

    /// Divides the bytes among all parts of a cache with these options.
    pub(crate) fn plan(&self, keys: &RowKeys, options: &CacheOptions) -> Result<CachePlan, CacheError> {
        let tagged = tagged_tables(&self.tables, keys);
        let extras = Extras { tables: &tagged, options };
        let rest = |sized_for| {
            let bytes = self.bytes.saturating_sub(extras.bytes(sized_for));
            Self { bytes, tables: tagged.clone() }
        };
        let (sized_for, layout) = match rest(self.bytes).layout() {
            Err(CacheError::TooSmall { minimum, sizes, .. }) => {
                let least = extras.least_bytes_with(minimum);
                if self.bytes < least {
                    return Err(CacheError::TooSmall { got: self.bytes, minimum: least, sizes });
                }
                // Ranks and sketch grow in steps. With a few bytes more than the least, the next step would
                // take bytes that the rows need.
                (least, rest(least).layout())
            }
            layout => (self.bytes, layout),
        };
        let mut layout = layout?;
        let (sketch_bytes, ranked) = (extras.sketch_bytes(sized_for), extras.ranked(sized_for));
        layout.buckets = (layout.buckets + pointer_buckets(options.pointers)).min(u32::MAX as usize);
        Ok(CachePlan { layout, tagged_tables: tagged, sketch_bytes, ranked })
    }

    /// Divides the bytes between index and pool.
    pub(crate) fn layout(&self) -> Result<Layout, CacheError> {
        let odd = |t: &TableShape| t.row_bytes == 0 || !t.row_bytes.is_multiple_of(ROW_ALIGN);
        if let Some(table) = self.tables.iter().position(odd) {
            return Err(CacheError::RowAlign { table, got: self.tables[table].row_bytes });
        }
        let Minimum { row_bytes, bytes: minimum } = Minimum::of(&self.tables);
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

    /// Buckets for as many rows of mean size as fit in the bytes, at most for all rows.
    fn buckets(&self) -> usize {
        (entries(self.bytes, 0, &self.tables) / ENTRIES_PER_BUCKET).ceil().min(u32::MAX.into()) as usize
    }

    /// An upper bound of the bytes that a pool of all rows takes, for any slab size. A larger pool is
    /// useless.
    fn pool_bytes_of_all_rows(&self, least: usize) -> usize {
        let bytes: f64 = self.tables.iter().map(|t| t.rows as f64 * t.row_bytes as f64).sum();
        let slack = (self.tables.len() * MAX_SLAB_BYTES) as f64;
        (bytes / WATERMARKS.high * 2.0 + slack) as usize + least
    }
}

/// What a cache needs at least.
struct Minimum {
    /// The distinct row sizes, ascending.
    row_bytes: Vec<usize>,
    /// The least `cache.bytes` that holds a row of each size.
    bytes: usize,
}

impl Minimum {
    fn of(tables: &[TableShape]) -> Self {
        let mut row_bytes: Vec<usize> = tables.iter().map(|t| t.row_bytes).collect();
        row_bytes.sort_unstable();
        row_bytes.dedup();
        let slab = row_bytes.last().map_or(0, |&largest| SlabShape::slab_cost(&row_bytes, largest));
        let bytes = MIN_BUCKETS * BUCKET_BYTES + row_bytes.len() * slab;
        Self { row_bytes, bytes }
    }
}

/// How the bytes of a cache are divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CachePlan {
    pub layout: Layout,
    /// The tables, with tags included in their row bytes.
    pub tagged_tables: Vec<TableShape>,
    /// Bytes of the admission's sketch.
    pub sketch_bytes: usize,
    /// How many of the rows listed for LFU have a rank.
    pub ranked: usize,
}

/// The parts of a cache besides index and pool: policies, and the entries of pointers. Their sizes depend on
/// that of the whole cache.
struct Extras<'o> {
    /// The tables, with tags included in their row bytes.
    tables: &'o [TableShape],
    options: &'o CacheOptions,
}

impl Extras<'_> {
    /// The smallest `cache.bytes` that leaves `rest` bytes for index and pool.
    fn least_bytes_with(&self, rest: usize) -> usize {
        let mut bytes = rest;
        // More bytes need more ranks and a larger sketch, but less than the bytes added: the loop ends.
        loop {
            let needed = rest.saturating_add(self.bytes(bytes));
            if needed <= bytes {
                return bytes;
            }
            bytes = needed;
        }
    }

    /// Their bytes in a cache of `bytes`.
    fn bytes(&self, bytes: usize) -> usize {
        let policies = Ranks::bytes_of(self.ranked(bytes)) + self.sketch_bytes(bytes);
        policies.saturating_add(pointer_buckets(self.options.pointers).saturating_mul(BUCKET_BYTES))
    }

    /// Bytes of the admission's sketch in a cache of `bytes`. It remembers as many missed rows as the cache
    /// can hold.
    fn sketch_bytes(&self, bytes: usize) -> usize {
        match self.options.admission {
            AdmissionOption::Probability { .. } => 0,
            AdmissionOption::Frequency { .. } => {
                Sketch::bytes_of(entries(bytes, MISS_BYTES, self.tables).ceil() as usize)
            }
        }
    }

    /// How many rows have a rank in a cache of `bytes`: as many of the most frequent rows as the cache can
    /// hold together with their ranks. All other rows are colder.
    fn ranked(&self, bytes: usize) -> usize {
        let EvictionOption::Lfu(rows) = &self.options.eviction else { return 0 };
        let entry_bytes = ENTRY_BYTES as usize + Ranks::bytes_of(3) / 3;
        let mut used = 0_usize;
        let fits = |row: &&RowId| {
            used += entry_bytes + self.tables.get(row.table().index()).map_or(0, |table| table.row_bytes);
            used <= bytes
        };
        rows.iter().take_while(fits).count()
    }
}

/// How many rows of mean size fit in `bytes`, each with its index entry and `extra` bytes. At most all rows,
/// with room below the high watermark.
fn entries(bytes: usize, extra: usize, tables: &[TableShape]) -> f64 {
    let rows: f64 = tables.iter().map(|t| t.rows as f64).sum();
    let row_bytes: f64 = tables.iter().map(|t| t.rows as f64 * t.row_bytes as f64).sum();
    let mean = if rows > 0.0 { row_bytes / rows } else { 0.0 };
    (bytes as f64 / (mean + ENTRY_BYTES + extra as f64)).min(rows / WATERMARKS.high + 1.0)
}

/// The tables, with tags included in their row bytes.
fn tagged_tables(tables: &[TableShape], keys: &RowKeys) -> Vec<TableShape> {
    let slot = |(t, table): (usize, &TableShape)| TableShape {
        rows: table.rows,
        row_bytes: table.row_bytes + tag_bytes(keys, TableId(t as u32)),
    };
    tables.iter().enumerate().map(slot).collect()
}

/// The number of buckets for `pointers` pointers.
fn pointer_buckets(pointers: u64) -> usize {
    (pointers as f64 / ENTRIES_PER_BUCKET).ceil() as usize
}

/// The sizes of index and pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub buckets: usize,
    pub slabs: SlabShape,
}

impl Layout {
    /// Bytes of index and pool, including records.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets * BUCKET_BYTES + self.slabs.bytes()
    }

    /// Whether all these rows fit without crossing the high watermark.
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
            entries: Level { used: entries, capacity: index::capacity(self.buckets) },
            bytes: Level { used: bytes as u64, capacity: self.slabs.data_bytes() as u64 },
            watermarks: WATERMARKS,
        };
        !fill.crosses() && slabs <= self.slabs.slabs
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
