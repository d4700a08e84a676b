//! `train --resume`: finds the version that an interrupted run published last.

use anyhow::anyhow;

use super::Args;
use super::from::FromVersion;
use crate::cli::InputError;
use crate::dataset::Stop;
use crate::store::{self, Opened, Purpose, StoreError};
use crate::trainer::check_optimizer;
use crate::trainer::cursor::Cursor;

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
        // The run may have begun at this version and published nothing.
        let may_begin_here = match args.from {
            None => false,
            Some(FromVersion::Latest) => true,
            Some(FromVersion::Number(from)) => from == version,
        };
        let Some(text) = &latest.cursor else {
            let reason = format!("version {version} has no cursor");
            return if may_begin_here { Ok(Self::Beginning(reason)) } else { Err(wrong(reason)) };
        };
        let cursor: Cursor = serde_json::from_str(text)
            .map_err(|error| wrong(format!("version {version}: checkpoint/cursor.json: {error}")))?;
        let run = args.cursor_run(&args.feed(&latest.schema, stop))?;
        let optimizer = args.run.training.optimizer()?;
        match cursor.run.check(&run).and_then(|()| check_optimizer(&latest, optimizer)) {
            Ok(()) => Ok(Self::At(Box::new(latest), Box::new(cursor))),
            Err(other) => {
                let reason = format!("version {version} is of another run: {other}");
                if may_begin_here { Ok(Self::Beginning(reason)) } else { Err(wrong(reason)) }
            }
        }
    }
}
