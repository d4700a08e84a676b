//! Flat keys: one integer space for the ids of all tables (FLECHE section 3.1, size-aware coding).
//!
//! A flat key is a table code followed by feature bits. A large table gets a short code and a small table a
//! long one, so every table has just the feature bits that it needs. Codes are assigned in ascending order of
//! table size: each table takes the longest code whose remaining bits hold its ids, at the lowest free
//! position.
//!
//! As numbers, a code with `b` feature bits is an aligned block of `2^b` keys, and codes are prefix-free if
//! no two blocks overlap. The ascending order wastes no keys: every block length divides the next, so the
//! codes fit if the blocks' lengths add up to at most the whole space.
//!
//! **If the width cannot hold all ids**, the smallest tables keep exact keys. A table is exact as long as
//! every larger table can still get at least as many keys. The larger tables share the remaining keys in
//! proportion to their rows, as closely as powers of two allow, and hash their ids into their share. Then two
//! ids of one table may have the same key, and the cache distinguishes them by a tag. Two tables never share
//! a key.
//!
//! The lowest block belongs to no table; it contains [`EMPTY`] and [`TOMBSTONE`].

use std::collections::BinaryHeap;

use crate::mem::fold;
use crate::types::{FlatKey, TableId};

/// The key of an empty index slot. Zero, so that zeroed memory is an empty index.
pub(crate) const EMPTY: FlatKey = FlatKey(0);

/// The key of an index slot while its entry is replaced by another one.
pub(crate) const TOMBSTONE: FlatKey = FlatKey(1);

/// Keys below this belong to no table.
const RESERVED: u128 = 2;

/// The number of bits of a flat key, 2 to 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyWidth(u32);

impl KeyWidth {
    pub(crate) const W64: Self = Self(64);

    /// `None` outside 2 to 64.
    #[must_use]
    pub fn new(bits: u32) -> Option<Self> {
        (2..=64).contains(&bits).then_some(Self(bits))
    }

    #[must_use]
    pub(crate) fn bits(self) -> u32 {
        self.0
    }
}

/// Why a set of tables has no flat keys.
#[allow(missing_docs)] // the messages are the documentation
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KeyError {
    #[error("flat keys of {bits} bits cannot tell {tables} tables apart: {needed} bits are needed")]
    Width { bits: u32, tables: usize, needed: u32 },
    #[error("table {table}: {rows} rows do not fit flat keys of 64 bits together with the other tables")]
    Rows { table: usize, rows: u64 },
}

/// One table's code: the first key of its block, and how ids are mapped into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableCode {
    base: u64,
    rows: u64,
    bits: u32,
}

impl TableCode {
    /// The key of an id; `None` if the table has no such id. The key is unique if the code [is
    /// exact](Self::is_exact).
    #[inline]
    #[must_use]
    pub(crate) fn key(self, id: u64) -> Option<FlatKey> {
        if id >= self.rows {
            return None;
        }
        let feature = if self.is_exact() { id } else { fold(id, self.bits) };
        Some(FlatKey(self.base | feature))
    }

    /// The id that has this key; `None` if no id has it, or if the code is not exact.
    #[inline]
    #[must_use]
    pub(crate) fn id(self, key: FlatKey) -> Option<u64> {
        let feature = key.0.wrapping_sub(self.base);
        (feature < self.rows && self.is_exact()).then_some(feature)
    }

    /// Whether no two ids share a key.
    #[inline]
    #[must_use]
    pub fn is_exact(self) -> bool {
        self.bits >= id_bits(self.rows)
    }

    /// The number of ids of the table.
    #[inline]
    #[must_use]
    pub(crate) fn rows(self) -> u64 {
        self.rows
    }

    /// The first key of the table's block.
    #[inline]
    #[must_use]
    pub(crate) fn base(self) -> FlatKey {
        FlatKey(self.base)
    }

    /// Feature bits: the block has `2^bits` keys.
    #[inline]
    #[must_use]
    pub fn bits(self) -> u32 {
        self.bits
    }
}

/// The codes of a model's tables.
#[derive(Clone, Debug)]
pub struct FlatKeys {
    /// By [`TableId`].
    codes: Vec<TableCode>,
    /// Tables in ascending order of their blocks.
    order: Vec<TableId>,
}

