//! The pool: one allocation of rows of several sizes.
//!
//! The allocation is cut into slabs of one length. A slab belongs to no row size until a size
//! has no free slot left; then it is cut into slots of that size, and it returns to the free slabs
//! when its last slot is freed. So sizes grow and shrink against each other with use.
//!
//! Which slots are free is a bit each, beside the slab and not in it; slabs of a size with a free
//! slot form a list through their own records. All of it is taken at the start and counted in
//! [`SlabShape::bytes`]; nothing grows afterwards.
//!
//! **Who may touch a slot's bytes.** `take` hands a [`Slot`] to one owner, who alone may write it
//! ([`Pool::fill`], by `&mut`) until its location is linked in the index and the `Slot` is gone.
//! From then on the bytes are only read, through what the index found ([`Held`]). When the location has
//! left the index and no batch can read it any more ([`Freed`]), [`Pool::free`] takes it back.

#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{MmapMut, MmapRaw};

use super::epoch::Freed;
use super::index::{Held, Location};
use crate::types::ROW_ALIGN;

/// Offsets count units of this many bytes.
const UNIT: usize = ROW_ALIGN;
/// No slab.
const NONE: u32 = u32::MAX;
/// What freed slots hold where `debug_assertions` are on: a NaN that no arithmetic makes.
pub(super) const POISON: u32 = 0x7FC0_DEAD;

/// A row size's place among [`SlabShape::row_bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(pub u16);

/// The sizes of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlabShape {
    /// Bytes of each row size: ascending, distinct, multiples of 4.
    pub row_bytes: Vec<usize>,
    /// Bytes a slab; a multiple of the largest row.
    pub slab_bytes: usize,
    /// How many slabs.
    pub slabs: usize,
}

impl SlabShape {
    /// What a slab costs, its records included.
    pub fn slab_cost(row_bytes: &[usize], slab_bytes: usize) -> usize {
        slab_bytes + size_of::<Slab>() + 8 * Self::words(row_bytes, slab_bytes)
    }

    /// What the whole pool costs, its records included.
    pub fn bytes(&self) -> usize {
        self.slabs * Self::slab_cost(&self.row_bytes, self.slab_bytes)
    }

    /// Bytes of rows and of what is lost at the slabs' ends.
    pub fn data_bytes(&self) -> usize {
        self.slabs * self.slab_bytes
    }

    /// Slots in a slab of this class.
    pub fn slots(&self, class: Class) -> usize {
        self.slab_bytes / self.row_bytes[usize::from(class.0)]
    }

    /// What a slot of this class takes of [`Self::data_bytes`], its share of its slab's end included.
    pub fn footprint(&self, class: Class) -> usize {
        self.slab_bytes / self.slots(class)
    }

    /// The class of rows of this many bytes.
    pub fn class(&self, row_bytes: usize) -> Option<Class> {
        self.row_bytes.binary_search(&row_bytes).ok().map(|c| Class(c as u16))
    }

    /// Words of 64 bits that have a bit for each of a slab's smallest slots.
    fn words(row_bytes: &[usize], slab_bytes: usize) -> usize {
        row_bytes.first().map_or(0, |smallest| (slab_bytes / smallest).div_ceil(64))
    }
}

/// One slab's record.
#[derive(Clone, Copy, Debug)]
struct Slab {
    /// Its neighbours in the list it is in: of the free slabs, or of its class's partial ones.
    next: u32,
    previous: u32,
    /// How many slots it has, and how many of them are free.
    slots: u32,
    free: u32,
    /// No word of its bits below this one has a bit set.
    from: u32,
    /// The class, meaningful while a slot is taken.
    class: Class,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In the list of free slabs.
    Free,
    /// In its class's list: some slots taken, some free.
    Partial,
    /// In no list: all slots taken.
    Full,
    /// In no list: being emptied, and giving out no slots.
    Draining,
}

/// A slot that nobody else knows of.
#[derive(Debug)]
pub(super) struct Slot {
    location: Location,
    bytes: usize,
}

impl Slot {
    /// Its place, for the index. Once linked, the `Slot` is dropped and with it the right to write.
    pub fn location(&self) -> Location {
        self.location
    }
}

/// The memory of the rows.
#[derive(Debug)]
pub(super) struct Pool {
    shape: SlabShape,
    memory: MmapRaw,
    records: Mutex<Records>,
}

#[derive(Debug)]
struct Records {
    slabs: Box<[Slab]>,
    /// A bit a slot, set where it is free; `words` of them a slab.
    bits: Box<[u64]>,
    words: usize,
    /// Heads of the lists: free slabs, and each class's partial ones.
    free: u32,
    partial: Vec<u32>,
}

