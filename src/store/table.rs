//! One embedding table's rows and the optimizer state of each, in memory or in a mapped file.
//!
//! Rows are numbered from 0 and stored end to end, so a row's place is a multiplication and a
//! version is served from its file with no copy: the file's tensor data begins on a page, hence
//! a mapping of it can be read as it lies. A table is trained on in f32; one of a version may hold rows
//! of another type of element, encoded when the version was written, which are read and never written.
//! Memory of our own comes from a [`HostMemory`]; the plain
//! one here, [`PlainMemory`], asks for huge pages, which double the rate of random row reads.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::hint::black_box;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Advice, Mmap, MmapMut};
use rayon::prelude::*;

use crate::mem::{HostBlock, HostMemory, OutOfHostMemory, fold, huge_pages};
use crate::schema::{self, Lookup, Schema};
use crate::types::{Batch, Element, RowError};

// Files hold little-endian numbers and mappings are read as they lie.
#[cfg(target_endian = "big")]
compile_error!("the store maps little-endian files: big-endian machines are not supported");

const PAGE_BYTES: usize = 4096;
/// Elements that one thread fills or encodes at a time.
const CHUNK_ELEMENTS: usize = 1 << 16;
/// Bytes that one thread copies at a time.
const CHUNK_BYTES: usize = 1 << 18;

/// `rows x dim` elements of one type, with as many rows of each kind of optimizer state, in f32.
#[derive(Debug)]
pub struct Table {
    rows: u64,
    dim: usize,
    element: Element,
    /// Rows end to end, each of `element.row_bytes(dim)`; aligned for f32 where they are.
    weight: Bytes,
    states: Vec<State>,
}

/// A row that cannot be stored as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("row {row}: {reason}")]
pub struct BadRow {
    /// Which one: the first in its table.
    pub row: u64,
    /// What is wrong with it.
    pub reason: RowError,
}

/// One kind of optimizer state: `rows x width` f32.
#[derive(Debug)]
pub struct State {
    name: String,
    width: usize,
    data: Floats,
}

impl State {
    /// Names `data`, which has `width` elements a row.
    #[must_use]
    pub(crate) fn new(name: impl Into<String>, width: usize, data: Floats) -> Self {
        Self { name: name.into(), width, data }
    }

    /// What it is: `sum`, `exp_avg`, ...
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Elements a row: the table's dim or 1.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// All rows, end to end.
    #[must_use]
    pub fn as_slice(&self) -> &[f32] {
        self.data.as_slice()
    }

    /// All rows, to write; `None` when they are a mapped file's.
    pub fn rows_mut(&mut self) -> Option<&mut [f32]> {
        self.data.as_mut_slice()
    }
}

