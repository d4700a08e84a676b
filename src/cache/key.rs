//! Flat keys: one integer space for the ids of all tables (FLECHE 3.1, size-aware coding).
//!
//! A flat key is a table code followed by the id. A large table gets a short code and a small
//! table a long one, so that every table has just the id bits it needs. Codes are given in
//! ascending order of table size: each table takes the longest code whose remaining bits still
//! hold its ids, at the lowest free place.
//!
//! Seen as numbers, a code with `b` id bits is an aligned block of `2^b` keys, and prefix-free
//! means that no two blocks overlap. Going upwards in size loses nothing: every block length
//! divides the next, so rounding up at each step costs no more than rounding up once, and the
//! codes fit whenever the blocks' lengths add up to the whole space or less.
//!
//! The lowest block belongs to no table: [`EMPTY`] and [`TOMBSTONE`] lie there.

use crate::types::{FlatKey, TableId};

/// The key of an index slot that holds nothing. Zero, so that fresh memory is an empty index.
pub const EMPTY: FlatKey = FlatKey(0);

/// The key of an index slot whose entry is being replaced.
pub const TOMBSTONE: FlatKey = FlatKey(1);

/// Keys below this belong to no table.
const RESERVED: u128 = 2;

/// How many bits a flat key has, 2 to 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyWidth(u32);

impl KeyWidth {
    /// 32-bit keys.
    pub const W32: Self = Self(32);
    /// 64-bit keys.
    pub const W64: Self = Self(64);

    /// A width of `bits`, or `None` outside 2 to 64.
    #[must_use]
    pub fn new(bits: u32) -> Option<Self> {
        (2..=64).contains(&bits).then_some(Self(bits))
    }

    /// The width in bits.
    #[must_use]
    pub fn bits(self) -> u32 {
        self.0
    }
}

/// Why a set of tables has no flat keys.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KeyError {
    /// The tables' ids do not fit the width.
    #[error("flat keys of {bits} bits cannot hold {tables} tables of {rows} rows: {needed} bits are needed")]
    Width {
        /// The width asked for.
        bits: u32,
        /// How many tables.
        tables: usize,
        /// Their rows together.
        rows: u128,
        /// The least width that would do.
        needed: u32,
    },
}

/// One table's code: the first key of its block, and how many ids it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableCode {
    base: u64,
    rows: u64,
}

impl TableCode {
    /// The key of an id, or `None` past the table.
    #[inline]
    #[must_use]
    pub fn key(self, id: u64) -> Option<FlatKey> {
        (id < self.rows).then_some(FlatKey(self.base | id))
    }

    /// The id of a key of this table.
    #[inline]
    #[must_use]
    pub fn id(self, key: FlatKey) -> u64 {
        key.0 - self.base
    }

    /// How many ids the table has.
    #[inline]
    #[must_use]
    pub fn rows(self) -> u64 {
        self.rows
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
    /// Gives every table its code. `rows[t]` is the corpus size of table `t`.
    ///
    /// # Errors
    /// [`KeyError::Width`] when the ids do not fit.
    pub fn new(rows: &[u64], width: KeyWidth) -> Result<Self, KeyError> {
        let mut order: Vec<TableId> = (0..rows.len()).map(|t| TableId(t as u32)).collect();
        order.sort_by_key(|t| rows[t.index()]);
        let mut end = RESERVED;
        let mut bases = vec![0u128; rows.len()];
        for table in &order {
            let block = 1u128 << id_bits(rows[table.index()]);
            bases[table.index()] = end.next_multiple_of(block);
            end = bases[table.index()] + block;
        }
        if end > 1u128 << width.bits() {
            return Err(KeyError::Width {
                bits: width.bits(),
                tables: rows.len(),
                rows: rows.iter().map(|&r| u128::from(r)).sum(),
                needed: end.next_power_of_two().trailing_zeros(),
            });
        }
        let code = |(&base, &rows): (&u128, &u64)| TableCode { base: base as u64, rows };
        Ok(Self { codes: bases.iter().zip(rows).map(code).collect(), order })
    }

    /// The code of a table, or `None` where there is no such table.
    #[inline]
    #[must_use]
    pub fn code(&self, table: TableId) -> Option<TableCode> {
        self.codes.get(table.index()).copied()
    }

    /// The key of a row, or `None` where there is no such row.
    #[inline]
    #[must_use]
    pub fn encode(&self, table: TableId, id: u64) -> Option<FlatKey> {
        self.code(table)?.key(id)
    }

    /// The row of a key, or `None` where no row has it.
    #[must_use]
    pub fn decode(&self, key: FlatKey) -> Option<(TableId, u64)> {
        let after = self.order.partition_point(|t| self.codes[t.index()].base <= key.0);
        let table = self.order[after.checked_sub(1)?];
        let code = self.codes[table.index()];
        let id = code.id(key);
        (id < code.rows).then_some((table, id))
    }

    /// How many tables there are.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.codes.len()
    }
}

