//! Train: the stage that takes the steps.
//!
//! A step is the sequential trainer's step (`train_state`). Only the location of rows differs: for each
//! occurrence the casted index has the index of its row, and [`PreparedBatch::slots`] has the slot of each
//! row. The stage claims the slots of the batch for the duration of the step and never waits for a claim.

use std::ops::Range;

use super::super::casting::Casting;
use super::super::replicas::{Replicas, Window};
use super::super::train_state::{Labelled, TrainState};
use super::super::update::{Record, RecordShape, Records};
use super::super::{Progress, StepResult, TrainError};
use super::item::{Item, PreparedBatch, SampleGroup, TablePart, Work};
use super::scratchpad::{ScratchpadMemory, SlotLayout};
use crate::mem::prefetch::PREFETCH_AHEAD;
use crate::schema::Lookup;
use crate::trainer::pipeline::gpu::Stepper;
use crate::trainer::pipeline::slots::{Claim, ClaimedRows};
use crate::types::{Batch, TableId};

/// Observes every step. An observer cannot change what is trained.
pub trait StepObserver {
    /// Called when the loss and logits of a batch are known, before rows and dense weights are updated.
    ///
    /// # Errors
    /// An error ends the training.
    fn learnt(&mut self, batch: &Batch, progress: &Progress<'_>) -> Result<(), TrainError>;

    /// Who is to see the rows that the present step updates. A step may ask several times.
    fn row_observer(&mut self) -> Option<&mut dyn RowObserver> {
        None
    }

    /// Called when the step is complete, after its rows were shown.
    ///
    /// # Errors
    /// An error ends the training.
    fn stepped(&mut self, _train_state: &TrainState) -> Result<(), TrainError> {
        Ok(())
    }
}

/// Observes the rows of a step.
pub trait RowObserver: Send {
    /// Called with rows that the present step has updated, of each table at most once. A step may call it
    /// several times, each time with other rows, on a thread of the pool that trains. Other threads may still
    /// update dense weights.
    fn rows(&mut self, tables: &[UpdatedRows<'_>]);
}

/// The rows of a table that a step has updated.
pub struct UpdatedRows<'r> {
    /// The table.
    pub table: TableId,
    /// The rows, ascending.
    pub rows: &'r [u64],
    /// Returns the record of the row at an index of `rows`.
    pub record: Box<dyn Fn(usize) -> &'r [f32] + Send + Sync + 'r>,
}

impl<F: FnMut(&Progress<'_>)> StepObserver for F {
    fn learnt(&mut self, _: &Batch, progress: &Progress<'_>) -> Result<(), TrainError> {
        self(progress);
        Ok(())
    }
}

/// The state of the Train stage.
pub(crate) struct Train<'a> {
    pub train_state: &'a mut TrainState,
    pub scratchpad: &'a ScratchpadMemory,
    /// Takes steps on a device's scratchpad; `None` on the host.
    pub stepper: Option<Box<dyn Stepper>>,
    /// The slot layout of each table.
    pub tables: &'a [SlotLayout],
    pub observer: &'a mut dyn StepObserver,
    /// Samples trained so far.
    pub samples: u64,
    pub logits: Vec<f32>,
    /// Takes the steps if there are several replicas; else `None`.
    pub replicas: Option<Replicas>,
}

impl<'a> Train<'a> {
    /// Does the item's work.
    ///
    /// # Errors
    /// [`TrainError::Diverged`], [`TrainError::Hazard`], [`TrainError::Device`], and errors of the observer.
    pub(crate) fn train(&mut self, item: &Item) -> Result<(), TrainError> {
        match &item.work {
            Work::Move => Ok(()),
            Work::Steps(batches) => match self.replicas.take() {
                None => batches.iter().try_for_each(|prepared| self.step(prepared)),
                Some(mut replicas) => {
                    let done = self.window(&mut replicas, batches);
                    self.replicas = Some(replicas);
                    done
                }
            },
            Work::Gather { part, at, whole } => self.gather(SampleGroup { part, at: *at, whole }),
            Work::Update { whole, rows, slots } => self.update(whole, rows.clone(), slots),
        }
    }

