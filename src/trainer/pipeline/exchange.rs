//! Exchange: moves the staged rows between host and device, both ways at once.
//!
//! On a device, rows cross the bus here, while Train takes steps. On the host there is nothing to move:
//! scratchpad and store are both in host memory. It is a stage there too, so that the windows are the same on
//! every device.

use super::super::TrainError;
use super::item::Item;

/// Moves the rows that the item has staged.
///
/// # Errors
/// [`TrainError::Device`]; none on the host.
pub(crate) fn exchange(item: &mut Item) -> Result<(), TrainError> {
    item.staging.as_mut().map_or(Ok(()), |staging| Ok(staging.exchange()?))
}
