//! The slab allocator: which slots of a pool are free, for a pool on the host or on a device.
//!
//! The pool is divided into slabs of one length. A free slab belongs to no row size. When a size has no free
//! slot left, it takes a free slab and divides it into slots. A slab is free again when its last slot is
//! freed. So the memory of each row size follows its use.
//!
//! A bit per slot, stored outside the slab, records whether the slot is free. Slabs of one row size that have
//! free and taken slots form a list, linked through their records. All records are allocated at the start and
//! counted in [`SlabShape::bytes`]. Nothing grows afterwards. The records are in host memory, even if the
//! rows are on a device.

use std::sync::{Mutex, MutexGuard};

use super::index::Location;
use crate::mem::WORD_BYTES;
use crate::sync::EvenPoisoned;
use crate::types::ROW_ALIGN;

// The offsets of slots are in words.
const _: () = assert!(ROW_ALIGN.is_multiple_of(WORD_BYTES));
/// Marks the end of a list.
const NONE: u32 = u32::MAX;

/// A row size: an index into [`SlabShape::row_bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class(pub u16);

/// The sizes of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlabShape {
    /// Row sizes in bytes: ascending, distinct, multiples of 4.
    pub row_bytes: Vec<usize>,
    /// Bytes per slab; a multiple of the largest row.
    pub slab_bytes: usize,
    pub slabs: usize,
}

impl SlabShape {
    /// Bytes per slab, including its records.
    pub(crate) fn slab_cost(row_bytes: &[usize], slab_bytes: usize) -> usize {
        slab_bytes + size_of::<Slab>() + 8 * Self::words(row_bytes, slab_bytes)
    }

    /// Bytes of the whole pool, including records.
    pub(crate) fn bytes(&self) -> usize {
        self.slabs * Self::slab_cost(&self.row_bytes, self.slab_bytes)
    }

    /// Bytes of all slabs, including their unused ends.
    pub(crate) fn data_bytes(&self) -> usize {
        self.slabs * self.slab_bytes
    }

    /// Slots in a slab of this class.
    pub(crate) fn slots(&self, class: Class) -> usize {
        self.slab_bytes / self.row_bytes[usize::from(class.0)]
    }

    /// Bytes that a slot of this class takes in its slab, including its share of the slab's unused end.
    pub(crate) fn footprint(&self, class: Class) -> usize {
        self.slab_bytes / self.slots(class)
    }

    /// The class of rows of this many bytes.
    pub(crate) fn class(&self, row_bytes: usize) -> Option<Class> {
        self.row_bytes.binary_search(&row_bytes).ok().map(|c| Class(c as u16))
    }

    /// 64-bit words for one bit per slot of a slab with the smallest slots.
    fn words(row_bytes: &[usize], slab_bytes: usize) -> usize {
        row_bytes.first().map_or(0, |smallest| (slab_bytes / smallest).div_ceil(64))
    }
}

/// One slab's record.
#[derive(Clone, Copy, Debug)]
struct Slab {
    /// Neighbours in the list of free slabs, or in the list of partial slabs of its class.
    next: u32,
    previous: u32,
    slots: u32,
    free: u32,
    /// The slab has no free slot in the words of its bits before this one.
    from: u32,
    /// Valid unless the slab is free.
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
    /// In no list: it is being emptied, and its free slots are not taken.
    Draining,
}

/// A taken slot that is not published yet. Its owner alone may write it.
#[derive(Debug)]
pub(crate) struct Slot {
    location: Location,
    bytes: usize,
}

impl Slot {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The location to link. After linking, drop the `Slot`: its owner may no longer write.
    pub(crate) fn location(&self) -> Location {
        self.location
    }
}

/// The allocator of a pool's slots.
#[derive(Debug)]
pub(crate) struct SlotAllocator {
    shape: SlabShape,
    records: Mutex<Records>,
}

/// A slot, by its slab and its number there.
struct SlabSlot {
    slab: u32,
    slot: usize,
}

