//! New versions and new models, while the server runs. One thread makes all changes: those of this module,
//! and those that clients request (`changes.rs`).
//!
//! The thread reads the directory of the models at intervals. If a model is trained in this process, it also
//! reads the model's directory when a version was published. For each served model it opens the versions that
//! are wanted, checks all of them, prepares their rows, and lets engines take them over (`versions.rs`). A
//! version that is refused is logged once, and the next lower one is tried. A refused version is tried again
//! if its files have changed, or those of a version that it builds on (`stamps.rs`), so a version that is
//! copied into place slowly, or before its base, is served when it is complete. It is also tried again after
//! a while if the reason may have passed. A model that is new in the directory, or that could not be loaded
//! before, is loaded and served like those at start, unless a client has unloaded it.
//!
//! Every wait for a batch has a limit, so a model whose batch does not end delays the changes of other models
//! by some seconds. Reading and writing files has none.
//!
//! Nothing that happens here fails a request: the served version goes on until the next one is ready. A panic
//! ends what the thread was asked to do, and not the thread.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::time::{Duration, Instant};

use super::add::Adder;
use super::changes::{ChangeRequest, CommandSender, LabelsChanged, ModelInProgress};
use super::versions::SettleOptions;
use crate::bounded_thread::BoundedThread;
use crate::cli::train::run::NewVersion;
use crate::predict::Predict;
use crate::server::Registry;
use crate::store;

/// How long the end of the server waits for a version that is being opened.
const END_WAIT: Duration = Duration::from_secs(1);

/// Most commands that wait for the thread, which may be opening a large version.
const MOST_COMMANDS: usize = 1024;

/// How long the thread sleeps if it reads no directory at intervals. Then it only tries to open logs of
/// learned samples that could not be opened.
const IDLE_SLEEP: Duration = Duration::from_secs(10);

/// A command for the thread.
pub(crate) enum WatchCommand {
    /// To look for a new version of this model, which may be its first one.
    Look(NewVersion),
    /// To load and unload versions of this model, after its labels were set.
    Labels(LabelsChanged),
    /// To look at this model, whose main engine has taken over a version or failed to.
    Switched(String),
    /// To look at all models, because their settings have changed.
    Traffic,
    /// To load or unload a model.
    Change(ChangeRequest),
    /// To use the new interval between two looks at all models.
    Interval,
    /// To end.
    Stop,
}

/// Sends commands to the thread.
#[derive(Clone)]
pub(crate) struct Wake {
    commands: SyncSender<WatchCommand>,
    /// Whether a command found no room. Then the thread looks at all models.
    missed: Arc<AtomicBool>,
}

/// A command that is not sent, because [`MOST_COMMANDS`] wait.
pub(crate) struct NoRoom(pub WatchCommand);

impl Wake {
    pub(crate) fn of(commands: SyncSender<WatchCommand>) -> Self {
        Self { commands, missed: Arc::default() }
    }

    /// Sends a command. If the thread has ended, nothing happens.
    ///
    /// # Errors
    /// The command, if it finds no room.
    pub(crate) fn send(&self, command: WatchCommand) -> Result<(), NoRoom> {
        let Err(TrySendError::Full(command)) = self.commands.try_send(command) else { return Ok(()) };
        // The client of a change gets the error.
        if !matches!(command, WatchCommand::Change(_)) {
            self.missed.store(true, Ordering::Release);
        }
        Err(NoRoom(command))
    }
}

/// Both ends of the channel to the thread.
pub(crate) struct WatchChannel {
    pub wake: Wake,
    woken: Receiver<WatchCommand>,
    now: ModelInProgress,
}

impl WatchChannel {
    pub(crate) fn new() -> Self {
        let (commands, woken) = mpsc::sync_channel(MOST_COMMANDS);
        Self { wake: Wake::of(commands), woken, now: ModelInProgress::default() }
    }

    /// Lets clients load and unload the models of a directory. What they ask for waits for the thread.
    pub(crate) fn open(&self, registry: &Registry, models: &Path) {
        registry.set_repository(Arc::new(CommandSender::new(models, self.wake.clone(), self.now.clone())));
    }
}

/// A thread that watches the directory of the models until this is dropped.
pub struct Watching {
    stop: Arc<AtomicBool>,
    wake: Wake,
    thread: BoundedThread,
}

impl Watching {
    /// Starts the thread. If `models.watch_seconds` is 0, it only looks at the models that are named.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start(adder: Adder, channel: WatchChannel) -> std::io::Result<Self> {
        let WatchChannel { wake, woken, now } = channel;
        let stop = Arc::new(AtomicBool::new(false));
        let unloaded = HashSet::new();
        let missed = wake.missed.clone();
        let mut watcher = Watcher { adder, stop: stop.clone(), unloaded, now, missed, unreadable: false };
        let thread = BoundedThread::start("watch-models", move || watcher.watch(&woken))?;
        Ok(Self { stop, wake, thread })
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Without room, the thread has so much to do that it will see that it stops.
        let _ = self.wake.send(WatchCommand::Stop);
        // Opening a large version takes long, and its result is not needed any more.
        self.thread.wait(END_WAIT);
    }
}

