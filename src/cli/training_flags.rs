//! The flags of training, shared by `train` and `verify`: format, optimizer and learning rate.

use std::convert::Infallible;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use crate::cli::InputError;
use crate::cli::flags::{number, positive, whole};
use crate::cli::format_flags::{FormatFlags, MalformedFlag};
use crate::config::{Config, Flags};
use crate::dataset::{self, Labels, ReadOptions, Reader};
use crate::schema::Schema;
use crate::trainer::optim::{Optimizer, OptimizerKind};
use crate::trainer::schedule::{Curve, Decay, Schedule};

/// Flags of format, optimizer and learning rate.
#[derive(Debug, clap::Args)]
pub(crate) struct TrainingFlags {
    #[command(flatten)]
    pub format: FormatFlags,
    /// Samples per step
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = whole::<u32>(1, 1 << 20))]
    pub batch: u32,
    /// Optimizer: sgd, adagrad, rowwise_adagrad or adam
    #[arg(long, value_name = "O", default_value = "adagrad")]
    pub optimizer: OptimizerKind,
    /// Learning rate
    #[arg(long, value_name = "L", default_value_t = 0.02, value_parser = positive)]
    lr: f64,
    /// Steps in which the learning rate grows linearly from 0
    #[arg(long, value_name = "STEPS", default_value_t = 0, value_parser = whole::<u64>(0, u64::MAX))]
    lr_warmup: u64,
    /// How the learning rate decays after warmup: linear, cosine, or poly2 (a polynomial of power 2)
    #[arg(long, value_name = "CURVE", requires = "lr_decay_steps")]
    lr_decay: Option<Curve>,
    /// The last step with the full learning rate [default: --lr-warmup]
    #[arg(long, value_name = "STEP", requires = "lr_decay", value_parser = whole::<u64>(0, u64::MAX))]
    lr_decay_start: Option<u64>,
    /// Steps in which the learning rate decays to --lr-end
    #[arg(long, value_name = "STEPS", requires = "lr_decay", value_parser = whole::<u64>(1, u64::MAX))]
    lr_decay_steps: Option<u64>,
    /// The learning rate after the decay [default: 0]
    #[arg(long, value_name = "L", requires = "lr_decay", value_parser = number(0.0, f64::MAX))]
    lr_end: Option<f64>,
    /// Added to the optimizer's denominators [default: 1e-8 for adam, 1e-10 for the Adagrads]
    #[arg(long, value_name = "E")]
    eps: Option<f64>,
    /// Adam's decay rate of the mean of gradients [default: 0.9]
    #[arg(long, value_name = "B")]
    beta1: Option<f64>,
    /// Adam's decay rate of the mean of squared gradients [default: 0.999]
    #[arg(long, value_name = "B")]
    beta2: Option<f64>,
    /// Seed of the initial weights
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>(0, u64::MAX))]
    pub seed: u64,
    #[command(flatten)]
    malformed: MalformedFlag,
}

/// The flags of `train` and `verify` that are also settings.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct ComputeFlags {
    /// Threads that compute [default: one for each core]
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Device that holds the scratchpad and pools and updates rows: host, cuda (a GPU), or auto (the host)
    #[arg(long, value_name = "D")]
    device: Option<String>,
}

impl ComputeFlags {
    pub(crate) fn flags(&self) -> Flags {
        Flags { threads: self.threads.clone(), device: self.device.clone(), ..Flags::default() }
    }
}

