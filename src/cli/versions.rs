//! `flechette versions`: lists the versions of a model, writes one of them as a full version, or removes old
//! ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use serde_json::json;

use crate::cli::flags::whole;
use crate::cli::train::lock::lock_model;
use crate::cli::{InputError, note, print_and_end};
use crate::store::listing::{Check, Listed, Summary, list};
use crate::store::{self, Purpose, StoreError, retention};
use crate::types::{Version, unix_ms};

/// Flags of `versions`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory of the models
    #[arg(long, value_name = "DIR")]
    models: PathBuf,
    /// Name of the model; without it, all models are listed
    #[arg(long, required_if_eq("compact", "true"))]
    name: Option<String>,
    /// Reads only the manifests, which takes no time with large tables; damage to other files does not show
    #[arg(long, conflicts_with_all = ["compact", "keep"])]
    quick: bool,
    /// Writes the latest good version, if it is a delta, or any --version, as a full version with the next
    /// number
    #[arg(long)]
    compact: bool,
    /// The version for --compact
    #[arg(long, value_name = "N", requires = "compact", value_parser = whole::<u64>(1, u64::MAX))]
    version: Option<u64>,
    /// Removes all versions but the last N full ones and the deltas after the oldest of them, except those
    /// that a process uses, or that labels or settings of a server name
    #[arg(long, value_name = "N", requires = "name", value_parser = whole::<usize>(1, 1_000_000))]
    #[arg(conflicts_with_all = ["compact", "json"])]
    keep: Option<usize>,
    /// Prints one line of JSON
    #[arg(long, conflicts_with = "compact")]
    json: bool,
}

/// Lists, compacts or removes.
///
/// # Errors
/// When the directory cannot be read, the full version cannot be written, or another process publishes
/// versions of the model.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let wrong = |error: StoreError| anyhow::Error::from(InputError(anyhow!("--models: {error}")));
    if let (true, Some(name)) = (args.compact, &args.name) {
        return compact(args, name);
    }
    if let (Some(keep), Some(name)) = (args.keep, &args.name) {
        return remove_old(&args.models, name, keep);
    }
    let names = match &args.name {
        Some(name) => vec![name.clone()],
        None => store::models(&args.models).map_err(wrong)?,
    };
    let check = if args.quick { Check::Manifests } else { Check::Files };
    // A model that cannot be read does not hide the others.
    let (mut models, mut ended) = (Vec::new(), Ok(()));
    let mut fails = |error| match ended {
        Ok(()) => ended = Err(wrong(error)),
        Err(_) => note(&format!("--models: {error}")),
    };
    for name in &names {
        // Without its labels, a model has versions still.
        let named = store::labels::load(&args.models, name).unwrap_or_else(|error| {
            fails(error);
            BTreeMap::new()
        });
        match list(&args.models, name, &named, check) {
            Ok(listed) => models.push((name, listed)),
            Err(error) => fails(error),
        }
    }
    let text = if args.json {
        let models = models
            .iter()
            .map(|(name, listed)| json!({ "name": name, "versions": versions_json(listed, check) }));
        format!("{}\n", json!({ "models": models.collect::<Vec<_>>() }))
    } else {
        models.iter().map(|(name, listed)| table(name, listed, check)).collect()
    };
    print_and_end(&text, ended)
}

fn compact(args: &Args, name: &str) -> anyhow::Result<()> {
    let wrong = |error: StoreError| anyhow::Error::from(InputError(anyhow!("--compact: {error}")));
    store::check_name("model", name).map_err(wrong)?;
    // A trainer compacts its own chain. Here the contents of its next version would be hidden.
    let _lock = lock_existing(&args.models, name)?;
    let highest = store::versions(&args.models, name).map_err(wrong)?.pop();
    let opened = match args.version {
        Some(version) => store::open(&args.models, name, Version(version), Purpose::Serve),
        None => store::open_to_continue(&args.models, name, Purpose::Serve),
    };
    let store = opened.map_err(wrong)?.store;
    let (version, model) = (store.version(), args.models.join(name));
    if store.is_full() && args.version.is_none_or(|version| highest == Some(Version(version))) {
        note(&format!("{}/{version} is full", model.display()));
        return Ok(());
    }
    let written = retention::compact(&args.models, name, version, highest.unwrap_or(version))?.version;
    note(&format!("wrote {}/{written}, with the contents of version {version}", model.display()));
    Ok(())
}

/// Locks a model against trainers that publish. A model that is not there is not locked, because that would
/// make its directory.
fn lock_existing(models: &Path, name: &str) -> anyhow::Result<Option<File>> {
    if models.join(name).is_dir() { lock_model(models, name) } else { Ok(None) }
}

