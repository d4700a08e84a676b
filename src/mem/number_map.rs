//! Maps from rows and other numbers, fast enough to be asked once an access.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::mix64;

/// From numbers, or what hashes as one, to something. Rows come from data sets whose ids are hashed already or are of a
/// table's own, so that a map which a stranger could slow down is not feared here.
pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<MixHasher>>;

/// Scatters one number, in a tenth of the time that the standard library's hasher takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MixHasher(u64);

impl Hasher for MixHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = mix64(self.0.rotate_left(32) ^ number);
    }
}
