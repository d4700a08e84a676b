use super::*;
use proptest::prelude::*;

#[test]
fn ranked_keys_are_warmer_than_unranked_keys_of_any_age() {
    let ranks = Ranks::new([5, 9, 5, 7].map(FlatKey).into_iter());
    assert_eq!(ranks.len, 3);
    let mut keys = [(9, 1000), (3, 2), (5, 3), (4, 0), (7, 0)];
    keys.sort_by_key(|&(key, age)| ranks.coldness(FlatKey(key), age));
    assert_eq!(keys.map(|(key, _)| key), [5, 9, 7, 4, 3]);
}

proptest! {
    #[test]
    fn a_rank_is_a_keys_place_among_the_distinct_keys(
        keys in prop::collection::vec(2u64..300, 0..200),
    ) {
        let ranks = Ranks::new(keys.iter().map(|&key| FlatKey(key)));
        let mut distinct: Vec<u64> = Vec::new();
        keys.iter().for_each(|key| if !distinct.contains(key) { distinct.push(*key) });
        for key in 2..300 {
            let place = distinct.iter().position(|k| *k == key).map(|place| place as u32);
            prop_assert_eq!(ranks.rank(FlatKey(key)), place);
        }
        prop_assert_eq!(ranks.len, distinct.len());
        prop_assert_eq!(ranks.bytes(), Ranks::bytes_of(keys.len()));
    }
}
