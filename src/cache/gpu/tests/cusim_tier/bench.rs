//! An index with few buckets on a simulated device, jobs that change it, and probes that check what they
//! find.

use std::collections::HashSet;
use std::sync::Arc;

use crate::cache::gpu::args::{JobKind, MayReplace, NarrowColumn};
use crate::cache::gpu::context::{ContextShape, LookupContext, LookupKeys};
use crate::cache::gpu::table::{GpuTable, GpuTableShape, IndexJob, JobRow, Jobs};
use crate::device::cuda::memory::{MemoryPlan, PinnedMemory, Staging};
use crate::device::cusim::SimDriver;
use crate::mem::mix64;
use crate::schema::{Lookup, Pooling};
use crate::types::{Batch, Element, Jagged, TableId};

/// The first key of the only table; its ids are below `IDS`.
pub(super) const BASE: u64 = 64;
pub(super) const IDS: u64 = 64;
pub(super) const SLOTS: usize = 1 << 14;

/// An index with few buckets. Each job has its own row of one element, whose value is the job's number.
pub(super) struct Bench {
    pub(super) seed: u64,
    pub(super) table: Arc<GpuTable<SimDriver>>,
    pub(super) staging: Staging<SimDriver>,
    /// For each job number: the id of its row.
    pub(super) rows: Vec<u64>,
}

impl Bench {
    pub(super) fn new(buckets: u64, seed: u64) -> Self {
        let driver = Arc::new(SimDriver::new(seed, 1 << 30).unwrap());
        let shape = GpuTableShape { buckets, slab_bytes: 4 * SLOTS, slabs: 1 };
        let table = Arc::new(GpuTable::new(driver.clone(), shape).unwrap());
        let mut staging = Staging::new(&driver, SLOTS).unwrap();
        // Word `i` of the staging buffer is copied to slot `i`, once.
        for (i, word) in staging.words_mut().unwrap().iter_mut().enumerate() {
            *word = (i as f32).to_bits();
        }
        Self { seed, table, staging, rows: Vec::new() }
    }

    pub(super) fn jobs(&self) -> Jobs<SimDriver> {
        Jobs::new(&self.table, 64).unwrap()
    }

    /// Adds a job for an id, with an unused slot. Returns the slot's location.
    pub(super) fn push(&mut self, jobs: &mut Jobs<SimDriver>, id: u64, kind: JobKind) -> u64 {
        let slot = self.rows.len();
        assert!(slot < SLOTS);
        self.rows.push(id);
        let location = (slot as u64) << 1;
        let row = if kind == JobKind::Withdraw { JobRow::InPlace } else { JobRow::Staged(slot) };
        assert!(jobs.push(
            IndexJob { key: BASE | id, location, row, tag: 0, words: 1, kind, older: 0 },
            &self.staging
        ));
        location
    }

    pub(super) fn launch(&mut self, jobs: &mut Jobs<SimDriver>, now: u64) {
        jobs.launch(now, MayReplace::Coldest, Some(&mut self.staging)).unwrap();
    }

    pub(super) fn context(&self) -> LookupContext<SimDriver> {
        self.context_with(None)
    }

    pub(super) fn context_with(&self, narrow: Option<NarrowColumn>) -> LookupContext<SimDriver> {
        let (table, element, pooling) = (TableId(0), Element::F32, Pooling::Sum);
        let shape = ContextShape {
            features: 1,
            lookups: vec![Lookup { feature: 0, table, dim: 1, element, pooling, column: 0 }],
            dense_width: 0,
            stride: 1,
            max_samples: 256,
            max_ids: 256,
            staging_bytes: Some(4 * 256),
            copy_bytes: 4 * 64,
        };
        LookupContext::new(&self.table, &shape, &[LookupKeys { base: BASE, rows: IDS, narrow }]).unwrap()
    }

    /// Looks up all ids, some of them twice, and fetches the missing rows. Asserts that each id gets its own
    /// row, from the index or fetched. `probed` checks the context after the probe, with the number of
    /// missing rows. Returns how many values came from the index.
    pub(super) fn probe_all(
        &self,
        context: &mut LookupContext<SimDriver>,
        now: u64,
        probed: impl FnOnce(&LookupContext<SimDriver>, usize),
    ) -> u64 {
        let ids: Vec<u64> = (0..IDS).chain(0..IDS / 2).collect();
        let misses = context.probe(now, None, &batch_of(&ids)).unwrap();
        let missing: HashSet<u64> = context.misses().iter().map(|miss| miss.id).collect();
        assert_eq!(missing.len(), misses, "each missing row is reported once");
        probed(context, misses);
        let (misses, words) = context.staged_mut().unwrap();
        for miss in misses {
            words[miss.word] = (-1.0_f32 - miss.id as f32).to_bits();
        }
        if now.is_multiple_of(2) {
            context.copy_hits().unwrap();
        }
        context.pool().unwrap();
        context.settle().unwrap();
        let mut found = 0;
        for (&id, &value) in ids.iter().zip(context.out()) {
            let fetched = value == -1.0 - id as f32 && missing.contains(&id);
            found += u64::from(!fetched);
            let own = fetched || self.rows.get(value as usize) == Some(&id);
            assert!(own, "seed {}: id {id} got {value}", self.seed);
        }
        found
    }
}

pub(super) fn batch_of(ids: &[u64]) -> Batch {
    let offsets = (0..=ids.len() as u32).collect();
    Batch { samples: ids.len(), features: vec![Jagged { offsets, ids: ids.to_vec() }], ..Batch::default() }
}

/// A random third of the ids.
pub(super) fn some_ids(draw: &mut u64) -> Vec<u64> {
    *draw += 1;
    (0..IDS).filter(|id| mix64(*draw << 8 | id).is_multiple_of(3)).collect()
}

/// Rows of all ids in pinned host memory. Each has one element, `first + id`.
pub(super) fn host_rows(bench: &Bench, first: f32) -> Arc<PinnedMemory<SimDriver>> {
    let mut plan = MemoryPlan::default();
    let rows = plan.array::<f32>(IDS as usize);
    let mut memory = PinnedMemory::new(bench.table.driver(), plan.bytes()).unwrap();
    memory.get_mut(rows).iter_mut().enumerate().for_each(|(i, row)| *row = first + i as f32);
    Arc::new(memory)
}

/// Gives each missed row of the last probe the value -1, which no stored row has.
pub(super) fn mark_misses(context: &mut LookupContext<SimDriver>) {
    let (misses, words) = context.staged_mut().unwrap();
    misses.iter().for_each(|miss| words[miss.word] = (-1.0_f32).to_bits());
}
