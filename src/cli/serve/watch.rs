//! New versions and new models, while the server runs. One thread makes all changes: those of this module,
//! and those that clients request (`changes.rs`).
//!
//! The thread reads the directory of the models at intervals. If a model is trained in this process, it also
//! reads the model's directory when a version was published. For each served model it opens the highest
//! version above the served one, checks all of it, prepares its rows, and lets the engine take it over. A
//! version that is refused is logged once, and the next lower one is tried. A refused version is tried again
//! only if its files have changed, so a version that is copied into place slowly is served when it is
//! complete. A model that is new in the directory, or that could not be loaded before, is loaded and served
//! like those at start, unless a client has unloaded it.
//!
//! Nothing that happens here fails a request: the served version goes on until the next one is ready.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::add::{Adder, Stamp, stamp, version_folder};
use super::changes::{Asks, Requested};
use super::{LoadedModel, Loader};
use crate::cli::background;
use crate::cli::train::run::NewVersion;
use crate::engine::switch::{Changes, NextVersion, Taken};
use crate::predict::Predict;
use crate::server::Registry;
use crate::store;
use crate::types::Version;

/// How long the end of the server waits for a version that is being opened.
const END_WAIT: Duration = Duration::from_secs(1);

/// How long the thread sleeps if it reads no directory at intervals.
const LONG: Duration = Duration::from_secs(3600);

/// What the thread is asked to do.
pub(crate) enum Ask {
    /// To look for a new version of this model, which may be its first one.
    Look(NewVersion),
    /// To load or unload a model.
    Change(Requested),
    /// To use the new interval between two looks at all models.
    Interval,
    /// To end.
    Stop,
}

/// The way to the thread.
pub(crate) struct Wakes {
    pub wake: Sender<Ask>,
    woken: Receiver<Ask>,
}

impl Wakes {
    pub(crate) fn new() -> Self {
        let (wake, woken) = mpsc::channel();
        Self { wake, woken }
    }

    /// Lets clients load and unload the models of a directory. What they ask for waits for the thread.
    pub(crate) fn open(&self, registry: &Registry, models: &Path) {
        registry.set_repository(Arc::new(Asks { models: models.to_owned(), wake: self.wake.clone() }));
    }
}

/// A thread that watches the directory of the models until this is dropped.
pub struct Watching {
    stop: Arc<AtomicBool>,
    /// Wakes the thread.
    wake: Sender<Ask>,
    /// Closed when the thread ends.
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Watching {
    /// Starts the thread. If `models.watch_seconds` is 0, it only looks at the models that are named.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start(adder: Adder, wakes: Wakes) -> std::io::Result<Self> {
        let Wakes { wake, woken } = wakes;
        let stop = Arc::new(AtomicBool::new(false));
        let (end, ended) = mpsc::channel::<()>();
        let mut watcher = Watcher {
            adder,
            stop: stop.clone(),
            models: HashMap::new(),
            unloaded: HashSet::new(),
            unreadable: false,
            opening: background::idle_pool("open").map_err(std::io::Error::other)?,
        };
        let thread = std::thread::Builder::new().name("watch-models".into()).spawn(move || {
            let _end = end;
            watcher.watch(&woken);
        })?;
        Ok(Self { stop, wake, ended, thread: Some(thread) })
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // It fails if the thread has ended.
        let _ = self.wake.send(Ask::Stop);
        // Opening a large version takes long, and its result is not needed any more.
        if self.ended.recv_timeout(END_WAIT) == Err(RecvTimeoutError::Timeout) {
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches the models panicked");
        }
    }
}

/// What is known about a served model.
#[derive(Default)]
struct Watched {
    /// Versions that were refused, as they were then.
    refused: BTreeMap<Version, Stamp>,
    /// Whether its directory could not be read at the last look.
    unreadable: bool,
}

/// What the thread has.
pub(crate) struct Watcher {
    pub adder: Adder,
    /// Models that are served again only when a client loads them.
    pub unloaded: HashSet<String>,
    stop: Arc<AtomicBool>,
    models: HashMap<String, Watched>,
    /// Whether the directory could not be read at the last look.
    unreadable: bool,
    /// Threads that open versions when a processor is free.
    opening: rayon::ThreadPool,
}

