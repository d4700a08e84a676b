//! The batcher through its public interface: which requests are merged, dropped and answered.

mod batches;
mod changing_versions;
mod failures;
mod merging;
mod waiting;

use super::*;
use batches::{ANY, batch, start, until_then};
