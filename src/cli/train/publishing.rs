//! The flags of publishing, and the versions that `train` writes: at intervals, of the best epoch, and at the
//! end.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};

use super::Args;
use super::data::Consumer;
use super::run::ToServer;
use super::trained::Trained;
use crate::cli::flags::whole;
use crate::cli::{InputError, error_line};
use crate::config::{Config, VersionsConfig};
use crate::dataset::{Shortage, Stop};
use crate::store::disk::{SystemDisk, is_at};
use crate::store::hot_rows::STATE;
use crate::store::{self, Base, EmbeddingStore, Opened, Purpose, retention, versions};
use crate::trainer::progressive::Progressive;
use crate::trainer::publish::{CutNotes, Every, PublishOptions, Published, Publisher, RunObserver};
use crate::trainer::{Data, TrainError, is_exact};
use crate::types::Version;

/// Flags of publishing.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PublishFlags {
    /// Publishes a version at this interval while training goes on: 500steps, 5s or 200ms. Earlier when the
    /// rows that changed take a sixteenth of the tables and 64 MiB. `serve --train` has the default 5s
    #[arg(long, value_name = "INTERVAL")]
    publish_every: Option<Interval>,
    /// Publishes no version whose progressive AUC is less, or log loss is more, than a bound, or whose log
    /// loss is not finite: auc=0.7 or logloss=0.5
    #[arg(long, value_name = "BOUND")]
    publish_gate: Option<Gate>,
    /// Samples before the cut that --publish-gate looks at; at most --window
    #[arg(long, value_name = "N", requires = "publish_gate", default_value_t = 10_000)]
    #[arg(value_parser = whole::<usize>(1, 1 << 30))]
    gate_samples: usize,
}

/// The value of `--publish-every`.
#[derive(Clone, Copy, Debug)]
struct Interval(Every);

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |unit: &str| text.strip_suffix(unit)?.trim().parse::<u64>().ok().filter(|&n| n > 0);
        let every = number("steps").map(Every::Steps);
        let every = every.or_else(|| number("ms").map(|ms| Every::Time(Duration::from_millis(ms))));
        let every = every.or_else(|| number("s").map(|s| Every::Time(Duration::from_secs(s))));
        every
            .map(Self)
            .ok_or_else(|| "expected a number of steps or a time, such as 500steps or 5s".to_owned())
    }
}

/// The value of `--publish-gate`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gate {
    Auc(f64),
    LogLoss(f64),
}

impl FromStr for Gate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bound = |text: &str| text.parse().ok().filter(|bound: &f64| bound.is_finite() && *bound > 0.0);
        let gate = match text.split_once('=') {
            Some(("auc", least)) => bound(least).filter(|&least| least < 1.0).map(Self::Auc),
            Some(("logloss", most)) => bound(most).map(Self::LogLoss),
            _ => None,
        };
        gate.ok_or_else(|| "expected auc= and a number below 1, or logloss= and a positive number".to_owned())
    }
}

impl PublishFlags {
    /// With an interval, if none was given.
    #[must_use]
    pub(crate) fn or_every(mut self, every: Duration) -> Self {
        self.publish_every.get_or_insert(Interval(Every::Time(every)));
        self
    }

    /// Checks that no flag is given without the flag that it needs. `serve --train` always has an interval.
    ///
    /// # Errors
    /// For a gate without an interval.
    pub(crate) fn check_needs(&self) -> anyhow::Result<()> {
        if self.publish_gate.is_some() && self.publish_every.is_none() {
            return Err(InputError(anyhow!("--publish-gate: used only with --publish-every")).into());
        }
        Ok(())
    }

    /// Whether versions are published while training goes on.
    pub(crate) fn publishes(&self) -> bool {
        self.publish_every.is_some()
    }

    /// Checks that a version with these last samples may be published.
    ///
    /// # Errors
    /// What the gate found, and its bound.
    pub(crate) fn check(&self, progressive: &Progressive) -> Result<(), String> {
        let Some(gate) = self.publish_gate else { return Ok(()) };
        let refused = |what: &str| Err(format!("--publish-gate: {what}"));
        let Some(last) = progressive.last(self.gate_samples) else {
            return refused("no sample was trained");
        };
        let (samples, quality) = (last.quality.samples, last.quality);
        match (gate, quality.auc) {
            _ if !quality.log_loss.is_finite() => {
                refused(&format!("log loss of the last {samples} samples: not finite"))
            }
            (Gate::Auc(_), None) => refused(&format!("all labels of the last {samples} samples are equal")),
            (Gate::Auc(least), Some(auc)) if auc.is_nan() || auc < least => refused(&format!(
                "AUC of the last {samples} samples: expected at least {least}, got {auc:.4}"
            )),
            (Gate::LogLoss(most), _) if quality.log_loss > most => refused(&format!(
                "log loss of the last {samples} samples: expected at most {most}, got {:.4}",
                quality.log_loss
            )),
            _ => Ok(()),
        }
    }
}

