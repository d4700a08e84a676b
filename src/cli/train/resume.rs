//! `train --resume`: finds the version that an interrupted run published last.

use anyhow::anyhow;

use super::Args;
use super::run::Start;
use crate::cli::InputError;
use crate::dataset::Stop;
use crate::store::{self, Opened, Purpose, RunNotes, StoreError};
use crate::trainer::cursor::{Cursor, RunIdentity};
use crate::trainer::{check_optimizer, check_optimizer_notes};
use crate::types::{Version, VersionSelector};

/// Where the run continues: after the last version. `None` if the run published nothing, which is logged.
///
/// # Errors
/// When the last version belongs to another run, which is named by its first difference, or cannot be read.
pub(crate) fn find(args: &Args, stop: &Stop) -> anyhow::Result<Option<Start>> {
    let Some(latest) = open_last(args)? else { return Ok(beginning(args, None)) };
    let version = latest.store.version();
    let run = args.cursor_run(&args.feed(&latest.schema, stop))?;
    let reason = match cursor_of_run(args, &latest, &run)? {
        Ok(cursor) => return Ok(Some(Start::Resumed(Box::new(latest), Box::new(cursor)))),
        Err(reason) => reason,
    };
    let own = match args.from {
        None => overtaken(args, &run, Version(0), version),
        Some(VersionSelector::Latest) => None,
        Some(VersionSelector::Version(from)) => overtaken(args, &run, from, version),
    };
    match own {
        Some(own) => Err(wrong(&way_out(args, &reason, own, version))),
        None if args.from.is_none() => Err(wrong(&reason)),
        None => Ok(beginning(args, Some(&reason))),
    }
}

/// Opens the last version of the model; `None` if there is none.
fn open_last(args: &Args) -> anyhow::Result<Option<Opened>> {
    match store::open_to_continue(&args.models, &args.name, Purpose::Train) {
        Ok(latest) => Ok(Some(latest)),
        Err(StoreError::MissingDirectory { .. }) => Ok(None),
        Err(StoreError::NoGoodVersion { refused, .. }) if refused.is_empty() => Ok(None),
        Err(error) => Err(unreadable(args, error.into())),
    }
}

/// The cursor of a version, or why the run does not continue from it.
///
/// # Errors
/// When the cursor cannot be read.
fn cursor_of_run(args: &Args, latest: &Opened, run: &RunIdentity) -> anyhow::Result<Result<Cursor, String>> {
    let version = latest.store.version();
    let Some(text) = &latest.cursor else { return Ok(Err(format!("version {version} has no cursor"))) };
    let cursor = Cursor::parse(text).map_err(|error| {
        let file = format!("version {version}: checkpoint/cursor.json");
        unreadable(args, anyhow::Error::new(error).context(file))
    })?;
    let optimizer = args.run.training.optimizer()?;
    Ok(match cursor.run.check(run).and_then(|()| check_optimizer(latest, optimizer)) {
        Ok(()) => Ok(cursor),
        Err(other) => Err(format!("version {version} is of another run: {other}")),
    })
}

/// Logs that the run starts at the beginning. `other`: why the last version is not of this run; `None` if
/// there is no version.
fn beginning(args: &Args, other: Option<&str>) -> Option<Start> {
    let reason = other.unwrap_or("no version");
    let text =
        format!("this run has published nothing yet ({reason}): it starts at the beginning of its data");
    match other.filter(|_| !args.alone) {
        None => tracing::info!(model = args.name, "{text}"),
        // Perhaps only a flag was changed, and the data should not be trained on again.
        Some(_) => tracing::warn!(model = args.name, "{text}"),
    }
    None
}

/// The error when the last version or its cursor cannot be read.
fn unreadable(args: &Args, error: anyhow::Error) -> anyhow::Error {
    match args.alone {
        true => wrong(&format!("{error:#}")),
        // With `serve --train`, the existing versions are served all the same.
        false => error.context("--resume"),
    }
}

fn wrong(reason: &str) -> anyhow::Error {
    InputError(anyhow!("--resume: {reason}")).into()
}

/// What helps if `last` is of another run, but `own` is of this one.
fn way_out(args: &Args, reason: &str, own: Version, last: Version) -> String {
    let dir = args.shown_dir(last);
    let moved = match last.0 - own.0 {
        1 => format!("{dir} is"),
        _ => format!("all directories up to {dir} are"),
    };
    format!("{reason}. Version {own} is of this run, and continues if {moved} moved away or removed")
}

/// A version of this run between two others.
fn overtaken(args: &Args, run: &RunIdentity, after: Version, before: Version) -> Option<Version> {
    let versions = store::versions(&args.models, &args.name).ok()?;
    let between = versions.into_iter().filter(|&version| version > after && version < before);
    between.rev().find(|&version| is_of_run(args, run, version))
}

/// Whether a version is of this run. Its tables are not read.
fn is_of_run(args: &Args, run: &RunIdentity, version: Version) -> bool {
    let Ok(RunNotes { cursor, metadata }) = RunNotes::read(&args.models, &args.name, version) else {
        return false;
    };
    let cursor = cursor.and_then(|text| Cursor::parse(&text).ok());
    let same_optimizer =
        args.run.training.optimizer().is_ok_and(|now| check_optimizer_notes(&metadata, now).is_ok());
    same_optimizer && cursor.is_some_and(|cursor| cursor.run.check(run).is_ok())
}

/// How the run is continued if it ends now.
pub(crate) fn outlook(args: &Args, run: &RunIdentity) -> String {
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
