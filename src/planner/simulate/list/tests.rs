use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn two_lists_over_the_same_links_behave_as_two_deques(
        steps in prop::collection::vec((0usize..2, 0u32..12, any::<bool>()), 0..200),
    ) {
        let mut links = Links::new(12);
        let mut lists = [List::default(), List::default()];
        let mut wanted = [std::collections::VecDeque::new(), std::collections::VecDeque::new()];
        for (which, key, pop) in steps {
            if pop {
                prop_assert_eq!(lists[which].pop_back(&mut links), wanted[which].pop_back());
                continue;
            }
            for (list, wanted) in lists.iter_mut().zip(&mut wanted) {
                if let Some(at) = wanted.iter().position(|&k| k == key) {
                    wanted.remove(at);
                    list.remove(&mut links, key);
                }
            }
            lists[which].push_front(&mut links, key);
            wanted[which].push_front(key);
            for (list, wanted) in lists.iter().zip(&wanted) {
                prop_assert_eq!(list.len(), wanted.len());
                prop_assert_eq!(list.is_empty(), wanted.is_empty());
                prop_assert_eq!(list.back(), wanted.back().copied());
            }
        }
    }
}