fn remove_old(models: &Path, name: &str, keep: usize) -> anyhow::Result<()> {
    let wrong = |error: StoreError| anyhow::Error::from(InputError(anyhow!("--keep: {error}")));
    store::check_name("model", name).map_err(wrong)?;
    let highest = store::versions(models, name).map_err(wrong)?.pop();
    // What stays must not be only versions that cannot be opened. Opening one takes long, so it comes before
    // the lock, and the version stays open, so that it is not removed.
    let open = |highest| store::open(models, name, highest, Purpose::Serve).map_err(wrong);
    let _highest = highest.map(open).transpose()?;
    // A trainer that publishes removes what is old itself.
    let _lock = lock_existing(models, name)?;
    let removed = retention::retain(models, name, keep).map_err(wrong)?;
    let numbers: Vec<String> = removed.iter().map(ToString::to_string).collect();
    let model = models.join(name);
    note(&match removed.len() {
        0 => format!("{}: no version was removed", model.display()),
        _ => format!("{}: removed {}", model.display(), numbers.join(", ")),
    });
    Ok(())
}

/// Whether a version can be opened; `None` if that was not checked.
fn good(listed: &Listed, check: Check) -> Option<bool> {
    match check {
        Check::Manifests if listed.refusal.is_none() => None,
        _ => Some(listed.refusal.is_none()),
    }
}

fn versions_json(versions: &[Listed], check: Check) -> Vec<serde_json::Value> {
    let version = |listed: &Listed| {
        let Listed { version, served, labels, summary, refusal, checkpoint } = listed;
        let summary = summary.as_ref();
        let training = summary.and_then(|summary| summary.training);
        json!({
            "version": version.0, "kind": summary.map(kind),
            "base": summary.and_then(|summary| summary.base).map(|base| base.version.0),
            "step": training.map(|training| training.steps),
            "samples": training.map(|training| training.samples),
            "last_batch_unix_ms": training.map(|training| training.last_batch_unix_ms),
            "bytes": summary.map(|summary| summary.bytes), "quality": summary.map(|summary| &summary.quality),
            "good": good(listed, check), "refused": refusal.as_ref().map(ToString::to_string),
            "training_refused": checkpoint.as_ref().map(ToString::to_string),
            "served": served, "labels": labels,
        })
    };
    versions.iter().map(version).collect()
}

fn kind(summary: &Summary) -> &'static str {
    if summary.base.is_some() { "delta" } else { "full" }
}

/// The versions of a model, one a line, under a header.
fn table(name: &str, versions: &[Listed], check: Check) -> String {
    let mut text = format!(
        "{name}\n{:>8} {:5} {:>6} {:>10} {:>13} {:>13} {:>8}  {:4} {:6} {:10} {}\n",
        "VERSION",
        "KIND",
        "BASE",
        "STEP",
        "SAMPLES",
        "BYTES",
        "TRAINED",
        "GOOD",
        "SERVED",
        "LABELS",
        "QUALITY"
    );
    for listed in versions {
        let Listed { version, served, labels, summary, refusal, checkpoint } = listed;
        let number = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
        let summary = summary.as_ref();
        let training = summary.and_then(|summary| summary.training);
        let yes = |yes: bool| if yes { "yes" } else { "no" };
        let quality = summary.into_iter().flat_map(|summary| &summary.quality);
        let quality: Vec<String> = quality.map(|(name, value)| format!("{name} {value:.4}")).collect();
        let mut quality = if quality.is_empty() { "-".to_owned() } else { quality.join(", ") };
        if let Some(reason) = checkpoint {
            let _ = write!(quality, "; training cannot continue from it: {reason}");
        }
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:>8} {:5} {:>6} {:>10} {:>13} {:>13} {:>8}  {:4} {:6} {:10} {}",
            version.0,
            summary.map_or("-", kind),
            number(summary.and_then(|summary| summary.base).map(|base| base.version.0)),
            number(training.map(|training| training.steps)),
            number(training.map(|training| training.samples)),
            number(summary.map(|summary| summary.bytes)),
            training.map_or("-".to_owned(), |training| ago(training.last_batch_unix_ms)),
            good(listed, check).map_or("-", yes),
            yes(*served),
            if labels.is_empty() { "-".to_owned() } else { labels.join(",") },
            refusal.as_ref().map_or(quality, ToString::to_string),
        );
    }
    text
}

/// How long ago a time was, in its largest unit. A time in the future, after a clock was set back, is `0s`.
fn ago(then: u64) -> String {
    let seconds = unix_ms().saturating_sub(then) / 1000;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}min", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_its_largest_unit_and_a_time_in_the_future_is_0s() {
        let now = unix_ms();
        let ages = [3000, 180_000, 7_200_000, 259_200_000].map(|age| ago(now - age - 500));
        assert_eq!(ages, ["3s", "3min", "2h", "3d"]);
        assert_eq!(ago(now + 3_600_000), "0s");
    }
}
