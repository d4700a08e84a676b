use super::*;

/// Candidates, and the stamp of each slot that is a candidate. Outside of tests `SlotDirectory` keeps the
/// stamps.
struct Kept {
    candidates: Candidates,
    stamps: Vec<Option<u32>>,
    last: u32,
}

impl Kept {
    fn new(policy: ScratchpadPolicy, count: usize, seed: u64) -> Self {
        Self { candidates: Candidates::new(policy, count, seed), stamps: vec![None; count], last: 0 }
    }

    fn add(&mut self, slot: u32, row_use: RowUse) {
        let Self { candidates, stamps, last } = self;
        *last += 1;
        stamps[slot as usize] = Some(*last);
        candidates.add(Candidate { slot, stamp: *last }, row_use, 10, |slot| stamps[slot as usize]);
    }

    fn remove(&mut self, slot: u32) {
        self.stamps[slot as usize] = None;
        self.candidates.remove(slot);
    }

    fn drained(&mut self) -> Vec<u32> {
        let mut all = Vec::new();
        while let Some(slot) = self.candidates.pop(10, |slot| self.stamps[slot as usize], |_| ()) {
            self.stamps[slot as usize] = None;
            all.push(slot);
        }
        assert_eq!(self.candidates.len(), 0);
        all
    }
}

#[test]
fn lru_evicts_the_oldest_candidate_and_any_candidate_can_be_removed() {
    let mut candidates = Kept::new(ScratchpadPolicy::Lru, 6, 0);
    [3, 1, 5, 0, 2].into_iter().for_each(|slot| candidates.add(slot, RowUse::default()));
    [3, 0, 1].into_iter().for_each(|slot| candidates.remove(slot));
    candidates.add(1, RowUse::default());
    assert_eq!(candidates.candidates.len(), 3);
    assert_eq!(candidates.drained(), [5, 2, 1]);
}

#[test]
fn lfu_evicts_the_least_frequent_by_the_latest_frequencies() {
    let mut candidates = Kept::new(ScratchpadPolicy::Lfu, 4, 0);
    let row_use = |frequency| RowUse { frequency, next: 0 };
    for (slot, frequency) in [(0, 5), (1, 1), (2, 3), (3, 4)] {
        candidates.add(slot, row_use(frequency));
    }
    candidates.remove(1);
    candidates.add(1, row_use(9));
    candidates.remove(3);
    assert_eq!(candidates.drained(), [2, 0, 1]);
    candidates.add(3, row_use(4));
    candidates.remove(3);
    candidates.add(1, row_use(3));
    candidates.add(3, row_use(2));
}

#[test]
fn random_evicts_each_candidate_once_and_in_the_same_order_for_the_same_seed() {
    let run = |seed| {
        let mut candidates = Kept::new(ScratchpadPolicy::Random, 40, seed);
        (0..40).for_each(|slot| candidates.add(slot, RowUse::default()));
        candidates.remove(7);
        candidates.drained()
    };
    let mut all = run(1);
    assert_eq!(all, run(1));
    assert_ne!(all, run(2));
    all.sort_unstable();
    assert_eq!(all, (0..40).filter(|&slot| slot != 7).collect::<Vec<_>>());
}

#[test]
fn the_optimal_policy_evicts_what_is_never_needed_and_then_what_is_needed_last() {
    let mut candidates = Kept::new(ScratchpadPolicy::Optimal, 5, 0);
    for (slot, next) in [(0, 3), (1, 0), (2, 60), (3, 7), (4, 0)] {
        candidates.add(slot, RowUse { frequency: 0, next });
    }
    candidates.remove(4);
    candidates.add(4, RowUse { frequency: 0, next: 20 });
    assert_eq!(candidates.drained(), [1, 2, 4, 3, 0]);
}

#[test]
fn a_policy_is_parsed_by_its_name_and_an_unknown_name_is_refused() {
    for policy in ScratchpadPolicy::ALL {
        assert_eq!(policy.to_string().parse::<ScratchpadPolicy>().unwrap(), policy);
    }
    let refused = "fifo".parse::<ScratchpadPolicy>().unwrap_err().to_string();
    assert_eq!(refused, "policy: expected lru, lfu, random or optimal, got \"fifo\"");
}
