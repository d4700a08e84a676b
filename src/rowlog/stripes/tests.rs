use super::*;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn bytes_written_across_files_are_read_back_by_calls_and_by_the_mapping(
        writes in prop::collection::vec((0_usize..10 << 20, 1_usize..(3 << 20) / 4, any::<bool>()), 1..5),
        read in (0_usize..10 << 20, 1_usize..(5 << 20) / 4),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let stripes = Stripes::create(dir.path(), 48 << 20).unwrap();
        let mut plain = vec![0_f32; 12 << 20];
        for (n, (at, len, by_call)) in writes.into_iter().enumerate() {
            let words: Vec<f32> = (0..len).map(|i| (i * 31 + n * 7 + 1) as f32).collect();
            if by_call {
                stripes.write(bytemuck::cast_slice(&words), at as u64 * 4).unwrap();
            } else {
                stripes.store(&words, at as u64 * 4);
            }
            plain[at..][..len].copy_from_slice(&words);
        }
        let mut got = vec![1.0; read.1];
        stripes.load(&mut got, read.0 as u64 * 4);
        prop_assert!(got == plain[read.0..][..read.1]);
        let mut got = vec![1.0; read.1];
        stripes.read(bytemuck::cast_slice_mut(&mut got), read.0 as u64 * 4).unwrap();
        prop_assert!(got == plain[read.0..][..read.1]);
    }
}
