//! Where the tables of an opened version are: in memory of the process, or in its mapped files.
//!
//! Rows in memory are in huge pages, which are faster to read at random, and do not depend on the files any
//! more. Mapped rows are in the page cache, which processes share and the system can reclaim.

use crate::config::TableMemory;
use crate::mem;
use crate::mem::available::{available_bytes, memory_bytes};
use crate::types::Version;

/// The part of the memory that `auto` leaves free, for requests, the cache and everything else.
const FREE_PART: u64 = 8;

/// Where to put the tables that an opening reads, and why.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TableLocation {
    /// Whether their files are read into memory; otherwise they are mapped.
    pub in_ram: bool,
    bytes: u64,
    /// `None` if mapped tables were asked for, as by every command but `serve`.
    reason: Option<String>,
}

impl TableLocation {
    /// For tables of this many bytes.
    pub(crate) fn choose(memory: TableMemory, bytes: u64) -> Self {
        match memory {
            TableMemory::Ram => Self { in_ram: true, bytes, reason: Some("store.memory is ram".to_owned()) },
            TableMemory::Mapped => Self { in_ram: false, bytes, reason: None },
            TableMemory::Auto => Self::auto(bytes, memory_bytes(), available_bytes()),
        }
    }

    /// `available` does not count what the process has, such as the tables of the served version. So two
    /// versions are in memory only if there is room for both.
    fn auto(bytes: u64, memory: Option<u64>, available: Option<u64>) -> Self {
        let located = |in_ram, reason| Self { in_ram, bytes, reason: Some(reason) };
        let (Some(memory), Some(available)) = (memory, available) else {
            return located(false, "the system does not say how much memory it has".to_owned());
        };
        let (free, shown) = (memory / FREE_PART, |amount: u64| mem::bytes(amount as f64));
        if bytes > memory / 2 {
            located(false, format!("they take more than half of {} of memory", shown(memory)))
        } else if bytes.saturating_add(free) > available {
            located(
                false,
                format!("{} of memory are available, and {} stay free", shown(available), shown(free)),
            )
        } else {
            located(true, format!("{} of memory are available", shown(available)))
        }
    }

    /// Logs the choice, if there was one. A delta of the served version comes often, and is logged for
    /// debugging only.
    pub(crate) fn log(&self, model: &str, version: Version, delta: bool) {
        let Self { bytes, reason: Some(reason), .. } = self else { return };
        let memory = if self.in_ram { "ram" } else { "mapped" };
        if delta {
            tracing::debug!(model, version = version.0, memory, bytes, reason, "tables of a delta opened");
        } else {
            tracing::info!(model, version = version.0, memory, bytes, reason, "tables opened");
        }
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn in_ram(tables: u64, available: u64) -> bool {
        TableLocation::auto(tables * GIB, Some(32 * GIB), Some(available * GIB)).in_ram
    }

    #[test]
    fn auto_reads_tables_into_memory_if_they_are_at_most_half_of_it_and_an_eighth_stays_free() {
        assert!(in_ram(16, 32) && in_ram(16, 20));
        assert!(!in_ram(17, 32), "a second version would never fit");
        assert!(!in_ram(16, 19), "not an eighth stays free");
    }

    #[test]
    fn auto_maps_the_next_full_version_if_the_served_one_leaves_no_room_for_it() {
        let (tables, free_before) = (12, 30);
        assert!(in_ram(tables, free_before) && !in_ram(tables, free_before - 2 * tables));
        let small = 8;
        assert!(in_ram(small, free_before) && in_ram(small, free_before - small));
    }

    #[test]
    fn auto_maps_tables_if_the_system_does_not_say_how_much_memory_it_has() {
        assert!(
            !TableLocation::auto(1, None, None).in_ram && !TableLocation::auto(1, Some(GIB), None).in_ram
        );
    }
}
