use super::*;

/// Candidates and what `SlotDirectory` keeps of them: of each slot its stamp, where it is one.
struct Kept(Candidates, Vec<Option<u32>>, u32);

impl Kept {
    fn new(policy: Policy, count: usize, seed: u64) -> Self {
        Self(Candidates::new(policy, count, seed), vec![None; count], 0)
    }

    fn add(&mut self, slot: u32, worth: Worth) {
        let Self(candidates, stamps, last) = self;
        *last += 1;
        stamps[slot as usize] = Some(*last);
        candidates.add((slot, *last), worth, 10, |slot| stamps[slot as usize]);
    }

    fn remove(&mut self, slot: u32) {
        self.1[slot as usize] = None;
        self.0.remove(slot);
    }

    fn drained(&mut self) -> Vec<u32> {
        let mut all = Vec::new();
        while let Some(slot) = self.0.pop(10, |slot| self.1[slot as usize], |_| ()) {
            self.1[slot as usize] = None;
            all.push(slot);
        }
        assert_eq!(self.0.len(), 0);
        all
    }
}

#[test]
fn lru_gives_up_what_became_a_candidate_first_and_others_can_be_taken_out() {
    let mut candidates = Kept::new(Policy::Lru, 6, 0);
    [3, 1, 5, 0, 2].into_iter().for_each(|slot| candidates.add(slot, Worth::default()));
    [3, 0, 1].into_iter().for_each(|slot| candidates.remove(slot));
    candidates.add(1, Worth::default());
    assert_eq!(candidates.0.len(), 3);
    assert_eq!(candidates.drained(), [5, 2, 1]);
}

#[test]
fn lfu_gives_up_the_least_frequent_as_it_was_last_judged() {
    let mut candidates = Kept::new(Policy::Lfu, 4, 0);
    let worth = |frequency| Worth { frequency, next: 0 };
    for (slot, frequency) in [(0, 5), (1, 1), (2, 3), (3, 4)] {
        candidates.add(slot, worth(frequency));
    }
    candidates.remove(1);
    candidates.add(1, worth(9));
    candidates.remove(3);
    assert_eq!(candidates.drained(), [2, 0, 1]);
    candidates.add(3, worth(4));
    candidates.remove(3);
    candidates.add(1, worth(3));
    candidates.add(3, worth(2));
    assert_eq!(candidates.drained(), [3, 1], "another row, less frequent");
}

#[test]
fn random_gives_up_each_candidate_once_and_the_same_ones_for_a_seed() {
    let run = |seed| {
        let mut candidates = Kept::new(Policy::Random, 40, seed);
        (0..40).for_each(|slot| candidates.add(slot, Worth::default()));
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
fn the_optimal_gives_up_what_is_never_needed_and_then_what_is_needed_last() {
    let mut candidates = Kept::new(Policy::Optimal, 5, 0);
    for (slot, next) in [(0, 3), (1, 0), (2, 60), (3, 7), (4, 0)] {
        candidates.add(slot, Worth { frequency: 0, next });
    }
    candidates.remove(4);
    candidates.add(4, Worth { frequency: 0, next: 20 });
    assert_eq!(candidates.drained(), [1, 2, 4, 3, 0]);
}

#[test]
fn a_policy_is_named_and_an_unknown_one_refused() {
    for policy in Policy::ALL {
        assert_eq!(policy.to_string().parse::<Policy>().unwrap(), policy);
    }
    let refused = "fifo".parse::<Policy>().unwrap_err().to_string();
    assert_eq!(refused, "policy: expected lru, lfu, random or optimal, got \"fifo\"");
}
