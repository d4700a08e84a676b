//! Compares every policy with a slow, independent transcription of its paper, and checks the bounds that hold
//! for all policies.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::super::trace::Trace;
use super::super::trace::tests::{accesses, trace};
use super::*;

/// Keys below 24. Low keys are more frequent, and scans of successive keys are mixed in.
fn keys() -> impl Strategy<Value = Vec<u32>> {
    let hot = (0u32..24).prop_map(|k| vec![k * k / 24]);
    let scan = (0u32..20, 1u32..5).prop_map(|(from, len)| (from..from + len).collect());
    prop::collection::vec(prop_oneof![4 => hot, 1 => scan], 1..150).prop_map(|parts| parts.concat())
}

const KEYS: u32 = 24;

fn hits(mut cache: Box<dyn Simulated>, keys: &[u32]) -> Vec<bool> {
    keys.iter().map(|&key| cache.access(key)).collect()
}

fn slow_lru(capacity: usize, keys: &[u32]) -> Vec<bool> {
    let mut held: Vec<u32> = Vec::new();
    let access = |&key: &u32| {
        let at = held.iter().position(|&k| k == key);
        at.map(|at| held.remove(at));
        held.insert(0, key);
        held.truncate(capacity);
        at.is_some()
    };
    keys.iter().map(access).collect()
}

fn slow_lfu(capacity: usize, keys: &[u32]) -> Vec<bool> {
    // Key to count and time of last access.
    let mut held: HashMap<u32, (usize, usize)> = HashMap::new();
    let mut access = |now: usize, key: u32| {
        if let Some(entry) = held.get_mut(&key) {
            *entry = (entry.0 + 1, now);
            return true;
        }
        if held.len() == capacity {
            let out = *held.iter().min_by_key(|(_, entry)| **entry).unwrap().0;
            held.remove(&out);
        }
        held.insert(key, (1, now));
        false
    };
    keys.iter().enumerate().map(|(now, &key)| access(now, key)).collect()
}

/// Evicts the key with the farthest next use, which it finds by a search of all cached keys.
fn slow_optimal(capacity: usize, keys: &[u32]) -> Vec<bool> {
    let mut held: Vec<u32> = Vec::new();
    let mut access = |at: usize, key: u32| {
        if held.contains(&key) {
            return true;
        }
        if capacity == 0 {
            return false;
        }
        if held.len() == capacity {
            let next = |k: &u32| keys[at..].iter().position(|later| later == k).unwrap_or(usize::MAX);
            let out = (0..held.len()).max_by_key(|&i| next(&held[i])).unwrap();
            held.remove(out);
        }
        held.push(key);
        false
    };
    keys.iter().enumerate().map(|(at, &key)| access(at, key)).collect()
}

/// ARC, line by line as in figure 4 of the paper. Lists have the most recently used key first.
fn slow_arc(c: usize, keys: &[u32]) -> Vec<bool> {
    let [mut t1, mut t2, mut b1, mut b2]: [VecDeque<u32>; 4] = Default::default();
    let mut p = 0.0f64;
    let take = |list: &mut VecDeque<u32>, x: u32| {
        let at = list.iter().position(|&k| k == x);
        at.map(|at| list.remove(at)).is_some()
    };
    let mut outcomes = Vec::new();
    for &x in keys {
        macro_rules! replace {
            ($in_b2:expr) => {
                if !t1.is_empty() && (t1.len() as f64 > p || $in_b2 && t1.len() as f64 == p) {
                    b1.push_front(t1.pop_back().unwrap());
                } else {
                    b2.push_front(t2.pop_back().unwrap());
                }
            };
        }
        if take(&mut t1, x) || take(&mut t2, x) {
            t2.push_front(x);
            outcomes.push(true);
            continue;
        }
        outcomes.push(false);
        if b1.contains(&x) {
            p = (p + (b2.len() as f64 / b1.len() as f64).max(1.0)).min(c as f64);
            replace!(false);
            take(&mut b1, x);
            t2.push_front(x);
        } else if b2.contains(&x) {
            p = (p - (b1.len() as f64 / b2.len() as f64).max(1.0)).max(0.0);
            replace!(true);
            take(&mut b2, x);
            t2.push_front(x);
        } else {
            if t1.len() + b1.len() == c {
                if t1.len() < c {
                    b1.pop_back();
                    replace!(false);
                } else {
                    t1.pop_back();
                }
            } else if t1.len() + t2.len() + b1.len() + b2.len() >= c {
                if t1.len() + t2.len() + b1.len() + b2.len() == 2 * c {
                    b2.pop_back();
                }
                replace!(false);
            }
            t1.push_front(x);
        }
    }
    outcomes
}

