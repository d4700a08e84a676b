//! How much memory this machine lends to this process.

/// Bytes of memory that this process may use: the machine's, or less where a control group says so.
/// None where the system does not tell.
#[must_use]
pub(crate) fn memory_bytes() -> Option<u64> {
    let machine = meminfo("MemTotal:")?;
    // Of control groups version 2 and 1; without a limit the one says "max", the other a huge number.
    let files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = files.iter().filter_map(|file| std::fs::read_to_string(file).ok()?.trim().parse().ok());
    Some(limits.fold(machine, u64::min))
}

/// Bytes of the machine's memory that nobody holds. None where the system does not tell.
#[must_use]
pub(crate) fn available_bytes() -> Option<u64> {
    meminfo("MemAvailable:")
}

fn meminfo(name: &str) -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}
