//! Runs the stages on one thread, in a chosen order. With the computed windows, every order that the
//! channels allow gives the sequential bytes. With a shorter window, some order corrupts a row.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::sync_channel;

use super::*;
use crate::mem::SplitMix64;
use crate::trainer::pipeline::item::{RowSlot, TableRun, Transfers, Work};
use crate::trainer::pipeline::jitter::Jitter;

/// How often each hazard of ScratchPipe (section IV-B) happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Hazards {
    /// A victim was read before an item had trained it.
    second: usize,
    /// A victim was read before its row had been written to the slot.
    third: usize,
    /// A row was fetched before it was written back to the working file.
    fourth: usize,
}

/// The order in which the stages work.
#[derive(Clone, Copy)]
enum Order {
    /// Each stage works as early as it can.
    Eager,
    /// Each stage works as late as it can.
    Lazy,
    /// A random order, drawn from a seed.
    Random(u64),
}

/// The result of a run in a chosen order.
struct Outcome {
    /// Whether all bytes equal the sequential trainer's.
    same: bool,
    hazards: Hazards,
    stats: PlanStats,
}

/// Plans a case with these windows in another thread, and passes its items through the stages. Up to
/// `buffered` items may wait between two stages.
fn run_in_order(case: &Case, windows: HazardWindows, buffered: usize, order: Order) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let (mut train_state, store) =
        initialise_on_disk(&schema(), case.optimizer(), 7, WorkingFileOptions::logs(dir.path())).unwrap();
    let sizes = Sizes::of(&schema(), case.kind);
    let counts = sizes.counts(&case.settings.scratchpad);
    let scratchpad = ScratchpadMemory::Host(sizes.slots(&counts).unwrap());
    let plan = PlanSettings {
        policy: case.settings.policy,
        seed: 0,
        lookahead: case.settings.lookahead,
        windows,
        item_words: case.settings.staging_bytes / 96,
        overlap: true,
        frequencies: None,
    };
    let mut planner = Planner::new(&train_state, plan, &counts, sizes.tables.clone()).unwrap();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let mover = RowMover { store: &store, scratchpad: &scratchpad, tables: &sizes.tables, threads: &threads };
    let mut observer = |_: &Progress<'_>| ();
    let mut train = Train {
        train_state: &mut train_state,
        scratchpad: &scratchpad,
        stepper: None,
        tables: &sizes.tables,
        observer: &mut observer,
        samples: 0,
        logits: Vec::new(),
        replicas: None,
    };
    let (progress, clocks, transfers) = (TrainProgress::at(0), Clocks::default(), BufferPool::default());
    let (progress, clocks, transfers) = (&progress, &clocks, &transfers);
    let hazards = thread::scope(|scope| {
        let (planned, items) = sync_channel(100_000);
        let batches = all_batches(case);
        let planner = &mut planner;
        let plan = scope.spawn(move || {
            let jitter = Jitter::new(None, 0);
            let mut channels = PlanChannels { batches, items: planned, transfers, progress, clocks, jitter };
            planner.run(&mut channels).unwrap();
        });
        let mut stages = Stages::new(order, buffered);
        loop {
            // Let Plan run as far ahead as it can: until it has ended or waits for an item to train.
            while !plan.is_finished() && !progress.is_awaited() {
                thread::yield_now();
            }
            stages.items.extend(items.try_iter());
            let Some(stage) = stages.next() else { break };
            stages.work(stage, &mover, &mut train);
            progress.trained(stages.done[3] as u64);
        }
        plan.join().unwrap();
        assert_eq!(stages.done, [stages.items.len(); 4]);
        stages.tracker.hazards
    });
    for (size, directory) in planner.directories().iter().enumerate() {
        // There are few enough rows for one list.
        let mut listed = Vec::new();
        directory.rows_after(None, &mut listed);
        for RowSlot { row, slot } in listed {
            let record = scratchpad.read(size, &[slot]).unwrap();
            store.write(row.table(), &[row.row()], &record).unwrap();
        }
    }
    let (expected, _) = case.expected();
    let same = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        assert_same(&train_state, &store, &expected, "");
    }));
    Outcome { same: same.is_ok(), hazards, stats: planner.stats() }
}

/// All batches of a case, already read.
fn all_batches(case: &Case) -> std::sync::mpsc::Receiver<crate::trainer::read_ahead::BatchGroup> {
    let (loaded, batches) = sync_channel(10_000);
    let mut data = case.data();
    let data = Data { reader: &mut data, batch: case.batch, steps: u64::MAX };
    ReadAhead::new(&schema(), data).run(&loaded, &BufferPool::default(), &Clocks::default());
    batches
}

/// Collect, Exchange, Insert and Train, numbered 0 to 3.
struct Stages {
    order: Order,
    draws: SplitMix64,
    buffered: usize,
    items: Vec<Item>,
    /// The number of items that each stage has done.
    done: [usize; 4],
    tracker: RowTracker,
}