#[derive(Debug)]
struct Records {
    slabs: Box<[Slab]>,
    /// One bit per slot, set if it is free; `words` words per slab.
    bits: Box<[u64]>,
    words: usize,
    /// Heads of the lists: the free slabs, and by class the partial slabs.
    free: u32,
    partial: Vec<u32>,
}

impl SlotAllocator {
    /// An allocator with all slabs free.
    pub(crate) fn new(shape: SlabShape) -> Self {
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
        Self { shape, records: Mutex::new(records) }
    }

    pub(crate) fn shape(&self) -> &SlabShape {
        &self.shape
    }

    /// Takes a free slot of this class, if there is one.
    pub(crate) fn take(&self, class: Class) -> Option<Slot> {
        self.take_from(&mut self.records(), class)
    }

    /// As [`Self::take`] for each of these classes, under one lock.
    pub(crate) fn take_each(&self, classes: impl Iterator<Item = Class>) -> Vec<Option<Slot>> {
        let mut slots = Vec::with_capacity(classes.size_hint().1.unwrap_or(0));
        let mut records = self.records();
        slots.extend(classes.map(|class| self.take_from(&mut records, class)));
        slots
    }

    fn take_from(&self, records: &mut Records, class: Class) -> Option<Slot> {
        let SlabSlot { slab, slot } = records.take(class, self.shape.slots(class))?;
        let bytes = self.shape.row_bytes[usize::from(class.0)];
        let offset = slab as usize * self.shape.slab_bytes + slot * bytes;
        Some(Slot { location: Location::slot((offset / WORD_BYTES) as u64), bytes })
    }

    /// Whether [`Self::take`] would succeed.
    pub(crate) fn has_room(&self, class: Class) -> bool {
        let records = self.records();
        records.free != NONE || records.partial[usize::from(class.0)] != NONE
    }

    /// The length of a taken slot in bytes.
    pub(crate) fn bytes_at(&self, location: Location) -> usize {
        let class = self.records().slabs[self.slab_of(location)].class;
        self.shape.row_bytes[usize::from(class.0)]
    }

    /// Frees a slot that is no longer used.
    pub(crate) fn give_back(&self, location: Location) {
        let mut records = self.records();
        let slab = self.slab_of(location);
        let class = records.slabs[slab].class;
        let offset = location.offset() as usize * WORD_BYTES % self.shape.slab_bytes;
        records.free(slab as u32, offset / self.shape.row_bytes[usize::from(class.0)]);
    }

    fn slab_of(&self, location: Location) -> usize {
        location.offset() as usize * WORD_BYTES / self.shape.slab_bytes
    }

    /// Marks up to `count` more slabs as draining, those with the most free space first. Their slots are no
    /// longer taken, so that they can be emptied and change their row size. Returns whether any slab is
    /// draining.
    pub(crate) fn drain(&self, count: usize) -> bool {
        self.records().drain(count)
    }

    /// By slab: whether it is draining.
    pub(crate) fn draining(&self) -> Vec<bool> {
        self.records().slabs.iter().map(|slab| slab.state == State::Draining).collect()
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().even_poisoned()
    }
}

impl Records {
    fn take(&mut self, class: Class, slots: usize) -> Option<SlabSlot> {
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
        Some(SlabSlot { slab, slot })
    }

    /// Assigns a free slab to a class.
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

    /// Inserts a slab at the head of the list of `state`: the free slabs, or its class's partial slabs.
    fn list(&mut self, slab: u32, state: State) {
        self.slabs[slab as usize].state = state;
        let next = std::mem::replace(self.head(slab), slab);
        if next != NONE {
            self.slabs[next as usize].previous = slab;
        }
        let record = &mut self.slabs[slab as usize];
        (record.next, record.previous) = (next, NONE);
    }

    /// Removes a slab from its list.
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

    /// The head of the list for a slab's state.
    fn head(&mut self, slab: u32) -> &mut u32 {
        let Slab { state, class, .. } = self.slabs[slab as usize];
        match state {
            State::Free => &mut self.free,
            _ => &mut self.partial[usize::from(class.0)],
        }
    }
}