impl Table {
    /// A table of f32 zeros with zeroed states, each a name and its elements a row.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub fn zeroed(
        memory: &dyn HostMemory,
        rows: u64,
        dim: usize,
        states: &[(&str, usize)],
    ) -> Result<Self, OutOfHostMemory> {
        let take = |width: usize| {
            let elements = usize::try_from(rows).ok().and_then(|rows| rows.checked_mul(width));
            Floats::zeroed(memory, elements.ok_or(OutOfHostMemory { bytes: usize::MAX })?)
        };
        let Floats(weight) = take(dim)?;
        let state = |&(name, width): &(&str, usize)| Ok(State::new(name, width, take(width)?));
        let states = states.iter().map(state).collect::<Result<_, _>>()?;
        Ok(Self { rows, dim, element: Element::F32, weight, states })
    }

    /// The table that the schema declares, over bytes that exist. `None` unless each part holds as many
    /// rows of its width as declared, and f32 rows are aligned.
    #[must_use]
    pub(crate) fn from_parts(declared: &schema::Table, weight: Bytes, states: Vec<State>) -> Option<Self> {
        let (rows, &schema::Table { dim, element, .. }) = (declared.stored_rows(), declared);
        let fits = |width: usize, length: usize| {
            usize::try_from(rows).ok()?.checked_mul(width).filter(|&n| n == length)
        };
        fits(element.row_bytes(dim), weight.as_slice().len())?;
        if element == Element::F32 {
            bytemuck::try_cast_slice::<u8, f32>(weight.as_slice()).ok()?;
        }
        states.iter().try_for_each(|state| fits(state.width, state.as_slice().len()).map(|_| ()))?;
        Some(Self { rows, dim, element, weight, states })
    }

    /// The same rows in another type of element, without state, in memory of their own. Rows that are
    /// not f32 are decoded first.
    ///
    /// # Errors
    /// [`EncodeError`] for a row that the type cannot hold, and when the memory is not to be had.
    pub fn encoded(&self, element: Element, memory: &dyn HostMemory) -> Result<Self, EncodeError> {
        let row_bytes = element.row_bytes(self.dim);
        let bytes = usize::try_from(self.rows).ok().and_then(|rows| rows.checked_mul(row_bytes));
        let mut weight = Bytes::zeroed(memory, bytes.ok_or(OutOfHostMemory { bytes: usize::MAX })?)?;
        if let Some(to) = weight.as_mut_slice() {
            self.encode_rows(element, 0, to)?;
        }
        Ok(Self { rows: self.rows, dim: self.dim, element, weight, states: Vec::new() })
    }

    /// Writes the elements of all rows over `out`, end to end.
    ///
    /// # Panics
    /// When `out` has not as many elements.
    pub fn decode(&self, out: &mut [f32]) {
        let row_bytes = self.element.row_bytes(self.dim);
        assert_eq!(out.len() / self.dim.max(1), self.as_bytes().len() / row_bytes.max(1), "rows");
        let rows = self.as_bytes().par_chunks_exact(row_bytes.max(1));
        out.par_chunks_exact_mut(self.dim.max(1)).zip(rows).for_each(|(out, row)| {
            self.element.decode(row, out);
        });
    }

    /// Writes the rows from `first` on over `out`, encoded in this type, as many as it has room for.
    ///
    /// # Errors
    /// [`BadRow`] with the first row that the type cannot hold.
    ///
    /// # Panics
    /// When the table has fewer rows.
    pub(crate) fn encode_rows(&self, element: Element, first: u64, out: &mut [u8]) -> Result<(), BadRow> {
        let (dim, row_bytes) = (self.dim, element.row_bytes(self.dim));
        let chunk_rows = CHUNK_ELEMENTS.div_ceil(dim.max(1));
        let chunks = out.par_chunks_mut((chunk_rows * row_bytes).max(1)).enumerate();
        let encoded = chunks.map(|(chunk, out)| {
            let first = first + (chunk * chunk_rows) as u64;
            let mut values = vec![0.0; dim];
            for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
                self.element.decode(&self.as_bytes()[self.byte_range(row)], &mut values);
                element.encode(&values, out).map_err(|reason| BadRow { row, reason })?;
            }
            Ok(())
        });
        // All of them, and then the first that failed in the order of rows.
        encoded.collect::<Vec<_>>().into_iter().collect()
    }

    /// A copy in memory of its own, which can be written: the RAM tier of a mapped table, or the
    /// start of further training.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let state = |s: &State| Ok(State::new(s.name.clone(), s.width, s.data.copied(memory)?));
        let states = self.states.iter().map(state).collect::<Result<_, _>>()?;
        let weight = self.weight.copied(memory)?;
        Ok(Self { rows: self.rows, dim: self.dim, element: self.element, weight, states })
    }

    /// A copy of the rows in memory of its own, without state.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had.
    pub(crate) fn rows_copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let weight = self.weight.copied(memory)?;
        Ok(Self { rows: self.rows, dim: self.dim, element: self.element, weight, states: Vec::new() })
    }

    /// The same rows where they are, without the state.
    #[must_use]
    pub(crate) fn without_states(self) -> Self {
        Self { states: Vec::new(), ..self }
    }

    /// Whether the rows lie in memory of their own, and not in a mapped file.
    #[must_use]
    pub(crate) fn in_ram(&self) -> bool {
        matches!(self.weight.0, Source::Owned { .. })
    }

    /// The rows' memory, for a device to read: row after row from its beginning. None where it is not of a device's
    /// kind. From then on the rows are not written.
    #[must_use]
    pub(crate) fn shared_rows(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        match &self.weight.0 {
            Source::Owned { block, .. } => block.shared(),
            Source::Mapped { .. } => None,
        }
    }

    /// How many rows.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Elements a row.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The type of the rows' elements.
    #[must_use]
    pub fn element(&self) -> Element {
        self.element
    }

    /// The bytes of the row of this id; `None` past the end. A loop over many ids does better with
    /// [`rows_of`].
    #[must_use]
    pub fn row(&self, id: u64) -> Option<&[u8]> {
        self.view().row(id)
    }

    /// The elements of the row of this id; `None` past the end or when they are not f32.
    #[must_use]
    pub fn row_values(&self, id: u64) -> Option<&[f32]> {
        self.values()?.get(self.range(id)?)
    }

    /// The bytes of all rows, end to end.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.weight.as_slice()
    }

    /// The elements of all rows, end to end; `None` when they are not f32.
    #[must_use]
    pub fn values(&self) -> Option<&[f32]> {
        (self.element == Element::F32).then(|| bytemuck::cast_slice(self.as_bytes()))
    }

    /// The row of this id, to write; `None` past the end, and as for [`Self::rows_mut`].
    pub fn row_mut(&mut self, id: u64) -> Option<&mut [f32]> {
        let range = self.range(id)?;
        self.rows_mut()?.get_mut(range)
    }

    /// All rows, to write; `None` when they are a mapped file's or not f32.
    pub fn rows_mut(&mut self) -> Option<&mut [f32]> {
        Some(self.parts_mut()?.0)
    }

    /// The optimizer state, in the order given when the table was made.
    #[must_use]
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// All rows and all state, to write together; `None` when they are a mapped file's or not f32.
    pub fn parts_mut(&mut self) -> Option<(&mut [f32], &mut [State])> {
        let rows = if self.element == Element::F32 { self.weight.as_mut_slice() } else { None };
        Some((bytemuck::cast_slice_mut(rows?), &mut self.states))
    }

    /// Bytes of rows and state.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let states: usize = self.states.iter().map(|s| size_of_val(s.as_slice())).sum();
        (self.as_bytes().len() + states) as u64
    }

    /// Tells the system that rows will be read here and there, so that it does not read a file's neighbours
    /// of each. Only advice: on memory of our own, or where the system takes none, it does nothing.
    pub(crate) fn expect_random_reads(&self) {
        self.weight.expect_random_reads();
    }

    /// Asks the disk for a row's pages, without waiting. Only advice, as above.
    pub(crate) fn fetch(&self, id: u64) {
        if id < self.rows {
            self.weight.fetch(self.byte_range(id));
        }
    }

    /// Reads one byte of every page of the rows (not of the state), so that no first request waits
    /// for the disk.
    pub(crate) fn prefault(&self) {
        self.as_bytes().par_iter().step_by(PAGE_BYTES).for_each(|x| {
            black_box(*x);
        });
    }

    fn range(&self, id: u64) -> Option<Range<usize>> {
        // Below `rows` the product is at most the length of a slice that exists.
        (id < self.rows).then(|| id as usize * self.dim..(id as usize + 1) * self.dim)
    }

    /// Where the bytes of row `id` lie, if there is one.
    fn byte_range(&self, id: u64) -> Range<usize> {
        let row_bytes = self.element.row_bytes(self.dim);
        id as usize * row_bytes..(id as usize + 1) * row_bytes
    }

    fn view(&self) -> TableView<'_> {
        let row_bytes = self.element.row_bytes(self.dim);
        TableView { bytes: self.as_bytes(), rows: self.rows, row_bytes }
    }
}

