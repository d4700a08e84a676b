//! The overlay of a version: of each changed row, where it is, as a table that kernels ask before the index.
//!
//! It is written once and never changed, so a probe needs no care to read it: open addressing, half of the slots
//! empty, each a key and a location. A batch's header names it. What it says is checked here as what is put into
//! the index is: locations lie within the pool.

#![allow(unsafe_code)]

use super::args::{Changed, EMPTY_KEY, NOWHERE};
use super::table::GpuTable;
use crate::device::cuda::memory::{DeviceMemory, PinnedMemory, Plan};
use crate::device::cuda::{Address, Driver, DriverError};
use crate::mem::mix64;

/// Where a changed row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRow {
    /// Whose row; no two are the same.
    pub key: u64,
    /// Bits of where it is; `None` where the cache does not hold it.
    pub location: Option<u64>,
    /// Its words of 4 bytes.
    pub words: usize,
}

/// A version's overlay in memory of the device. Whoever has batches ask it keeps it until they have.
pub struct OverlayTable<D: Driver> {
    slots: DeviceMemory<D>,
    mask: u64,
}

impl<D: Driver> OverlayTable<D> {
    /// A table of these rows. Waits until it is on the device. A row that lies outside the pool is as if the
    /// cache did not hold it.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] for about 32 bytes a row, on the host too while this lasts; or what the driver
    /// says.
    pub fn new(
        tier: &GpuTable<D>,
        rows: impl ExactSizeIterator<Item = ChangedRow>,
    ) -> Result<Self, DriverError> {
        let count = (2 * rows.len()).next_power_of_two().max(2);
        let mask = count - 1;
        let mut plan = Plan::default();
        let array = plan.array::<Changed>(count);
        let mut written = PinnedMemory::new(tier.driver(), plan.bytes())?;
        let table = written.get_mut(array);
        for ChangedRow { key, location, words } in rows {
            let within = location.filter(|&at| at & 1 == 0 && tier.holds(at, words));
            let mut at = mix64(key) as usize & mask;
            while table[at].key != EMPTY_KEY {
                at = (at + 1) & mask;
            }
            table[at] = Changed { key, location: within.unwrap_or(NOWHERE) };
        }
        let slots = DeviceMemory::new(tier.driver(), plan.bytes())?;
        let (driver, stream) = (tier.driver(), tier.stream());
        let (from, to) = (Address(written.address()), Address(slots.address()));
        // SAFETY: both are as long as planned, and nobody else knows of them; they live until the wait is over.
        unsafe { driver.copy(stream, from, to, plan.bytes())? };
        driver.wait(&driver.record(stream)?)?;
        Ok(Self { slots, mask: mask as u64 })
    }

    /// Where kernels see it.
    pub(crate) fn address(&self) -> u64 {
        self.slots.address()
    }

    /// Its slots, a power of two, less one.
    pub(crate) fn mask(&self) -> u64 {
        self.mask
    }
}
