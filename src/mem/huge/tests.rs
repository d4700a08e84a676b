use super::*;

#[test]
fn an_array_has_the_requested_length_and_is_zeroed() {
    for count in [0, 1, 1000, 3 << 20] {
        let mut numbers = Huge::<u64>::zeroed(count).unwrap();
        assert_eq!(numbers.len(), count);
        assert!(numbers.iter().all(|&number| number == 0));
        numbers.fill(7);
        assert_eq!(numbers.last().copied(), (count > 0).then_some(7));
    }
    assert!(Huge::<u64>::zeroed(usize::MAX / 4).is_err());
    assert!(Huge::<u64>::zeroed(1 << 58).is_err());
}