/// S3-FIFO, as in algorithm 1 of the paper. Queues hold keys with counts, the newest first.
fn slow_s3fifo(capacity: usize, keys: &[u32]) -> Vec<bool> {
    let small_capacity = (capacity / 10).max(1);
    let [mut small, mut main]: [VecDeque<(u32, u8)>; 2] = Default::default();
    let mut ghost: VecDeque<u32> = VecDeque::new();
    let mut outcomes = Vec::new();
    for &x in keys {
        if let Some((_, freq)) = small.iter_mut().chain(&mut main).find(|(k, _)| *k == x) {
            *freq = (*freq + 1).min(3);
            outcomes.push(true);
            continue;
        }
        outcomes.push(false);
        let remembered = ghost.iter().position(|&k| k == x).map(|at| ghost.remove(at)).is_some();
        while small.len() + main.len() >= capacity {
            if small.len() >= small_capacity || main.is_empty() {
                let (t, freq) = small.pop_back().unwrap();
                if freq > 1 {
                    main.push_front((t, 0));
                } else {
                    ghost.push_front(t);
                    ghost.truncate(capacity - small_capacity);
                }
            } else {
                let (t, freq) = main.pop_back().unwrap();
                if freq > 0 {
                    main.push_front((t, freq - 1));
                }
            }
        }
        if remembered { &mut main } else { &mut small }.push_front((x, 0));
    }
    outcomes
}

/// W-TinyLFU, as in section 4 of the paper. In place of the sketch it has exact counts, which are halved as
/// in the sketch. Lists have the newest key first.
fn slow_wtinylfu(capacity: usize, keys: &[u32]) -> Vec<bool> {
    let window_capacity = (capacity / 100).max(1);
    let main_capacity = capacity - window_capacity;
    let [mut window, mut probation, mut protected]: [VecDeque<u32>; 3] = Default::default();
    let mut counts: HashMap<u32, u8> = HashMap::new();
    let mut added = 0;
    let take = |list: &mut VecDeque<u32>, x: u32| {
        let at = list.iter().position(|&k| k == x);
        at.map(|at| list.remove(at)).is_some()
    };
    let mut outcomes = Vec::new();
    for &x in keys {
        let count = counts.entry(x).or_default();
        *count = (*count + 1).min(15);
        added += 1;
        if added >= 10 * capacity {
            added /= 2;
            counts.values_mut().for_each(|c| *c /= 2);
        }
        if take(&mut window, x) {
            window.push_front(x);
            outcomes.push(true);
        } else if take(&mut probation, x) || take(&mut protected, x) {
            protected.push_front(x);
            if protected.len() > main_capacity * 4 / 5 {
                probation.push_front(protected.pop_back().unwrap());
            }
            outcomes.push(true);
        } else {
            outcomes.push(false);
            if window.len() == window_capacity {
                let candidate = window.pop_back().unwrap();
                let from = if probation.is_empty() { &mut protected } else { &mut probation };
                let victim = from.back().copied();
                if probation.len() + protected.len() < main_capacity {
                    probation.push_front(candidate);
                } else if let Some(victim) = victim
                    && counts[&candidate] > counts[&victim]
                {
                    let from = if probation.is_empty() { &mut protected } else { &mut probation };
                    from.pop_back();
                    probation.push_front(candidate);
                }
            }
            window.push_front(x);
        }
    }
    outcomes
}

