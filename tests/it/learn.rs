//! Learned samples: clients send them to a server, a trainer trains on them.

mod calls;
mod damage;
mod full_log;
mod kills;
mod removal;
mod sending;
pub(crate) mod served;
mod training;
