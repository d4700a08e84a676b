//! Writing and opening a version need little memory in addition to the mapped tables.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::store::{self, Purpose};
use crate::types::{Element, TableId, Version};

use super::Sample;

const CHILD: &str = "FLECHETTE_TEST_STORE_MEMORY";

/// The value of a line of `/proc/self/status`, in bytes.
pub(crate) fn memory(line: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let value = status.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(':')).unwrap();
    value.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// Does nothing as a test. The next test runs it in a child process, because it measures the memory of its
/// process.
#[test]
fn child_that_writes_and_opens_a_large_version() {
    let Some(models) = std::env::var_os(CHILD) else { return };
    let models = Path::new(&models);
    let mut sample = Sample::zeroed(&[(1 << 20, 24, Element::F32)], &[("sum", false)]);
    let (rows, states) = sample.tables[0].parts_mut().unwrap();
    rows.fill(0.5);
    states[0].rows_mut().unwrap().fill(2.0);
    let (large, slack) = (sample.tables[0].bytes(), 24 << 20);
    assert_eq!(large, 192 << 20);

    let before = memory("VmRSS");
    sample.write(models, "m").unwrap();
    let peak = memory("VmHWM");
    assert!(peak < before + slack, "writing took {} bytes", peak - before);

    let anonymous = memory("RssAnon");
    let opened = store::open(models, "m", Version(1), Purpose::Train).unwrap();
    assert_eq!(opened.store.row(TableId(0), (1 << 20) - 1), Some(bytemuck::cast_slice(&[0.5_f32; 24])));
    assert!(memory("RssAnon") < anonymous + slack, "opening copied the rows");
    let peak = memory("VmHWM");
    assert!(
        peak < before + large + slack,
        "opening took {} bytes more than the mapping",
        peak - before - large
    );
    println!("measured");
}

#[test]
fn writing_and_checking_a_table_need_far_less_memory_than_the_table() {
    let dir = tempfile::tempdir().unwrap();
    measured_alone("store::tests::footprint::child_that_writes_and_opens_a_large_version", CHILD, dir.path());
}

/// Runs a test in a child process, whose environment has the directory in `variable`. Checks that it printed
/// `measured`.
pub(crate) fn measured_alone(test: &str, variable: &str, dir: &Path) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(variable, dir)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && stdout.contains("measured"),
        "{stdout}{}",
        String::from_utf8_lossy(&child.stderr)
    );
}
