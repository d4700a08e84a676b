//! `serve --train`: one process trains a model and serves it. Clients score meanwhile, and no request fails.

mod faults;
mod kills;
mod runs;
mod scores;
pub(crate) mod site;
