//! What `train` trains on: epochs and validation, shuffling, followed directories, standard input; and how a
//! signal ends it.

mod epochs;
pub(crate) mod interrupting;
mod signals;
mod sources;
pub(crate) mod workshop;