    fn step(&mut self, prepared: &PreparedBatch) -> Result<(), TrainError> {
        let slots = match self.scratchpad {
            ScratchpadMemory::Host(slots) => slots,
            ScratchpadMemory::Device(scratch) => return self.step_on(&**scratch, prepared),
        };
        let mut claims = prepared.claim(self.tables, |size, list| slots[size].claim(list))?;
        let lookups = self.train_state.lookups.clone();
        let rows = |l| rows_of(&prepared.casting, &claims, (l, &lookups[l]));
        let labelled = Labelled { batch: &prepared.batch, labels: &prepared.labels };
        let loss = self.train_state.gather_and_learn(labelled, prepared.batch.samples, rows);
        self.train_state.read_logits(&mut self.logits);
        self.learnt(prepared, loss)?;
        let (shapes, row_observer) = (RecordShape::of(self.train_state), self.observer.row_observer());
        self.train_state.update(|update| {
            let records = claims.iter_mut().zip(shapes);
            let records =
                records.map(|(claim, shape)| ClaimRecords { rows: claim.rows_mut(), first: 0, shape });
            update.tables(records, &prepared.casting);
            if let Some(observer) = row_observer {
                let tables = claims.iter().zip(prepared.casting.tables()).zip(0..);
                let updated = tables.map(|((claim, casted), t)| updated(TableId(t), casted.rows(), claim));
                observer.rows(&updated.collect::<Vec<_>>());
            }
        });
        self.observer.stepped(self.train_state)
    }

    /// Takes the steps of several replicas on a window of batches. They work on copies of the window's rows.
    fn window(&mut self, replicas: &mut Replicas, batches: &[PreparedBatch]) -> Result<(), TrainError> {
        let ScratchpadMemory::Host(slots) = self.scratchpad else {
            // `Pipeline::on_device` refuses several replicas.
            return Err(TrainError::Replicas { got: 2, most: 1 });
        };
        let window = Window::of(batches, self.tables);
        let mut claims = window.claim(slots)?;
        replicas.broadcast(&window, &claims);
        for (n, prepared) in batches.iter().enumerate() {
            let loss = replicas.learn(self.train_state, &window, prepared)?;
            replicas.read_logits(self.train_state, &mut self.logits);
            self.learnt(prepared, loss)?;
            replicas.update(self.train_state, &window);
            if n + 1 == batches.len() || replicas.average_after(self.train_state.steps) {
                replicas.average();
            }
            if let Some(observer) = self.observer.row_observer() {
                replicas.show(&window, prepared, observer);
            }
            self.observer.stepped(self.train_state)?;
        }
        window.write(&mut claims, replicas.first_cache());
        Ok(())
    }

    /// Counts the step, and reports it to the observer with the logits in `self.logits`.
    pub(crate) fn learnt(&mut self, prepared: &PreparedBatch, loss: f64) -> Result<(), TrainError> {
        let Self { train_state, observer, logits, .. } = self;
        let samples = prepared.batch.samples;
        train_state.counts_step(loss, samples);
        self.samples += samples as u64;
        let result = StepResult { loss, samples: self.samples, logits };
        let progress = Progress::after(train_state, result, prepared)?;
        observer.learnt(&prepared.batch, &progress)
    }

    /// Gathers one group of samples of a batch that was split. After the last group, the forward and
    /// backward pass of the whole batch follow.
    fn gather(&mut self, group: SampleGroup<'_>) -> Result<(), TrainError> {
        let SampleGroup { part, at, whole } = group;
        if at == 0 {
            self.train_state.begin(whole.batch.samples);
        }
        let slots = match self.scratchpad {
            ScratchpadMemory::Host(slots) => slots,
            ScratchpadMemory::Device(scratch) => return self.gather_on(&**scratch, group),
        };
        let claims = part.claim(self.tables, |size, list| slots[size].claim(list))?;
        let lookups = self.train_state.lookups.clone();
        self.train_state.gather(&part.batch, at, |l| rows_of(&part.casting, &claims, (l, &lookups[l])));
        self.gathered(at + part.batch.samples, whole)
    }

