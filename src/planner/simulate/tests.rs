//! Every policy against a slow transcription of its paper, written apart, and the bounds that hold for
//! all of them.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::super::trace::Trace;
use super::super::trace::tests::{accesses, trace};
use super::*;

/// Keys below 24, the lower the hotter, with scans of keys in turn among them.
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

/// Among the residents, the one whose next use is farthest leaves, looked for each time.
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

/// Figure 4 of the paper, line by line; the newest in front.
fn slow_arc(c: usize, keys: &[u32]) -> Vec<bool> {
    let [mut t1, mut t2, mut b1, mut b2]: [VecDeque<u32>; 4] = Default::default();
    let mut p = 0.0f64;
    let take = |list: &mut VecDeque<u32>, x: u32| {
        let at = list.iter().position(|&k| k == x);
        at.map(|at| list.remove(at)).is_some()
    };
    let mut told = Vec::new();
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
            told.push(true);
            continue;
        }
        told.push(false);
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
    told
}

/// Algorithm 1 of the paper; a key and its count, the newest in front.
fn slow_s3fifo(capacity: usize, keys: &[u32]) -> Vec<bool> {
    let small_capacity = (capacity / 10).max(1);
    let [mut small, mut main]: [VecDeque<(u32, u8)>; 2] = Default::default();
    let mut ghost: VecDeque<u32> = VecDeque::new();
    let mut told = Vec::new();
    for &x in keys {
        if let Some((_, freq)) = small.iter_mut().chain(&mut main).find(|(k, _)| *k == x) {
            *freq = (*freq + 1).min(3);
            told.push(true);
            continue;
        }
        told.push(false);
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
    told
}

/// Section 4 of the paper, with exact counts in place of the sketch, halved as the sketch is; the newest
/// in front.
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
    let mut told = Vec::new();
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
            told.push(true);
        } else if take(&mut probation, x) || take(&mut protected, x) {
            protected.push_front(x);
            if protected.len() > main_capacity * 4 / 5 {
                probation.push_front(protected.pop_back().unwrap());
            }
            told.push(true);
        } else {
            told.push(false);
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
    told
}

proptest! {
    #[test]
    fn lru_is_the_slow_one(keys in keys(), capacity in 1usize..30) {
        prop_assert_eq!(hits(Policy::Lru.cache(capacity, KEYS, 0), &keys), slow_lru(capacity, &keys));
    }

    #[test]
    fn lfu_is_the_slow_one(keys in keys(), capacity in 1usize..30) {
        prop_assert_eq!(hits(Policy::Lfu.cache(capacity, KEYS, 0), &keys), slow_lfu(capacity, &keys));
    }

    #[test]
    fn arc_is_the_slow_one(keys in keys(), capacity in 1usize..30) {
        prop_assert_eq!(hits(Policy::Arc.cache(capacity, KEYS, 0), &keys), slow_arc(capacity, &keys));
    }

    #[test]
    fn s3fifo_is_the_slow_one(keys in keys(), capacity in 1usize..30) {
        prop_assert_eq!(hits(Policy::S3Fifo.cache(capacity, KEYS, 0), &keys), slow_s3fifo(capacity, &keys));
    }

    /// Where the sketch happens to count exactly, which it does for so few keys in so wide a sketch unless
    /// two keys collide in all four rows.
    #[test]
    fn wtinylfu_is_the_slow_one(keys in keys(), capacity in 8usize..30) {
        let got = hits(Policy::WTinyLfu.cache(capacity, KEYS, 0), &keys);
        prop_assert_eq!(got, slow_wtinylfu(capacity, &keys));
    }

    #[test]
    fn optimal_is_the_slow_one(keys in keys(), capacity in 0usize..30) {
        let mut got = Vec::new();
        Future::of(&keys, KEYS).run(&keys, KEYS, capacity, |_, hit| got.push(hit));
        // Which of several rows that never come again leaves is free; how many accesses hit is not.
        let count = |told: &[bool]| told.iter().filter(|hit| **hit).count();
        prop_assert_eq!(count(&got), count(&slow_optimal(capacity, &keys)));
    }

    #[test]
    fn no_policy_beats_the_optimal_and_a_cache_of_all_keys_misses_each_once(
        keys in keys(), capacity in 0usize..30, seed: u64,
    ) {
        let count = |told: &[bool]| told.iter().filter(|hit| **hit).count();
        let best = count(&slow_optimal(capacity, &keys));
        let distinct = keys.iter().collect::<std::collections::HashSet<_>>().len();
        for policy in Policy::ALL {
            let got = count(&hits(policy.cache(capacity, KEYS, seed), &keys));
            prop_assert!(got <= best, "{}: {got} of {best}", policy.name());
            if capacity >= KEYS as usize {
                prop_assert_eq!(got, keys.len() - distinct, "{}", policy.name());
            }
        }
    }

    #[test]
    fn a_row_that_was_just_asked_for_hits(keys in keys(), capacity in 1usize..30, seed: u64) {
        for policy in Policy::ALL {
            let mut cache = policy.cache(capacity, KEYS, seed);
            for &key in &keys {
                cache.access(key);
                prop_assert!(cache.access(key), "{}", policy.name());
            }
        }
    }

    #[test]
    fn flat_is_one_cache_of_all_tables_and_per_table_one_of_each(
        wanted in accesses(200), fraction in 0.0f64..=1.0,
    ) {
        let trace = trace(&wanted);
        let sizes = simulate(&trace, &[fraction], 5);
        let size = &sizes[0];
        let tables = trace.table_of_keys();
        prop_assert_eq!(size.rows, (fraction * f64::from(trace.keys())).floor() as usize);
        prop_assert_eq!(size.flat[0].total(), total(&slow_lru(size.rows, &trace.accesses)));
        prop_assert_eq!(size.optimal.total(), total(&slow_optimal(size.rows, &trace.accesses)));
        for (t, table) in trace.tables.iter().enumerate() {
            let own = |key: &u32| tables[*key as usize] as usize == t;
            let asked: Vec<u32> = trace.accesses.iter().copied().filter(own).collect();
            let rows = (fraction * table.keys.len() as f64).floor() as usize;
            prop_assert_eq!(size.table_rows[t], rows);
            prop_assert_eq!(size.per_table[0].tables[t], total(&slow_lru(rows, &asked)));
            prop_assert_eq!(size.per_table[1].tables[t], total(&slow_or_none(rows, &asked)));
        }
    }
}

fn slow_or_none(rows: usize, keys: &[u32]) -> Vec<bool> {
    if rows == 0 { vec![false; keys.len()] } else { slow_lfu(rows, keys) }
}

fn total(told: &[bool]) -> u64 {
    told.iter().filter(|hit| **hit).count() as u64
}

#[test]
fn a_seed_decides_what_is_random() {
    let keys: Vec<u32> = (0..2000u32).map(|i| i.wrapping_mul(2_654_435_761) >> 27).collect();
    let told = |seed| hits(Policy::Random.cache(10, 32, seed), &keys);
    assert_eq!(told(3), told(3));
    assert_ne!(told(3), told(4));
}

#[test]
fn a_trace_of_no_accesses_hits_nothing() {
    let empty: Trace = trace(&[]);
    let sizes = simulate(&empty, &[0.5], 0);
    assert_eq!((sizes[0].rows, sizes[0].optimal.total()), (0, 0));
}