impl Stages {
    fn new(order: Order, buffered: usize) -> Self {
        let draws = SplitMix64::new(if let Order::Random(seed) = order { seed } else { 0 });
        Self { order, draws, buffered, items: Vec::new(), done: [0; 4], tracker: RowTracker::default() }
    }

    /// The stage that works next; `None` if no stage has an item.
    fn next(&mut self) -> Option<usize> {
        let done = &self.done;
        // While a stage works on an item, a stage that is `n` handovers earlier in the pipeline is at most
        // `n * (1 + buffered)` items ahead.
        let may_work = |stage: usize| {
            done[stage] < self.items.len()
                && (stage == 0 || done[stage] < done[stage - 1])
                && (stage + 1..4)
                    .all(|later| done[stage] <= done[later] + (later - stage) * (1 + self.buffered))
        };
        let ready: Vec<usize> = (0..4).filter(|&stage| may_work(stage)).collect();
        match self.order {
            Order::Eager => ready.first().copied(),
            Order::Lazy => ready.last().copied(),
            Order::Random(_) => {
                let draw = self.draws.next_u64() as usize;
                draw.checked_rem(ready.len()).map(|at| ready[at])
            }
        }
    }

    /// Lets the stage work on its next item.
    fn work(&mut self, stage: usize, mover: &RowMover<'_>, train: &mut Train<'_>) {
        let item = &mut self.items[self.done[stage]];
        match stage {
            0 => {
                self.tracker.collect(item);
                mover.collect(item).unwrap();
            }
            1 => exchange(item).unwrap(),
            2 => {
                self.tracker.insert(item);
                mover.insert(item).unwrap();
            }
            _ => {
                train.train(item).unwrap();
                self.tracker.train(item);
            }
        }
        self.done[stage] += 1;
    }
}

/// Tracks where each row is, to find hazards.
#[derive(Default)]
struct RowTracker {
    /// The row in each slot. The key is the slot size and the slot.
    row_in_slot: HashMap<(usize, u32), RowId>,
    /// Rows that were evicted and are not written yet.
    unwritten: HashSet<RowId>,
    /// How many items between Collect and Train use each row.
    untrained: HashMap<RowId, usize>,
    hazards: Hazards,
}

impl RowTracker {
    fn moved(transfers: &Transfers) -> impl Iterator<Item = (RowId, (usize, u32))> + '_ {
        let rows = |run: &'_ TableRun| {
            let table = run.table;
            run.range.clone().map(move |at| (table, at))
        };
        // Tables 0 and 1 share slots, and so do 2 and 3.
        transfers.runs.iter().flat_map(rows).map(|(table, at)| {
            (RowId::new(table, transfers.rows[at]), (table.index() / 2, transfers.slots[at]))
        })
    }

    /// The rows that Train uses.
    fn used(work: &Work) -> Vec<RowId> {
        match work {
            Work::Move => Vec::new(),
            Work::Steps(batches) => batches.iter().flat_map(PreparedBatch::rows).collect(),
            Work::Gather { part, .. } => part.rows().collect(),
            Work::Update { whole, rows, .. } => whole.rows().skip(rows.start).take(rows.len()).collect(),
        }
    }

    fn collect(&mut self, item: &Item) {
        for (row, slot) in Self::moved(&item.evictions) {
            if self.row_in_slot.get(&slot) != Some(&row) {
                self.hazards.third += 1;
            } else if self.untrained.get(&row).is_some_and(|&count| count > 0) {
                self.hazards.second += 1;
            }
            self.unwritten.insert(row);
        }
        self.hazards.fourth +=
            Self::moved(&item.fills).filter(|(row, _)| self.unwritten.contains(row)).count();
        // Counted after the evictions are checked, because they are only compared with earlier items.
        Self::used(&item.work).into_iter().for_each(|row| *self.untrained.entry(row).or_default() += 1);
    }

    fn insert(&mut self, item: &Item) {
        for (row, _) in Self::moved(&item.evictions) {
            self.unwritten.remove(&row);
        }
        self.row_in_slot.extend(Self::moved(&item.fills).map(|(row, slot)| (slot, row)));
    }

    fn train(&mut self, item: &Item) {
        Self::used(&item.work).into_iter().for_each(|row| *self.untrained.entry(row).or_default() -= 1);
    }
}

/// The settings from which the sizes of the windows follow.
#[derive(Clone, Copy, Debug)]
struct Shape {
    lookahead: usize,
    buffered: usize,
}

const SHAPES: [Shape; 4] = [
    Shape { lookahead: 1, buffered: 0 },
    Shape { lookahead: 1, buffered: 1 },
    Shape { lookahead: 2, buffered: 0 },
    Shape { lookahead: 3, buffered: 1 },
];

impl Shape {
    fn windows(self) -> HazardWindows {
        HazardWindows::of(self.buffered)
    }

    /// A case in which the windows fit in the scratchpad and many rows are evicted.
    fn busy_case(self) -> Case {
        let batch = 6 / self.lookahead;
        let mut case =
            Case::new(ScratchpadSize::Slots(vec![170 + 80 * self.buffered; 2]), ScratchpadPolicy::Random);
        (case.samples, case.batch) = (900, batch);
        case.settings.lookahead = self.lookahead;
        case.settings.staging_bytes = 1 << 20;
        case
    }

