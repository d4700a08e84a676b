//! Batches of samples, stored by column, before and after the schema's hashing and transforms.

use std::ops::Range;

/// One column of variable-length values: sample `s` has `ids[offsets[s]..offsets[s + 1]]`.
///
/// `offsets` has `samples + 1` entries. It starts at 0, never decreases, and ends at `ids.len()`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jagged {
    /// Start of each sample's ids, and one more entry for the end.
    pub offsets: Vec<u32>,
    /// The ids of all samples, in sample order.
    pub ids: Vec<u64>,
}

impl Default for Jagged {
    fn default() -> Self {
        Self { offsets: vec![0], ids: Vec::new() }
    }
}

impl Jagged {
    /// The ids of one sample.
    #[must_use]
    pub fn sample(&self, s: usize) -> &[u64] {
        &self.ids[self.offsets[s] as usize..self.offsets[s + 1] as usize]
    }

    /// Appends one sample's ids.
    pub fn push(&mut self, ids: &[u64]) {
        self.ids.extend_from_slice(ids);
        self.offsets.push(self.ids.len() as u32);
    }

    /// Appends a range of the samples of `other`.
    fn append_part(&mut self, other: &Jagged, samples: Range<usize>) {
        let base = self.ids.len() as u32;
        let offsets = &other.offsets[samples.start..=samples.end];
        let (from, to) = (offsets[0], offsets[samples.len()]);
        self.ids.extend_from_slice(&other.ids[from as usize..to as usize]);
        self.offsets.extend(offsets[1..].iter().map(|end| base + (end - from)));
    }
}

/// Samples ready for a model: transformed dense values and, per feature of the schema, ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Number of samples.
    pub samples: usize,
    /// `samples x dense_width`, row-major, after the schema's transforms.
    pub dense: Vec<f32>,
    /// One column per feature, in the schema's order.
    pub features: Vec<Jagged>,
    /// Whether its [`Scores`](super::Scores) should have logits.
    pub logits: bool,
}

impl Batch {
    /// A batch of 0 samples with `features` columns.
    #[must_use]
    pub fn empty(features: usize) -> Self {
        Self { features: vec![Jagged::default(); features], ..Self::default() }
    }

    /// Appends every sample of `other`, which must have the same number of columns and of dense values.
    pub fn append(&mut self, other: &Batch) {
        self.append_part(other, 0..other.samples);
    }

    /// Appends a range of the samples of `other`, which must have the same number of columns and of dense
    /// values.
    ///
    /// # Panics
    /// When the range ends after the last sample.
    pub(crate) fn append_part(&mut self, other: &Batch, samples: Range<usize>) {
        debug_assert_eq!(self.features.len(), other.features.len());
        let width = other.dense.len().checked_div(other.samples).unwrap_or(0);
        self.samples += samples.len();
        self.logits |= other.logits;
        self.dense.extend_from_slice(&other.dense[samples.start * width..samples.end * width]);
        for (mine, theirs) in self.features.iter_mut().zip(&other.features) {
            mine.append_part(theirs, samples.clone());
        }
    }

    /// Copies a range of samples to a new batch.
    ///
    /// # Panics
    /// When the range ends after the last sample.
    #[must_use]
    pub(crate) fn part(&self, samples: Range<usize>) -> Self {
        let mut part = Self::empty(self.features.len());
        part.append_part(self, samples);
        part
    }

    /// Empties the batch and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.samples = 0;
        self.logits = false;
        self.dense.clear();
        for feature in &mut self.features {
            feature.offsets.truncate(1);
            feature.ids.clear();
        }
    }
}

/// The values of one categorical column before hashing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RawValues {
    /// Ids, not hashed.
    Ids(Vec<u64>),
    /// Concatenated strings: string `i` begins at the end of string `i - 1` and ends at `ends[i]`.
    Text {
        /// The bytes of all strings.
        bytes: Vec<u8>,
        /// The end of each string.
        ends: Vec<u32>,
    },
}

impl RawValues {
    /// Number of values.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Ids(ids) => ids.len(),
            Self::Text { ends, .. } => ends.len(),
        }
    }
}

/// One categorical column of a file or a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawFeature {
    /// `samples + 1` offsets into the values, as in [`Jagged`].
    pub offsets: Vec<u32>,
    /// The values of all samples.
    pub values: RawValues,
}

/// What a categorical column holds before hashing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RawKind {
    Ids,
    Text,
}

impl RawFeature {
    /// A column with 0 samples.
    fn empty(kind: RawKind) -> Self {
        match kind {
            RawKind::Ids => Self::ids(),
            RawKind::Text => Self::text(),
        }
    }