    /// Called when the first `samples` samples of a split batch have their input rows. If these are all
    /// samples, it runs the forward and backward pass and updates the dense weights.
    pub(crate) fn gathered(&mut self, samples: usize, whole: &PreparedBatch) -> Result<(), TrainError> {
        if samples < whole.batch.samples {
            return Ok(());
        }
        let loss = self.train_state.learn(&whole.labels);
        self.train_state.read_logits(&mut self.logits);
        self.learnt(whole, loss)?;
        self.train_state.update(|_| ());
        if let Some(replicas) = &mut self.replicas {
            replicas.follow(self.train_state);
        }
        Ok(())
    }

    /// Updates one group of rows of a batch that was split.
    fn update(&mut self, whole: &PreparedBatch, rows: Range<usize>, slots: &[u32]) -> Result<(), TrainError> {
        let pools = match self.scratchpad {
            ScratchpadMemory::Host(slots) => slots,
            ScratchpadMemory::Device(scratch) => return self.update_on(&**scratch, whole, rows, slots),
        };
        let shapes = RecordShape::of(self.train_state);
        for TablePart { table, of_table, of_selection } in whole.parts(rows.clone()) {
            let casted = &whole.casting.tables()[table];
            let mut claim = pools[self.tables[table].size].claim(&slots[of_selection])?;
            let (rows, first) = (claim.rows_mut(), of_table.start);
            let records = ClaimRecords { rows, first, shape: shapes[table] };
            self.train_state.row_update().rows(records, casted, of_table.clone());
            if let Some(observer) = self.observer.row_observer() {
                let rows = &casted.rows()[of_table];
                observer.rows(&[updated(TableId(table as u32), rows, &claim)]);
            }
        }
        if whole.starts.last() == Some(&rows.end) {
            self.observer.stepped(self.train_state)?;
        }
        Ok(())
    }
}

/// The rows of a claim, for the observer.
fn updated<'r>(table: TableId, rows: &'r [u64], claim: &'r Claim<'_>) -> UpdatedRows<'r> {
    UpdatedRows { table, rows, record: Box::new(|k| claim.row(k).unwrap_or_default()) }
}

/// The function that finds the row of an occurrence of lookup number `l`, for
/// [`crate::model::InputRows::write`]. `claims` has one claim per table.
fn rows_of<'r>(
    casting: &'r Casting,
    claims: &'r [Claim<'_>],
    (l, lookup): (usize, &Lookup),
) -> impl Fn(usize) -> Option<&'r [u8]> + use<'r> {
    let (places, claim) = (casting.places(l, lookup), &claims[lookup.table.index()]);
    let dim = lookup.dim;
    // The place `ABSENT` is past the end of every claim, so an absent id gives no row. A record begins with
    // its weights.
    move |occurrence| {
        if let Some(&next) = places.get(occurrence + PREFETCH_AHEAD) {
            claim.prefetch_slot(next as usize);
        }
        Some(bytemuck::cast_slice(&claim.row(places[occurrence] as usize)?[..dim]))
    }
}

/// The claimed rows of a table, as records.
struct ClaimRecords<'c> {
    rows: ClaimedRows<'c>,
    /// Index of the first row in the casted index.
    first: usize,
    shape: RecordShape,
}

impl Records for ClaimRecords<'_> {
    #[inline(always)]
    fn record(&mut self, k: usize, _: u64) -> Record<'_> {
        self.shape.cut(self.rows.row_mut(k - self.first).unwrap_or_default())
    }
}
