//! How much memory this machine lends to this process.

/// Bytes of memory that this process may use: the machine's, or less where a control group says so.
/// None where the system does not tell.
#[must_use]
pub fn memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let machine = total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = limit.and_then(|limit| limit.trim().parse().ok()).unwrap_or(u64::MAX);
    Some(machine.min(limit))
}