impl Pool {
    /// Takes the memory, all of it free.
    ///
    /// # Errors
    /// The system's, where it refuses the memory.
    pub fn new(shape: SlabShape) -> io::Result<Self> {
        let memory = MmapMut::map_anon(shape.data_bytes())?;
        #[cfg(target_os = "linux")]
        if let Err(error) = memory.advise(memmap2::Advice::HugePage) {
            tracing::debug!(%error, "no huge pages for the cache's pool");
        }
        let words = SlabShape::words(&shape.row_bytes, shape.slab_bytes);
        let last = shape.slabs - 1;
        let slab = |s: usize| Slab {
            next: if s == last { NONE } else { s as u32 + 1 },
            previous: if s == 0 { NONE } else { s as u32 - 1 },
            slots: 0,
            free: 0,
            from: 0,
            class: Class(0),
            state: State::Free,
        };
        let records = Records {
            slabs: (0..shape.slabs).map(slab).collect(),
            bits: vec![0; words * shape.slabs].into(),
            words,
            free: 0,
            partial: vec![NONE; shape.row_bytes.len()],
        };
        Ok(Self { shape, memory: memory.into(), records: Mutex::new(records) })
    }

    /// The pool's sizes.
    pub fn shape(&self) -> &SlabShape {
        &self.shape
    }

    /// A slot of this class, or `None` while there is none.
    pub fn take(&self, class: Class) -> Option<Slot> {
        let (slab, slot) = self.records().take(class, self.shape.slots(class))?;
        let bytes = self.shape.row_bytes[usize::from(class.0)];
        let offset = slab as usize * self.shape.slab_bytes + slot * bytes;
        Some(Slot { location: Location::slot((offset / UNIT) as u64), bytes })
    }

    /// Whether [`Self::take`] would find a slot of this class.
    pub fn has_room(&self, class: Class) -> bool {
        let records = self.records();
        records.free != NONE || records.partial[usize::from(class.0)] != NONE
    }

    /// Copies a row into a slot that is not published. `row` must be as long as the slot.
    pub fn fill(&self, slot: &mut Slot, row: &[u8]) {
        assert_eq!(row.len(), slot.bytes, "a row of its slot's size");
        let start = self.start(slot.location);
        // SAFETY: `slot` was made by `take`, so `start..start + bytes` lies in the allocation. Nobody else accesses these bytes: slots
        // do not overlap, the bit of this one is taken, and its location is in no index while the
        // `Slot` lives. Readers of other slots hold slices of those bytes only;
        // no reference to the whole allocation exists. Source and slot cannot overlap, since a
        // reference into the pool never covers an unpublished slot.
        unsafe { start.copy_from_nonoverlapping(NonNull::from(row).cast(), row.len()) };
    }

    /// A published row, which begins on a multiple of 4 bytes. How long it is, its key's table says.
    #[inline]
    pub fn row<'a>(&'a self, held: Held<'a>, bytes: usize) -> &'a [u8] {
        let offset = held.location().offset() as usize * UNIT;
        assert!(offset + bytes <= self.shape.data_bytes(), "a row within the pool");
        // SAFETY: in bounds by the assertion; initialised, since pages begin as zeros. `held` was found in the index, hence filled before it was linked
        // and seen by an acquire; until its pin ends, which outlives `'a`, `Limbo` does not free the
        // slot, and nothing but `free` and the `fill` of a slot taken after it writes there.
        unsafe { std::slice::from_raw_parts(self.start(held.location()).as_ptr(), bytes) }
    }

    /// Takes back a slot that was unlinked and outlasted its readers.
    pub fn free(&self, slot: Freed) {
        // SAFETY: what `Freed` stands for.
        unsafe { self.release(slot.location()) };
    }

    /// Takes a slot back.
    ///
    /// # Safety
    /// `location` is of a slot taken from this pool and not freed since; it is in no index and no
    /// batch can read it any more.
    unsafe fn release(&self, location: Location) {
        let mut records = self.records();
        let offset = location.offset() as usize * UNIT;
        let slab = offset / self.shape.slab_bytes;
        let class = records.slabs[slab].class;
        let bytes = self.shape.row_bytes[usize::from(class.0)];
        if cfg!(debug_assertions) {
            let start = self.start(location).cast::<u32>();
            for i in 0..bytes / UNIT {
                // SAFETY: in bounds as in `fill`; nobody else accesses the slot, by the caller's promise.
                unsafe { start.add(i).write(POISON) };
            }
        }
        let slot = (offset % self.shape.slab_bytes) / bytes;
        records.free(slab as u32, slot);
    }

