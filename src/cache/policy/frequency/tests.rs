use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_word_is_a_queue_of_the_rows_missed_last_with_their_counts(
        names in prop::collection::vec((0u64..7, 1u64..5), 0..80),
    ) {
        let (mut queue, mut list) = (0, Vec::<(u64, u64)>::new());
        for (name, occurrences) in names {
            let known = list.iter().position(|&(n, _)| n == name);
            let count = (known.map_or(0, |at| list.remove(at).1) + occurrences).min(MAX_COUNT);
            list.insert(0, (name, count));
            list.truncate(DEPTH as usize);
            let (after, counted) = missed(queue, name << COUNT_BITS, occurrences);
            prop_assert_eq!(counted, count);
            let packed = |word, &(n, c): &(u64, u64)| word << BITS | n << COUNT_BITS | c;
            prop_assert_eq!(after, list.iter().rev().fold(0, packed));
            queue = after;
        }
    }
}

#[test]
fn a_row_is_admitted_at_its_nth_miss_and_not_earlier() {
    for least in [1, 2, 5] {
        let sketch = Sketch::new(1 << 16, least);
        for key in 2..100 {
            let admitted: Vec<bool> = (0..6).map(|_| sketch.admits(FlatKey(key), 1)).collect();
            let first = admitted.iter().position(|a| *a);
            assert_eq!(first, Some(least as usize - 1), "key {key}: {admitted:?}");
        }
    }
}

#[test]
fn every_occurrence_in_a_batch_counts() {
    let sketch = Sketch::new(1 << 16, 3);
    assert!(sketch.admits(FlatKey(5), 3), "used three times by one batch");
    assert!(!sketch.admits(FlatKey(6), 1));
    assert!(sketch.admits(FlatKey(6), 2), "used once by a batch and twice by the next");
}

#[test]
fn rows_missed_once_are_not_admitted() {
    let sketch = Sketch::new(1 << 12, 2);
    let admitted = (0..1u64 << 18).filter(|&key| sketch.admits(FlatKey(key + 2), 1)).count();
    assert!(admitted < 1 << 9, "{admitted} of {} keys of one miss were admitted", 1 << 18);
}

/// The share of rows that are admitted at their second miss, with `others` misses of other rows in between.
fn remembered(others: u64) -> f64 {
    const KEYS: u64 = 200;
    let admitted = |key: &u64| {
        let sketch = Sketch::new(ROOM as usize * MISS_BYTES, 2);
        assert!(!sketch.admits(FlatKey(*key), 1));
        let admitted = (0..others).filter(|other| sketch.admits(FlatKey(1000 + key * others + other), 1));
        assert!(admitted.count() <= others as usize / 100, "rows missed once");
        sketch.admits(FlatKey(*key), 1)
    };
    (2..2 + KEYS).filter(admitted).count() as f64 / KEYS as f64
}

/// Rows that the sketch has room for.
const ROOM: u64 = 1 << 10;

#[test]
fn a_miss_is_remembered_for_about_as_many_others_as_there_is_room_for() {
    let shares = [ROOM / 4, ROOM / 2, 2 * ROOM, 4 * ROOM].map(remembered);
    assert!(shares[0] > 0.95 && shares[1] > 0.8, "soon after: {shares:?}");
    assert!(shares[2] < 0.2 && shares[3] < 0.02, "long after: {shares:?}");
}