/// Bits that hold every id below `rows`.
fn id_bits(rows: u64) -> u32 {
    u64::BITS - rows.saturating_sub(1).leading_zeros()
}

/// Scatters a key over 64 bits: the finaliser of SplitMix64, a bijection in which every input bit
/// reaches every output bit. Flat keys are dense ranges, so low bits alone would cluster.
#[inline]
#[must_use]
pub fn scatter(key: FlatKey) -> u64 {
    let mut x = key.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Corpus sizes spread evenly over magnitudes, from 1 to 2^40.
    fn corpus() -> impl Strategy<Value = u64> {
        (0u32..=40).prop_flat_map(|bits| (1u64 << bits.saturating_sub(1))..=(1u64 << bits))
    }

    /// The ids of a table where a code could go wrong, and some between.
    fn probes(rows: u64, inner: &[u64]) -> Vec<u64> {
        let mut ids = vec![0, rows / 2, rows - 1];
        ids.extend(inner.iter().map(|i| i % rows));
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    proptest! {
        #[test]
        fn keys_are_distinct_unreserved_and_decodable(
            rows in prop::collection::vec(corpus(), 1..=300),
            inner in prop::collection::vec(any::<u64>(), 4),
        ) {
            let keys = FlatKeys::new(&rows, KeyWidth::W64).unwrap();
            let mut seen = std::collections::HashSet::new();
            for (t, &rows) in rows.iter().enumerate() {
                let table = TableId(t as u32);
                for id in probes(rows, &inner) {
                    let key = keys.encode(table, id).unwrap();
                    prop_assert!(key != EMPTY && key != TOMBSTONE);
                    prop_assert!(seen.insert(key), "key {key:?} of two rows");
                    prop_assert_eq!(keys.decode(key), Some((table, id)));
                }
                prop_assert_eq!(keys.encode(table, rows), None);
            }
        }

        #[test]
        fn no_code_is_a_prefix_of_another(rows in prop::collection::vec(corpus(), 1..=300)) {
            let keys = FlatKeys::new(&rows, KeyWidth::W64).unwrap();
            let mut blocks: Vec<(u64, u64)> = keys
                .codes
                .iter()
                .map(|c| (c.base, c.base + (1u64 << id_bits(c.rows))))
                .collect();
            for &(start, end) in &blocks {
                prop_assert_eq!(start % (end - start), 0, "a code's id bits begin at zero");
            }
            blocks.sort_unstable();
            prop_assert!(blocks[0].0 >= 2);
            prop_assert!(blocks.windows(2).all(|w| w[0].1 <= w[1].0));
        }

        #[test]
        fn a_width_is_refused_only_when_the_blocks_do_not_fit(
            rows in prop::collection::vec(1u64..300, 1..40),
            bits in 2u32..16,
        ) {
            let width = KeyWidth::new(bits).unwrap();
            let room = RESERVED + rows.iter().map(|&r| 1u128 << id_bits(r)).sum::<u128>();
            match FlatKeys::new(&rows, width) {
                Ok(_) => prop_assert!(room <= 1 << bits),
                Err(KeyError::Width { needed, .. }) => {
                    prop_assert!(room > 1 << bits);
                    prop_assert!(FlatKeys::new(&rows, KeyWidth::new(needed).unwrap()).is_ok());
                    prop_assert!(FlatKeys::new(&rows, KeyWidth::new(needed - 1).unwrap()).is_err());
                }
            }
        }
    }

    #[test]
    fn keys_of_no_row_decode_to_nothing() {
        let keys = FlatKeys::new(&[3, 1000], KeyWidth::W32).unwrap();
        assert_eq!(keys.decode(EMPTY), None);
        assert_eq!(keys.decode(TOMBSTONE), None);
        assert_eq!(keys.decode(FlatKey(u64::MAX)), None);
        let past = FlatKey(keys.encode(TableId(0), 2).unwrap().0 + 1);
        assert_eq!(keys.decode(past), None);
    }

    #[test]
    fn too_narrow_a_width_says_what_is_needed() {
        let error = FlatKeys::new(&[1 << 40, 7], KeyWidth::W32).unwrap_err();
        assert_eq!(
            error.to_string(),
            "flat keys of 32 bits cannot hold 2 tables of 1099511627783 rows: 41 bits are needed"
        );
    }
}