/// Writes the versions of a run.
pub(crate) struct Versions<'a> {
    args: &'a Args,
    /// Removes the samples that a published version was trained on from the log of learned samples.
    consume: Option<Consumer>,
    /// Without one, a version is written only when it is asked for.
    publisher: Option<Publisher>,
    /// The version of the best epoch: while it is open, retention does not remove it.
    best: Option<EmbeddingStore>,
    /// Without a publisher, the versions of best epochs that were written here and not removed.
    bests: Vec<Base>,
}

impl<'a> Versions<'a> {
    /// `from` is the version that training continues from. A server in this process is told what happens. The
    /// lock is renewed if the model's directory has to be made again.
    ///
    /// # Errors
    /// When the thread that writes cannot start, or memory does not suffice.
    pub(crate) fn new(
        args: &'a Args,
        config: &Config,
        model: &Trained,
        (from, server, lock): (Option<Base>, Option<&ToServer>, ModelLock),
    ) -> anyhow::Result<Self> {
        let consume = args.consumer();
        let Some(Interval(every)) = args.run.publish.publish_every else {
            return Ok(Self { args, consume, publisher: None, best: None, bests: Vec::new() });
        };
        let VersionsConfig { keep, compact_at } = config.versions;
        let options = PublishOptions {
            models: args.models.clone(),
            name: args.name.clone(),
            disk: Arc::new(SystemDisk),
            every,
            keep,
            compact_at,
        };
        let (server, in_process) = (server.cloned(), server.cloned());
        let (models, name, consumer) = (args.models.clone(), args.name.clone(), consume.clone());
        let on_publish = move |outcome: Result<Published, String>| {
            if outcome.is_ok() {
                lock.renew(&models, &name);
            }
            if let (Some(consume), Ok(Published { cursor: Some(cursor), .. })) = (&consumer, &outcome) {
                consume(cursor);
            }
            if let Some(server) = &server {
                server.published(&name, &outcome);
            }
            report(&name, outcome);
        };
        let mut publisher = Publisher::new(options, model.state(), from, Box::new(on_publish))?;
        if let Some(server) = in_process {
            publisher = publisher.resting_while(Box::new(move || server.looks()));
        }
        Ok(Self { args, consume, publisher: Some(publisher), best: None, bests: Vec::new() })
    }

    /// Publishes what was trained as soon as a log of samples is full.
    #[must_use]
    pub(crate) fn relieving(self, shortage: Shortage) -> Self {
        Self { publisher: self.publisher.map(|publisher| publisher.relieving(shortage)), ..self }
    }

    /// Trains on the data once. Returns the number of samples.
    ///
    /// # Errors
    /// [`TrainError`].
    pub(crate) fn train(
        &mut self,
        model: &mut Trained,
        data: Data<'_>,
        (observer, stop): (&mut dyn RunObserver, &Stop),
    ) -> Result<u64, TrainError> {
        match (&mut self.publisher, model) {
            (None, model) => model.epoch(data, |progress| observer.step(progress)),
            (Some(publisher), Trained::InMemory(reference)) => {
                publisher.train_in_memory(reference, data, observer, stop)
            }
            (Some(publisher), Trained::OnDisk { state, pipeline }) => {
                publisher.train_on_disk(state, pipeline, data, (observer, stop))
            }
        }
    }

    /// Writes a version of the model as it is now.
    ///
    /// # Errors
    /// When the version cannot be written.
    pub(crate) fn write(&mut self, model: &mut Trained, notes: &CutNotes) -> anyhow::Result<Version> {
        Ok(Version(self.write_base(model, notes)?.version))
    }

    fn write_base(&mut self, model: &mut Trained, notes: &CutNotes) -> anyhow::Result<Base> {
        match (&mut self.publisher, &mut *model) {
            (None, model) => {
                let base = model.save(&self.args.models, &self.args.name, notes)?;
                if let (Some(consume), Some(cursor)) = (&self.consume, &notes.cursor) {
                    consume(cursor);
                }
                Ok(base)
            }
            (Some(publisher), Trained::InMemory(reference)) => {
                Ok(publisher.finish(&reference.state, &reference.tables, notes)?)
            }
            (Some(publisher), Trained::OnDisk { state, pipeline }) => {
                pipeline.flush()?;
                Ok(publisher.finish_file(state, pipeline.store(), notes)?)
            }
        }
    }

