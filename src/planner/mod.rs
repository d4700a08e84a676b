//! `flechette plan`: the hit rate of caches of several sizes for a workload.
//!
//! A [`trace::Trace`] is the order in which rows are used, from click logs or from a server's access traces.
//! [`simulate`] runs it through caches of several sizes and policies, as one flat cache of all tables and as
//! a cache of its own for each table. Both are compared with the optimal policy, which knows the future.
//! [`curve`] gives the hit rate of LRU at every size, and so the size from which more memory gains little.
//! [`capacity`] says how many replicas a rate of scores needs with each cache. [`report`] writes the results
//! as text or JSON, [`plot`] as SVG.
//!
//! [`counts`] counts how often each row is used, to fill a cache before its first request. It needs no trace
//! and stays within the memory that it is given.

pub(crate) mod capacity;
pub(crate) mod counts;
pub(crate) mod curve;
mod grid;
pub(crate) mod plot;
pub(crate) mod report;
mod row_accesses;
pub mod simulate;
pub mod trace;

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