impl FlatKeys {
    /// Size-aware codes. `rows[t]` is the number of ids of table `t`.
    ///
    /// # Errors
    /// [`KeyError::Width`] when there are fewer keys than tables.
    pub fn new(rows: &[u64], width: KeyWidth) -> Result<Self, KeyError> {
        let bits = share(rows, width)?;
        let mut order: Vec<TableId> = (0..rows.len()).map(|t| TableId(t as u32)).collect();
        order.sort_by_key(|t| (bits[t.index()], rows[t.index()]));
        let mut codes: Vec<TableCode> =
            rows.iter().zip(bits).map(|(&rows, bits)| TableCode { base: 0, rows, bits }).collect();
        let mut end = RESERVED;
        for table in &order {
            let code = &mut codes[table.index()];
            let block = 1u128 << code.bits;
            let base = end.next_multiple_of(block);
            // Below 2^64: `share` ensures that all blocks fit the width.
            code.base = base as u64;
            end = base + block;
        }
        Ok(Self { codes, order })
    }

    /// The fixed-length coding that FLECHE uses as its baseline (section 3.1, after Kraken). The high bits
    /// are the table's number and the others the feature, with the same lengths for all tables.
    ///
    /// # Errors
    /// [`KeyError::Width`] when the width does not hold the tables' numbers.
    pub fn fixed_length(rows: &[u64], width: KeyWidth) -> Result<Self, KeyError> {
        // No table has number 0, because its keys include the two reserved keys. Both have number 0 only if
        // there is at least one feature bit.
        let table_bits = id_bits(rows.len() as u64 + 1);
        let Some(bits) = width.bits().checked_sub(table_bits).filter(|&bits| bits > 0) else {
            return Err(KeyError::Width { bits: width.bits(), tables: rows.len(), needed: table_bits + 1 });
        };
        let code = |(t, &rows): (usize, &u64)| TableCode { base: (t as u64 + 1) << bits, rows, bits };
        let order = (0..rows.len()).map(|t| TableId(t as u32)).collect();
        Ok(Self { codes: rows.iter().enumerate().map(code).collect(), order })
    }

    /// The code of a table; `None` if there is no such table.
    #[inline]
    #[must_use]
    pub fn code(&self, table: TableId) -> Option<TableCode> {
        self.codes.get(table.index()).copied()
    }

    /// The key of a row; `None` if there is no such row.
    #[inline]
    #[must_use]
    pub(crate) fn encode(&self, table: TableId, id: u64) -> Option<FlatKey> {
        self.code(table)?.key(id)
    }

    /// The table that a key belongs to, if any.
    #[must_use]
    pub(crate) fn table_of(&self, key: FlatKey) -> Option<TableId> {
        let after = self.order.partition_point(|t| self.codes[t.index()].base <= key.0);
        let table = self.order[after.checked_sub(1)?];
        let code = self.codes[table.index()];
        (key.0 - code.base < 1 << code.bits).then_some(table)
    }

    /// The row of a key; `None` if no row has the key, or if several rows may have it.
    #[must_use]
    pub(crate) fn decode(&self, key: FlatKey) -> Option<(TableId, u64)> {
        let table = self.table_of(key)?;
        Some((table, self.codes[table.index()].id(key)?))
    }

    /// The number of tables.
    #[must_use]
    pub(crate) fn tables(&self) -> usize {
        self.codes.len()
    }
}

/// The two keys of each row. Its *own key* is unique. Its *index key* has the index's width, and several rows
/// of a table may share it.
#[derive(Clone, Debug)]
pub(crate) struct RowKeys {
    own: FlatKeys,
    index: FlatKeys,
}

impl RowKeys {
    /// Keys for an index of this width.
    ///
    /// # Errors
    /// [`KeyError`] when there are fewer keys than tables, or more ids than 64 bits hold.
    pub(crate) fn new(rows: &[u64], width: KeyWidth) -> Result<Self, KeyError> {
        let own = FlatKeys::new(rows, KeyWidth::W64)?;
        if let Some(table) = own.codes.iter().position(|code| !code.is_exact()) {
            return Err(KeyError::Rows { table, rows: rows[table] });
        }
        Ok(Self { own, index: FlatKeys::new(rows, width)? })
    }