/// Of a lookup, the bytes of the row of each occurrence in the batch: of an absent id, what its table's
/// default says, and none for zeros.
///
/// # Panics
/// When there is no such table or column.
pub fn rows_of<'t>(
    tables: &'t [Table],
    schema: &Schema,
    lookup: &Lookup,
    batch: &'t Batch,
) -> impl Fn(usize) -> Option<&'t [u8]> + use<'t> {
    let (table, ids) = (&tables[lookup.table.index()], &batch.features[lookup.feature].ids);
    let shape = &schema.tables[lookup.table.index()];
    debug_assert_eq!(lookup.element, table.element, "rows are read as they are stored");
    let rows = table.view();
    // Past every table, so that `row_of` says what stands for an absent id.
    let absent = shape.row_of(u64::MAX).and_then(|row| rows.row(row));
    let (bits, declared) = (shape.lossy_bits, shape.rows);
    move |i| {
        let row = match bits {
            None => ids[i],
            Some(bits) if ids[i] < declared => fold(ids[i], bits),
            Some(_) => return absent,
        };
        rows.row(row).or(absent)
    }
}

/// A table's rows, found once: no call into whatever holds the memory for each row.
#[derive(Clone, Copy)]
struct TableView<'t> {
    bytes: &'t [u8],
    rows: u64,
    row_bytes: usize,
}

