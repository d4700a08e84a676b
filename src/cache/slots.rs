//! Which slots of a pool are free, whatever memory the pool lies in.
//!
//! The pool is cut into slabs of one length. A slab belongs to no row size until a size
//! has no free slot left; then it is cut into slots of that size, and it returns to the free slabs
//! when its last slot is freed. So sizes grow and shrink against each other with use.
//!
//! Which slots are free is a bit each, beside the slab and not in it; slabs of a size with a free
//! slot form a list through their own records. All of it is taken at the start and counted in
//! [`SlabShape::bytes`]; nothing grows afterwards. The records lie in memory of the host, also where the
//! rows lie on a device.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::index::Location;
use crate::types::ROW_ALIGN;

/// Offsets count units of this many bytes.
pub(crate) const UNIT: usize = ROW_ALIGN;
/// No slab.
const NONE: u32 = u32::MAX;

/// A row size's place among [`SlabShape::row_bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class(pub u16);

/// The sizes of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlabShape {
    /// Bytes of each row size: ascending, distinct, multiples of 4.
    pub row_bytes: Vec<usize>,
    /// Bytes a slab; a multiple of the largest row.
    pub slab_bytes: usize,
    /// How many slabs.
    pub slabs: usize,
}

impl SlabShape {
    /// What a slab costs, its records included.
    pub(crate) fn slab_cost(row_bytes: &[usize], slab_bytes: usize) -> usize {
        slab_bytes + size_of::<Slab>() + 8 * Self::words(row_bytes, slab_bytes)
    }

    /// What the whole pool costs, its records included.
    pub(crate) fn bytes(&self) -> usize {
        self.slabs * Self::slab_cost(&self.row_bytes, self.slab_bytes)
    }

    /// Bytes of rows and of what is lost at the slabs' ends.
    pub(crate) fn data_bytes(&self) -> usize {
        self.slabs * self.slab_bytes
    }

    /// Slots in a slab of this class.
    pub(crate) fn slots(&self, class: Class) -> usize {
        self.slab_bytes / self.row_bytes[usize::from(class.0)]
    }

    /// What a slot of this class takes of [`Self::data_bytes`], its share of its slab's end included.
    pub(crate) fn footprint(&self, class: Class) -> usize {
        self.slab_bytes / self.slots(class)
    }

    /// The class of rows of this many bytes.
    pub(crate) fn class(&self, row_bytes: usize) -> Option<Class> {
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
pub(crate) struct Slot {
    location: Location,
    bytes: usize,
}

impl Slot {
    /// How long it is.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its place, for the index. Once linked, the `Slot` is dropped and with it the right to write.
    pub(crate) fn location(&self) -> Location {
        self.location
    }
}

/// The slots of a pool.
#[derive(Debug)]
pub(crate) struct Slots {
    shape: SlabShape,
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

impl Slots {
    /// All of them free.
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

    /// The pool's sizes.
    pub(crate) fn shape(&self) -> &SlabShape {
        &self.shape
    }

    /// A slot of this class, or `None` while there is none.
    pub(crate) fn take(&self, class: Class) -> Option<Slot> {
        let (slab, slot) = self.records().take(class, self.shape.slots(class))?;
        let bytes = self.shape.row_bytes[usize::from(class.0)];
        let offset = slab as usize * self.shape.slab_bytes + slot * bytes;
        Some(Slot { location: Location::slot((offset / UNIT) as u64), bytes })
    }

    /// Whether [`Self::take`] would find a slot of this class.
    pub(crate) fn has_room(&self, class: Class) -> bool {
        let records = self.records();
        records.free != NONE || records.partial[usize::from(class.0)] != NONE
    }

    /// The bytes of a slot that is taken.
    pub(crate) fn bytes_at(&self, location: Location) -> usize {
        let class = self.records().slabs[self.slab_of(location)].class;
        self.shape.row_bytes[usize::from(class.0)]
    }

    /// Takes a slot back that nobody uses any more.
    pub(crate) fn give_back(&self, location: Location) {
        let mut records = self.records();
        let slab = self.slab_of(location);
        let class = records.slabs[slab].class;
        let offset = location.offset() as usize * UNIT % self.shape.slab_bytes;
        records.free(slab as u32, offset / self.shape.row_bytes[usize::from(class.0)]);
    }

    fn slab_of(&self, location: Location) -> usize {
        location.offset() as usize * UNIT / self.shape.slab_bytes
    }

    /// Stops handing out slots of up to `count` more slabs, those with most free space first, so
    /// that they can be emptied and change their size. Returns whether any slab is draining.
    pub(crate) fn drain(&self, count: usize) -> bool {
        self.records().drain(count)
    }

    /// By slab: whether it is to be emptied.
    pub(crate) fn draining(&self) -> Vec<bool> {
        self.records().slabs.iter().map(|slab| slab.state == State::Draining).collect()
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
