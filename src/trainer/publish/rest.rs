//! How training beside a server makes room for a version that is on its way to the server.
//!
//! Training and writing a version run only when a processor is free. Training at full speed would take most
//! of that time, and the version would be served late. So from when its rows are copied until it is served,
//! training rests after each step.

use std::time::Duration;

/// A rest takes this many times the time of the step before it, but at most [`LONGEST`].
const STEPS: u32 = 2;
const LONGEST: Duration = Duration::from_millis(100);

/// Training does not rest for a version whose cut is older than this.
const PATIENCE: Duration = Duration::from_secs(5);

/// Tells whether the server is taking over a version.
pub(crate) type TakingOver = dyn Fn() -> bool + Send;

/// How long training rests after a step that took `step`, if the last cut is `since_cut` ago.
pub(super) fn after(step: Duration, since_cut: Duration) -> Duration {
    if since_cut > PATIENCE { Duration::ZERO } else { (step * STEPS).min(LONGEST) }
}
