//! Requests as the server reads them: `PredictRequest` and `LearnRequest` whose columns stay bytes of their
//! message. `convert.rs` reads these.

use prost::Message;

use crate::server::proto::Priority;
use crate::server::received::Received;

/// As `PredictRequest` in `proto/flechette/v1/ctr.proto`.
pub(crate) type PredictMessage = Received<PredictHead>;

/// All but `dense` and `features`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PredictHead {
    #[prost(string, tag = "1")]
    pub model: String,
    #[prost(uint64, tag = "2")]
    pub version: u64,
    #[prost(uint32, tag = "3")]
    pub samples: u32,
    #[prost(uint32, tag = "6")]
    pub timeout_ms: u32,
    #[prost(enumeration = "Priority", tag = "7")]
    pub priority: i32,
    #[prost(bool, tag = "8")]
    pub logits: bool,
    #[prost(string, tag = "9")]
    pub label: String,
    #[prost(string, tag = "10")]
    pub request_id: String,
    #[prost(fixed64, tag = "11")]
    pub dense_order: u64,
}

/// As `LearnRequest` in `proto/flechette/v1/ctr.proto`.
pub(crate) type LearnMessage = Received<LearnHead>;

/// All but `dense` and `features`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct LearnHead {
    #[prost(string, tag = "1")]
    pub model: String,
    #[prost(uint32, tag = "3")]
    pub samples: u32,
    #[prost(float, repeated, tag = "6")]
    pub labels: Vec<f32>,
    #[prost(fixed64, tag = "7")]
    pub dense_order: u64,
}
