//! A workshop with a directory to follow, the server that trains on it, and what its metrics show.

use std::fs;
use std::path::Path;

use flechette::schema::preset::ArchKind;

use crate::program::{LAST_VERSION, PATIENT, Served, Workshop, highest_version, metrics_page, run};
use crate::train_resume::last_version;

pub const MODEL: &str = "dlrm";
pub(super) const PARTS: usize = 8;

/// A flag with which training publishes only its last version.
pub const LAST_ONLY: &str = "--publish-every 3600s";

/// A workshop with an empty directory to follow.
pub struct Site {
    pub workshop: Workshop,
    pub incoming: String,
    /// The flags of training, with the `model.toml`.
    pub(super) flags: String,
}

impl Site {
    pub fn new(rows: u64) -> Self {
        let workshop = Workshop::new(rows, 200);
        let (config, incoming) = (workshop.config(ArchKind::Dlrm, 8, 1000), workshop.path("incoming"));
        fs::create_dir(&incoming).unwrap();
        let flags = format!("--model-config {config} --format criteo-tsv --batch 32");
        Self { workshop, incoming, flags }
    }

    /// Renames one of the parts of the training data into the directory.
    pub fn arrive(&self, part: usize) {
        let text = fs::read_to_string(&self.workshop.train).unwrap();
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        let lines = lines.chunks(lines.len().div_ceil(PARTS)).nth(part).unwrap();
        let path = format!("{}/{part}", self.incoming);
        fs::write(format!("{path}.tmp"), lines.concat()).unwrap();
        fs::rename(format!("{path}.tmp"), path).unwrap();
    }

    pub(super) fn serve(&self, source: &str, more: &str) -> Served {
        Served::start_in(PATIENT, &self.workshop.models, &self.line(source, more))
    }

    /// A server that may not have a version yet.
    pub(super) fn listen(&self, source: &str, more: &str) -> Served {
        Served::listening(&self.workshop.models, &self.line(source, more))
    }

    fn line(&self, source: &str, more: &str) -> String {
        format!("--train {MODEL}={source} {} {LAST_VERSION} {more}", self.flags)
    }

    pub fn follow(&self, more: &str) -> Served {
        self.serve(&self.incoming, &format!("--follow-until {} {more}", PARTS - 1))
    }

    /// The files of the model's last version, which `train` alone must have too.
    pub(super) fn compare_with_train(&self, data: &str, more: &str) {
        let models = &self.workshop.models;
        let line = format!("train {} {data} {more} --models {models} --name alone", self.flags);
        let output = run(&line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        let (own, alone) = (last_version(&self.workshop, MODEL), last_version(&self.workshop, "alone"));
        let differ: Vec<_> = alone.keys().filter(|file| own.get(*file) != alone.get(*file)).collect();
        let cursor = |name: &str| {
            let version = highest_version(Path::new(models), name).unwrap();
            fs::read_to_string(format!("{models}/{name}/{version}/checkpoint/cursor.json")).unwrap()
        };
        let cursors = [MODEL, "alone"].map(cursor);
        assert!(own == alone, "{differ:?}, files {} and {}: {cursors:?}", own.len(), alone.len());
        assert!(own.len() > 2 * 26, "{own:?}");
        fs::remove_dir_all(Path::new(models).join("alone")).unwrap();
    }

    pub(super) fn compare_with_train_of_parts(&self, more: &str) {
        let data = format!("--follow {} --follow-until {}", self.incoming, PARTS - 1);
        self.compare_with_train(&data, more);
    }
}

/// Whether the metrics page has this value.
pub fn shows(served: &Served, metric: &str, value: f64) -> bool {
    let label = format!("flechette_{metric}{{model=\"{MODEL}\"}} {value}");
    metrics_page(served.http).lines().any(|line| line == label)
}

pub fn shown(served: &Served, metric: &str) -> f64 {
    served.metric(&format!("flechette_{metric}"), &[&format!("model=\"{MODEL}\"")])
}

pub(super) fn version_on_disk(site: &Site) -> u64 {
    version_at(&site.workshop.models)
}

pub fn version_at(models: &str) -> u64 {
    highest_version(Path::new(models), MODEL).unwrap()
}
