//! `train --resume`: finds the version that an interrupted run published last.

use anyhow::anyhow;

use super::Args;
use super::from::FromVersion;
use crate::cli::InputError;
use crate::dataset::Stop;
use crate::store::{self, Opened, Purpose, StoreError};
use crate::trainer::check_optimizer;
use crate::trainer::cursor::{Cursor, Run};
use crate::types::Version;

/// Where a run with `--resume` begins.
pub(crate) enum ResumePoint {
    /// After the last step of this version.
    At(Box<Opened>, Box<Cursor>),
    /// At its beginning, because it published nothing. The text says so.
    Beginning(String),
}

impl ResumePoint {
    /// The last version of the run.
    ///
    /// # Errors
    /// When the last version belongs to another run, which is named by its first difference, or cannot be
    /// read.
    pub(crate) fn find(args: &Args, stop: &Stop) -> anyhow::Result<Self> {
        let wrong = |reason: String| anyhow::Error::from(InputError(anyhow!("--resume: {reason}")));
        let latest = match store::open_latest(&args.models, &args.name, Purpose::Train, |_| Ok(())) {
            Ok(latest) => latest.opened,
            Err(StoreError::MissingDirectory { .. }) => return Ok(Self::Beginning("no version".to_owned())),
            Err(StoreError::NoGoodVersion { refused, .. }) if refused.is_empty() => {
                return Ok(Self::Beginning("no version".to_owned()));
            }
            Err(error) => return Err(wrong(error.to_string())),
        };
        let version = latest.store.version();
        let run = args.cursor_run(&args.feed(&latest.schema, stop))?;
        let optimizer = args.run.training.optimizer()?;
        let reason = match &latest.cursor {
            None => format!("version {version} has no cursor"),
            Some(text) => {
                let cursor = Cursor::parse(text)
                    .map_err(|error| wrong(format!("version {version}: checkpoint/cursor.json: {error}")))?;
                match cursor.run.check(&run).and_then(|()| check_optimizer(&latest, optimizer)) {
                    Ok(()) => return Ok(Self::At(Box::new(latest), Box::new(cursor))),
                    Err(other) => format!("version {version} is of another run: {other}"),
                }
            }
        };
        let before = match args.from {
            None => return Err(wrong(reason)),
            Some(FromVersion::Latest) => None,
            Some(FromVersion::Number(from)) => overtaken(args, &run, from, version),
        };
        match before {
            None => Ok(Self::Beginning(reason)),
            Some(before) => Err(wrong(format!("{reason}. Version {before} is of this run"))),
        }
    }
}

/// A version of this run between two others.
fn overtaken(args: &Args, run: &Run, after: Version, before: Version) -> Option<Version> {
    let versions = store::versions(&args.models, &args.name).ok()?;
    let between = versions.into_iter().filter(|&version| version > after && version < before);
    between.rev().find(|&version| is_of_run(args, run, version))
}

/// Whether a version is of this run. Its tables are not read.
fn is_of_run(args: &Args, run: &Run, version: Version) -> bool {
    let cursor = store::cursor(&args.models, &args.name, version).ok().flatten();
    let cursor = cursor.and_then(|text| Cursor::parse(&text).ok());
    cursor.is_some_and(|cursor| cursor.run.check(run).is_ok())
}

/// How the run is continued if it ends now.
pub(crate) fn outlook(args: &Args, run: &Run) -> String {
    let latest = store::versions(&args.models, &args.name).ok().and_then(|mut versions| versions.pop());
    let own = latest.and_then(|latest| overtaken(args, run, Version(0), latest));
    match (latest, own) {
        (Some(latest), _) if is_of_run(args, run, latest) => {
            format!("the same command with --resume continues from version {latest}")
        }
        // `--resume` refuses to begin again beside a version of the run.
        (_, Some(own)) => format!("--from {own} continues from version {own}, which is of this run"),
        (Some(latest), None) if args.from.is_none() => {
            let begins = "the same command without --resume starts at the beginning";
            format!("{begins}, because version {latest} is of another run")
        }
        _ => "the same command with --resume starts at the beginning".to_owned(),
    }
}
