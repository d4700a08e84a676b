//! What the fields of a request cost when they are decoded or converted, by their numbers.

use std::mem::size_of;

use prost::bytes::Bytes;

use crate::schema::MAX_FEATURES;
use crate::server::inference::model_infer_request::InferRequestedOutputTensor;
use crate::server::inference::{InferParameter, InferTensorContents};

/// A nested message of at most this many bytes is not parsed if its layout has a [`Layout::growth`]: each of
/// its bytes is charged with that.
pub(super) const SHORT: usize = 64;

/// Messages within messages, with the outermost one.
pub(super) const DEPTH: usize = 3;

/// The fields of a message that take more memory than their encoding. All requests of a service have one
/// layout: a field that is larger in one of them costs as much in all.
pub(crate) struct Layout {
    /// Memory of its vectors that no entry is charged for: see [`spare`]. Each message costs it.
    pub(super) spare: usize,
    /// Memory for each byte of a message of at most [`SHORT`] bytes, which is not parsed because parsing
    /// takes longer. `None`: the message is always parsed.
    pub(super) growth: Option<usize>,
    fields: &'static [(u64, Field)],
}

/// The most entries of some fields in a request. Entries without content take two bytes, but much memory, so
/// without these limits a request could cost 500 times its bytes. `config::message_bytes` depends on them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Limit {
    /// Which counter of the meter counts them.
    pub counter: usize,
    /// The field in error messages, and what its entries are.
    pub name: &'static str,
    pub entries: &'static str,
    pub most: usize,
}

/// Counters of a meter.
pub(super) const LIMITS: usize = 3;

/// The dense tensor, and for each feature its values and their lengths.
static TENSORS: Limit = Limit { counter: 0, name: "inputs", entries: "tensors", most: 2 * MAX_FEATURES + 1 };

/// There are only two outputs.
static OUTPUTS: Limit = Limit { counter: 1, name: "outputs", entries: "tensors", most: 100 };

/// Of the request and its outputs together.
static PARAMETERS: Limit =
    Limit { counter: 2, name: "parameters", entries: "entries", most: 2 * MAX_FEATURES + 1 };

/// The memory of a field.
#[derive(Clone, Copy)]
pub(super) enum Field {
    /// As much as its encoding: a string, a single number, an unknown field.
    Other,
    /// The name of the model.
    Model,
    /// The priority of a native request.
    Priority,
    /// An entry of the parameters of a KServe request. As [`Field::Flat`].
    Parameter(usize, &'static Limit),
    /// Numbers of 4 or 8 bytes, packed. Without packing each takes this many bytes of memory.
    Fixed(usize),
    /// Packed numbers of variable length. Each takes this many bytes of memory.
    Varints(usize),
    /// Strings that stay slices of the message, or are joined. Each takes this many bytes of memory in
    /// addition.
    Slices(usize),
    /// Messages without repeated fields. Each takes this many bytes of memory in addition to its encoding.
    /// The meter does not parse them, so what is not valid in them is found by the decoder.
    Flat(usize, &'static Limit),
    /// Messages with a layout of their own. Each takes this many bytes of memory in addition to its fields.
    Messages(usize, &'static Layout, Option<&'static Limit>),
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

/// What the first entry of a vector takes besides, because there is room for four at first and [`grown`]
/// charges for two.
const fn spare(bytes: usize) -> usize {
    2 * bytes
}

/// The smallest allocation of a string, or of a vector of numbers.
const SMALL: usize = size_of::<Bytes>();

const fn numbers(bytes: usize) -> Field {
    Field::Varints(grown(bytes))
}

const fn fixed(bytes: usize) -> Field {
    Field::Fixed(grown(bytes))
}

/// Requests of `flechette.v1.Ctr`: `model`, `dense`, `features`, `labels`, `priority`. Columns take no memory
/// of their own, because they are read in place.
pub(crate) static CTR: Layout = Layout {
    spare: SMALL,
    growth: None,
    fields: &[
        (1, Field::Model),
        (4, fixed(4)),
        (5, Field::Messages(0, &COLUMN, None)),
        (6, fixed(4)),
        (7, Field::Priority),
    ],
};

/// `lengths`, `ids`, and `strings`, which are joined. An id takes most.
static COLUMN: Layout = Layout {
    spare: 0,
    growth: Some(grown(8)),
    fields: &[(2, numbers(4)), (3, numbers(8)), (4, Field::Slices(grown(4)))],
};

/// Requests of `inference.GRPCInferenceService`: the model's name, `parameters` of a repository request or
/// the id of another one, `parameters`, `inputs`, `outputs`, `raw_input_contents`.
pub(crate) static KSERVE: Layout = Layout {
    spare: spare(size_of::<InferRequestedOutputTensor>()) + 2 * spare(SLICE),
    growth: None,
    fields: &[
        (1, Field::Model),
        (3, PARAMETER),
        (4, Field::Parameter(PARAMETER_BYTES, &PARAMETERS)),
        (5, Field::Messages(TENSOR_BYTES, &TENSOR, Some(&TENSORS))),
        (6, Field::Messages(OUTPUT_BYTES, &OUTPUT, Some(&OUTPUTS))),
        (7, Field::Slices(grown(SLICE))),
    ],
};

/// Tensors, and their raw contents, are read in place.
const SLICE: usize = size_of::<&[u8]>();

/// An entry of a hash map. After the map has grown it is 7/16 full, and its old memory, half as large, is
/// still there.
const PARAMETER_BYTES: usize = 4 * size_of::<(String, InferParameter)>() + 2 * SMALL;
const PARAMETER: Field = Field::Flat(PARAMETER_BYTES, &PARAMETERS);

/// An entry in the vector of outputs, and the smallest allocation of its name.
const OUTPUT_BYTES: usize = grown(size_of::<InferRequestedOutputTensor>()) + SMALL;

/// A tensor in place, its contents, and the smallest allocations of its shape and of the vectors of its
/// contents. Its parameters are not decoded.
const TENSOR_BYTES: usize =
    grown(SLICE) + size_of::<InferTensorContents>() + 9 * SMALL + spare(size_of::<Bytes>());

/// `shape`, `contents`. A string takes most: at least two bytes of the message.
static TENSOR: Layout = Layout {
    spare: 0,
    growth: Some(grown(size_of::<Bytes>()) / 2),
    fields: &[(3, numbers(8)), (5, Field::Messages(0, &CONTENTS, None))],
};

/// Elements of eight datatypes.
static CONTENTS: Layout = Layout {
    spare: 0,
    growth: None,
    fields: &[
        (1, numbers(1)),
        (2, numbers(4)),
        (3, numbers(8)),
        (4, numbers(4)),
        (5, numbers(8)),
        (6, fixed(4)),
        (7, fixed(8)),
        (8, Field::Slices(grown(size_of::<Bytes>()))),
    ],
};

/// `parameters`.
static OUTPUT: Layout = Layout { spare: 0, growth: None, fields: &[(2, PARAMETER)] };
