use super::*;

#[test]
fn streaming_copies_write_exactly_the_row_at_every_alignment() {
    let from: Vec<f32> = (1..=80).map(|i| i as f32).collect();
    for (offset, length) in (0..5).flat_map(|offset| (0..70).map(move |length| (offset, length))) {
        let mut to = vec![-1.0; 80];
        let row = offset..offset + length;
        copy_past_caches([(&mut to[row.clone()], &from[5..5 + length])].into_iter());
        assert_eq!(to[row.clone()], from[5..5 + length], "{row:?}");
        let outside = to[..row.start].iter().chain(&to[row.end..]);
        assert!(outside.copied().all(|word| word == -1.0), "{row:?}: {to:?}");
    }
}