impl<'t> TableView<'t> {
    /// The row of this id; `None` past the end.
    #[inline(always)]
    fn row(self, id: u64) -> Option<&'t [u8]> {
        // Below `rows` the product is at most the length of a slice that exists.
        let start = (id < self.rows).then(|| id as usize * self.row_bytes)?;
        self.bytes.get(start..start + self.row_bytes)
    }
}

/// Why rows could not be encoded in memory.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The type of element cannot hold a row.
    #[error(transparent)]
    Row(#[from] BadRow),
    /// The memory is not to be had.
    #[error(transparent)]
    Memory(#[from] OutOfHostMemory),
}

/// Bytes in memory of our own or in a mapped file.
pub(crate) struct Bytes(Source);

/// f32 values in memory of our own or in a mapped file.
#[derive(Debug)]
pub(crate) struct Floats(Bytes);

enum Source {
    Owned { block: Box<dyn HostBlock>, bytes: usize },
    Mapped { file: MappedFile, bytes: Range<usize> },
}

impl Bytes {
    /// So many zeros.
    ///
    /// # Errors
    /// [`OutOfHostMemory`] when the memory is not to be had, or is not aligned and as long as asked.
    pub(crate) fn zeroed(memory: &dyn HostMemory, bytes: usize) -> Result<Self, OutOfHostMemory> {
        let block = memory.take(bytes)?;
        let usable =
            block.bytes().get(..bytes).is_some_and(|b| b.as_ptr().cast::<f32>().is_aligned() || b.is_empty());
        if !usable {
            return Err(OutOfHostMemory { bytes });
        }
        Ok(Self(Source::Owned { block, bytes }))
    }

    /// These bytes of a mapped file; `None` when the range is not within the file.
    #[must_use]
    pub(crate) fn mapped(file: &MappedFile, bytes: Range<usize>) -> Option<Self> {
        file.bytes().get(bytes.clone())?;
        Some(Self(Source::Mapped { file: file.clone(), bytes }))
    }

    /// The bytes.
    #[must_use]
    pub(crate) fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Source::Owned { block, bytes } => &block.bytes()[..*bytes],
            Source::Mapped { file, bytes } => &file.bytes()[bytes.clone()],
        }
    }

    /// The bytes, to write; `None` when they are a mapped file's, or a device reads them.
    pub(crate) fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        match &mut self.0 {
            Source::Owned { block, bytes } => block.bytes_mut().map(|block| &mut block[..*bytes]),
            Source::Mapped { .. } => None,
        }
    }

    fn fetch(&self, row: Range<usize>) {
        #[cfg(unix)]
        if let Source::Mapped { file, bytes } = &self.0 {
            // It fails where the system is short of memory; the row is then read when it is wanted.
            let _ = file.0.advise_range(Advice::WillNeed, bytes.start + row.start, row.len());
        }
    }

    fn expect_random_reads(&self) {
        #[cfg(unix)]
        if let Source::Mapped { file, .. } = &self.0
            && let Err(error) = file.0.advise(Advice::Random)
        {
            tracing::debug!(%error, "no advice for a mapped table");
        }
    }

    fn copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        let mut copy = Self::zeroed(memory, self.as_slice().len())?;
        if let Some(to) = copy.as_mut_slice() {
            let from = self.as_slice().par_chunks(CHUNK_BYTES);
            to.par_chunks_mut(CHUNK_BYTES).zip(from).for_each(|(to, from)| to.copy_from_slice(from));
        }
        Ok(copy)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.0 {
            Source::Owned { .. } => "owned",
            Source::Mapped { .. } => "mapped",
        };
        write!(f, "Bytes({} {place})", self.as_slice().len())
    }
}

