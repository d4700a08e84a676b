//! The default layout of a table in the working file: records in the order in which they were last written.
//!
//! Rows evicted from the scratchpad are spread over the whole table. If each had a fixed place, each would
//! dirty a page of its own. The disk would then write a whole page for each row, after reading it if it was
//! not in memory. For a record of 512 bytes that is 8 times its size or more. So records are appended to a
//! segment with free space, as in a log-structured file system (Rosenblum and Ousterhout, "The design and
//! implementation of a log-structured file system", 1992): many rows in one long write, and no reads.
//!
//! ```text
//! index                    rows                         segments
//! | place of row 0 | ...   | row of place 0 | ...       | record | record | ...   | record | record | ...
//! ```
//!
//! The index gives the place of the newest record of each row, which is live. Older records are garbage. A
//! segment without a live record is free and is reused. When more than a third of the places hold garbage
//! and at most one segment is free, the segment with the fewest live records is emptied: these are appended
//! again, with their row numbers from `rows`. So the segments take at most one and a half times the space
//! of the live records, plus three segments.

use std::io;
use std::ops::Range;
use std::sync::{Mutex, RwLock, RwLockReadGuard};

use super::bitmap::Bitmap;
use super::region::PAGE_BYTES;
use super::stripes::Stripes;
use crate::mem::OutOfHostMemory;
use crate::mem::prefetch::PREFETCH_AHEAD;
use crate::sync::EvenPoisoned;

/// Most bytes of a segment; it holds at least one record.
const SEGMENT_BYTES: usize = 1 << 20;
/// Segments of small tables are smaller, so that there are at least this many.
const FEWEST_SEGMENTS: u64 = 16;
/// Bytes of an entry of `index` and of `rows`.
const WORD_BYTES: u64 = size_of::<u32>() as u64;
/// The index is initialised a page at a time.
const PAGE_PLACES: u64 = PAGE_BYTES / WORD_BYTES;

/// The records of a table, in the order of their last writes.
pub(crate) struct Log {
    /// Offsets in the file of the index, the rows and the segments.
    index: u64,
    rows: u64,
    begin: u64,
    /// Which pages of the index were initialised.
    pages: Bitmap,
    /// f32 elements of a record.
    width: usize,
    /// Places per segment.
    segment: u32,
    segments: Mutex<Segments>,
    /// Locked for reading while places are looked up and their records read; locked for writing before a
    /// freed segment is reused.
    reuse: RwLock<()>,
}

struct Segments {
    /// The live records of each segment.
    live: Vec<u32>,
    /// Live records in all segments.
    rows: u64,
    /// The segment that is being written, and how many of its places are used.
    open: OpenSegment,
    free: Vec<u32>,
}

#[derive(Clone, Copy)]
struct OpenSegment {
    number: u32,
    used: u32,
}

/// A row, and the place of one of its records.
#[derive(Clone, Copy)]
pub(crate) struct RowPlace {
    pub(crate) row: u64,
    pub(crate) place: u64,
}

impl Log {
    /// A log for `rows` rows of `width` elements, from offset `begin` of the file. `None` if it may need more
    /// places than a u32 can number.
    pub(crate) fn new(rows: u64, width: usize, begin: u64) -> Result<Option<Self>, OutOfHostMemory> {
        let longest = SEGMENT_BYTES as u64 / (width.max(1) as u64 * WORD_BYTES);
        let segment = rows.div_ceil(FEWEST_SEGMENTS).min(longest).max(1);
        let places = most_places(rows, segment);
        if places >= u64::from(u32::MAX) {
            return Ok(None);
        }
        let pages = Bitmap::new(rows.div_ceil(PAGE_PLACES))?;
        let rows_begin = begin + (rows * WORD_BYTES).next_multiple_of(PAGE_BYTES);
        let records = rows_begin + (places * WORD_BYTES).next_multiple_of(PAGE_BYTES);
        // Counts as full, so that the first write opens a segment.
        let open = OpenSegment { number: 0, used: segment as u32 };
        let segments = Segments { live: Vec::new(), rows: 0, open, free: Vec::new() };
        Ok(Some(Self {
            index: begin,
            rows: rows_begin,
            begin: records,
            pages,
            width,
            segment: segment as u32,
            segments: Mutex::new(segments),
            reuse: RwLock::new(()),
        }))
    }

    /// The end of the log in the file, which no write exceeds.
    pub(crate) fn end(&self, rows: u64) -> u64 {
        self.offset(most_places(rows, u64::from(self.segment)))
    }

    /// The offset in the file of the record at this place.
    pub(crate) fn offset(&self, place: u64) -> u64 {
        self.begin + place * self.width as u64 * WORD_BYTES
    }

