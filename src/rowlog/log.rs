//! Where the records of a table lie that has no order of its own: in the order in which they were written.
//!
//! Rows leave a scratchpad from all over a table. Written back where they were, each dirties a page of its own, which a disk
//! takes as one small write, after a read where the page was not in memory: for a record of 512 bytes eight times its bytes
//! or more, at random. So records are written end to end instead, wherever there is room, as in a log-structured file system
//! (Rosenblum and Ousterhout, "The design and implementation of a log-structured file system", 1992): many rows in one
//! long write, and none is read before.
//!
//! ```text
//! index                    rows                         segments
//! | place of row 0 | ...   | row of place 0 | ...       | record | record | ...   | record | record | ...
//! ```
//!
//! The index says where the last record of each row is; the one before is garbage. A segment without a live record is free
//! and written anew. Where only one is, and a third of the records are garbage, the segment with the fewest live ones
//! is emptied into that one: they are written once more, and what is of which row is read for that. So the file takes at most
//! half again as much as its rows, and three segments.

use std::io;
use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};

use super::bitmap::Bitmap;
use super::stripes::Stripes;
use crate::mem::OutOfHostMemory;
use crate::mem::prefetch::PREFETCH_AHEAD;

/// Bytes of a segment, at most, but at least one record.
const SEGMENT_BYTES: usize = 1 << 20;
/// A small table's segments are smaller, so that there are several.
const FEWEST_SEGMENTS: u64 = 16;
/// The grid of the file, and bytes of the index that are made together.
const PAGE_BYTES: u64 = 4096;
/// Bytes of a place in the index, and of the row of a place.
const WORD_BYTES: u64 = size_of::<u32>() as u64;
const PAGE_PLACES: u64 = PAGE_BYTES / WORD_BYTES;

/// The records of a table, in the order in which they were written.
pub(crate) struct Log {
    /// Where in the file the index begins, the rows, and the segments.
    index: u64,
    rows: u64,
    begin: u64,
    /// Which pages of the index are in the file.
    pages: Bitmap,
    /// Words of a record.
    width: usize,
    /// Places of a segment.
    segment: u32,
    segments: Mutex<Segments>,
    /// Held to read while places are looked up and read from, and to write before a freed segment is written anew.
    reuse: RwLock<()>,
}

struct Segments {
    /// Of each segment, how many of its records are the last of their row.
    live: Vec<u32>,
    /// How many are in all.
    rows: u64,
    /// The segment that is being written, and how many of its places are.
    open: (u32, u32),
    free: Vec<u32>,
}

impl Log {
    /// For so many rows of `width` words, from byte `begin` of a file on; `None` where there may be more places than a
    /// word can number.
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
        // The first write opens a segment.
        let segments = Segments { live: Vec::new(), rows: 0, open: (0, segment as u32), free: Vec::new() };
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

    /// The byte of the file before which all lies that may ever be written.
    pub(crate) fn end(&self, rows: u64) -> u64 {
        self.offset(most_places(rows, u64::from(self.segment)))
    }

    /// Where in the file the record at this place begins.
    pub(crate) fn offset(&self, place: u64) -> u64 {
        self.begin + place * self.width as u64 * WORD_BYTES
    }