    /// [`Self::write`] for the best epoch, whose version is kept on disk. Those of earlier best epochs are
    /// removed, unless something uses them.
    ///
    /// # Errors
    /// When the version cannot be written.
    pub(crate) fn write_best(&mut self, model: &mut Trained, notes: &CutNotes) -> anyhow::Result<Version> {
        let base = self.write_base(model, notes)?;
        if self.publisher.is_none() {
            self.remove_earlier_bests();
            self.bests.push(base);
        } else {
            self.keep(Version(base.version))?;
        }
        Ok(Version(base.version))
    }

    fn remove_earlier_bests(&mut self) {
        let Args { models, name, .. } = self.args;
        match retention::remove_unused(models, name, &self.bests) {
            Ok(removed) => self.bests.retain(|base| !removed.contains(base)),
            Err(error) => {
                tracing::warn!(model = name, %error, "versions of earlier best epochs are not removed");
            }
        }
    }

    /// Ends publishing, and makes a version the latest one: if others followed it, writes a full version with
    /// its contents. Returns the number of the latest version.
    ///
    /// # Errors
    /// When the version cannot be read or written.
    pub(crate) fn make_latest(&mut self, version: Version) -> anyhow::Result<Version> {
        // Waits for a version that is being written.
        self.publisher = None;
        let Args { models, name, .. } = self.args;
        match versions(models, name)?.pop() {
            Some(highest) if highest != version => {
                Ok(Version(retention::compact(models, name, version, highest)?.version))
            }
            _ => Ok(version),
        }
    }

    /// Keeps the version of the best epoch on disk: retention removes none that is open.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub(crate) fn keep(&mut self, version: Version) -> anyhow::Result<()> {
        let opened = store::open(&self.args.models, &self.args.name, version, Purpose::Serve)?;
        self.best = Some(opened.store);
        Ok(())
    }
}

/// Logs a published version.
fn report(model: &str, outcome: Result<Published, String>) {
    match outcome {
        Ok(Published { version, full, rows, bytes, took, pause, steps, .. }) => {
            let kind = if full { "full" } else { "delta" };
            let (took_ms, pause_ms) = (took.as_millis() as u64, pause.as_micros() as f64 / 1e3);
            tracing::info!(model, version, kind, steps, rows, bytes, took_ms, pause_ms, "published");
        }
        Err(reason) => tracing::warn!(model, "not published: {reason}; the next version has its rows"),
    }
}

/// What deltas of this version name as their base: the version itself, if training continues from it to the
/// bit and it is the highest.
pub(crate) fn base_of(args: &Args, opened: &Opened) -> anyhow::Result<Option<Base>> {
    let exact = is_exact(opened, args.run.training.optimizer()?);
    let highest = versions(&args.models, &args.name)?.pop();
    Ok(opened.store.base().filter(|base| exact && highest == Some(Version(base.version))))
}

/// Locks the model for a trainer that publishes, or whose version removes learned samples from their log.
///
/// # Errors
/// When another process publishes versions of the model.
pub(crate) fn lock(args: &Args) -> anyhow::Result<ModelLock> {
    let locks = args.run.publish.publishes() || args.data.learned;
    let file = locks.then(|| lock_model(&args.models, &args.name)).transpose()?.flatten();
    Ok(ModelLock(Arc::new(Mutex::new(file))))
}

/// The lock of a model while it is trained; nothing for a run that does not publish, and on a file system
/// without locks. Clones are the same lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelLock(Arc<Mutex<Option<File>>>);

impl ModelLock {
    /// Whether it locks anything.
    pub(crate) fn is_held(&self) -> bool {
        self.file().is_some()
    }

    /// Locks the model again if the locked file is gone, mostly with the directory of the model, which a
    /// version has made again. Must be called when a version was published.
    fn renew(&self, models: &Path, name: &str) {
        let mut file = self.file();
        // If the path cannot be examined, the next version tries it again.
        if file.as_ref().is_none_or(|file| is_at(file, &lock_path(models, name)).unwrap_or(true)) {
            return;
        }
        match lock_model(models, name) {
            Ok(again) => *file = again,
            Err(error) => {
                let reason = error_line(error.as_ref());
                tracing::warn!(model = name, "this run has lost the lock of the model: {reason}");
            }
        }
    }

    fn file(&self) -> MutexGuard<'_, Option<File>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock_path(models: &Path, name: &str) -> PathBuf {
    models.join(name).join(STATE).join("trainer.lock")
}

/// How often a lock is taken whose file was removed meanwhile.
const LOCK_TRIES: usize = 100;

