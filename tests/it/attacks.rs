//! Clients that take connections, places, memory or descriptors and give nothing back. Others must be served,
//! and the server must end in time.

mod cancelled;
mod connections;
mod descriptors;
mod endings;
mod health;
pub(crate) mod http2;
mod messages;
mod served;
mod unread_answers;
