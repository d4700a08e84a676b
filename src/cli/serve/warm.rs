//! The hot rows of a server's caches, from one run to the next.
//!
//! Before a model is ready its cache is filled with the rows that the last run saved, or else with those that
//! counts name. While it serves, and at its end, a thread saves what the caches hold. Nothing of this can keep a
//! server from serving: what does not work is logged and left.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::engine::Engine;
use crate::predict::Predict;
use crate::schema::Schema;
use crate::store::hot_rows::{HotRows, MAX_ROWS};
use crate::types::TableId;

/// Fills an engine's cache with the rows that were saved of its model, or with `ranked` where none were.
pub(crate) fn fill(engine: &Engine, models: &Path, ranked: Vec<(TableId, u64)>) {
    let description = engine.describe();
    let model = description.model.as_str();
    let saved = HotRows::load(models, model).unwrap_or_else(|reason| {
        tracing::warn!(model, %reason, "hot rows ignored");
        None
    });
    let saved = saved.map(|saved| by_table(saved, &description.schema)).filter(|rows| !rows.is_empty());
    let (from, rows) = match saved {
        Some(rows) => ("hot rows", rows),
        None if ranked.is_empty() => return,
        None => ("cache.counts", ranked),
    };
    let (warmed, skipped) = engine.warm(rows);
    tracing::info!(model, from, rows = warmed.stored, full = warmed.full, skipped, "cache warmed");
}

/// Rows by the schema's tables. Those of a table that it has not get a number that no table has.
fn by_table(saved: HotRows, schema: &Schema) -> Vec<(TableId, u64)> {
    let place = |name: &String| schema.tables.iter().position(|table| table.name == *name);
    let id = |name| place(name).map_or(TableId(u32::MAX), |place| TableId(place as u32));
    let tables: Vec<TableId> = saved.tables.iter().map(id).collect();
    saved.rows.into_iter().map(|(table, row)| (tables[table as usize], row)).collect()
}

/// Saves the caches' rows on a thread of its own: now and then, and once more when it is dropped.
pub struct Saving {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Saving {
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn start(
        engines: &[Arc<Engine>],
        models: &Path,
        every: Option<Duration>,
    ) -> std::io::Result<Self> {
        let mut saver =
            Saver { engines: engines.to_vec(), models: models.to_owned(), failing: HashSet::new() };
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("save-hot-rows".into()).spawn(move || {
            loop {
                let told = match every {
                    Some(every) => stopped.recv_timeout(every),
                    None => stopped.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                saver.save();
                if told != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that saves hot rows panicked");
        }
    }
}

struct Saver {
    engines: Vec<Arc<Engine>>,
    models: PathBuf,
    /// Models whose last save failed, which was logged.
    failing: HashSet<String>,
}

impl Saver {
    fn save(&mut self) {
        for engine in &self.engines {
            let mut rows = engine.hot_rows();
            // Of a cache that nobody has used there is nothing to know.
            if rows.is_empty() {
                continue;
            }
            rows.truncate(MAX_ROWS);
            let description = engine.describe();
            let hot = HotRows {
                tables: description.schema.tables.iter().map(|table| table.name.clone()).collect(),
                rows: rows.into_iter().map(|(table, row)| (table.0, row)).collect(),
            };
            let model = description.model;
            match hot.save(&self.models, &model) {
                Ok(()) => {
                    tracing::debug!(model, rows = hot.rows.len(), "hot rows saved");
                    self.failing.remove(&model);
                }
                Err(reason) if !self.failing.contains(&model) => {
                    tracing::warn!(model, %reason, "hot rows not saved: the next start will be a cold one");
                    self.failing.insert(model);
                }
                Err(_) => {}
            }
        }
    }
}
