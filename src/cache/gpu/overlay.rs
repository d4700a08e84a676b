//! The overlay of a version (`cache/version.rs`) in device memory: a hash table with the location of each
//! changed row. Kernels read it before the index.
//!
//! The table is written once and never changes, so a probe reads it without synchronisation. It uses open
//! addressing and is at most half full. A slot has a key and a location. The header of a batch has the
//! address of the table. [`OverlayTable::new`] checks that locations lie within the pool, as `table` does for
//! the index.

#![allow(unsafe_code)]

use super::args::{Changed, EMPTY_KEY, NOWHERE};
use super::table::GpuTable;
use crate::cache::index::Location;
use crate::device::cuda::memory::{DeviceMemory, MemoryPlan, PinnedMemory};
use crate::device::cuda::{Address, Driver, DriverError};
use crate::mem::mix64;

/// A changed row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChangedRow {
    /// The row's own key, unique in the overlay.
    pub key: u64,
    /// Bits of the row's location; `None` if it is not cached.
    pub location: Option<u64>,
    /// The length of the row's slot, in words of 4 bytes.
    pub words: usize,
}

/// A version's overlay in device memory. A batch that reads it holds a reference.
pub(crate) struct OverlayTable<D: Driver> {
    slots: DeviceMemory<D>,
    mask: u64,
}

impl<D: Driver> OverlayTable<D> {
    /// A table of these rows. Waits until it is on the device. A row outside the pool counts as not cached.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] when an allocation fails: the table takes 32 to 64 bytes per row on the
    /// device, and until this returns also on the host. Other driver errors.
    pub(crate) fn new(gpu_table: &GpuTable<D>, rows: &[ChangedRow]) -> Result<Self, DriverError> {
        let count = (2 * rows.len()).next_power_of_two().max(2);
        let mask = count - 1;
        let mut plan = MemoryPlan::default();
        let array = plan.array::<Changed>(count);
        let mut written = PinnedMemory::new(gpu_table.driver(), plan.bytes())?;
        let table = written.get_mut(array);
        for &ChangedRow { key, location, words } in rows {
            let within =
                location.filter(|&at| !Location::from_bits(at).is_pointer() && gpu_table.holds(at, words));
            let mut at = mix64(key) as usize & mask;
            while table[at].key != EMPTY_KEY {
                at = (at + 1) & mask;
            }
            table[at] = Changed { key, location: within.unwrap_or(NOWHERE) };
        }
        let slots = DeviceMemory::new(gpu_table.driver(), plan.bytes())?;
        let (driver, stream) = (gpu_table.driver(), gpu_table.stream());
        let (from, to) = (Address(written.address()), Address(slots.address()));
        // SAFETY: both allocations have the planned size, and only this function uses them. They are dropped
        // after the wait; if it fails, the driver keeps them.
        unsafe { driver.copy(stream, from, to, plan.bytes())? };
        driver.finish(stream)?;
        Ok(Self { slots, mask: mask as u64 })
    }

    pub(crate) fn address(&self) -> u64 {
        self.slots.address()
    }

    /// The number of slots minus one. The number of slots is a power of two.
    pub(crate) fn mask(&self) -> u64 {
        self.mask
    }
}
