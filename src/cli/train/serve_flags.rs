//! The flags of `serve --train`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::anyhow;
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches};

use super::data::{OrderFlags, SampleSource};
use super::{Args, RunFlags};
use crate::cli::InputError;
use crate::cli::flags::whole;
use crate::cli::training_flags::ComputeFlags;
use crate::store::versions;
use crate::trainer::cursor::MAX_EPOCHS;
use crate::types::VersionSelector;

/// How often versions are published without `--publish-every`.
const PUBLISH_EVERY: Duration = Duration::from_secs(5);

/// The flags of `serve --train` as they are given.
#[derive(Debug, clap::Args)]
struct GivenFlags {
    /// Trains the model NAME while it is served. SOURCE is a directory (or follow:DIR), whose files are
    /// trained in the order of their names as they are renamed into it, or data files, or `learn`: the
    /// samples that clients send with Learn
    #[arg(long, value_name = "NAME=SOURCE", num_args = 1..)]
    train: Vec<String>,
    /// The model.toml that `init` wrote; needed if the model has no version yet
    #[arg(long, value_name = "FILE")]
    model_config: Option<PathBuf>,
    /// Threads that train when a processor is free [default: --threads]
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1, 1024))]
    train_threads: Option<usize>,
    /// Ends training after the file of this name, or before a file whose name is greater
    #[arg(long, value_name = "NAME")]
    follow_until: Option<String>,
    /// How many times to train on the data files
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u32>(1, u64::from(MAX_EPOCHS)))]
    epochs: u32,
    #[command(flatten)]
    order: OrderFlags,
    /// How long the end of the server waits for the last version to be published
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = whole::<u64>(1, 86_400))]
    last_version_seconds: u64,
    #[command(flatten)]
    run: RunFlags,
}

impl GivenFlags {
    /// A flag that is given and only for data files.
    fn for_files_only(&self) -> Option<&'static str> {
        if self.epochs > 1 { Some("--epochs") } else { self.order.given() }
    }
}

/// Flags of `serve --train`.
#[derive(Debug)]
pub(crate) struct ServeTrainFlags {
    target: Target,
    given: GivenFlags,
}

/// [`ServeTrainFlags`] if `--train` is given. Each of them requires it. clap cannot derive this, because
/// flags are flattened within them.
#[derive(Debug)]
pub(crate) struct OptionalServeTrain(pub Option<ServeTrainFlags>);

impl clap::Args for OptionalServeTrain {
    fn augment_args(command: Command) -> Command {
        // For an update, no flag is required.
        let flags = GivenFlags::augment_args_for_update(Command::new("serve-train"));
        let needs_train = |flag: &clap::Arg| {
            let flag = flag.clone().help_heading("Training in the server");
            if flag.get_id() == "train" { flag } else { flag.requires("train") }
        };
        command.args(flags.get_arguments().map(needs_train))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for OptionalServeTrain {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        if !matches.contains_id("train") {
            return Ok(Self(None));
        }
        if matches.get_occurrences::<String>("train").is_some_and(|given| given.len() > 1) {
            let reason = "--train: given twice, but a server trains one model\n";
            return Err(clap::Error::raw(ErrorKind::ArgumentConflict, reason));
        }
        let given = GivenFlags::from_arg_matches(matches)?;
        let wrong = |reason| clap::Error::raw(ErrorKind::ValueValidation, format!("--train: {reason}\n"));
        let target = Target::parse(&given.train).map_err(wrong)?;
        if let Some(flag) =
            given.for_files_only().filter(|_| !matches!(target.source, SampleSource::Files(_)))
        {
            let reason = format!("{flag}: only for data files, because this SOURCE grows\n");
            return Err(clap::Error::raw(ErrorKind::ValueValidation, reason));
        }
        if given.run.training.format.given().is_none() && target.source != SampleSource::Learned {
            let reason = "--format: missing, for the files of --train\n";
            return Err(clap::Error::raw(ErrorKind::MissingRequiredArgument, reason));
        }
        Ok(Self(Some(ServeTrainFlags { target, given })))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The value of `--train`.
#[derive(Clone, Debug)]
struct Target {
    name: String,
    source: SampleSource,
}

impl Target {
    /// # Errors
    /// When the first word has no name, or the words no source.
    fn parse(words: &[String]) -> Result<Self, String> {
        let mut words = words.iter().map(String::as_str);
        let parts = words.next().and_then(|first| first.split_once('=')).filter(|(name, _)| !name.is_empty());
        let (name, first) = parts.ok_or("expected NAME=SOURCE, such as ctr=incoming")?;
        let source: Vec<&str> = std::iter::once(first).chain(words).collect();
        Ok(Self { name: name.to_owned(), source: SampleSource::parse(&source)? })
    }
}

impl ServeTrainFlags {
    /// The model's name.
    pub(crate) fn name(&self) -> &str {
        &self.target.name
    }

    /// The model's name, if it is trained on the samples that clients send.
    pub(crate) fn learns(&self) -> Option<String> {
        (self.target.source == SampleSource::Learned).then(|| self.target.name.clone())
    }

    /// How long the end of the server waits for the last version.
    pub(super) fn last_version(&self) -> Duration {
        Duration::from_secs(self.given.last_version_seconds)
    }

    /// Threads that train, if they are given.
    pub(super) fn threads(&self) -> Option<usize> {
        self.given.train_threads
    }

    /// The flags of `train` that mean the same, with which the model's last version continues.
    pub(super) fn into_args(self, models: &Path) -> anyhow::Result<Args> {
        let Self { target: Target { name, source }, given } = self;
        let GivenFlags { model_config, follow_until, epochs, order, run, .. } = given;
        // A directory without this model has no versions.
        let from = versions(models, &name).is_ok_and(|versions| !versions.is_empty());
        if model_config.is_none() && !from {
            let error = anyhow!("--model-config: missing, and model {name:?} has no version yet");
            return Err(InputError(error).into());
        }
        Ok(Args {
            model_config,
            from: from.then_some(VersionSelector::Latest),
            resume: true,
            data: source.flags(follow_until, order),
            run: RunFlags { publish: run.publish.or_every(PUBLISH_EVERY), ..run },
            compute: ComputeFlags::default(),
            valid: None,
            valid_out: None,
            models: models.to_owned(),
            name,
            epochs,
            early_stop: None,
            save_best: false,
            metrics_http: None,
            alone: false,
            json: false,
        })
    }
}
