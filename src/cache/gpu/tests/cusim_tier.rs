//! Tests the kernels of the index on a device: how jobs and sweeps change the index, and what concurrent
//! probes find. Each seed gives another schedule. The module `tags` tests rows that share keys, and the list
//! of entries.

mod bench;
mod jobs;
mod probes;
mod sweeps;
mod tags;