proptest! {
    #[test]
    fn lru_hits_like_its_slow_transcription(keys in keys(), capacity in 1usize..30) {
        let got = hits(SimulatedPolicy::Lru.cache(capacity, KEYS, 0), &keys);
        prop_assert_eq!(got, slow_lru(capacity, &keys));
    }

    #[test]
    fn lfu_hits_like_its_slow_transcription(keys in keys(), capacity in 1usize..30) {
        let got = hits(SimulatedPolicy::Lfu.cache(capacity, KEYS, 0), &keys);
        prop_assert_eq!(got, slow_lfu(capacity, &keys));
    }

    #[test]
    fn arc_hits_like_its_slow_transcription(keys in keys(), capacity in 1usize..30) {
        let got = hits(SimulatedPolicy::Arc.cache(capacity, KEYS, 0), &keys);
        prop_assert_eq!(got, slow_arc(capacity, &keys));
    }

    #[test]
    fn s3fifo_hits_like_its_slow_transcription(keys in keys(), capacity in 1usize..30) {
        let got = hits(SimulatedPolicy::S3Fifo.cache(capacity, KEYS, 0), &keys);
        prop_assert_eq!(got, slow_s3fifo(capacity, &keys));
    }

    /// The sketch counts exactly here: it is wide, and these few keys do not collide in all four rows.
    #[test]
    fn wtinylfu_hits_like_its_slow_transcription(keys in keys(), capacity in 8usize..30) {
        let got = hits(SimulatedPolicy::WTinyLfu.cache(capacity, KEYS, 0), &keys);
        prop_assert_eq!(got, slow_wtinylfu(capacity, &keys));
    }

    #[test]
    fn optimal_hits_like_its_slow_transcription(keys in keys(), capacity in 0usize..30) {
        let mut got = Vec::new();
        Future::of(&keys, KEYS).run(&keys, KEYS, capacity, |_, hit| got.push(hit));
        // Rows that are not used again may be evicted in any order, so only the number of hits must be equal.
        let count = |outcomes: &[bool]| outcomes.iter().filter(|hit| **hit).count();
        prop_assert_eq!(count(&got), count(&slow_optimal(capacity, &keys)));
    }

    #[test]
    fn no_policy_beats_the_optimal_and_a_cache_of_all_keys_misses_each_key_once(
        keys in keys(), capacity in 0usize..30, seed: u64,
    ) {
        let count = |outcomes: &[bool]| outcomes.iter().filter(|hit| **hit).count();
        let best = count(&slow_optimal(capacity, &keys));
        let distinct = keys.iter().collect::<std::collections::HashSet<_>>().len();
        // A cache that may refuse a row hits at most as often as an optimal cache with room for one more row,
        // because that cache can keep each refused row in the extra place until the next miss.
        let best_refusing = count(&slow_optimal(capacity + 1, &keys));
        for policy in SimulatedPolicy::ALL {
            let got = count(&hits(policy.cache(capacity, KEYS, seed), &keys));
            let best = if policy == SimulatedPolicy::ServerDefault { best_refusing } else { best };
            prop_assert!(got <= best, "{}: {got} of {best}", policy.name());
            if capacity >= KEYS as usize {
                prop_assert_eq!(got, keys.len() - distinct, "{}", policy.name());
            }
        }
    }

    #[test]
    fn a_row_that_was_just_used_hits(keys in keys(), capacity in 1usize..30, seed: u64) {
        let admits_all = |policy: &SimulatedPolicy| *policy != SimulatedPolicy::ServerDefault;
        for policy in SimulatedPolicy::ALL.into_iter().filter(admits_all) {
            let mut cache = policy.cache(capacity, KEYS, seed);
            for &key in &keys {
                cache.access(key);
                prop_assert!(cache.access(key), "{}", policy.name());
            }
        }
    }

    #[test]
    fn flat_is_one_cache_of_all_tables_and_per_table_is_one_for_each(
        wanted in accesses(200), fraction in 0.0f64..=1.0,
    ) {
        let trace = trace(&wanted);
        let sizes = simulate(&trace, &[fraction], 5);
        let size = &sizes[0];
        let tables = trace.table_of_keys();
        prop_assert_eq!(size.rows, (fraction * f64::from(trace.keys())).floor() as usize);
        let flat = size.flat.of(SimulatedPolicy::Lru);
        prop_assert_eq!(flat.total(), total(&slow_lru(size.rows, &trace.accesses)));
        prop_assert_eq!(size.flat.optimal.total(), total(&slow_optimal(size.rows, &trace.accesses)));
        for (t, table) in trace.tables.iter().enumerate() {
            let own = |key: &u32| tables[*key as usize] as usize == t;
            let own_keys: Vec<u32> = trace.accesses.iter().copied().filter(own).collect();
            let rows = (fraction * table.keys.len() as f64).floor() as usize;
            prop_assert_eq!(size.table_rows[t], rows);
            let hits = |policy| size.per_table.of(policy).tables[t];
            prop_assert_eq!(hits(SimulatedPolicy::Lru), total(&slow_lru(rows, &own_keys)));
            prop_assert_eq!(hits(SimulatedPolicy::Lfu), total(&slow_or_none(rows, &own_keys)));
            prop_assert_eq!(size.per_table.optimal.tables[t], total(&slow_optimal(rows, &own_keys)));
        }
    }
}

