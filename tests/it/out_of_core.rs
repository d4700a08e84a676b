//! Trains a model that is larger than the allowed memory. Training must stay within that memory and write the
//! same bytes as without a limit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::program::{bytes_of, flechette, manifest, run, run_json};
use crate::skip::skip;

/// Memory that training takes according to docs/training.md, in addition to scratchpad, staging, dense
/// weights, one bit per row, and [`BATCH_ID`] for each id of a batch.
const EXTRA: u64 = 48 << 20;
/// 64 bytes for each id of the 13 batches in flight.
const BATCH_ID: u64 = 13 * 64;

const SCRATCHPAD: u64 = 32 << 20;
const STAGING: u64 = 16 << 20;
const BATCH: u64 = 512;
const TABLES: u64 = 8;
/// Rows per table. With dim 64 and Adagrad a row takes 512 bytes, so the 8 tables take a gigabyte.
const ROWS: u64 = 262_144;

/// A control group with a memory limit, removed on drop.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Option<Self> {
        let name = format!("flechette-test-{}", std::process::id());
        // The memory controllers of control groups v1 and v2.
        for (root, limit) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let group = Self(Path::new(root).join(&name));
            let made = Path::new(root).join(limit.replace("memory.max", "cgroup.controllers")).exists()
                && fs::create_dir(&group.0).is_ok();
            if made && fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                return Some(group);
            }
            drop(group);
        }
        skip("no control group can be created, which needs root and the memory controller");
        None
    }

    /// Runs the program in the group. Returns the JSON that it printed, and its peak of anonymous memory.
    fn run(&self, line: &str) -> (Value, u64) {
        let program = flechette();
        let enter = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", enter]).arg(&self.0).arg(program.get_program()).args(line.split_whitespace());
        for (name, _) in program.get_envs().filter(|(_, value)| value.is_none()) {
            command.env_remove(name);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut peak = 0;
        while child.try_wait().unwrap().is_none() {
            // `RssAnon` leaves out pages of the working file, which the system can reclaim. It is missing if
            // the program has just ended.
            peak = bytes_of(child.id(), "RssAnon").unwrap_or(0).max(peak);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{line}: {:?}", output.status);
        assert!(peak > 0, "its memory use was never read");
        let text = String::from_utf8(output.stdout).unwrap();
        (serde_json::from_str(text.lines().last().unwrap()).unwrap(), peak)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_model_of_a_gigabyte_trains_in_a_quarter_of_it_to_the_same_version() {
    let Some(group) = Group::new(256 << 20) else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (config, models) = (path("model.toml"), path("models"));
    let init = run(&format!("init --dataset synthetic --tables {TABLES} --arch dlrm --dim 64 --rows {ROWS}"));
    fs::write(&config, init.stdout).unwrap();
    let train = format!(
        "train --model-config {config} --format synthetic --data rows=12000,seed=3,skew=0.7 --batch {BATCH} \
         --models {models} --json"
    );
    let (trained, peak) =
        group.run(&format!("{train} --name small --scratchpad {SCRATCHPAD} --staging {STAGING}"));
    assert_eq!((&trained["rows"], &trained["steps"]), (&12_000.into(), &24.into()));
    let scratchpad = &trained["scratchpad"];
    assert!(scratchpad["bytes"].as_u64().unwrap() <= SCRATCHPAD, "{scratchpad}");
    assert!(scratchpad["evictions"].as_u64().unwrap() > 0, "no row was evicted: {scratchpad}");
    // The dense weights take little memory here, so the sum leaves them out.
    let stated = SCRATCHPAD + STAGING + TABLES * ROWS / 8 + EXTRA + BATCH_ID * BATCH * TABLES;
    eprintln!("{peak} bytes of {stated}");
    assert!(peak <= stated, "{peak} bytes, docs/training.md allows {stated}");

    run_json(&format!("{train} --name all"));
    assert_eq!(manifest(&models, "small", 1), manifest(&models, "all", 1));
}
