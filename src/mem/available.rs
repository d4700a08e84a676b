//! How much memory this process may use.
//!
//! A process can use what the machine has, and what the limits of its control groups leave.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Bytes of memory that this process may use: the machine's memory, or the lowest limit of the process's
/// control groups if that is lower. `None` if the system does not report it.
#[must_use]
pub(crate) fn memory_bytes() -> Option<u64> {
    let machine = value(Path::new("/proc/meminfo"), "MemTotal:")?;
    Some(groups().map(|group| group.limit).fold(machine, u64::min))
}

/// Bytes of that memory that are free or can be reclaimed. `None` if the system does not report it.
#[must_use]
pub(crate) fn available_bytes() -> Option<u64> {
    let machine = value(Path::new("/proc/meminfo"), "MemAvailable:")?;
    Some(groups().map(|group| group.limit.saturating_sub(group.used)).fold(machine, u64::min))
}

/// The memory of a control group.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    limit: u64,
    /// Without pages of files, which can be reclaimed.
    used: u64,
}

/// The files of control groups.
struct Layout {
    root: &'static str,
    /// The name of the controller in `/proc/self/cgroup`.
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The lines of `memory.stat` with pages that can be reclaimed.
    reclaimable: [&'static str; 2],
}

/// Of version 2 and of version 1.
const LAYOUTS: [Layout; 2] = [
    Layout {
        root: "/sys/fs/cgroup",
        controller: "",
        limit: "memory.max",
        used: "memory.current",
        reclaimable: ["inactive_file ", "active_file "],
    },
    Layout {
        root: "/sys/fs/cgroup/memory",
        controller: "memory",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        reclaimable: ["total_inactive_file ", "total_active_file "],
    },
];

/// The control groups of this process that have a limit: its own and those above it.
fn groups() -> impl Iterator<Item = Group> {
    let own = read_to_string("/proc/self/cgroup").unwrap_or_default();
    LAYOUTS.iter().flat_map(move |layout| {
        let folders = layout.folders(&own);
        folders.into_iter().filter_map(|folder| layout.group(&folder))
    })
}

impl Layout {
    /// The directories of a process's groups. In a container they may be only the root, although `own`, the
    /// text of `/proc/self/cgroup`, has a longer path.
    fn folders(&self, own: &str) -> Vec<PathBuf> {
        let path = own.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|name| name == self.controller).then_some(path)
        });
        let root = Path::new(self.root);
        let own = root.join(path.unwrap_or_default().trim_start_matches('/'));
        own.ancestors().take_while(|folder| folder.starts_with(root)).map(Path::to_owned).collect()
    }

    /// `None` if the group does not exist or has no limit.
    fn group(&self, folder: &Path) -> Option<Group> {
        let number = |file: &str| read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
        // Without a limit, version 2 has "max" and version 1 a huge number.
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let stat = folder.join("memory.stat");
        let reclaimable: u64 = self.reclaimable.iter().filter_map(|name| value(&stat, name)).sum();
        Some(Group { limit, used: used.saturating_sub(reclaimable) })
    }
}

/// The number of bytes of the line of a file that begins with `name`.
fn value(file: &Path, name: &str) -> Option<u64> {
    let text = read_to_string(file).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name))?.trim();
    match value.strip_suffix("kB") {
        Some(kilobytes) => Some(kilobytes.trim().parse::<u64>().ok()? << 10),
        None => value.parse().ok(),
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests;
