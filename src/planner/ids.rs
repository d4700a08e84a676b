//! Maps from rows, fast enough to be asked once an access.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::types::scatter;

/// From a table's rows to what is known of them.
pub(super) type RowMap<V> = HashMap<u64, V, BuildHasherDefault<RowHasher>>;

/// Scatters one row number as the cache's index does. Rows come from data sets whose ids are hashed
/// already or of a table's own, so a map that a stranger could slow down is not feared here.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RowHasher(u64);

impl Hasher for RowHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, row: u64) {
        self.0 = scatter(self.0.rotate_left(32) ^ row);
    }
}
