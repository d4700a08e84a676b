//! What a cache of which size would do for a workload: `flechette plan`.
//!
//! A [`trace::Trace`] is the order in which rows are asked for, from click logs or from a server's
//! recording. [`simulate`] runs it through caches of several sizes and policies, once as one flat cache
//! of all tables, once as a static cache a table, and once as the optimal cache, which knows the future.
//! [`curve`] gives the hit rate of LRU at every size at once, and so where more memory stops paying.
//! [`report`] writes it all as text or JSON and [`plot`] as a drawing. [`counts`] keeps how often each
//! row was asked for, for whoever fills a cache before its first request; it needs no trace, and so no more
//! memory than it is given.

pub mod counts;
pub(crate) mod curve;
pub(crate) mod plot;
pub(crate) mod report;
mod row_accesses;
pub mod simulate;
pub mod trace;
