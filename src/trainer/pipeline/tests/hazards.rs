//! The stages on one thread, in an order that is chosen: every order that the channels allow gives the sequential bytes
//! with the windows that are computed, and with a shorter one an order is found in which a row is spoilt.

use std::collections::{HashMap, HashSet};

use super::*;
use crate::trainer::pipeline::item::Work;

/// What went wrong, by the numbers of ScratchPipe (section IV-B).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Hazards {
    /// A victim was read before a batch had trained it.
    second: usize,
    /// A victim was read before its row was there.
    third: usize,
    /// A row was fetched before it was written back.
    fourth: usize,
}

/// The order in which stages work.
#[derive(Clone, Copy)]
enum Order {
    /// The first stages are as far ahead as can be.
    Eager,
    /// Each as late as can be.
    Lazy,
    /// Any, from a seed.
    Random(u64),
}

/// Plans all of a case with these windows and works its items off with `buffered` between two stages. Gives whether
/// the bytes are the sequential trainer's, and the hazards.
fn work_off(case: &Case, windows: Windows, buffered: usize, order: Order) -> (bool, Hazards) {
    let dir = tempfile::tempdir().unwrap();
    let (mut network, store) =
        initialise_on_disk(&schema(), case.optimizer(), 7, (dir.path(), vec![])).unwrap();
    let sizes = Sizes::of(&schema(), case.kind).unwrap();
    let counts = sizes.counts(&case.settings.scratchpad);
    let pad = ScratchpadMemory::Host(sizes.slots(&counts).unwrap());
    let plan = PlanSettings {
        policy: case.settings.policy,
        seed: 0,
        ahead: case.settings.lookahead,
        windows,
        item_words: case.settings.staging_bytes / 96,
        overlap: true,
        frequencies: None,
    };
    let parts = (network.schema.clone(), network.lookups.clone());
    let mut planner = Planner::new(parts, plan, &counts, sizes.tables.clone()).unwrap();
    let mut items = planned(&mut planner, case);
    assert_eq!(planner.stats().bubbles, 0, "a bubble waits for what this test does not do");

    let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let places = RowMover { store: &store, pad: &pad, tables: &sizes.tables, threads: &threads };
    let mut watch = |_: &Progress<'_>| ();
    let mut train = Train {
        network: &mut network,
        pad: &pad,
        stepper: None,
        tables: &sizes.tables,
        watch: &mut watch,
        samples: 0,
        probabilities: Vec::new(),
        replicas: None,
    };
    // Items that each stage has done.
    let mut done = [0; 4];
    let mut seen = Symbols::default();
    let mut draws = match order {
        Order::Random(seed) => seed,
        _ => 0,
    };
    loop {
        // While a stage works on an item, one that is so many handovers before it can be at most so far ahead.
        let may = |stage: usize| {
            done[stage] < items.len()
                && (stage == 0 || done[stage] < done[stage - 1])
                && (stage + 1..4).all(|later| done[stage] <= done[later] + (later - stage) * (1 + buffered))
        };
        let ready: Vec<usize> = (0..4).filter(|&stage| may(stage)).collect();
        let Some(&first) = ready.first() else { break };
        draws = mix64(draws);
        let stage = match order {
            Order::Eager => first,
            Order::Lazy => ready[ready.len() - 1],
            Order::Random(_) => ready[draws as usize % ready.len()],
        };
        let item = &mut items[done[stage]];
        match stage {
            0 => {
                seen.collect(item);
                places.collect(item).unwrap();
            }
            1 => exchange(item).unwrap(),
            2 => {
                seen.insert(item);
                places.insert(item).unwrap();
            }
            _ => {
                train.train(item).unwrap();
                seen.train(item);
            }
        }
        done[stage] += 1;
    }
    assert_eq!(done, [items.len(); 4]);
    for (size, hold) in planner.holds().iter().enumerate() {
        // Few enough for one list.
        let mut rows = Vec::new();
        hold.rows_after(None, &mut rows);
        for (key, slot) in rows {
            let record = pad.read(size, &[slot]).unwrap();
            store.write(key.table(), &[key.row()], &record).unwrap();
        }
    }
    let (expected, _) = case.expected();
    let same = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        assert_same(&network, &store, &expected, "");
    }));
    (same.is_ok(), seen.hazards)
}

fn planned(planner: &mut Planner, case: &Case) -> Vec<Item> {
    let (clocks, (batches, loaded)) = (Clocks::default(), sync_channel(1000));
    let mut data = case.data();
    let data = Data { reader: &mut data, batch: case.batch, steps: u64::MAX };
    Load::new(Arc::new(schema()), data, Jitter::new(None, 0)).run(&batches, &Spare::default(), &clocks);
    drop(batches);
    let (planned, items) = sync_channel(10_000);
    let headway = &TrainProgress::at(u64::MAX);
    let (spare, jitter) = (&Spare::default(), Jitter::new(None, 0));
    let mut ends = PlanEnds { batches: loaded, items: planned, spare, headway, clocks: &clocks, jitter };
    planner.run(&mut ends).unwrap();
    drop(ends);
    items.into_iter().collect()
}

