//! Tests of the whole cache: a hit is the row that was inserted for that table and id, whatever is evicted
//! meanwhile, and memory stays within `cache.bytes`.

mod batches;
pub(crate) mod contract;
mod eviction;
mod lookups;
#[cfg(target_os = "linux")]
mod memory;
mod narrow;
mod pointing;
mod policies;
mod switching;
mod threads;

use super::*;
use batches::{
    Seen, by_hand, cache_of, changes, for_all, miss, row_at, row_of, run_batch, settle, switch, table, totals,
};
