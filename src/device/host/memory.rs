//! How much memory this machine lends to this process.

/// Bytes of memory that this process may use: the machine's, or less where a control group says so.
/// None where the system does not tell.
#[must_use]
pub fn memory_bytes() -> Option<u64> {
    let machine = meminfo("MemTotal:")?;
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = limit.and_then(|limit| limit.trim().parse().ok()).unwrap_or(u64::MAX);
    Some(machine.min(limit))
}

/// Bytes of the machine's memory that nobody holds. None where the system does not tell.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    meminfo("MemAvailable:")
}

fn meminfo(name: &str) -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}