/// Locks a model, so that no trainer publishes versions of it; `None` on a file system without locks.
///
/// # Errors
/// When another process publishes versions of the model.
pub(crate) fn lock_model(models: &Path, name: &str) -> anyhow::Result<Option<File>> {
    let path = lock_path(models, name);
    let at = || format!("{}", path.display());
    for _ in 0..LOCK_TRIES {
        fs::create_dir_all(models.join(name).join(STATE)).with_context(at)?;
        let file = File::create(&path).with_context(at)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                let path = path.display();
                bail!("--name: another process trains {name:?} and publishes: {path} is locked");
            }
            // Without locks on the file system, a second trainer is found when its version has a taken
            // number.
            Err(TryLockError::Error(_)) => return Ok(None),
            // Otherwise it was removed before it was locked, and others lock another file.
            Ok(()) if is_at(&file, &path).with_context(at)? => return Ok(Some(file)),
            Ok(()) => {}
        }
    }
    Err(anyhow!("{}: removed again and again before it is locked", path.display()))
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;
    use crate::store::disk::lock_if_free;

    #[test]
    fn intervals_are_steps_or_times() {
        let every = |text: &str| text.parse::<Interval>().map(|Interval(every)| every);
        assert_eq!(every("500steps"), Ok(Every::Steps(500)));
        assert_eq!(every("5s"), Ok(Every::Time(Duration::from_secs(5))));
        assert_eq!(every("200ms"), Ok(Every::Time(Duration::from_millis(200))));
        for wrong in ["", "5", "0s", "-1s", "steps", "1.5s", "5m"] {
            assert!(every(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_gate_refuses_what_is_worse_than_its_bound_or_not_finite() {
        let flags = |gate: &str| PublishFlags {
            publish_every: None,
            publish_gate: Some(gate.parse().unwrap()),
            gate_samples: 4,
        };
        let refusal = |gate: &str, scores: [f32; 4], labels: [f32; 4]| {
            let mut last = Progressive::new(10);
            last.push(&scores, &labels);
            flags(gate).check(&last).err()
        };
        let (good, bad, labels) = ([0.1, 0.9, 0.2, 0.8], [0.9, 0.1, 0.8, 0.2], [0.0, 1.0, 0.0, 1.0]);
        for gate in ["auc=0.7", "logloss=0.5"] {
            assert_eq!(refusal(gate, good, labels), None);
            assert!(refusal(gate, bad, labels).is_some_and(|reason| reason.contains("expected at")));
            let infinite = refusal(gate, [1.0, 0.9, 0.2, f32::NAN], labels);
            assert_eq!(
                infinite.as_deref(),
                Some("--publish-gate: log loss of the last 4 samples: not finite")
            );
        }
        assert!(refusal("auc=0.7", good, [1.0; 4]).is_some_and(|reason| reason.contains("are equal")));
        assert!(refusal("logloss=5", good, [1.0; 4]).is_none());
    }

    #[test]
    fn a_lock_is_that_of_the_file_at_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let (models, path) = (dir.path(), lock_path(dir.path(), "m"));
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            // It removes the file only if it is not locked, but others may have opened it.
            scope.spawn(|| {
                while !ended.load(Ordering::SeqCst) {
                    let Ok(file) = File::open(&path) else { continue };
                    if lock_if_free(&file) && is_at(&file, &path).is_ok_and(|at| at) {
                        let _ = fs::remove_file(&path);
                    }
                }
            });
            // It fails while the other thread has the lock.
            let is_held = |file: File| is_at(&file, &path).is_ok_and(|at| at);
            let held = (0..5000).filter_map(|_| lock_model(models, "m").ok().flatten()).all(is_held);
            ended.store(true, Ordering::SeqCst);
            assert!(held);
        });
    }

    #[test]
    fn a_model_whose_directory_was_removed_is_locked_again() {
        let dir = tempfile::tempdir().unwrap();
        let models = dir.path();
        let lock = ModelLock(Arc::new(Mutex::new(lock_model(models, "m").unwrap())));
        let others = || lock_model(models, "m").map(|file| file.is_some());
        assert!(lock.is_held() && others().is_err());
        fs::remove_dir_all(models.join("m")).unwrap();
        lock.renew(models, "m");
        assert!(others().unwrap_err().to_string().contains("another process trains \"m\" and publishes"));
        // Another trainer was faster. It keeps the lock, until it ends.
        fs::remove_dir_all(models.join("m")).unwrap();
        let other = lock_model(models, "m").unwrap();
        lock.renew(models, "m");
        drop(other);
        assert!(others().unwrap());
        lock.renew(models, "m");
        assert!(others().is_err());
        // A run that does not publish locks nothing.
        fs::remove_dir_all(models.join("m")).unwrap();
        ModelLock::default().renew(models, "m");
        assert!(!models.join("m").exists());
    }

    #[test]
    fn a_gate_has_one_bound() {
        assert_eq!("auc=0.7".parse(), Ok(Gate::Auc(0.7)));
        assert_eq!("logloss=0.5".parse(), Ok(Gate::LogLoss(0.5)));
        for wrong in ["auc", "auc=1", "auc=nan", "logloss=-1", "logloss=inf", "recall=0.5"] {
            assert!(wrong.parse::<Gate>().is_err(), "{wrong}");
        }
    }
}
