//! How much memory this process may use.

/// Bytes of memory that this process may use: the machine's memory, or the limit of the process's control
/// group if that is lower. `None` if the system does not report it.
#[must_use]
pub(crate) fn memory_bytes() -> Option<u64> {
    let machine = meminfo("MemTotal:")?;
    // Control groups of version 2 and 1. Without a limit, version 2 has "max" and version 1 a huge number.
    let files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = files.iter().filter_map(|file| std::fs::read_to_string(file).ok()?.trim().parse().ok());
    Some(limits.fold(machine, u64::min))
}

/// Bytes of the machine's memory that are free or can be reclaimed. `None` if the system does not report it.
#[must_use]
pub(crate) fn available_bytes() -> Option<u64> {
    meminfo("MemAvailable:")
}

fn meminfo(name: &str) -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}