    /// Gives back a slot that was never published.
    pub fn put_back(&self, slot: Slot) {
        // SAFETY: `slot` came from `take` and is consumed; it was in no index.
        unsafe { self.release(slot.location) };
    }

    /// Stops handing out slots of up to `count` more slabs, those with most free space first, so
    /// that they can be emptied and change their size. Returns whether any slab is draining.
    pub fn drain(&self, count: usize) -> bool {
        self.records().drain(count)
    }

    /// Whether a slot lies in a slab that is to be emptied.
    pub fn draining(&self) -> impl Fn(Location) -> bool {
        let states: Vec<bool> =
            self.records().slabs.iter().map(|slab| slab.state == State::Draining).collect();
        let slab_units = (self.shape.slab_bytes / UNIT) as u64;
        move |location| states[(location.offset() / slab_units) as usize]
    }

    fn start(&self, location: Location) -> NonNull<u8> {
        let offset = location.offset() as usize * UNIT;
        debug_assert!(offset < self.shape.data_bytes());
        // SAFETY: locations are made by `take` alone, below the allocation's end.
        unsafe { NonNull::new_unchecked(self.memory.as_mut_ptr().add(offset)) }
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Records {
    fn take(&mut self, class: Class, slots: usize) -> Option<(u32, usize)> {
        let head = self.partial[usize::from(class.0)];
        let slab = if head == NONE { self.open(class, slots)? } else { head };
        let record = &mut self.slabs[slab as usize];
        let bits = &mut self.bits[slab as usize * self.words..(slab as usize + 1) * self.words];
        let from = record.from as usize;
        let (w, word) = bits.iter_mut().enumerate().skip(from).find(|(_, word)| **word != 0)?;
        let slot = w * 64 + word.trailing_zeros() as usize;
        *word &= *word - 1;
        record.from = w as u32;
        record.free -= 1;
        if self.slabs[slab as usize].free == 0 {
            self.unlist(slab);
            self.slabs[slab as usize].state = State::Full;
        }
        Some((slab, slot))
    }

    /// Gives a free slab to a class.
    fn open(&mut self, class: Class, slots: usize) -> Option<u32> {
        let slab = self.free;
        if slab == NONE {
            return None;
        }
        self.unlist(slab);
        for slot in 0..slots {
            self.bits[slab as usize * self.words + slot / 64] |= 1 << (slot % 64);
        }
        let record = &mut self.slabs[slab as usize];
        (record.slots, record.free, record.from, record.class) = (slots as u32, slots as u32, 0, class);
        self.list(slab, State::Partial);
        Some(slab)
    }

    fn free(&mut self, slab: u32, slot: usize) {
        let word = &mut self.bits[slab as usize * self.words + slot / 64];
        debug_assert_eq!(*word >> (slot % 64) & 1, 0, "a slot freed twice");
        *word |= 1 << (slot % 64);
        let record = &mut self.slabs[slab as usize];
        record.free += 1;
        record.from = record.from.min((slot / 64) as u32);
        let (state, empty) = (record.state, record.free == record.slots);
        if state == State::Partial && empty {
            self.unlist(slab);
        }
        if empty {
            let words = slab as usize * self.words..(slab as usize + 1) * self.words;
            self.bits[words].fill(0);
            self.list(slab, State::Free);
        } else if state == State::Full {
            self.list(slab, State::Partial);
        }
    }

    fn drain(&mut self, count: usize) -> bool {
        let mut partial: Vec<u32> = (0..self.slabs.len() as u32)
            .filter(|&s| self.slabs[s as usize].state == State::Partial)
            .collect();
        let emptiness = |slab: &Slab| (u64::from(slab.free) << 32) / u64::from(slab.slots);
        partial.sort_by_key(|&s| std::cmp::Reverse(emptiness(&self.slabs[s as usize])));
        for &slab in partial.iter().take(count) {
            self.unlist(slab);
            self.slabs[slab as usize].state = State::Draining;
        }
        self.slabs.iter().any(|slab| slab.state == State::Draining)
    }

    /// Puts a slab at the head of the list of `state`: of the free ones, or its class's partial ones.
    fn list(&mut self, slab: u32, state: State) {
        self.slabs[slab as usize].state = state;
        let next = std::mem::replace(self.head(slab), slab);
        if next != NONE {
            self.slabs[next as usize].previous = slab;
        }
        let record = &mut self.slabs[slab as usize];
        (record.next, record.previous) = (next, NONE);
    }

    /// Takes a slab out of the list it is in.
    fn unlist(&mut self, slab: u32) {
        let Slab { next, previous, .. } = self.slabs[slab as usize];
        if next != NONE {
            self.slabs[next as usize].previous = previous;
        }
        match previous {
            NONE => *self.head(slab) = next,
            _ => self.slabs[previous as usize].next = next,
        }
    }

    /// The head of the list that a slab's state names.
    fn head(&mut self, slab: u32) -> &mut u32 {
        let Slab { state, class, .. } = self.slabs[slab as usize];
        match state {
            State::Free => &mut self.free,
            _ => &mut self.partial[usize::from(class.0)],
        }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(slabs: usize) -> SlabShape {
        SlabShape { row_bytes: vec![4, 20, 64], slab_bytes: 128, slabs }
    }

    /// Takes slots of a class until there are none.
    fn exhaust(pool: &Pool, class: Class) -> Vec<Location> {
        std::iter::from_fn(|| pool.take(class)).map(|slot| slot.location()).collect()
    }

    proptest! {
        #[test]
        fn slots_never_overlap_and_all_memory_returns(
            ops in prop::collection::vec((0u16..3, any::<bool>(), any::<prop::sample::Index>()), 1..400),
        ) {
            let pool = Pool::new(shape(6)).unwrap();
            let mut held: Vec<(Location, usize)> = Vec::new();
            for (class, take, which) in ops {
                if take {
                    let bytes = pool.shape().row_bytes[usize::from(class)];
                    let Some(slot) = pool.take(Class(class)) else { continue };
                    let location = slot.location();
                    let start = location.offset() as usize * UNIT;
                    for &(other, length) in &held {
                        let other = other.offset() as usize * UNIT;
                        prop_assert!(start + bytes <= other || other + length <= start);
                    }
                    prop_assert!(start + bytes <= pool.shape().data_bytes());
                    held.push((location, bytes));
                } else if !held.is_empty() {
                    let (location, _) = held.swap_remove(which.index(held.len()));
                    // SAFETY: taken above, removed from `held`, never indexed.
                    unsafe { pool.release(location) };
                }
            }
            for (location, _) in held.drain(..) {
                // SAFETY: as above.
                unsafe { pool.release(location) };
            }
            for class in 0..3 {
                let all = exhaust(&pool, Class(class));
                prop_assert_eq!(all.len(), 6 * pool.shape().slots(Class(class)));
                for location in all {
                    // SAFETY: as above.
                    unsafe { pool.release(location) };
                }
            }
        }
    }

    #[test]
    fn an_emptied_slab_serves_another_row_size() {
        let pool = Pool::new(shape(1)).unwrap();
        let small = exhaust(&pool, Class(0));
        assert_eq!(small.len(), 32);
        assert!(!pool.has_room(Class(2)));
        for location in small {
            // SAFETY: taken above, never indexed.
            unsafe { pool.release(location) };
        }
        assert_eq!(exhaust(&pool, Class(2)).len(), 2);
    }

    #[test]
    fn a_draining_slab_gives_no_slots_until_it_is_empty() {
        let pool = Pool::new(shape(2)).unwrap();
        let full = exhaust(&pool, Class(2));
        // SAFETY: taken above, never indexed.
        unsafe { pool.release(full[0]) };
        assert!(pool.drain(1));
        assert!(pool.draining()(full[1]) && !pool.draining()(full[2]));
        assert!(!pool.has_room(Class(2)) && !pool.has_room(Class(0)));
        // SAFETY: as above.
        unsafe { pool.release(full[1]) };
        assert!(pool.has_room(Class(0)));
        assert!(!pool.drain(0), "nothing is draining any more");
    }

    #[test]
    fn freed_slots_are_poisoned_in_debug() {
        let pool = Pool::new(shape(1)).unwrap();
        let mut slot = pool.take(Class(1)).unwrap();
        pool.fill(&mut slot, &[1; 20]);
        let location = slot.location();
        let bits = |pool: &Pool| {
            // SAFETY: a slot of five values, and nobody writes it while the test reads it.
            let row = unsafe { std::slice::from_raw_parts(pool.start(location).cast::<u32>().as_ptr(), 5) };
            row.to_vec()
        };
        assert_eq!(bits(&pool), [0x0101_0101; 5]);
        pool.put_back(slot);
        if cfg!(debug_assertions) {
            assert_eq!(bits(&pool), [POISON; 5]);
        }
    }
}