impl Watcher {
    /// Looks at all models at intervals, and does what it is asked to do.
    fn watch(&mut self, woken: &Receiver<Ask>) {
        let mut last = Instant::now();
        while !self.stops() {
            // A new interval wakes this thread.
            let every = self.adder.loader.live.watch();
            let wait = every.map_or(LONG, |every| (last + every).saturating_duration_since(Instant::now()));
            match woken.recv_timeout(wait) {
                Ok(Ask::Look(new)) => self.look_at_named(&new.model),
                Ok(Ask::Change(requested)) => self.change(requested),
                Ok(Ask::Interval) => {}
                Ok(Ask::Stop) => return,
                Err(RecvTimeoutError::Timeout) if every.is_none() => {}
                Err(RecvTimeoutError::Timeout) => {
                    self.look();
                    last = Instant::now();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn look_at_named(&mut self, name: &str) {
        match self.adder.served.find(name) {
            Some(model) => {
                // The reason is in the log.
                let _ = self.look_at(&model);
            }
            // It has its first good version.
            None if !self.unloaded.contains(name) => self.add(name),
            None => {}
        }
    }

    fn look(&mut self) {
        let served = self.adder.served.all();
        for model in &served {
            if self.stops() {
                return;
            }
            // The reason is in the log.
            let _ = self.look_at(model);
        }
        let names = match store::models(&self.adder.loader.models) {
            Ok(names) => names,
            Err(reason) => {
                if !std::mem::replace(&mut self.unreadable, true) {
                    tracing::warn!(%reason, "server.models: cannot be read; the loaded models go on");
                }
                return;
            }
        };
        self.unreadable = false;
        let known: Vec<String> = served.iter().map(|model| model.engine.describe().model).collect();
        for name in names.iter().filter(|name| !known.contains(name)) {
            if self.stops() {
                return;
            }
            if !self.unloaded.contains(name) {
                self.add(name);
            }
        }
        self.adder.retain(&names);
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Forgets which versions of a model were refused, so that they are tried again.
    pub(crate) fn forget_refused(&mut self, name: &str) {
        self.models.remove(name);
        self.adder.forget_refused(name);
    }

    /// Takes over the highest good version of a model above the served one, if there is one.
    ///
    /// # Errors
    /// Why the highest version is not served, if it was refused now.
    pub(crate) fn look_at(&mut self, model: &LoadedModel) -> Result<(), String> {
        let description = model.engine.describe();
        let (name, serving) = (description.model, description.version);
        let watched = self.models.entry(name.clone()).or_default();
        let versions = match store::versions(&self.adder.loader.models, &name) {
            Ok(versions) => versions,
            Err(reason) => {
                if !std::mem::replace(&mut watched.unreadable, true) {
                    let effect = "the loaded version goes on";
                    tracing::warn!(model = name, version = %serving, %reason, "model unreadable: {effect}");
                }
                return Err(reason.to_string());
            }
        };
        if std::mem::take(&mut watched.unreadable) {
            tracing::info!(model = name, version = %serving, "model readable again");
        }
        watched.refused.retain(|version, _| versions.contains(version));
        let mut result = Ok(());
        for version in versions.into_iter().rev().filter(|version| *version > serving) {
            // Read before the version is opened, so that later changes are noticed.
            let now = stamp([version_folder(&self.adder.loader, &name, version)]);
            if watched.refused.get(&version) == Some(&now) {
                continue;
            }
            match take_over(&self.adder.loader, &self.opening, model, version) {
                Ok(()) => {
                    watched.refused.remove(&version);
                    return result;
                }
                Err(reason) => {
                    let reason = format!("{reason:#}");
                    tracing::warn!(model = name, %version, serving = %serving, %reason, "version refused");
                    model.engine.count_refused();
                    result = result.and(Err(format!("version {version} is refused: {reason}")));
                    watched.refused.insert(version, now);
                }
            }
        }
        result
    }

    /// Loads and serves a new model, if it can be loaded.
    fn add(&mut self, name: &str) {
        if let Ok(true) = self.adder.add(name) {
            tracing::info!(model = name, "new model served");
        }
    }
}

/// Opens a version, checks all of it and switches to it.
fn take_over(
    loader: &Loader,
    opening: &rayon::ThreadPool,
    model: &LoadedModel,
    version: Version,
) -> anyhow::Result<()> {
    let taken = opening.install(|| anyhow::Ok(model.engine.switch(open_next(loader, model, version)?)?));
    let Taken { from, to, carried, dropped } = taken?;
    let name = model.engine.describe().model;
    tracing::info!(model = name, %from, version = %to, carried, dropped, "version taken over");
    Ok(())
}

fn open_next(loader: &Loader, model: &LoadedModel, version: Version) -> anyhow::Result<NextVersion> {
    let LoadedModel { engine, memory } = model;
    let (served, name) = (engine.served(), engine.describe().model);
    let mut opened = store::open_after(&loader.models, &name, version, &served.store)?;
    let weights = engine.check_next(&opened)?;
    let changes = match opened.store.changed_since(&served.store) {
        // The base rows are those of the served version, and ready.
        Some(rows) => Changes::Rows(rows),
        None => {
            memory.load(&mut opened)?;
            memory.prepare(&mut opened);
            Changes::Unknown
        }
    };
    Ok(NextVersion { opened, weights, changes, switch_bytes: loader.live.switch_bytes() })
}