impl TrainingFlags {
    /// The optimizer and its parameters.
    ///
    /// # Errors
    /// When a number is out of range, or the optimizer does not use a flag.
    pub(crate) fn optimizer(&self) -> anyhow::Result<Optimizer> {
        // Steps are computed in f32. A rate that is too large for it is reported by the first step.
        if self.lr as f32 == 0.0 {
            return Err(InputError(anyhow!("--lr: expected a positive f32, got {}", self.lr)).into());
        }
        let mut optimizer = Optimizer::new(self.optimizer, self.lr);
        if let Some(eps) = self.eps {
            if self.optimizer == OptimizerKind::Sgd {
                return Err(InputError(anyhow!("--eps: not used by sgd")).into());
            }
            if !(eps.is_finite() && eps as f32 > 0.0) {
                return Err(InputError(anyhow!("--eps: expected a positive f32, got {eps}")).into());
            }
            optimizer.eps = eps;
        }
        for (flag, given, beta) in [
            ("--beta1", self.beta1, &mut optimizer.betas.first),
            ("--beta2", self.beta2, &mut optimizer.betas.second),
        ] {
            let Some(given) = given else { continue };
            if self.optimizer != OptimizerKind::Adam {
                return Err(
                    InputError(anyhow!("{flag}: used only by adam, not by {}", self.optimizer)).into()
                );
            }
            if !(0.0..1.0).contains(&given) {
                let expected = "expected a number from 0 to below 1";
                return Err(InputError(anyhow!("{flag}: {expected}, got {given}")).into());
            }
            *beta = given;
        }
        optimizer.schedule = self.schedule()?;
        Ok(optimizer)
    }

    /// The schedule of the learning rate.
    fn schedule(&self) -> anyhow::Result<Schedule> {
        let start = self.lr_decay_start.unwrap_or(self.lr_warmup);
        if start < self.lr_warmup {
            let warmup = self.lr_warmup;
            let error = anyhow!("--lr-decay-start: expected at least --lr-warmup, {warmup}, got {start}");
            return Err(InputError(error).into());
        }
        // clap requires the steps with the curve.
        let decay = self.lr_decay.zip(self.lr_decay_steps);
        let end = self.lr_end.unwrap_or(0.0);
        let decay = decay.map(|(curve, steps)| Decay { curve, start, steps, end });
        Ok(Schedule { warmup: self.lr_warmup, decay })
    }

    /// How files are read.
    pub(crate) fn read_options(&self) -> ReadOptions {
        let malformed_lines = self.malformed.max_malformed;
        let (labels, fields) = (Labels::Required, self.format.fields());
        ReadOptions { malformed_lines, labels, fields, ..ReadOptions::default() }
    }

    /// Opens files in the format of the data.
    ///
    /// # Errors
    /// When a file cannot be used.
    pub(crate) fn open(&self, paths: &[PathBuf], schema: &Schema) -> anyhow::Result<Box<dyn Reader + Send>> {
        Ok(dataset::open(self.format.format()?, paths, schema, self.read_options())?)
    }

    /// Opens the data for a first pass before training, which `flag` needs.
    ///
    /// # Errors
    /// When a file cannot be used, or is a pipe, which can be read only once.
    pub(crate) fn open_before(
        &self,
        flag: &str,
        data: &[PathBuf],
        schema: &Schema,
    ) -> anyhow::Result<Box<dyn Reader + Send>> {
        readable_twice(flag, data)?;
        self.open(data, schema)
    }
}

/// Checks that files can be read more than once, which `flag` needs.
///
/// # Errors
/// When one is a pipe.
pub(crate) fn readable_twice(flag: &str, data: &[PathBuf]) -> anyhow::Result<()> {
    let Some(pipe) = data.iter().find(|path| is_pipe(path)) else { return Ok(()) };
    let pipe = pipe.display();
    let error = anyhow!("{flag}: --data must be read twice, but {pipe} is a pipe or a device");
    Err(InputError(error).into())
}

/// The error for data without samples.
pub(crate) fn no_samples(flag: &str, data: &Path) -> anyhow::Error {
    InputError(anyhow!("{flag}: no samples in {}", data.display())).into()
}

/// The path of a file; `-` is standard input.
pub(crate) fn data_path(text: &str) -> Result<PathBuf, Infallible> {
    Ok(PathBuf::from(if text == "-" { "/dev/stdin" } else { text }))
}

/// Starts the threads that compute.
///
/// # Errors
/// When the system cannot start a thread.
pub(crate) fn compute_threads(config: &Config) -> anyhow::Result<rayon::ThreadPool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(config.threads.compute).build();
    pool.context("threads.compute")
}

/// Whether this path is a pipe or a device. Opening it may consume bytes or block, so checks do not open it.
pub(crate) fn is_pipe(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir())
}