/// LRU that, when it is full, admits only rows that were missed before. Unlike the sketch, it never forgets a
/// miss.
fn slow_server(capacity: usize, keys: &[u32]) -> Vec<bool> {
    let (mut held, mut missed) = (Vec::new(), std::collections::HashSet::new());
    let mut access = |&key: &u32| {
        let at = held.iter().position(|&k| k == key);
        at.map(|at| held.remove(at));
        if at.is_some() || !missed.insert(key) || held.len() < capacity {
            held.insert(0, key);
            held.truncate(capacity);
        }
        at.is_some()
    };
    keys.iter().map(&mut access).collect()
}

#[test]
fn the_server_default_admits_a_row_to_a_full_cache_at_its_second_miss() {
    // 0 and 1 fill the cache; 2 is refused once and then evicts 0, the least recently used; 3 is refused.
    let keys = [0, 1, 2, 1, 2, 2, 3, 1, 0];
    let got = hits(SimulatedPolicy::ServerDefault.cache(2, KEYS, 0), &keys);
    assert_eq!(got, [false, false, false, true, false, true, false, true, false]);
    assert_eq!(got, slow_server(2, &keys));
}

#[test]
fn a_scan_of_rows_used_once_does_not_evict_under_the_server_default() {
    let hot = (0..50u32).cycle().take(200);
    let keys: Vec<u32> = hot.clone().chain(100..1100).chain(hot).collect();
    let got = |policy: SimulatedPolicy| total(&hits(policy.cache(50, 1100, 0), &keys));
    assert_eq!(got(SimulatedPolicy::Lru), 300);
    // All but the first use of each hot row hit. A few scanned rows may share a hash in the sketch and be
    // admitted.
    assert!(
        (340..=350).contains(&got(SimulatedPolicy::ServerDefault)),
        "{}",
        got(SimulatedPolicy::ServerDefault)
    );
}

fn slow_or_none(rows: usize, keys: &[u32]) -> Vec<bool> {
    if rows == 0 { vec![false; keys.len()] } else { slow_lfu(rows, keys) }
}

fn total(outcomes: &[bool]) -> u64 {
    outcomes.iter().filter(|hit| **hit).count() as u64
}

#[test]
fn equal_seeds_give_equal_random_evictions() {
    let keys: Vec<u32> = (0..2000u32).map(|i| i.wrapping_mul(2_654_435_761) >> 27).collect();
    let run = |seed| hits(SimulatedPolicy::Random.cache(10, 32, seed), &keys);
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn an_empty_trace_has_no_hits() {
    let empty: Trace = trace(&[]);
    let sizes = simulate(&empty, &[0.5], 0);
    assert_eq!((sizes[0].rows, sizes[0].flat.optimal.total()), (0, 0));
}
