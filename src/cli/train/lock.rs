//! The lock of a model while it is trained: no two trainers publish versions of one model.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::anyhow;

use super::Args;
use crate::cli::error_line;
use crate::store::StoreError;
use crate::store::disk::{is_at, lock_until};
use crate::store::hot_rows::STATE;
use crate::sync::EvenPoisoned;

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
    pub(super) fn renew(&self, models: &Path, name: &str) {
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
        self.0.lock().even_poisoned()
    }
}

/// Checks that no other process publishes versions of the model, for a run that locks nothing. The version of
/// such a run would come between those of the other one, whose `--resume` would be refused.
///
/// # Errors
/// When another process does.
pub(crate) fn check_no_other(models: &Path, name: &str) -> anyhow::Result<()> {
    let path = lock_path(models, name);
    let Ok(file) = File::open(&path) else { return Ok(()) };
    // Shared, and given back at once with the file.
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Err(locked_by_other(name, &path)),
        _ => Ok(()),
    }
}

fn locked_by_other(name: &str, path: &Path) -> anyhow::Error {
    anyhow!("--name: another process trains {name:?} and publishes: {} is locked", path.display())
}

fn lock_path(models: &Path, name: &str) -> PathBuf {
    models.join(name).join(STATE).join("trainer.lock")
}

/// How often a lock is taken whose file was removed meanwhile.
const LOCK_TRIES: usize = 100;

/// How long another process may have the lock: one that only checks it ([`check_no_other`]) has it for an
/// instant.
const LOCK_WAIT: Duration = Duration::from_millis(500);

/// Locks a model, so that no trainer publishes versions of it; `None` on a file system without locks.
///
/// # Errors
/// When another process publishes versions of the model; [`StoreError`] when the file cannot be made.
pub(crate) fn lock_model(models: &Path, name: &str) -> anyhow::Result<Option<File>> {
    let path = lock_path(models, name);
    let at = |error| StoreError::at(&path, error);
    let until = Instant::now() + LOCK_WAIT;
    for _ in 0..LOCK_TRIES {
        fs::create_dir_all(models.join(name).join(STATE)).map_err(at)?;
        let file = File::create(&path).map_err(at)?;
        match lock_until(until, || file.try_lock()) {
            Err(TryLockError::WouldBlock) => return Err(locked_by_other(name, &path)),
            // Without locks on the file system, a second trainer is found when its version has a taken
            // number.
            Err(TryLockError::Error(_)) => return Ok(None),
            // Otherwise it was removed before it was locked, and others lock another file.
            Ok(()) if is_at(&file, &path).map_err(at)? => return Ok(Some(file)),
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
            let held = (0..500).filter_map(|_| lock_model(models, "m").ok().flatten()).all(is_held);
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
}
