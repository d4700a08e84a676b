//! Small models that are trained once for all tests of this process that need the same ones.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use flechette::schema::preset::ArchKind;
use serde_json::Value;

use crate::program::Workshop;

/// What decides the bytes of a model: workshops of one size have the same data.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    kind: &'static str,
    train_rows: u64,
    valid_rows: u64,
}

/// In memory, because nothing would remove files at the end of the process.
static TRAINED: Mutex<BTreeMap<Key, Arc<OnceLock<Trained>>>> = Mutex::new(BTreeMap::new());

/// A model with its first version.
struct Trained {
    /// The output of `train --json`.
    report: Value,
    files: Vec<SavedFile>,
    /// The trainer's scores of the validation rows.
    scores: Vec<u8>,
}

struct SavedFile {
    /// In the directory of the model.
    path: PathBuf,
    bytes: Vec<u8>,
    permissions: Permissions,
}

/// Gives a workshop its first version of a model, and returns the output of `train --json`. The first caller
/// trains the model by `train`.
pub fn once(workshop: &Workshop, kind: ArchKind, train: impl FnOnce() -> Value) -> Value {
    let (train_rows, valid_rows) = (workshop.train_rows, workshop.valid_rows);
    let key = Key { kind: kind.name(), train_rows, valid_rows };
    let trained = TRAINED.lock().unwrap().entry(key).or_default().clone();
    let trained = trained.get_or_init(|| Trained::read(workshop, kind, train()));
    if !directory(workshop, kind).exists() {
        trained.write(workshop, kind);
    }
    trained.report.clone()
}

fn directory(workshop: &Workshop, kind: ArchKind) -> PathBuf {
    Path::new(&workshop.models).join(kind.name())
}

impl Trained {
    fn read(workshop: &Workshop, kind: ArchKind, report: Value) -> Self {
        let directory = directory(workshop, kind);
        let entries = walkdir::WalkDir::new(&directory).into_iter().map(Result::unwrap);
        let file = |entry: walkdir::DirEntry| SavedFile {
            path: entry.path().strip_prefix(&directory).unwrap().to_owned(),
            bytes: fs::read(entry.path()).unwrap(),
            permissions: entry.metadata().unwrap().permissions(),
        };
        let files = entries.filter(|entry| entry.file_type().is_file()).map(file).collect();
        Self { report, files, scores: fs::read(workshop.trained_scores(kind)).unwrap() }
    }

    fn write(&self, workshop: &Workshop, kind: ArchKind) {
        fs::write(workshop.trained_scores(kind), &self.scores).unwrap();
        // A server may watch the directory of the models, so the model appears as a whole.
        let whole = workshop.dir.path().join(format!("{}.whole", kind.name()));
        for SavedFile { path, bytes, permissions } in &self.files {
            let path = whole.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, permissions.clone()).unwrap();
        }
        fs::create_dir_all(&workshop.models).unwrap();
        fs::rename(whole, directory(workshop, kind)).unwrap();
    }
}
