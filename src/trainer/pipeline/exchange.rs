//! Exchange: moves the staged rows between host and device, both ways at once.
//!
//! On a device this is where rows cross the bus, beside Train's steps. On the host, where scratchpad and
//! store are the same memory's, there is nothing to move: the stage hands items over. It stays a stage of its
//! own, so that the windows and all that depends on them are the same on every device.

use super::super::TrainError;
use super::item::Item;

/// Moves what the item has staged.
///
/// # Errors
/// [`TrainError::Device`]; none on the host.
pub(crate) fn exchange(item: &mut Item) -> Result<(), TrainError> {
    item.berth.as_mut().map_or(Ok(()), |berth| Ok(berth.exchange()?))
}
