use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn keys_are_numbered_by_first_occurrence_in_every_generation(
        batches in prop::collection::vec(prop::collection::vec(2u64..40, 0..60), 1..20),
    ) {
        let mut numbering = KeyNumbering { generation: u32::MAX - 10, ..KeyNumbering::default() };
        for batch in batches {
            numbering.begin(batch.len());
            let mut order: Vec<u64> = Vec::new();
            for key in batch {
                let number = numbering.number(FlatKey(key), order.len() as u32) as usize;
                if number == order.len() {
                    prop_assert!(!order.contains(&key));
                    order.push(key);
                }
                prop_assert_eq!(order[number], key);
            }
        }
    }
}
