//! Batches of samples in columns, before and after the schema's hashing and transforms.

use std::ops::Range;

/// One column of variable-length values: sample `s` owns `values[offsets[s]..offsets[s + 1]]`.
///
/// `offsets` has `samples + 1` entries, starts at 0, never falls, and ends at the values' count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jagged {
    /// Where each sample's ids begin, and a last entry where they all end.
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

    /// Appends every sample of `other`.
    pub(crate) fn append(&mut self, other: &Jagged) {
        let base = self.ids.len() as u32;
        self.ids.extend_from_slice(&other.ids);
        self.offsets.extend(other.offsets[1..].iter().map(|end| base + end));
    }
}

/// Samples ready for a model: transformed dense values and, per feature of the schema, ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// How many samples.
    pub samples: usize,
    /// `samples x dense_width`, row-major, after the schema's transforms.
    pub dense: Vec<f32>,
    /// One column a feature, in the schema's order.
    pub features: Vec<Jagged>,
}

impl Batch {
    /// A batch of no samples for `features` columns.
    #[must_use]
    pub fn empty(features: usize) -> Self {
        Self { samples: 0, dense: Vec::new(), features: vec![Jagged::default(); features] }
    }

    /// Appends every sample of `other`, which must have as many columns and as wide a dense part.
    pub fn append(&mut self, other: &Batch) {
        debug_assert_eq!(self.features.len(), other.features.len());
        self.samples += other.samples;
        self.dense.extend_from_slice(&other.dense);
        for (mine, theirs) in self.features.iter_mut().zip(&other.features) {
            mine.append(theirs);
        }
    }

    /// A batch of these samples alone, in this order.
    ///
    /// # Panics
    /// Where there are not so many samples.
    #[must_use]
    pub(crate) fn part(&self, samples: Range<usize>) -> Self {
        let width = self.dense.len().checked_div(self.samples).unwrap_or(0);
        let column = |column: &Jagged| {
            let offsets = &column.offsets[samples.start..=samples.end];
            let (from, to) = (offsets[0], offsets[samples.len()]);
            Jagged {
                offsets: offsets.iter().map(|offset| offset - from).collect(),
                ids: column.ids[from as usize..to as usize].to_vec(),
            }
        };
        Self {
            samples: samples.len(),
            dense: self.dense[samples.start * width..samples.end * width].to_vec(),
            features: self.features.iter().map(column).collect(),
        }
    }

    /// Empties the batch and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.samples = 0;
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
    /// Ids that are rows already.
    Ids(Vec<u64>),
    /// Strings end to end in `bytes`; string `i` ends at `ends[i]` and begins where `i - 1` ended.
    Text {
        /// Every string's bytes.
        bytes: Vec<u8>,
        /// Where each string ends.
        ends: Vec<u32>,
    },
}

impl RawValues {
    /// How many values there are.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Ids(ids) => ids.len(),
            Self::Text { ends, .. } => ends.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One categorical column as a file or a request has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawFeature {
    /// `samples + 1` offsets into the values, as in [`Jagged`].
    pub offsets: Vec<u32>,
    /// The values of all samples.
    pub values: RawValues,
}

impl RawFeature {
    /// A column of ids, of no samples.
    #[must_use]
    pub fn ids() -> Self {
        Self { offsets: vec![0], values: RawValues::Ids(Vec::new()) }
    }

    /// A column of strings, of no samples.
    #[must_use]
    pub(crate) fn text() -> Self {
        Self { offsets: vec![0], values: RawValues::Text { bytes: Vec::new(), ends: Vec::new() } }
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

/// Samples as a file or a request has them: no hashing, no transform. Columns stand in the
/// schema's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RawBatch {
    /// How many samples.
    pub samples: usize,
    /// `samples x dense_width`, row-major, raw; a missing number is 0.
    pub dense: Vec<f32>,
    /// One column a feature, in the schema's order.
    pub features: Vec<RawFeature>,
    /// The label of each sample, 0 or 1, where the source has labels.
    pub labels: Option<Vec<f32>>,
}

impl RawBatch {
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
