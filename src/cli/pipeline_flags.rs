//! The flags of the training pipeline, shared by `train` and `verify`.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, anyhow};

use crate::cli::InputError;
use crate::cli::flags::{bytes, whole};
use crate::config::{BYTES_FORM, Config, DeviceKind, parse_bytes};
use crate::dataset::Reader;
use crate::device::cuda::{self, Nvidia};
use crate::planner::counts::Ranked;
use crate::rowlog::RowOrder;
use crate::schema::Schema;
use crate::trainer::{
    Pipeline, PipelineRows, PipelineSettings, RowFrequency, ScratchpadPolicy, ScratchpadSize, Sizes,
    TrainError, TrainState, largest_sample,
};

/// Flags of the scratchpad and the stages around it.
#[derive(Debug, clap::Args)]
pub(crate) struct PipelineFlags {
    /// Which rows are evicted from the scratchpad first: lru, lfu, random or optimal
    #[arg(long, value_name = "P", default_value = "lru")]
    policy: ScratchpadPolicy,
    /// Batches that are planned together, so that their rows are loaded ahead, 1 to 21
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize>(0, u64::MAX))]
    lookahead: usize,
    /// Bytes of all staging buffers between disk and scratchpad
    #[arg(long, value_name = "BYTES", default_value = "64Mi", value_parser = bytes)]
    staging: u64,
    /// Batches that may wait between two stages
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u8>(0, 8))]
    buffered: u8,
    /// File that `plan --counts` wrote: how often each row is used. The most frequent rows are loaded before
    /// training, and the policy lfu uses the counts
    #[arg(long, value_name = "FILE")]
    counts: Option<PathBuf>,
    /// Directory of the working file [default: the model's directory for train, the system's temporary
    /// directory for verify]
    #[arg(long, value_name = "DIR")]
    pub working_dir: Option<PathBuf>,
}

/// The value of `--scratchpad`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SizeFlag {
    /// Room for the largest sample alone.
    Min,
    /// Room for this share of all rows.
    Fraction(f64),
    Bytes(u64),
}

impl FromStr for SizeFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "min" {
            return Ok(Self::Min);
        }
        let fraction = text.parse().ok().filter(|&fraction: &f64| fraction > 0.0 && fraction <= 1.0);
        let bytes = || parse_bytes(text).filter(|&bytes| bytes > 1).map(Self::Bytes);
        let expected =
            || format!("expected min, a fraction of all rows (above 0, at most 1), or {BYTES_FORM}");
        fraction.map(Self::Fraction).or_else(bytes).ok_or_else(expected)
    }
}

impl SizeFlag {
    /// The size for a model. `reader` opens the training data. Only its first `limit` samples count.
    pub(crate) fn resolve(
        self,
        sizes: &Sizes,
        schema: &Schema,
        reader: impl FnOnce() -> anyhow::Result<Box<dyn Reader + Send>>,
        limit: u64,
    ) -> anyhow::Result<ScratchpadSize> {
        Ok(match self {
            Self::Fraction(fraction) => ScratchpadSize::Fraction(fraction),
            Self::Bytes(bytes) => ScratchpadSize::Bytes(bytes),
            Self::Min => ScratchpadSize::Slots(largest_sample(schema, sizes, &mut *reader()?, limit)?),
        })
    }
}

impl PipelineFlags {
    /// The settings of the pipeline.
    pub(crate) fn settings(&self, scratchpad: ScratchpadSize, seed: u64) -> PipelineSettings {
        PipelineSettings {
            scratchpad,
            policy: self.policy,
            seed,
            lookahead: self.lookahead,
            buffered: usize::from(self.buffered),
            staging_bytes: usize::try_from(self.staging).unwrap_or(usize::MAX),
            ..PipelineSettings::default()
        }
    }

    /// The names of the flags that differ from their defaults.
    pub(crate) fn given(&self) -> Vec<&'static str> {
        let default = PipelineSettings::default();
        let given = self.settings(default.scratchpad.clone(), default.seed);
        let flags = [
            ("--policy", given.policy != default.policy),
            ("--lookahead", given.lookahead != default.lookahead),
            ("--staging", given.staging_bytes != default.staging_bytes),
            ("--buffered", given.buffered != default.buffered),
            ("--counts", self.counts.is_some()),
            ("--working-dir", self.working_dir.is_some()),
        ];
        flags.into_iter().filter_map(|(name, given)| given.then_some(name)).collect()
    }

    /// The counts of this schema's rows in the file of `--counts`; `None` without that flag.
    pub(crate) fn frequencies(&self, schema: &Schema) -> anyhow::Result<Option<Vec<RowFrequency>>> {
        let Some(path) = &self.counts else { return Ok(None) };
        let ranked = Ranked::read(path).map_err(|e| InputError(e.into())).context("--counts")?;
        let rows = ranked.rows_of(schema).into_iter();
        let used = rows.map(|(table, ranked)| RowFrequency { table, row: ranked.row, count: ranked.count });
        let rows: Vec<RowFrequency> = used.collect();
        if rows.is_empty() {
            let error = anyhow!("--counts: {}: contains no row of this model's tables", path.display());
            return Err(InputError(error).into());
        }
        Ok(Some(rows))
    }
}

/// The GPU to train on, if `device.kind` is `cuda`. `auto` means the host, because the speed of training on a
/// GPU has not been measured.
pub(crate) fn training_device(config: &Config) -> anyhow::Result<Option<Arc<Nvidia>>> {
    if config.device.kind != DeviceKind::Cuda {
        return Ok(None);
    }
    let device = cuda::open(0, config.device.kernel_cache.as_deref());
    let device = device.map_err(|e| InputError(anyhow!("device.kind: {e}")))?;
    Ok(Some(Arc::new(device)))
}

/// A pipeline on this device, or on the host.
pub(crate) fn pipeline_on(
    device: Option<&Arc<Nvidia>>,
    state: &TrainState,
    rows: PipelineRows,
    settings: PipelineSettings,
) -> Result<Pipeline, TrainError> {
    match device {
        None => Pipeline::new(state, rows, settings),
        Some(device) => Pipeline::on_device(device, state, rows, settings),
    }
}

/// Creates and returns the directory of the working file: `--working-dir`, or `default`.
pub(crate) fn working_dir<'a>(flags: &'a PipelineFlags, default: &'a Path) -> anyhow::Result<&'a Path> {
    let dir = flags.working_dir.as_deref().unwrap_or(default);
    let made = std::fs::create_dir_all(dir);
    made.map_err(|e| InputError(anyhow!("--working-dir: {}: {e}", dir.display())))?;
    Ok(dir)
}

/// For each table the order of its rows by frequency; `None` if the counts contain none of its rows.
pub(crate) fn orders(schema: &Schema, frequencies: &[RowFrequency]) -> anyhow::Result<Vec<Option<RowOrder>>> {
    let order = |(t, table): (usize, &crate::schema::TableSchema)| {
        let of_table = frequencies.iter().filter(|used| used.table.index() == t);
        let ranked: Vec<u64> = of_table.map(|used| used.row).collect();
        let order = (!ranked.is_empty()).then(|| RowOrder::hottest_first(table.stored_rows(), &ranked));
        Ok(order.transpose()?)
    };
    schema.tables.iter().enumerate().map(order).collect()
}

#[cfg(test)]
mod tests;
