//! The servers that are attacked: a program with a small model, and whether others are still served.

use std::path::Path;

use flechette::schema::preset::{self, ArchKind};
use flechette::trainer;
use flechette::trainer::optim::{Optimizer, OptimizerKind};

use crate::program::Served;
use crate::serving::{Running, request};

/// A directory with a small model.
pub(super) fn models() -> tempfile::TempDir {
    let models = tempfile::tempdir().unwrap();
    let sgd = Optimizer::new(OptimizerKind::Sgd, 0.1);
    let schema = preset::criteo(ArchKind::Dlrm, 4, 100);
    trainer::initialise(&schema, sgd, 1).unwrap().save(models.path(), "ads").unwrap();
    models
}

pub(super) fn serve(setup: &str, models: &Path, flags: &str) -> Served {
    Served::start_in(setup, models.to_str().unwrap(), flags)
}

pub(super) async fn is_served(running: &Running) -> bool {
    let (message, scores) = request(1, 3);
    running.send(message).await.unwrap().is_ok_and(|got| got == scores)
}
