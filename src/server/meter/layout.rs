//! What the fields of a request cost when they are decoded, by their numbers.

use std::mem::size_of;

use prost::bytes::Bytes;

use crate::schema::MAX_FEATURES;
use crate::server::inference::InferParameter;
use crate::server::inference::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use crate::server::proto::FeatureColumn;

/// Messages within messages, with the outermost one.
pub(super) const DEPTH: usize = 3;

/// The fields of a message that take more memory than their encoding. All requests of a service have one
/// layout: a field that is larger in one of them costs as much in all.
pub(crate) struct Layout {
    fields: &'static [(u64, Field)],
    pub(super) limit: Option<Limit>,
}

/// The most entries of a field.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Limit {
    pub field: u64,
    pub field_name: &'static str,
    /// What its entries are.
    pub entries: &'static str,
    pub most: usize,
}

/// The memory of a field.
#[derive(Clone, Copy)]
pub(super) enum Field {
    /// As much as its encoding: a string, a single number, an unknown field.
    Other,
    /// Numbers of 4 or 8 bytes, packed. Without packing each takes this many bytes of memory.
    Fixed(usize),
    /// Packed numbers of variable length. Each takes this many bytes of memory.
    Varints(usize),
    /// Strings that stay slices of the message. Each takes this many bytes of memory besides.
    Slices(usize),
    /// Messages without repeated fields. Each takes this many bytes of memory besides its encoding.
    Flat(usize),
    /// Messages with a layout of their own. Each takes this many bytes of memory besides its fields.
    Messages(usize, &'static Layout),
}

impl Layout {
    pub(super) fn field(&self, number: u64) -> Field {
        let found = self.fields.iter().find(|(field, _)| *field == number);
        found.map_or(Field::Other, |(_, field)| *field)
    }
}

/// Most memory of one entry in a vector that grows by doubling: twice the entry's size.
const fn grown(bytes: usize) -> usize {
    2 * bytes
}

/// The smallest allocation of a string or a vector.
const SMALL: usize = size_of::<Bytes>();

const fn numbers(bytes: usize) -> Field {
    Field::Varints(grown(bytes))
}

const fn fixed(bytes: usize) -> Field {
    Field::Fixed(grown(bytes))
}

const SLICES: Field = Field::Slices(grown(size_of::<Bytes>()));

/// Requests of `flechette.v1.Ctr`: `dense`, `features`, `labels`.
pub(crate) static CTR: Layout = Layout {
    fields: &[(4, fixed(4)), (5, Field::Messages(COLUMN_BYTES, &COLUMN)), (6, fixed(4))],
    limit: Some(Limit { field: 5, field_name: "features", entries: "columns", most: MAX_FEATURES }),
};

/// An entry in the vector of columns, and the smallest allocations of its name and its three vectors.
pub(super) const COLUMN_BYTES: usize = grown(size_of::<FeatureColumn>()) + 4 * SMALL + 128;

/// `lengths`, `ids`, `strings`.
static COLUMN: Layout = Layout { fields: &[(2, numbers(4)), (3, numbers(8)), (4, SLICES)], limit: None };

/// Requests of `inference.GRPCInferenceService`: `parameters` of a repository request or the id of another
/// one, `parameters`, `inputs`, `outputs`, `raw_input_contents`.
pub(crate) static KSERVE: Layout = Layout {
    fields: &[
        (3, PARAMETER),
        (4, PARAMETER),
        (5, Field::Messages(TENSOR_BYTES, &TENSOR)),
        (6, Field::Messages(grown(size_of::<InferRequestedOutputTensor>()) + SMALL, &OUTPUT)),
        (7, SLICES),
    ],
    // The dense tensor, and for each feature its values and their lengths.
    limit: Some(Limit { field: 5, field_name: "inputs", entries: "tensors", most: 2 * MAX_FEATURES + 1 }),
};

/// An entry of a hash map. After the map has grown it is 7/16 full, and its old memory, half as large, is
/// still there.
const PARAMETER: Field = Field::Flat(4 * size_of::<(String, InferParameter)>() + 2 * SMALL);

/// An entry in the vector of tensors, and the smallest allocations of its name, its datatype, its shape and
/// the eight vectors of its contents.
const TENSOR_BYTES: usize = grown(size_of::<InferInputTensor>()) + 11 * SMALL + 128;

/// `shape`, `parameters`, `contents`.
static TENSOR: Layout =
    Layout { fields: &[(3, numbers(8)), (4, PARAMETER), (5, Field::Messages(0, &CONTENTS))], limit: None };

/// Elements of eight datatypes.
static CONTENTS: Layout = Layout {
    fields: &[
        (1, numbers(1)),
        (2, numbers(4)),
        (3, numbers(8)),
        (4, numbers(4)),
        (5, numbers(8)),
        (6, fixed(4)),
        (7, fixed(8)),
        (8, SLICES),
    ],
    limit: None,
};

/// `parameters`.
static OUTPUT: Layout = Layout { fields: &[(2, PARAMETER)], limit: None };
