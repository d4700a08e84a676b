//! Train: the stage that takes the steps, on rows that are all there.
//!
//! A step on a scratchpad is the sequential trainer's step on tables (`network`), but for where a row lies: an occurrence names its row's
//! place in the casted index, and that place its slot. The stage claims the slots of the batch for as long as the step takes and
//! waits for nothing.

use std::ops::Range;

use super::super::casting::Casting;
use super::super::replicas::{Replicas, Window};
use super::super::train_state::{Labelled, TrainState};
use super::super::update::{Record, RecordShape, Records};
use super::super::{Progress, TrainError};
use super::item::{Item, PreparedBatch, Work};
use super::scratchpad::ScratchpadMemory;
use crate::mem::prefetch::TURNS_AHEAD;
use crate::schema::Lookup;
use crate::trainer::pipeline::gpu::Stepper;
use crate::trainer::pipeline::slots::{Claim, ClaimedRows, Slots};
use crate::types::{Batch, TableId};

/// Who is told of every step. Nothing it is told can change what is trained.
pub trait StepObserver {
    /// A batch was learnt: this is what it showed, and its rows and dense weights are not updated yet.
    ///
    /// # Errors
    /// Whatever is to end the training.
    fn learnt(&mut self, batch: &Batch, progress: &Progress<'_>) -> Result<(), TrainError>;

    /// Whether to be told of rows.
    fn wants_rows(&self) -> bool {
        false
    }

    /// A row that the batch learnt last has updated, and its state.
    fn row(&mut self, _table: TableId, _row: u64, _record: &[f32]) {}

    /// All is updated. A step on the next batch follows.
    fn stepped(&mut self, _network: &TrainState) {}
}

impl<F: FnMut(&Progress<'_>)> StepObserver for F {
    fn learnt(&mut self, _: &Batch, progress: &Progress<'_>) -> Result<(), TrainError> {
        self(progress);
        Ok(())
    }
}

/// The stage.
pub(crate) struct Train<'a> {
    pub network: &'a mut TrainState,
    pub pad: &'a ScratchpadMemory,
    /// What a device's scratchpad is worked with.
    pub stepper: Option<Box<dyn Stepper>>,
    /// Of each table: which of the slots, and words of a record.
    pub tables: &'a [(usize, usize)],
    pub watch: &'a mut dyn StepObserver,
    /// Samples trained so far.
    pub samples: u64,
    pub probabilities: Vec<f32>,
    /// Who takes the steps, where there are several.
    pub replicas: Option<Replicas>,
}

impl<'a> Train<'a> {
    /// Does the item's work.
    ///
    /// # Errors
    /// [`TrainError::Diverged`], [`TrainError::Hazard`], [`TrainError::Device`], and what the watch says.
    pub(crate) fn train(&mut self, item: &Item) -> Result<(), TrainError> {
        match &item.work {
            Work::Move => Ok(()),
            Work::Steps(casts) => match self.replicas.take() {
                None => casts.iter().try_for_each(|cast| self.step(cast)),
                Some(mut replicas) => {
                    let done = self.window(&mut replicas, casts);
                    self.replicas = Some(replicas);
                    done
                }
            },
            Work::Gather { part, at, whole } => self.gather(part, *at, whole),
            Work::Update { whole, rows, slots } => self.update(whole, rows.clone(), slots),
        }
    }

    fn step(&mut self, cast: &PreparedBatch) -> Result<(), TrainError> {
        let slots = match self.pad {
            ScratchpadMemory::Host(slots) => slots,
            ScratchpadMemory::Device(scratch) => return self.step_on(&**scratch, cast),
        };
        let mut claims = self.claim(slots, cast)?;
        let lookups = self.network.lookups.clone();
        let rows = |l| rows_of(&cast.casting, &claims, (l, &lookups[l]));
        let labelled = Labelled { batch: &cast.batch, labels: &cast.labels };
        let loss = self.network.gather_and_learn(labelled, cast.batch.samples, rows);
        self.network.read_probabilities(&mut self.probabilities);
        self.learnt(cast, loss)?;
        let shapes = RecordShape::of(self.network);
        self.network.update(|update| {
            let records = claims.iter_mut().zip(shapes);
            let records =
                records.map(|(claim, shape)| ClaimRecords { rows: claim.rows_mut(), first: 0, shape });
            update.tables(records, &cast.casting);
        });
        if self.watch.wants_rows() {
            for ((claim, casted), t) in claims.iter().zip(cast.casting.tables()).zip(0..) {
                self.show(TableId(t), casted.rows(), claim);
            }
        }
        self.watch.stepped(self.network);
        Ok(())
    }

    /// The steps of a window of batches by several replicas, on caches of its rows.
    fn window(&mut self, replicas: &mut Replicas, casts: &[PreparedBatch]) -> Result<(), TrainError> {
        let ScratchpadMemory::Host(slots) = self.pad else {
            // Refused where a pipeline is made.
            return Err(TrainError::Replicas { got: 2, most: 1 });
        };
        let window = Window::of(casts, self.tables);
        let mut claims = window.claim(slots)?;
        replicas.broadcast(&window, &claims);
        for (n, cast) in casts.iter().enumerate() {
            let loss = replicas.learn(self.network, &window, cast)?;
            replicas.read_probabilities(self.network, &mut self.probabilities);
            self.learnt(cast, loss)?;
            replicas.update(self.network, &window);
            if n + 1 == casts.len() || replicas.average_after(self.network.steps()) {
                replicas.average();
            }
            if self.watch.wants_rows() {
                replicas.show(&window, cast, self.watch);
            }
            self.watch.stepped(self.network);
        }
        window.write(&mut claims, replicas.first_cache());
        Ok(())
    }

