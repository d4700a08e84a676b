//! Rows per second under a memory limit: a cache in front of a store that is mapped from disk, compared with
//! the mapped file alone.
//!
//! The table has rows of 128 bytes and four times the size of the limit; the cache has half the size of the
//! limit. The hottest 2 % of the ids get 80 % of the accesses and are scattered over the table. Each side is
//! a child process of this program in a control group with the limit, which includes its page cache; the
//! sides alternate. The cache should win because a page of the file holds mostly cold rows, and the cache
//! holds only hot rows.
//!
//! Needs root and the memory controller (v1 or v2); prints a message if it cannot create a group.
//!
//! `--limit-mib N` (256), `--pairs N` (9), `--window-ms N` (6000), `--json`.

mod harness;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use flechette::cache::{CacheOptions, CacheShape, FlatCache, Query, Source, TableShape};
use flechette::dataset::synthetic::Skew;
use flechette::schema::preset::{ArchKind, SyntheticShape, synthetic};
use flechette::store::{self, Contents, PlainMemory, Purpose, Table};
use flechette::types::{TableId, Version};
use harness::{Draw, Options, Pairs, PowerLaw, Report};

const DIM: usize = 32;
const ROW_BYTES: usize = 4 * DIM;
/// Ids per batch.
const BATCH: usize = 4096;
const NAME: &str = "mapped";

fn main() -> anyhow::Result<()> {
    let options = Options::read(6000);
    let limit = options.number("--limit-mib", 256) << 20;
    let folder = std::env::current_dir()?.join("target/mapped_store");
    if let Some(side) = options.value("--child") {
        return child(&options, &folder, limit, &side);
    }
    let Some(group) = Group::new(limit) else {
        println!("SKIPPED: no control group can be created, which needs root and the memory controller");
        return Ok(());
    };
    fs::create_dir_all(&folder)?;
    write(&folder, (4 * limit / ROW_BYTES) as u64)?;
    // Drops the page cache of the file that this process has written: its pages are not charged to the group,
    // so the children would read them beyond the limit.
    fs::write("/proc/sys/vm/drop_caches", "1").context("/proc/sys/vm/drop_caches")?;
    let mut report = Report::new("mapped_store", "rows", "the mapped file alone", &options);
    let pair = |_| Ok((group.run(&options, "cached")?, group.run(&options, "mapped")?));
    let pairs = (0..options.pairs).map(pair).collect::<anyhow::Result<_>>()?;
    let setting = format!("table {} MiB, limit {} MiB", limit >> 18, limit >> 20);
    report.add(setting, &Pairs::of(pairs), Some(3.0));
    report.finish();
    fs::remove_dir_all(&folder)?;
    Ok(())
}

/// Writes a version of one table.
fn write(folder: &Path, rows: u64) -> anyhow::Result<()> {
    let shape = SyntheticShape { tables: 1, rows, dense: 0, multi_hot: None };
    let schema = synthetic(ArchKind::Dcn, DIM, shape);
    let mut table = Table::zeroed(&PlainMemory, rows, DIM, &[])?;
    let values = table.rows_mut().into_iter().flatten().enumerate();
    values.for_each(|(i, x)| *x = (i % 97) as f32);
    let contents =
        Contents { model_toml: &schema.to_toml(), tables: vec![(&table).into()], ..Contents::default() };
    let _ = fs::remove_dir_all(folder.join(NAME));
    store::write(folder, NAME, &contents)?;
    Ok(())
}

/// A control group with a memory limit.
struct Group(PathBuf);

impl Group {
    /// `None` if no group can be created.
    fn new(limit: usize) -> Option<Self> {
        let name = format!("flechette-{}", std::process::id());
        let layouts = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        layouts.into_iter().find_map(|(root, file)| {
            let group = Path::new(root).join(&name);
            fs::create_dir(&group).ok()?;
            match fs::write(group.join(file), limit.to_string()) {
                Ok(()) => Some(Self(group)),
                Err(_) => {
                    let _ = fs::remove_dir(&group);
                    None
                }
            }
        })
    }

    /// Runs this program in the group and reads the rate that it prints.
    fn run(&self, options: &Options, side: &str) -> anyhow::Result<f64> {
        let limit = options.number("--limit-mib", 256).to_string();
        let window = options.window.as_millis().to_string();
        // A shell joins the group and then becomes the child, so all pages of the child are charged to the
        // group.
        let output = Command::new("sh")
            .arg("-c")
            .arg("echo $$ > \"$0/cgroup.procs\" && exec \"$@\"")
            .arg(&self.0)
            .arg(std::env::current_exe()?)
            .args(["--child", side, "--limit-mib", &limit, "--window-ms", &window])
            .output()?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        stdout.trim().parse().with_context(|| format!("expected a rate, got {stdout:?}; stderr: {stderr}"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// One side, in the group: warms up for two windows, then prints its rows per second.
fn child(options: &Options, folder: &Path, limit: usize, side: &str) -> anyhow::Result<()> {
    let mut opened = store::open(folder, NAME, Version(1), Purpose::Serve)?;
    opened.store.expect_disk();
    let rows = opened.schema.tables[0].rows;
    let cache = (side == "cached").then(|| {
        let shape = CacheShape { bytes: limit / 2, tables: vec![TableShape { rows, row_bytes: ROW_BYTES }] };
        FlatCache::new(&shape, &CacheOptions::default())
    });
    let cache = cache.transpose()?;
    let mut ids = Ids::new(rows);
    let (mut query, mut sum) = (Query::default(), 0.0);
    let mut batch = || {
        let wanted: Vec<u64> = (0..BATCH).map(|_| ids.next()).collect();
        let stored = |id| opened.store.row(TableId(0), id).unwrap_or(&[]);
        match &cache {
            None => wanted.iter().for_each(|&id| sum += touch(stored(id))),
            Some(cache) => {
                query.clear();
                query.push(TableId(0), wanted.iter().copied());
                let pin = cache.pin();
                let Ok(found) = pin.lookup(&mut query) else { unreachable!("ids are below the rows") };
                opened.store.fetch(found.misses().iter().map(|miss| miss.row()));
                for miss in found.misses() {
                    let _ = pin.insert(miss, stored(miss.id));
                }
                for (&unique, &id) in found.uniques().iter().zip(&wanted) {
                    sum += match found.source(unique) {
                        Source::Row(row) => touch(row),
                        Source::Pointer(_) | Source::Miss(_) => touch(stored(id)),
                    };
                }
            }
        }
        BATCH as u64
    };
    options.rate(&mut batch);
    options.rate(&mut batch);
    println!("{}", options.rate(&mut batch));
    std::hint::black_box(sum);
    Ok(())
}

/// Reads every element of a row.
fn touch(row: &[u8]) -> f32 {
    row.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).sum()
}

/// Random ids with high skew, whose hot ids are scattered over the table.
struct Ids {
    draw: Draw,
    law: PowerLaw,
    rows: u64,
}

impl Ids {
    fn new(rows: u64) -> Self {
        Self { draw: Draw::new(5), law: PowerLaw::new(Skew::High.alpha(rows), rows), rows }
    }

    fn next(&mut self) -> u64 {
        // If `rows` is a power of two, which it is for powers of two in `--limit-mib`, multiplying by an odd
        // factor maps ranks to ids one to one.
        self.law.rank(&mut self.draw).wrapping_mul(0x9e37_79b9_7f4a_7c15) & (self.rows - 1)
    }
}
