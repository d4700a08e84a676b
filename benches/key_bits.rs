//! AUC by the number of bits of flat keys (FLECHE Exp #5): size-aware coding compared with fixed-length
//! coding.
//!
//! Trains DLRM for one epoch on the Criteo sample, with ids hashed into tables of the columns' true sizes
//! (capped). The keys are too narrow for all ids, and ids with the same key share a row in training and in
//! serving. In the setting `ideal`, every id has its own key. All settings use the same seeds, batches and
//! dense layers; the median AUC over the seeds is reported.
//!
//! `--seeds N` (3), `--json`. Real rows are read from `../shared/data` or `$FLECHETTE_DATA`.

mod harness;

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use flechette::cache::key::{FlatKeys, KeyWidth};
use flechette::schema::Schema;
use flechette::schema::preset::{ArchKind, criteo};
use flechette::types::TableId;
use harness::{Options, Sorted};

const DIM: usize = 16;
/// Number of ids in each of Criteo Kaggle's columns C1 to C26 (`cardinalities.json` of the data).
const COLUMNS: [u64; 26] = [
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992,
    5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
];
/// Cap of the table sizes. Larger tables would mostly add rows that no sample uses: there are 15,662 samples.
const CAP: u64 = 1 << 17;

fn main() -> anyhow::Result<()> {
    let options = Options::read(0);
    let Some(data) = data() else {
        println!("SKIPPED: no criteo_kaggle_train.tsv.zst in ../shared/data or $FLECHETTE_DATA");
        return Ok(());
    };
    let seeds = options.number("--seeds", 3).max(1);
    println!("key_bits: AUC on the Criteo sample, median of {seeds} seeds (least to most)");
    println!("{}", harness::place());
    let ideal = auc(&data, &schema(None)?, seeds)?;
    println!("{:>5} {:>24} {:>24}", "bits", "size-aware", "fixed-length");
    println!("{:>5} {:>24}", "ideal", shown(&ideal));
    let mut rows = Vec::new();
    for bits in [9, 10, 11, 12, 13, 14, 16, 18, 20] {
        let width = KeyWidth::new(bits).context("2 to 64 bits")?;
        let of = |keys: fn(&[u64], KeyWidth) -> Result<FlatKeys, _>| {
            auc(&data, &schema(Some((keys, width)))?, seeds)
        };
        let (aware, fixed) = (of(FlatKeys::new)?, of(FlatKeys::fixed_length)?);
        println!("{bits:>5} {:>24} {:>24}", shown(&aware), shown(&fixed));
        rows.push(serde_json::json!({
            "bits": bits, "size_aware": aware.at(0.5), "fixed_length": fixed.at(0.5),
        }));
    }
    if options.json {
        println!("{}", serde_json::json!({ "bench": "key_bits", "ideal": ideal.at(0.5), "rows": rows }));
    }
    Ok(())
}

fn shown(aucs: &Sorted) -> String {
    format!("{:.4} ({:.4}-{:.4})", aucs.at(0.5), aucs.at(0.0), aucs.at(1.0))
}

type Coding = fn(&[u64], KeyWidth) -> Result<FlatKeys, flechette::cache::key::KeyError>;

/// The model. Each table has as many rows as its column has ids, up to [`CAP`]. With `keys`, tables without
/// exact keys have only as many rows as their keys' bits can tell apart.
fn schema(keys: Option<(Coding, KeyWidth)>) -> anyhow::Result<Schema> {
    let mut schema = criteo(ArchKind::Dlrm, DIM, CAP);
    let rows = COLUMNS.map(|ids| ids.min(CAP));
    for ((table, feature), rows) in schema.tables.iter_mut().zip(&mut schema.features).zip(rows) {
        table.rows = rows;
        if let Some(hash) = &mut feature.hash {
            hash.modulus = rows;
        }
    }
    if let Some((coding, width)) = keys {
        let keys = coding(&rows, width)?;
        for (t, table) in schema.tables.iter_mut().enumerate() {
            let code = keys.code(TableId(t as u32)).filter(|code| !code.is_exact());
            table.lossy_bits = code.map(|code| code.bits());
        }
    }
    schema.check()?;
    Ok(schema)
}

/// Trains with the flechette program, once per seed. Returns the test AUCs.
fn auc(data: &(PathBuf, PathBuf), schema: &Schema, seeds: usize) -> anyhow::Result<Sorted> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("model.toml");
    std::fs::write(&config, schema.to_toml())?;
    let run = |seed: usize| -> anyhow::Result<f64> {
        let output = Command::new(env!("CARGO_BIN_EXE_flechette"))
            .args(["train", "--format", "criteo-tsv", "--json", "--name", "bits", "--model-config"])
            .arg(&config)
            .arg("--data")
            .arg(&data.0)
            .arg("--valid")
            .arg(&data.1)
            .arg("--models")
            .arg(folder.path().join("models"))
            .args(["--seed", &seed.to_string()])
            .output()?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let last = stdout.lines().last().unwrap_or_default();
        let reported: serde_json::Value = serde_json::from_str(last)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        std::fs::remove_dir_all(folder.path().join("models"))?;
        reported["auc"].as_f64().context("an AUC")
    };
    Ok(Sorted::of((0..seeds).map(run).collect::<anyhow::Result<Vec<_>>>()?.into_iter()))
}

/// The files for training and evaluation.
fn data() -> Option<(PathBuf, PathBuf)> {
    let folder = std::env::var_os("FLECHETTE_DATA").map_or_else(|| "../shared/data".into(), PathBuf::from);
    let file = |name: &str| Some(folder.join(name)).filter(|path| path.exists());
    Some((file("criteo_kaggle_train.tsv.zst")?, file("criteo_kaggle_test.tsv.zst")?))
}
