//! A hash map that grows in small steps.
//!
//! A hash map that is full moves all its entries to twice the memory, at once. Beside requests that is too
//! long: for a million entries about 50 ms, most of them for fresh memory of the system. So the entries are
//! divided by their hash among maps that grow on their own.

use std::array::from_fn;
use std::collections::hash_map::Entry;
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

    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(NumberMap::len).sum()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.parts.iter().flatten()
    }
}

/// The entries of a [`PartedMap`] that is made of all of them at once. They are listed by part, so making the
/// map writes to one part at a time, which fits in the processor's caches and has its size from the start.
#[derive(Debug)]
pub(crate) struct PartedEntries<K, V> {
    parts: Box<[Vec<(K, V)>; PARTS]>,
}

impl<K, V> Default for PartedEntries<K, V> {
    fn default() -> Self {
        Self { parts: Box::new(from_fn(|_| Vec::new())) }
    }
}

impl<K: Eq + Hash, V> PartedEntries<K, V> {
    pub(crate) fn push(&mut self, key: K, value: V) {
        self.parts[PartedMap::<K, V>::part_of(&key)].push((key, value));
    }

    /// The map with `change` of each value. If a key has several values, it gets the last one, and the others
    /// are passed to `replaced`. Calls `pause` before each part.
    pub(crate) fn into_map<W>(
        self,
        mut change: impl FnMut(V) -> W,
        mut replaced: impl FnMut(V),
        mut pause: impl FnMut(),
    ) -> PartedMap<K, W> {
        let mut map = PartedMap::default();
        for (entries, part) in self.parts.into_iter().zip(map.parts.iter_mut()) {
            pause();
            part.reserve(entries.len());
            for (key, value) in entries.into_iter().rev() {
                match part.entry(key) {
                    Entry::Vacant(vacant) => drop(vacant.insert(change(value))),
                    Entry::Occupied(_) => replaced(value),
                }
            }
        }
        map
    }

    pub(crate) fn into_values(self) -> impl Iterator<Item = V> {
        self.parts.into_iter().flatten().map(|(_, value)| value)
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
        assert_eq!(parted.into_iter().collect::<NumberMap<u64, u64>>(), whole);
    }

    #[test]
    fn a_map_made_at_once_has_the_last_value_of_each_key_and_returns_the_others() {
        let (mut entries, mut whole, mut before) =
            (PartedEntries::default(), NumberMap::default(), Vec::new());
        for (value, key) in (0..10_000_u64).chain(5_000..15_000).chain(9_000..9_500).enumerate() {
            entries.push(key, value);
            before.extend(whole.insert(key, value));
        }
        let (mut replaced, mut pauses) = (Vec::new(), 0);
        let map = entries.into_map(|value| value, |value| replaced.push(value), || pauses += 1);
        assert_eq!(map.into_iter().collect::<NumberMap<u64, usize>>(), whole);
        replaced.sort_unstable();
        before.sort_unstable();
        assert_eq!((replaced, pauses), (before, PARTS));
    }

    #[test]
    fn keys_in_sequence_fill_all_parts_alike() {
        let mut map = PartedMap::default();
        (0..64_000_u64).for_each(|key| assert_eq!(map.insert(key, ()), None));
        assert!(map.parts.iter().all(|part| (800..1_200).contains(&part.len())));
    }
}