    fn kind(&self) -> RawKind {
        match self.values {
            RawValues::Ids(_) => RawKind::Ids,
            RawValues::Text { .. } => RawKind::Text,
        }
    }

    /// A column of ids, with 0 samples.
    #[must_use]
    pub(crate) fn ids() -> Self {
        Self { offsets: vec![0], values: RawValues::Ids(Vec::new()) }
    }

    /// A column of strings, with 0 samples.
    #[must_use]
    pub(crate) fn text() -> Self {
        Self { offsets: vec![0], values: RawValues::Text { bytes: Vec::new(), ends: Vec::new() } }
    }

    /// Appends the values of sample `s` of `other`, which has the same kind of values.
    fn push_sample(&mut self, other: &RawFeature, s: usize) {
        let (from, to) = (other.offsets[s] as usize, other.offsets[s + 1] as usize);
        match (&mut self.values, &other.values) {
            (RawValues::Ids(ids), RawValues::Ids(theirs)) => ids.extend_from_slice(&theirs[from..to]),
            (RawValues::Text { bytes, ends }, RawValues::Text { bytes: theirs, ends: their_ends }) => {
                for value in from..to {
                    let begin = if value == 0 { 0 } else { their_ends[value - 1] as usize };
                    bytes.extend_from_slice(&theirs[begin..their_ends[value] as usize]);
                    ends.push(bytes.len() as u32);
                }
            }
            _ => debug_assert!(false, "the columns have the same kind of values"),
        }
        self.offsets.push(self.values.len() as u32);
    }

    /// Empties the column and keeps its memory and its kind of values.
    pub(crate) fn clear(&mut self) {
        self.offsets.clear();
        self.offsets.push(0);
        match &mut self.values {
            RawValues::Ids(ids) => ids.clear(),
            RawValues::Text { bytes, ends } => {
                bytes.clear();
                ends.clear();
            }
        }
    }
}

/// A column of a batch ends at about this many ids (1 GiB).
const FULL_IDS: usize = 1 << 27;
/// A column of a batch ends at about this many bytes of text.
const FULL_BYTES: usize = 1 << 30;

/// Samples of a file or a request, before hashing and transforms. Columns are in the schema's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawBatch {
    /// Number of samples.
    pub samples: usize,
    /// `samples x dense_width`, row-major, not transformed; a missing number is 0.
    pub dense: Vec<f32>,
    /// One column per feature, in the schema's order.
    pub features: Vec<RawFeature>,
    /// The label of each sample, from 0 to 1, if the source has labels.
    pub labels: Option<Vec<f32>>,
}

impl RawBatch {
    /// Empties the batch and gives it these columns, without samples. Keeps its memory where it can.
    pub(crate) fn begin(&mut self, columns: impl ExactSizeIterator<Item = RawKind>, labelled: bool) {
        let labels = self.labels.take().unwrap_or_default();
        self.clear();
        self.labels = labelled.then_some(labels);
        self.labels.iter_mut().for_each(Vec::clear);
        self.features.resize_with(columns.len(), RawFeature::ids);
        for (column, kind) in self.features.iter_mut().zip(columns) {
            if column.kind() != kind {
                *column = RawFeature::empty(kind);
            }
        }
    }

    /// [`Self::begin`] with the columns of `other`.
    pub(crate) fn clear_like(&mut self, other: &RawBatch) {
        self.begin(other.features.iter().map(RawFeature::kind), other.labels.is_some());
    }

    /// Appends sample `s` of `other`, which has the same columns.
    pub(crate) fn push_sample(&mut self, other: &RawBatch, s: usize) {
        let width = other.dense.len() / other.samples.max(1);
        self.dense.extend_from_slice(&other.dense[s * width..][..width]);
        for (mine, theirs) in self.features.iter_mut().zip(&other.features) {
            mine.push_sample(theirs, s);
        }
        if let (Some(mine), Some(theirs)) = (&mut self.labels, &other.labels) {
            mine.push(theirs[s]);
        }
        self.samples += 1;
    }

    /// Whether a column is so long that the batch must end, because offsets are 32-bit numbers.
    pub(crate) fn is_full(&self) -> bool {
        self.features.iter().any(|column| match &column.values {
            RawValues::Ids(ids) => ids.len() >= FULL_IDS,
            RawValues::Text { bytes, .. } => bytes.len() >= FULL_BYTES,
        })
    }

    /// Empties the batch, labels too, and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.samples = 0;
        self.dense.clear();
        self.labels = None;
        for feature in &mut self.features {
            feature.clear();
        }
    }
}
