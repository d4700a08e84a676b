//! Warm start: the hot rows of the caches are saved, and fill the caches at the next start.
//!
//! Before a model is ready, its cache is filled with the rows that the last run saved, or else with the rows
//! of `cache.counts`. While the server runs and when it stops, a thread saves which rows the caches hold. A
//! failure is logged and never stops the server.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use super::LoadedModels;
use crate::bounded_thread::BoundedThread;
use crate::engine::Engine;
use crate::predict::Predict;
use crate::schema::Schema;
use crate::store::hot_rows::{HotRow, HotRows, MAX_ROWS};
use crate::types::{RowId, TableId};

/// How long the end of the server waits for the disk. What is not saved by then makes the next start colder.
const END_WAIT: Duration = Duration::from_secs(15);

/// Fills an engine's cache with the saved rows of its model, or with `ranked` if there are none.
pub(crate) fn fill(engine: &Engine, models: &Path, ranked: Vec<RowId>) {
    let description = engine.describe();
    let model = description.model.as_str();
    let saved = HotRows::load(models, model).unwrap_or_else(|reason| {
        tracing::warn!(model, %reason, "hot rows ignored");
        None
    });
    let (from, rows, unknown) = match saved.filter(|saved| !saved.rows.is_empty()) {
        Some(saved) => {
            let rows = known_rows(&saved, &description.schema);
            let unknown = saved.rows.len() - rows.len();
            ("hot rows", rows, unknown as u64)
        }
        None if ranked.is_empty() => return,
        None => ("cache.counts", ranked, 0),
    };
    let (warmed, absent) = engine.warm(rows);
    let skipped = unknown + absent;
    tracing::info!(model, from, rows = warmed.stored, full = warmed.full, skipped, "cache warmed");
}

/// The saved rows that the tables of this schema have.
fn known_rows(saved: &HotRows, schema: &Schema) -> Vec<RowId> {
    let tables: Vec<Option<TableId>> = saved.tables.iter().map(|name| schema.table_id(name)).collect();
    let row = |hot: &HotRow| {
        let table = tables[hot.table as usize]?;
        (hot.row < schema.tables[table.index()].stored_rows()).then(|| RowId::new(table, hot.row))
    };
    saved.rows.iter().filter_map(row).collect()
}

/// A thread that saves the rows of the caches at intervals, and a last time when this is dropped.
pub struct Saving {
    stop: Option<Sender<()>>,
    thread: BoundedThread,
}

impl Saving {
    /// Starts the thread. Without `every`, rows are saved only when this is dropped.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn start(
        served: &LoadedModels,
        models: &Path,
        every: Option<Duration>,
    ) -> std::io::Result<Self> {
        let (served, models) = (served.clone(), models.to_owned());
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = BoundedThread::start("save-hot-rows", move || {
            loop {
                let waited = match every {
                    Some(every) => stopped.recv_timeout(every),
                    None => stopped.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                served.engines().iter().for_each(|engine| save_once(engine, &models));
                if waited != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread })
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        self.stop = None;
        if !self.thread.wait(END_WAIT) {
            tracing::warn!("hot rows not saved: the disk takes longer than {} s", END_WAIT.as_secs());
        }
    }
}

/// Saves the rows of an engine that is not served any more. If the disk takes too long, the memory of the
/// engine is released later.
pub(crate) fn save_unloaded(engine: Arc<Engine>, models: &Path) {
    let models = models.to_owned();
    let saving = BoundedThread::start("save-hot-rows", move || save_once(&engine, &models));
    if !saving.is_ok_and(|mut saving| saving.wait(END_WAIT)) {
        tracing::warn!("hot rows of an unloaded model are not saved after {} s", END_WAIT.as_secs());
    }
}

/// Saves the rows that an engine's cache holds.
fn save_once(engine: &Engine, models: &Path) {
    let model = engine.describe().model;
    if let Err(reason) = save(engine, models) {
        tracing::warn!(model, %reason, "hot rows not saved: the next start uses an older save or is cold");
    }
}

fn save(engine: &Engine, models: &Path) -> Result<(), String> {
    let mut rows = engine.hot_rows();
    // No row is cached yet. An older save is better than an empty one.
    if rows.is_empty() {
        return Ok(());
    }
    rows.truncate(MAX_ROWS);
    let description = engine.describe();
    let hot = HotRows {
        tables: description.schema.tables.iter().map(|table| table.name.clone()).collect(),
        rows: rows.into_iter().map(|row| HotRow { table: row.table().0, row: row.row() }).collect(),
    };
    let model = description.model;
    hot.save(models, &model).map_err(|reason| reason.to_string())?;
    tracing::debug!(model, rows = hot.rows.len(), "hot rows saved");
    Ok(())
}
