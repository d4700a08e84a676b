use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn the_sketch_never_counts_too_little_before_it_is_halved(
        keys in prop::collection::vec(0u32..50, 0..300),
    ) {
        let mut sketch = Sketch::new(40, 50);
        for (i, &key) in keys.iter().enumerate() {
            sketch.add(key);
            let true_count = keys[..=i].iter().filter(|&&k| k == key).count();
            prop_assert!(usize::from(sketch.count(key)) >= true_count.min(15));
        }
    }
}

#[test]
fn halving_forgets_what_is_old() {
    let mut sketch = Sketch::new(16, 64);
    (0..10).for_each(|_| sketch.add(1));
    assert_eq!(sketch.count(1), 10);
    (0..150).for_each(|i| sketch.add(2 + i % 3));
    assert_eq!(sketch.count(1), 5);
}