/// What is where, by name.
#[derive(Default)]
struct Symbols {
    /// The row in each slot of each size.
    there: HashMap<(usize, u32), Key>,
    /// Rows that left and are not written yet.
    unwritten: HashSet<Key>,
    /// Rows that items have planned to train and have not yet, by how many.
    untrained: HashMap<Key, usize>,
    /// Items that have been looked at for that.
    planned: usize,
    hazards: Hazards,
}

impl Symbols {
    fn moved(transfers: &Transfers) -> impl Iterator<Item = (Key, (usize, u32))> + '_ {
        // Tables 0 and 1 share slots, and 2 and 3.
        let of_run = |(table, run): &(TableId, std::ops::Range<usize>)| {
            let table = *table;
            run.clone().map(move |at| (table, at))
        };
        transfers.runs.iter().flat_map(of_run).map(|(table, at)| {
            (Key::new(table, transfers.rows[at]), (table.index() / 2, transfers.slots[at]))
        })
    }

    fn keys(work: &Work) -> Vec<Key> {
        match work {
            Work::Steps(casts) => casts.iter().flat_map(PreparedBatch::keys).collect(),
            _ => Vec::new(),
        }
    }

    fn collect(&mut self, item: &Item) {
        for (key, slot) in Self::moved(&item.evictions) {
            if self.there.get(&slot) != Some(&key) {
                self.hazards.third += 1;
            } else if self.untrained.get(&key).is_some_and(|&count| count > 0) {
                self.hazards.second += 1;
            }
            self.unwritten.insert(key);
        }
        self.hazards.fourth +=
            Self::moved(&item.fills).filter(|(key, _)| self.unwritten.contains(key)).count();
        // From now on its rows are to be trained: what leaves earlier is another item's.
        Self::keys(&item.work).into_iter().for_each(|key| *self.untrained.entry(key).or_default() += 1);
        self.planned += 1;
    }

    fn insert(&mut self, item: &Item) {
        for (key, _) in Self::moved(&item.evictions) {
            self.unwritten.remove(&key);
        }
        self.there.extend(Self::moved(&item.fills).map(|(key, slot)| (slot, key)));
    }

    fn train(&mut self, item: &Item) {
        Self::keys(&item.work).into_iter().for_each(|key| *self.untrained.entry(key).or_default() -= 1);
    }
}

/// A case with room for the windows and much coming and going.
fn busy(buffered: usize) -> Case {
    let mut case = Case::new(ScratchpadSize::Slots(vec![150 + 75 * buffered; 2]), Policy::Random);
    (case.samples, case.batch) = (800, 5);
    case.settings.staging_bytes = 1 << 20;
    case
}

#[test]
fn with_the_computed_windows_every_order_gives_the_sequential_bytes() {
    for buffered in [0, 1] {
        let windows = Windows::of(buffered);
        let orders = (0..10).map(Order::Random).chain([Order::Eager, Order::Lazy]);
        for order in orders {
            let (same, hazards) = work_off(&busy(buffered), windows, buffered, order);
            assert!(same && hazards == Hazards::default(), "{buffered} buffered: {hazards:?}");
        }
    }
}

#[test]
fn a_shorter_past_window_lets_a_victim_go_before_it_was_trained() {
    for buffered in [0, 1] {
        let windows = Windows::of(buffered);
        let shorter = Windows { past: windows.past - 1, ..windows };
        let (same, hazards) = work_off(&busy(buffered), shorter, buffered, Order::Eager);
        assert!(!same && hazards.second > 0, "{buffered} buffered: {hazards:?}");
        assert_eq!((hazards.third, hazards.fourth), (0, 0));
    }
}

#[test]
fn a_past_window_shorter_than_the_way_to_insert_lets_a_victim_go_before_it_was_there() {
    for buffered in [0, 1] {
        let windows = Windows::of(buffered);
        let shorter = Windows { past: windows.future - 1, ..windows };
        let (same, hazards) = work_off(&busy(buffered), shorter, buffered, Order::Eager);
        assert!(!same && hazards.third > 0, "{buffered} buffered: {hazards:?}");
    }
}

#[test]
fn a_shorter_future_window_lets_a_row_be_fetched_before_it_was_written() {
    for buffered in [0, 1] {
        let windows = Windows::of(buffered);
        let shorter = Windows { future: windows.future - 1, ..windows };
        let (same, hazards) = work_off(&busy(buffered), shorter, buffered, Order::Eager);
        assert!(!same && hazards.fourth > 0, "{buffered} buffered: {hazards:?}");
        assert_eq!((hazards.second, hazards.third), (0, 0));
    }
}

#[test]
fn windows_are_those_of_the_paper_without_buffers_and_grow_with_them() {
    assert_eq!(Windows::of(0), Windows { past: 3, future: 2 });
    assert_eq!(Windows::of(1), Windows { past: 6, future: 4 });
    assert_eq!(Windows::of(2), Windows { past: 9, future: 6 });
}