    /// Places that are looked up while this lock is held stay readable until it is released.
    pub(crate) fn hold(&self) -> RwLockReadGuard<'_, ()> {
        self.reuse.read().even_poisoned()
    }

    /// The place of the newest record of the row; `None` if it was never written. An index entry is the place
    /// plus 1, or 0 for no record.
    #[inline]
    pub(crate) fn place(&self, stripes: &Stripes, row: u64) -> Option<u32> {
        let made = self.pages.has(row / PAGE_PLACES);
        made.then(|| stripes.word(self.index + row * WORD_BYTES)).and_then(|word| word.checked_sub(1))
    }

    /// Prefetches the index entry that [`Self::place`] reads.
    #[inline]
    pub(crate) fn prefetch(&self, stripes: &Stripes, row: u64) {
        stripes.prefetch(self.index + row * WORD_BYTES, WORD_BYTES as usize);
    }

    /// The written rows of a range, ascending, each with the place of its newest record.
    pub(crate) fn within<'l>(
        &'l self,
        stripes: &'l Stripes,
        rows: Range<u64>,
    ) -> impl Iterator<Item = RowPlace> + 'l {
        let pages = rows.start / PAGE_PLACES..rows.end.div_ceil(PAGE_PLACES);
        let made = self.pages.within(pages).flat_map(|page| page * PAGE_PLACES..(page + 1) * PAGE_PLACES);
        let made = made.filter(move |row| rows.contains(row));
        made.filter_map(move |row| Some(RowPlace { row, place: u64::from(self.place(stripes, row)?) }))
    }

    /// Appends the records of these rows. On failure each row has its old or its new record.
    pub(crate) fn write(&self, stripes: &Stripes, rows: &[u64], records: &[f32]) -> io::Result<()> {
        let mut segments = self.segments.lock().even_poisoned();
        self.append(&mut segments, stripes, rows, records)
    }

    fn append(
        &self,
        segments: &mut Segments,
        stripes: &Stripes,
        mut rows: &[u64],
        mut records: &[f32],
    ) -> io::Result<()> {
        let mut numbers: Vec<u32> = Vec::new();
        while !rows.is_empty() {
            if segments.open.used == self.segment {
                self.open(segments, stripes)?;
            }
            let OpenSegment { number, used } = segments.open;
            let count = rows.len().min((self.segment - used) as usize);
            let now = rows.split_off(..count).unwrap_or_default();
            let of_now = records.split_off(..count * self.width).unwrap_or_default();
            numbers.clear();
            numbers.extend(now.iter().map(|&row| row as u32));
            let first = number * self.segment + used;
            stripes.write(bytemuck::cast_slice(of_now), self.offset(u64::from(first)))?;
            stripes.write(bytemuck::cast_slice(&numbers), self.rows + u64::from(first) * WORD_BYTES)?;
            segments.open.used += count as u32;
            for (at, (&row, place)) in now.iter().zip(first..).enumerate() {
                if let Some(&next) = now.get(at + PREFETCH_AHEAD) {
                    self.prefetch(stripes, next);
                }
                self.publish(segments, stripes, RowPlace { row, place: u64::from(place) })?;
            }
        }
        Ok(())
    }

    /// Makes the record at this place the newest of its row.
    fn publish(
        &self,
        segments: &mut Segments,
        stripes: &Stripes,
        RowPlace { row, place }: RowPlace,
    ) -> io::Result<()> {
        // `new` has checked that 32 bits can number all places.
        let place = place as u32;
        let old = self.place(stripes, row);
        let page = row / PAGE_PLACES;
        if !self.pages.has(page) {
            stripes.write(&[0; PAGE_BYTES as usize], self.index + page * PAGE_BYTES)?;
            self.pages.mark(page);
        }
        stripes.set_word(self.index + row * WORD_BYTES, place + 1);
        segments.live[(place / self.segment) as usize] += 1;
        match old {
            None => segments.rows += 1,
            Some(old) => {
                let at = old / self.segment;
                let live = &mut segments.live[at as usize];
                *live -= 1;
                if *live == 0 && at != segments.open.number {
                    segments.free.push(at);
                }
            }
        }
        Ok(())
    }

    /// Opens a free segment or a new one.
    fn open(&self, segments: &mut Segments, stripes: &Stripes) -> io::Result<()> {
        let full = segments.open.number as usize;
        if segments.live.get(full) == Some(&0) {
            segments.free.push(full as u32);
        }
        let places = segments.live.len() as u64 * u64::from(self.segment);
        let crowded = 2 * places > 3 * segments.rows + 2 * u64::from(self.segment);
        // One segment stays free, so that `empty` can append to it.
        let free = if crowded || segments.free.len() > 1 { segments.free.pop() } else { None };
        let empties = crowded && segments.free.is_empty();
        let open = free.unwrap_or_else(|| {
            segments.live.push(0);
            segments.live.len() as u32 - 1
        });
        // Waits for readers that looked up a place in the segment before it was freed.
        drop(self.reuse.write().even_poisoned());
        segments.open = OpenSegment { number: open, used: 0 };
        if empties { self.empty(segments, stripes) } else { Ok(()) }
    }

    /// Appends the live records of the segment with the fewest live records to the open segment, which is
    /// empty and has room for them.
    fn empty(&self, segments: &mut Segments, stripes: &Stripes) -> io::Result<()> {
        let others = (0..).zip(&segments.live).filter(|(at, _)| *at != segments.open.number);
        let Some((victim, _)) = others.min_by_key(|(_, live)| **live) else { return Ok(()) };
        let first = victim * self.segment;
        let mut numbers = vec![0_u32; self.segment as usize];
        let mut records = vec![0.0_f32; numbers.len() * self.width];
        stripes.read(bytemuck::cast_slice_mut(&mut numbers), self.rows + u64::from(first) * WORD_BYTES)?;
        stripes.read(bytemuck::cast_slice_mut(&mut records), self.offset(u64::from(first)))?;
        let mut rows = Vec::with_capacity(numbers.len());
        for (at, number) in numbers.into_iter().enumerate() {
            let row = u64::from(number);
            if self.place(stripes, row) == Some(first + at as u32) {
                records.copy_within(at * self.width..(at + 1) * self.width, rows.len() * self.width);
                rows.push(row);
            }
        }
        records.truncate(rows.len() * self.width);
        self.append(segments, stripes, &rows, &records)
    }
}

/// The most places that a log of this many rows can use.
fn most_places(rows: u64, segment: u64) -> u64 {
    rows * 3 / 2 + 4 * segment
}
