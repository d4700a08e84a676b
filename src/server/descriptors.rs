//! The limit of the process's open files, and how it is divided between the two ports.
//!
//! A port without a free descriptor cannot accept a connection, not even to close it. So each port gets a
//! share of the limit, and closes further connections at once. A part of the limit is left for files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that are assumed to be open if the system does not list them.
const ASSUMED_OPEN: usize = 64;

/// Most connections of each port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    pub grpc: usize,
    pub http: usize,
}

/// Raises the soft limit to the hard one, and returns the new soft limit; `None` if there is no limit.
pub(crate) fn raise() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    // It fails, for example, where the system allows less than the hard limit.
    if setrlimit(Resource::Nofile, raised).is_ok() { maximum } else { current }
}

/// What the ports may use, with `wanted` connections for each and `limit` descriptors. Of the descriptors
/// that are free, a quarter stays for files, and an eighth is for the HTTP port, which has few clients.
pub(crate) fn shares(limit: Option<u64>, wanted: usize) -> Shares {
    let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) else {
        return Shares { grpc: wanted, http: wanted };
    };
    let shares = divided(limit.saturating_sub(open_now()), wanted);
    if shares.grpc < wanted {
        let Shares { grpc, http } = shares;
        tracing::warn!(
            limit,
            grpc,
            http,
            "the limit of open files (ulimit -n) is too low for server.max_connections {wanted}: the ports \
             take fewer connections"
        );
    }
    shares
}

fn divided(free: usize, wanted: usize) -> Shares {
    let http = (free / 8).clamp(1, wanted);
    Shares { grpc: (free - free.min(free / 4 + http)).clamp(1, wanted), http }
}

fn open_now() -> usize {
    std::fs::read_dir("/dev/fd").map_or(ASSUMED_OPEN, Iterator::count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_low_limit_is_divided_and_a_high_one_is_not_used_up() {
        assert_eq!(divided(48, 4096), Shares { grpc: 30, http: 6 });
        assert_eq!(divided(0, 4096), Shares { grpc: 1, http: 1 });
        assert_eq!(divided(1 << 20, 4096), Shares { grpc: 4096, http: 4096 });
        assert_eq!(shares(None, 7), Shares { grpc: 7, http: 7 });
    }
}