impl Floats {
    /// So many zeros.
    ///
    /// # Errors
    /// Those of [`Bytes::zeroed`].
    pub(crate) fn zeroed(memory: &dyn HostMemory, elements: usize) -> Result<Self, OutOfHostMemory> {
        let bytes = elements.checked_mul(size_of::<f32>()).ok_or(OutOfHostMemory { bytes: usize::MAX })?;
        Ok(Self(Bytes::zeroed(memory, bytes)?))
    }

    /// The values that lie at these bytes of a mapped file; `None` when the range is not within the
    /// file, not a whole number of values, or not aligned to them.
    #[must_use]
    pub(crate) fn mapped(file: &MappedFile, bytes: Range<usize>) -> Option<Self> {
        let bytes = Bytes::mapped(file, bytes)?;
        bytemuck::try_cast_slice::<u8, f32>(bytes.as_slice()).ok()?;
        Some(Self(bytes))
    }

    /// The values.
    #[must_use]
    pub(crate) fn as_slice(&self) -> &[f32] {
        // The constructors have seen that this cast holds, and the next.
        bytemuck::cast_slice(self.0.as_slice())
    }

    /// The values, to write; `None` when they are a mapped file's.
    pub(crate) fn as_mut_slice(&mut self) -> Option<&mut [f32]> {
        self.0.as_mut_slice().map(bytemuck::cast_slice_mut)
    }

    fn copied(&self, memory: &dyn HostMemory) -> Result<Self, OutOfHostMemory> {
        Ok(Self(self.0.copied(memory)?))
    }
}

/// A whole file, mapped for reading.
#[derive(Clone, Debug)]
pub(crate) struct MappedFile(Arc<Mmap>);

impl MappedFile {
    /// Maps the file at `path`, which must be a file of a published version.
    ///
    /// # Errors
    /// Those of opening and mapping; `InvalidInput` when it is not a regular file.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Self::map(&open_regular(path)?)
    }

    /// Maps an open file of a published version.
    ///
    /// # Errors
    /// Those of mapping.
    pub(crate) fn map(file: &File) -> io::Result<Self> {
        // SAFETY: a mapping is sound while nobody changes the file under it. Files of a published
        // version are never changed: our writer creates each under a name that no reader opens,
        // without write permission for anyone, and opens no file that exists; a version is replaced
        // by a new directory, and one that is removed keeps its pages as long as the mapping lives.
        // A stranger who truncates a file in place gets us killed by SIGBUS at the next touch; one
        // who writes into it changes values that we have checked. Both are outside of what a model
        // directory allows (README: versions are immutable), as with any mapped file.
        let map = unsafe { Mmap::map(file)? };
        Ok(Self(Arc::new(map)))
    }

    /// The bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Opens a regular file for reading.
///
/// # Errors
/// Those of opening; `InvalidInput` when it is anything else.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    // Asked before opening: opening a pipe would wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(path)
}

/// Memory straight from the system, in huge pages where it has them.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainMemory;

struct PlainBlock(MmapMut);

impl HostMemory for PlainMemory {
    fn take(&self, bytes: usize) -> Result<Box<dyn HostBlock>, OutOfHostMemory> {
        let map = huge_pages(bytes).map_err(|_| OutOfHostMemory { bytes })?;
        Ok(Box::new(PlainBlock(map)))
    }
}

impl HostBlock for PlainBlock {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(&mut self.0)
    }
}

#[cfg(test)]
mod tests;