    /// The outcome of the busy case. Asserts that all windows fit.
    fn run(self, windows: HazardWindows, order: Order) -> Outcome {
        let outcome = run_in_order(&self.busy_case(), windows, self.buffered, order);
        let PlanStats { bubbles, splits, shrinks, .. } = outcome.stats;
        assert_eq!((bubbles, splits, shrinks), (0, 0, 0), "{self:?}");
        outcome
    }
}

fn orders(random: u64) -> impl Iterator<Item = Order> {
    (0..random).map(Order::Random).chain([Order::Eager, Order::Lazy])
}

#[test]
fn with_the_computed_windows_every_order_gives_the_sequential_bytes() {
    for shape in SHAPES {
        for order in orders(6) {
            let Outcome { same, hazards, .. } = shape.run(shape.windows(), order);
            assert!(same && hazards == Hazards::default(), "{shape:?}: {hazards:?}");
        }
    }
}

#[test]
fn with_splits_bubbles_and_shrunk_windows_every_order_gives_the_sequential_bytes() {
    let mut seen = PlanStats::default();
    for (lookahead, batch, slots) in [(1, 3, [12, 9]), (2, 3, [24, 20]), (3, 5, [60, 60]), (2, 6, [90, 90])] {
        let mut case = Case::new(ScratchpadSize::Slots(slots.to_vec()), ScratchpadPolicy::Lru);
        (case.samples, case.batch, case.settings.lookahead) = (150, batch, lookahead);
        for order in orders(3) {
            for buffered in [0, 1] {
                let Outcome { same, hazards, stats } =
                    run_in_order(&case, HazardWindows::of(buffered), buffered, order);
                assert!(same && hazards == Hazards::default(), "{case:?}: {hazards:?}");
                seen.splits += stats.splits;
                seen.bubbles += stats.bubbles;
                seen.shrinks += stats.shrinks;
            }
        }
    }
    assert!(seen.splits > 0 && seen.bubbles > 0 && seen.shrinks > 0, "{seen:?}");
}

#[test]
fn with_several_items_per_unit_every_order_gives_the_sequential_bytes() {
    for shape in SHAPES {
        let mut case = shape.busy_case();
        case.settings.staging_bytes = 1000;
        for order in orders(2) {
            let Outcome { same, hazards, .. } = run_in_order(&case, shape.windows(), shape.buffered, order);
            assert!(same && hazards == Hazards::default(), "{shape:?}: {hazards:?}");
        }
    }
}

#[test]
fn a_batch_after_a_split_fetches_its_rows_after_they_were_written() {
    for (seed, slots) in (0..30).zip([10, 12, 14, 17, 20].into_iter().cycle()) {
        let mut case =
            Case { seed, ..Case::new(ScratchpadSize::Slots(vec![slots; 2]), ScratchpadPolicy::Lru) };
        (case.samples, case.batch) = (120, 3);
        let Outcome { same, hazards, .. } = run_in_order(&case, HazardWindows::of(0), 0, Order::Eager);
        assert!(same && hazards == Hazards::default(), "{case:?}: {hazards:?}");
    }
}

#[test]
fn a_shorter_past_window_evicts_a_row_before_it_was_trained() {
    for shape in SHAPES {
        let windows = shape.windows();
        let shorter = HazardWindows { past_items: windows.past_items - 1, ..windows };
        let Outcome { same, hazards, .. } = shape.run(shorter, Order::Eager);
        assert!(!same && hazards.second > 0, "{shape:?}: {hazards:?}");
        assert_eq!((hazards.third, hazards.fourth), (0, 0), "{shape:?}");
    }
}

#[test]
fn a_too_short_past_window_evicts_a_row_that_is_not_inserted_yet() {
    for shape in SHAPES {
        let windows = shape.windows();
        let shorter = HazardWindows { past_items: windows.future_items - 1, ..windows };
        let Outcome { same, hazards, .. } = shape.run(shorter, Order::Eager);
        assert!(!same && hazards.third > 0, "{shape:?}: {hazards:?}");
    }
}

#[test]
fn a_shorter_future_window_fetches_a_row_before_it_was_written() {
    for shape in SHAPES {
        let windows = shape.windows();
        let shorter = HazardWindows { future_items: windows.future_items - 1, ..windows };
        let Outcome { same, hazards, .. } = shape.run(shorter, Order::Eager);
        assert!(!same && hazards.fourth > 0, "{shape:?}: {hazards:?}");
        assert_eq!((hazards.second, hazards.third), (0, 0), "{shape:?}");
    }
}

#[test]
fn windows_are_those_of_the_paper_without_buffers_and_grow_with_them() {
    assert_eq!(HazardWindows::of(0), HazardWindows { past_items: 3, future_items: 2 });
    assert_eq!(HazardWindows::of(1), HazardWindows { past_items: 6, future_items: 4 });
    assert_eq!(HazardWindows::of(2), HazardWindows { past_items: 9, future_items: 6 });
}
