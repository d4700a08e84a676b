use super::*;

#[test]
fn the_generator_is_splitmix64() {
    // The first outputs for seed 1234567, as published with the reference implementation.
    let outputs = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423_u64];
    let mut numbers = SplitMix64::new(1_234_567);
    assert_eq!(outputs.map(|_| numbers.next_u64()), outputs);
}