    /// Bytes of memory that grow with the table.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        self.pages.bytes() + ((segments.live.len() + segments.free.len()) * size_of::<u32>()) as u64
    }

    /// Places that were looked up while this is held stay readable until it is dropped.
    pub(crate) fn hold(&self) -> RwLockReadGuard<'_, ()> {
        self.reuse.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the last record of the row is; `None` where it was never written.
    #[inline]
    pub(crate) fn place(&self, stripes: &Stripes, row: u64) -> Option<u32> {
        let made = self.pages.has(row / PAGE_PLACES);
        made.then(|| stripes.word(self.index + row * WORD_BYTES)).and_then(|word| word.checked_sub(1))
    }

    /// Asks memory for what [`Self::place`] looks at.
    #[inline]
    pub(crate) fn prefetch(&self, stripes: &Stripes, row: u64) {
        stripes.prefetch(self.index + row * WORD_BYTES, WORD_BYTES as usize);
    }

    /// The rows of a range that were written, ascending, and where each one's last record is.
    pub(crate) fn within<'l>(
        &'l self,
        stripes: &'l Stripes,
        rows: Range<u64>,
    ) -> impl Iterator<Item = (u64, u64)> + 'l {
        let pages = rows.start / PAGE_PLACES..rows.end.div_ceil(PAGE_PLACES);
        let made = self.pages.within(pages).flat_map(|page| page * PAGE_PLACES..(page + 1) * PAGE_PLACES);
        let made = made.filter(move |row| rows.contains(row));
        made.filter_map(move |row| Some((row, u64::from(self.place(stripes, row)?))))
    }

    /// Writes the records of these rows, end to end. Where it fails, each row has its old record or the new one.
    pub(crate) fn write(&self, stripes: &Stripes, rows: &[u64], records: &[f32]) -> io::Result<()> {
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
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
            if segments.open.1 == self.segment {
                self.open(segments, stripes)?;
            }
            let (open, used) = segments.open;
            let count = rows.len().min((self.segment - used) as usize);
            let now = rows.split_off(..count).unwrap_or_default();
            let of_now = records.split_off(..count * self.width).unwrap_or_default();
            numbers.clear();
            numbers.extend(now.iter().map(|&row| row as u32));
            let first = open * self.segment + used;
            stripes.write(bytemuck::cast_slice(of_now), self.offset(u64::from(first)))?;
            stripes.write(bytemuck::cast_slice(&numbers), self.rows + u64::from(first) * WORD_BYTES)?;
            segments.open.1 += count as u32;
            for (at, (&row, place)) in now.iter().zip(first..).enumerate() {
                if let Some(&next) = now.get(at + PREFETCH_AHEAD) {
                    self.prefetch(stripes, next);
                }
                self.publish(segments, stripes, (row, place))?;
            }
        }
        Ok(())
    }

    /// The row's last record is at this place.
    fn publish(
        &self,
        segments: &mut Segments,
        stripes: &Stripes,
        (row, place): (u64, u32),
    ) -> io::Result<()> {
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
                if *live == 0 && at != segments.open.0 {
                    segments.free.push(at);
                }
            }
        }
        Ok(())
    }

    /// Opens a segment with room.
    fn open(&self, segments: &mut Segments, stripes: &Stripes) -> io::Result<()> {
        let full = segments.open.0 as usize;
        if segments.live.get(full) == Some(&0) {
            segments.free.push(full as u32);
        }
        let places = segments.live.len() as u64 * u64::from(self.segment);
        let crowded = 2 * places > 3 * segments.rows + 2 * u64::from(self.segment);
        // One stays free, for what is emptied next.
        let free = if crowded || segments.free.len() > 1 { segments.free.pop() } else { None };
        let empties = crowded && segments.free.is_empty();
        let open = free.unwrap_or_else(|| {
            segments.live.push(0);
            segments.live.len() as u32 - 1
        });
        // Whoever has looked up a place in it, when it was not free yet, has read it then.
        drop(self.reuse.write().unwrap_or_else(PoisonError::into_inner));
        segments.open = (open, 0);
        if empties { self.empty(segments, stripes) } else { Ok(()) }
    }

    /// Writes what is live in the segment that has the least of it once more, into the open one, which has room.
    fn empty(&self, segments: &mut Segments, stripes: &Stripes) -> io::Result<()> {
        let others = (0..).zip(&segments.live).filter(|(at, _)| *at != segments.open.0);
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

/// Places that may be written at most, for so many rows.
fn most_places(rows: u64, segment: u64) -> u64 {
    rows * 3 / 2 + 4 * segment
}