    /// Claims all rows of a batch, table by table.
    fn claim<'c>(&self, slots: &'c [Slots], cast: &'c PreparedBatch) -> Result<Vec<Claim<'c>>, TrainError> {
        let claim = |(bounds, (class, _)): (&[usize], &(usize, usize))| {
            Ok(slots[*class].claim(&cast.slots[bounds[0]..bounds[1]])?)
        };
        cast.starts.windows(2).zip(self.tables).map(claim).collect()
    }

    /// Counts the step and tells of it and of the probabilities that were read.
    pub(crate) fn learnt(&mut self, cast: &PreparedBatch, loss: f64) -> Result<(), TrainError> {
        let Self { network, watch, probabilities, .. } = self;
        let samples = cast.batch.samples;
        network.counts_step(loss, samples);
        self.samples += samples as u64;
        let progress = Progress::after(network, loss, self.samples, (probabilities, &cast.labels))?;
        watch.learnt(&cast.batch, &progress)
    }

    fn show(&mut self, table: TableId, rows: &[u64], claim: &Claim<'_>) {
        for (k, &row) in rows.iter().enumerate() {
            self.watch.row(table, row, claim.row(k).unwrap_or_default());
        }
    }

    /// One group of the samples of a batch that was split; with the last one the batch is learnt.
    fn gather(&mut self, part: &PreparedBatch, at: usize, whole: &PreparedBatch) -> Result<(), TrainError> {
        if at == 0 {
            self.network.begin(whole.batch.samples);
        }
        let slots = match self.pad {
            ScratchpadMemory::Host(slots) => slots,
            ScratchpadMemory::Device(scratch) => return self.gather_on(&**scratch, (part, at), whole),
        };
        let claims = self.claim(slots, part)?;
        let lookups = self.network.lookups.clone();
        self.network.gather(&part.batch, at, |l| rows_of(&part.casting, &claims, (l, &lookups[l])));
        self.gathered(at + part.batch.samples, whole)
    }

    /// So many samples of a batch that was split have their input rows: all of them are learnt together.
    pub(crate) fn gathered(&mut self, samples: usize, whole: &PreparedBatch) -> Result<(), TrainError> {
        if samples < whole.batch.samples {
            return Ok(());
        }
        let loss = self.network.learn(&whole.labels);
        self.network.read_probabilities(&mut self.probabilities);
        self.learnt(whole, loss)?;
        self.network.update(|_| ());
        if let Some(replicas) = &mut self.replicas {
            replicas.follow(self.network);
        }
        Ok(())
    }

    /// One group of its rows.
    fn update(&mut self, whole: &PreparedBatch, rows: Range<usize>, slots: &[u32]) -> Result<(), TrainError> {
        let pools = match self.pad {
            ScratchpadMemory::Host(slots) => slots,
            ScratchpadMemory::Device(scratch) => return self.update_on(&**scratch, whole, rows, slots),
        };
        let shapes = RecordShape::of(self.network);
        for (t, of_table, places) in whole.parts(rows.clone()) {
            let casted = &whole.casting.tables()[t];
            let mut claim = pools[self.tables[t].0].claim(&slots[places])?;
            let (rows, first) = (claim.rows_mut(), of_table.start);
            let records = ClaimRecords { rows, first, shape: shapes[t] };
            self.network.row_update().rows(records, casted, of_table.clone());
            if self.watch.wants_rows() {
                self.show(TableId(t as u32), &casted.rows()[of_table], &claim);
            }
        }
        if whole.starts.last() == Some(&rows.end) {
            self.watch.stepped(self.network);
        }
        Ok(())
    }
}

/// Of a lookup, the row of each occurrence, as [`crate::model::InputRows::write`] asks for it; `claims` are of all tables.
fn rows_of<'r>(
    casting: &'r Casting,
    claims: &'r [Claim<'_>],
    (l, lookup): (usize, &Lookup),
) -> impl Fn(usize) -> Option<&'r [u8]> + use<'r> {
    let (places, claim) = (casting.places(l, lookup), &claims[lookup.table.index()]);
    let dim = lookup.dim;
    // An absent occurrence's place is past every claim; a record begins with its weights.
    move |occurrence| {
        if let Some(&next) = places.get(occurrence + TURNS_AHEAD) {
            claim.ask(next as usize);
        }
        Some(bytemuck::cast_slice(&claim.row(places[occurrence] as usize)?[..dim]))
    }
}

/// The claimed rows of a table, as records.
struct ClaimRecords<'c> {
    rows: ClaimedRows<'c>,
    /// The first one's place in the casted index.
    first: usize,
    shape: RecordShape,
}

impl Records for ClaimRecords<'_> {
    #[inline(always)]
    fn record(&mut self, k: usize, _: u64) -> Record<'_> {
        self.shape.cut(self.rows.row_mut(k - self.first).unwrap_or_default())
    }
}
