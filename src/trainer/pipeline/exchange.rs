//! Exchange: moves the staged rows between host and device, in both directions at once.
//!
//! With a scratchpad on a device, rows cross the bus in this stage while Train takes steps. With a
//! scratchpad on the host there is nothing to move. The stage exists there too, so that the hazard windows
//! are the same.

use super::super::TrainError;
use super::item::Item;

/// Moves the rows that the item has staged.
///
/// # Errors
/// [`TrainError::Device`], only with a scratchpad on a device.
pub(crate) fn exchange(item: &mut Item) -> Result<(), TrainError> {
    item.staging.as_mut().map_or(Ok(()), |staging| Ok(staging.exchange()?))
}