/// What the thread has.
pub(crate) struct Watcher {
    pub adder: Adder,
    /// Models that are served again only when a client loads them.
    pub unloaded: HashSet<String>,
    pub now: ModelInProgress,
    stop: Arc<AtomicBool>,
    /// That of [`Wake`].
    missed: Arc<AtomicBool>,
    /// Whether the directory could not be read at the last look.
    unreadable: bool,
}

impl Watcher {
    /// Looks at all models at intervals, and does what it is asked to do.
    fn watch(&mut self, woken: &Receiver<WatchCommand>) {
        let mut last = Instant::now();
        while !self.stops() {
            // A new interval wakes this thread.
            let every = self.adder.loader.live.watch();
            let wait = (last + every.unwrap_or(IDLE_SLEEP)).saturating_duration_since(Instant::now());
            // Models are looked at also if commands come faster than they are done.
            let next = if wait.is_zero() { Err(RecvTimeoutError::Timeout) } else { woken.recv_timeout(wait) };
            match next {
                Ok(WatchCommand::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(ask) => unless_it_panics(|| self.do_command(ask)).unwrap_or(()),
                Err(RecvTimeoutError::Timeout) => {
                    let work = || match every {
                        Some(_) => self.look(SettleOptions::NEW),
                        None => self.adder.registry.retry_learn_logs(),
                    };
                    unless_it_panics(work).unwrap_or(());
                    last = Instant::now();
                }
            }
            if self.missed.swap(false, Ordering::AcqRel) {
                unless_it_panics(|| self.look_again()).unwrap_or(());
            }
        }
    }

    fn do_command(&mut self, ask: WatchCommand) {
        match ask {
            WatchCommand::Look(new) => {
                let looking = new.begin();
                self.look_at_named(&looking.model, SettleOptions::NEW);
            }
            WatchCommand::Labels(look) => self.look_at_labels(&look.begin()),
            WatchCommand::Switched(name) if self.adder.versions.is_switching(&name) => {
                self.look_at_named(&name, SettleOptions::LOADED)
            }
            WatchCommand::Traffic => self.look_again(),
            WatchCommand::Change(requested) => self.change(requested),
            WatchCommand::Switched(_) | WatchCommand::Interval | WatchCommand::Stop => {}
        }
    }

    fn look_at_named(&mut self, name: &str, options: SettleOptions<'_>) {
        self.now.set(name);
        match self.adder.served.find(name) {
            Some(model) => {
                // The reason is in the log.
                let _ = self.adder.versions.settle(&model, options);
            }
            // It has its first good version.
            None if !self.unloaded.contains(name) => self.add(name),
            None => {}
        }
    }

    fn look_at_labels(&mut self, name: &str) {
        self.now.set(name);
        if let Some(model) = self.adder.served.find(name) {
            // The reason is in the log.
            let _ = self.adder.versions.settle(&model, SettleOptions::LABELS);
        }
    }

    /// Looks at all models, also at those that were refused, because their settings have changed. If the
    /// directory is not read at intervals, what is new there waits for a client that asks for it.
    fn look_again(&mut self) {
        self.adder.forget_all_refused();
        self.adder.versions.report_again();
        self.look(match self.adder.loader.live.watch() {
            Some(_) => SettleOptions::NEW,
            None => SettleOptions::LOADED,
        });
    }

    fn look(&mut self, options: SettleOptions<'_>) {
        let served = self.adder.served.all();
        for model in &served {
            if self.stops() {
                return;
            }
            self.now.set(&model.engine.describe().model);
            // The reason is in the log.
            let _ = self.adder.versions.settle(model, options);
        }
        self.adder.registry.retry_learn_logs();
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
            if !self.unloaded.contains(name) && (options.new || self.adder.registry.has_refused(name)) {
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
        self.adder.versions.forget_refused(name);
        self.adder.forget_refused(name);
    }

    /// Loads and serves a new model, if it can be loaded.
    fn add(&mut self, name: &str) {
        self.now.set(name);
        if let Ok(true) = self.adder.add(name) {
            tracing::info!(model = name, "new model served");
        }
    }
}

/// The result of some work, or `None` if it has panicked. The log has the panic already.
pub(crate) fn unless_it_panics<T>(work: impl FnOnce() -> T) -> Option<T> {
    // What the work has changed is read again from the directory and from the registry.
    let result = catch_unwind(AssertUnwindSafe(work));
    if result.is_err() {
        tracing::error!("a change of the served models panicked: it is not made, and the models go on");
    }
    result.ok()
}
