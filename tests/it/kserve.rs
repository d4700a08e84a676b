//! The KServe v2 service, by a generated Rust client: its scores are those of the native service, errors name
//! the tensor, and the limits of native calls apply.

mod descriptions;
mod limits;
pub(crate) mod messages;
mod scoring;
mod streams;
mod wrong_requests;
