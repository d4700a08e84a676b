//! The flags of every training, as `train` and `verify` share them: what is trained on what, and how.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use crate::cli::InputError;
use crate::cli::scratchpad::PipelineFlags;
use crate::config::{Config, Flags};
use crate::dataset::{self, Format, Limits, Reader};
use crate::schema::Schema;
use crate::trainer::optim::{Kind, Optimizer};

/// Flags that say what is trained.
#[derive(Debug, clap::Args)]
pub(crate) struct TrainingFlags {
    /// The model's schema, as `init` writes it
    #[arg(long, value_name = "FILE")]
    pub model_config: PathBuf,
    #[arg(long, value_name = "F", help = format!("Format of the data: {}", Format::names()))]
    format: Format,
    /// Files to train on, in this order
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// Samples a step
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub batch: u32,
    /// sgd, adagrad, rowwise_adagrad or adam
    #[arg(long, value_name = "O", default_value = "adagrad")]
    pub optimizer: Kind,
    /// Learning rate
    #[arg(long, value_name = "L", default_value_t = 0.02)]
    lr: f64,
    /// Seed of the first weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Threads that compute; all cores when 0 or absent
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Malformed lines that are skipped before the data is refused
    #[arg(long, value_name = "N", default_value_t = Limits::default().malformed_lines)]
    max_malformed: u64,
}

/// Added to the optimizers' denominators.
const EPS: f64 = 1e-10;

impl TrainingFlags {
    /// What the configuration takes of them and of the pipeline's.
    pub(crate) fn flags(&self, pipeline: &PipelineFlags) -> Flags {
        Flags { threads: self.threads.clone(), device: pipeline.device.clone(), ..Flags::default() }
    }

    /// The optimizer.
    ///
    /// # Errors
    /// A learning rate that is none.
    pub(crate) fn optimizer(&self) -> anyhow::Result<Optimizer> {
        if !(self.lr.is_finite() && self.lr > 0.0) {
            return Err(InputError(anyhow!("--lr: expected a positive number, got {}", self.lr)).into());
        }
        Ok(Optimizer { kind: self.optimizer, lr: self.lr, eps: EPS })
    }

    /// Opens files of the data's format.
    ///
    /// # Errors
    /// Files that cannot be used.
    pub(crate) fn open(&self, paths: &[PathBuf], schema: &Schema) -> anyhow::Result<Box<dyn Reader + Send>> {
        let limits = Limits { malformed_lines: self.max_malformed, ..Limits::default() };
        Ok(dataset::open(self.format, paths, schema, limits)?)
    }

    /// Opens the data that is to be read once before it is trained on, as `flag` wants it.
    ///
    /// # Errors
    /// Files that cannot be used, and a pipe, which could be read only once.
    pub(crate) fn open_before(&self, flag: &str, schema: &Schema) -> anyhow::Result<Box<dyn Reader + Send>> {
        if let Some(pipe) = self.data.iter().find(|path| is_pipe(path)) {
            let pipe = pipe.display();
            return Err(InputError(anyhow!("{flag}: --data is read twice, and {pipe} is no file")).into());
        }
        self.open(&self.data, schema)
    }

    /// That there were no samples.
    pub(crate) fn no_samples(&self) -> anyhow::Error {
        InputError(anyhow!("--data: no samples in {}", self.data[0].display())).into()
    }
}

/// The threads that compute.
///
/// # Errors
/// What the system says where they cannot be had.
pub(crate) fn compute_threads(config: &Config) -> anyhow::Result<rayon::ThreadPool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(config.threads.compute).build();
    pool.context("threads.compute")
}

/// Whether this is a pipe or a device: opening one takes its first bytes, or waits for its other end.
pub(crate) fn is_pipe(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir())
}
