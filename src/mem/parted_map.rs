//! A hash map that grows in small steps.
//!
//! A hash map that is full moves all its entries to twice the memory, at once. Beside requests that is too
//! long: for a million entries about 50 ms, most of them for fresh memory of the system. So the entries are
//! divided by their hash among maps that grow on their own.

use std::array::from_fn;
use std::hash::{BuildHasher, BuildHasherDefault, Hash};

use super::number_map::{MixHasher, NumberMap};

/// With a million entries, each map grows by about 0.5 MB.
const PARTS: usize = 64;

/// The first bit of the hash that chooses the part. The maps use the lowest and the highest bits.
const PART_BIT: u32 = 40;

/// A [`NumberMap`] in parts.
#[derive(Debug)]
pub(crate) struct PartedMap<K, V> {
    parts: Box<[NumberMap<K, V>; PARTS]>,
}

impl<K, V> Default for PartedMap<K, V> {
    fn default() -> Self {
        Self { parts: Box::new(from_fn(|_| NumberMap::default())) }
    }
}

impl<K: Eq + Hash, V> PartedMap<K, V> {
    #[inline]
    fn part_of(key: &K) -> usize {
        (BuildHasherDefault::<MixHasher>::default().hash_one(key) >> PART_BIT) as usize % PARTS
    }

    /// The part of the map that has or gets this key.
    #[inline]
    pub(crate) fn part_mut(&mut self, key: &K) -> &mut NumberMap<K, V> {
        &mut self.parts[Self::part_of(key)]
    }

    #[inline]
    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.parts[Self::part_of(key)].get(key)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.part_mut(&key).insert(key, value)
    }

    /// The map with `change` of each value. Calls `pause` before each part. A part keeps its order, so this
    /// reads and writes memory in sequence.
    pub(crate) fn map_values<W>(
        self,
        mut change: impl FnMut(V) -> W,
        mut pause: impl FnMut(),
    ) -> PartedMap<K, W> {
        let mut changed = PartedMap::default();
        for (from, to) in self.parts.into_iter().zip(changed.parts.iter_mut()) {
            pause();
            to.reserve(from.len());
            to.extend(from.into_iter().map(|(key, value)| (key, change(value))));
        }
        changed
    }

    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(NumberMap::len).sum()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.parts.iter().flatten()
    }
}

impl<K, V> IntoIterator for PartedMap<K, V> {
    type Item = (K, V);
    type IntoIter = std::iter::Flatten<std::array::IntoIter<NumberMap<K, V>, PARTS>>;

    fn into_iter(self) -> Self::IntoIter {
        self.parts.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_in_parts_holds_what_a_map_in_one_part_holds() {
        let (mut parted, mut whole) = (PartedMap::default(), NumberMap::default());
        for key in (0..10_000_u64).chain(5_000..15_000) {
            assert_eq!(parted.insert(key, key + 1), whole.insert(key, key + 1));
        }
        assert_eq!(parted.len(), whole.len());
        assert!((0..20_000).all(|key| parted.get(&key) == whole.get(&key)));
        assert!(parted.iter().all(|(key, value)| whole.get(key) == Some(value)));
        let (parted, whole) = (
            parted.map_values(|value| value * 2, || ()),
            whole.into_iter().map(|(key, value)| (key, value * 2)),
        );
        let whole: NumberMap<u64, u64> = whole.collect();
        assert_eq!(parted.into_iter().collect::<NumberMap<u64, u64>>(), whole);
    }

    #[test]
    fn keys_in_sequence_fill_all_parts_alike() {
        let mut map = PartedMap::default();
        (0..64_000_u64).for_each(|key| assert_eq!(map.insert(key, ()), None));
        assert!(map.parts.iter().all(|part| (800..1_200).contains(&part.len())));
    }
}
