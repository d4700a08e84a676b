use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_word_is_a_queue_of_the_names_missed_last_with_their_counts(
        names in prop::collection::vec(0u64..7, 0..80),
    ) {
        let (mut queue, mut list) = (0, Vec::<(u64, u64)>::new());
        for name in names {
            let known = list.iter().position(|&(n, _)| n == name);
            let count = known.map_or(1, |at| list.remove(at).1 + 1).min(MOST);
            list.insert(0, (name, count));
            list.truncate(DEPTH as usize);
            let (after, counted) = missed(queue, name << COUNT_BITS);
            prop_assert_eq!(counted, count);
            let packed = |word, &(n, c): &(u64, u64)| word << BITS | n << COUNT_BITS | c;
            prop_assert_eq!(after, list.iter().rev().fold(0, packed));
            queue = after;
        }
    }
}

#[test]
fn a_key_is_let_in_at_its_nth_miss_and_no_earlier_where_keys_are_few() {
    for least in [1, 2, 5] {
        let sketch = Sketch::new(1 << 16, least);
        for key in 2..100 {
            let admitted: Vec<bool> = (0..6).map(|_| sketch.admits(FlatKey(key))).collect();
            let first = admitted.iter().position(|a| *a);
            assert_eq!(first, Some(least as usize - 1), "key {key}: {admitted:?}");
        }
    }
}

#[test]
fn keys_seen_once_are_kept_out_however_many_they_are() {
    let sketch = Sketch::new(1 << 12, 2);
    let let_in = (0..1u64 << 18).filter(|&key| sketch.admits(FlatKey(key + 2))).count();
    assert!(let_in < 1 << 9, "{let_in} of {} keys of one miss were let in", 1 << 18);
}

/// What share of the keys is let in at a second miss, so many other misses after the first.
fn remembered(others: u64) -> f64 {
    const KEYS: u64 = 200;
    let let_in = |key: &u64| {
        let sketch = Sketch::new(ROOM as usize * MISS_BYTES, 2);
        assert!(!sketch.admits(FlatKey(*key)));
        let let_in = (0..others).filter(|other| sketch.admits(FlatKey(1000 + key * others + other)));
        assert!(let_in.count() <= others as usize / 100, "rows missed once");
        sketch.admits(FlatKey(*key))
    };
    (2..2 + KEYS).filter(let_in).count() as f64 / KEYS as f64
}

/// Misses that the sketch has room for.
const ROOM: u64 = 1 << 10;

#[test]
fn a_miss_is_remembered_for_about_as_many_others_as_there_is_room_for() {
    let shares = [ROOM / 4, ROOM / 2, 2 * ROOM, 4 * ROOM].map(remembered);
    assert!(shares[0] > 0.95 && shares[1] > 0.8, "soon after: {shares:?}");
    assert!(shares[2] < 0.2 && shares[3] < 0.02, "long after: {shares:?}");
}