    /// The row's own key; `None` if there is no such row.
    #[inline]
    #[must_use]
    pub(crate) fn own(&self, table: TableId, id: u64) -> Option<FlatKey> {
        self.own.encode(table, id)
    }

    /// The codes of own keys. All are exact.
    #[must_use]
    pub(crate) fn own_keys(&self) -> &FlatKeys {
        &self.own
    }

    /// The codes of index keys.
    #[must_use]
    pub(crate) fn index_keys(&self) -> &FlatKeys {
        &self.index
    }

    /// The id and the index key of the row of `table` with this own key.
    ///
    /// # Panics
    /// When the key is not of that table.
    #[inline]
    #[must_use]
    pub(crate) fn row(&self, table: TableId, own: FlatKey) -> (u64, FlatKey) {
        let id = own.0 - self.own.codes[table.index()].base;
        let key = self.index.codes[table.index()].key(id);
        (id, key.unwrap_or_else(|| panic!("own key {own:?} is not of table {}", table.0)))
    }

    /// Whether index keys differ from own keys.
    #[must_use]
    pub(crate) fn narrow(&self) -> bool {
        self.own.codes != self.index.codes
    }

    /// Whether rows of a table may share an index key, so that each cached row stores its own key as a tag.
    #[inline]
    #[must_use]
    pub(crate) fn tagged(&self, table: TableId) -> bool {
        !self.index.codes[table.index()].is_exact()
    }
}

/// The feature bits of each table, by [`TableId`] (see the module docs).
fn share(rows: &[u64], width: KeyWidth) -> Result<Vec<u32>, KeyError> {
    let space = 1u128 << width.bits();
    let wanted: Vec<u32> = rows.iter().map(|&r| id_bits(r)).collect();
    let room = |bits: &[u32]| RESERVED + bits.iter().map(|&b| 1u128 << b).sum::<u128>();
    if room(&wanted) <= space {
        return Ok(wanted);
    }
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&t| rows[t]);
    let mut bits = vec![0; rows.len()];
    if room(&bits) > space {
        let needed = id_bits(u64::try_from(room(&bits)).unwrap_or(u64::MAX));
        return Err(KeyError::Width { bits: width.bits(), tables: rows.len(), needed });
    }
    // In ascending order, a table stays exact while every larger table could get as many keys.
    let mut used = RESERVED;
    for (exact, &t) in order.iter().enumerate() {
        let block = 1u128 << wanted[t];
        if used + block * (rows.len() - exact) as u128 > space {
            break;
        }
        used += block;
        order[exact..].iter().for_each(|&larger| bits[larger] = wanted[t]);
    }
    // Then, repeatedly, the table with the most rows per key gets twice as many keys, if that fits.
    let mut free = space - room(&bits);
    let crowding = |t: usize, bits: &[u32]| Crowding { load: rows[t] as f64 / 2f64.powi(bits[t] as i32), t };
    let mut crowded: BinaryHeap<Crowding> =
        (0..rows.len()).filter(|&t| bits[t] < wanted[t]).map(|t| crowding(t, &bits)).collect();
    while let Some(Crowding { t, .. }) = crowded.pop() {
        let block = 1u128 << bits[t];
        if block > free {
            continue;
        }
        free -= block;
        bits[t] += 1;
        if bits[t] < wanted[t] {
            crowded.push(crowding(t, &bits));
        }
    }
    Ok(bits)
}

/// A table, ordered by its rows per key. The first of equal tables is the greatest.
#[derive(PartialEq)]
struct Crowding {
    load: f64,
    t: usize,
}

impl Eq for Crowding {}

impl Ord for Crowding {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.load.total_cmp(&other.load).then(other.t.cmp(&self.t))
    }
}

impl PartialOrd for Crowding {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// How many bits hold every id below `rows`.
#[inline]
fn id_bits(rows: u64) -> u32 {
    u64::BITS - rows.saturating_sub(1).leading_zeros()
}

/// A 64-bit hash of a key. Flat keys are dense ranges, so their low bits alone would cluster.
#[inline]
#[must_use]
pub(crate) fn hash_key(key: FlatKey) -> u64 {
    crate::mem::mix64(key.0)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
