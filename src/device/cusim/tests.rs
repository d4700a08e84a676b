//! Tests of the simulator itself (`kernels/cusim`), with small kernels, some of which have a planted bug.
#![allow(unsafe_code)]

mod driver;
mod gather_pool;

use crate::device::cusim::{Argument, Launch, launch};
use crate::mem::fold;
use bytemuck::Pod;
use proptest::prelude::*;

impl Argument {
    /// A value passed by copy, such as a number, an address or a `#[repr(C)]` struct.
    fn value<T: Pod>(value: T) -> Self {
        Self::bytes(bytemuck::bytes_of(&value))
    }

    /// The address of memory that the kernel reads.
    fn read<T: Pod>(memory: &[T]) -> Self {
        Self::value(memory.as_ptr() as u64)
    }

    /// The address of memory that the kernel writes.
    fn write<T: Pod>(memory: &mut [T]) -> Self {
        Self::value(memory.as_mut_ptr() as u64)
    }
}

const SEEDS: [u64; 6] = [0, 1, 2, 3, 4, 5];

/// Runs a kernel that reverses 0..128 through shared memory.
fn reversed(kernel: &str, seed: u64) -> Vec<u32> {
    let mut values: Vec<u32> = (0..128).collect();
    let shape = Launch { blocks: 1, threads: 128, shared_bytes: 128 * 4, seed };
    let arguments = [Argument::write(&mut values), Argument::value(128_u32)];
    // SAFETY: the kernel takes (u32*, u32) and accesses one element per thread; the shared memory has room
    // for as many.
    unsafe { launch(kernel, shape, &arguments) }.unwrap();
    values
}

#[test]
fn a_barrier_orders_shared_memory_and_a_missing_one_is_detected() {
    let expected: Vec<u32> = (0..128).rev().collect();
    assert!(SEEDS.into_iter().all(|seed| reversed("reverse_with_barrier", seed) == expected));
    assert!(SEEDS.into_iter().any(|seed| reversed("reverse_without_barrier", seed) != expected));
}

/// Runs a kernel in which each of 4 x 64 threads increments the same counter. Returns the counter.
fn counted(kernel: &str, seed: u64) -> u32 {
    let mut counter = [0_u32];
    let shape = Launch { blocks: 4, threads: 64, shared_bytes: 0, seed };
    // SAFETY: the kernel takes (u32*) and accesses one element.
    unsafe { launch(kernel, shape, &[Argument::write(&mut counter)]) }.unwrap();
    counter[0]
}

#[test]
fn an_atomic_add_counts_every_thread_and_a_plain_increment_is_detected() {
    assert!(SEEDS.into_iter().all(|seed| counted("count_atomically", seed) == 256));
    assert!(SEEDS.into_iter().any(|seed| counted("count_plainly", seed) < 256));
}

#[test]
fn a_seed_reproduces_its_schedule() {
    for seed in SEEDS {
        assert_eq!(counted("count_plainly", seed), counted("count_plainly", seed));
    }
}

proptest! {
    #[test]
    fn shuffles_ballots_and_matches_follow_cuda(
        values in prop::collection::vec(0_u32..5, 128),
        seed in prop::sample::select(SEEDS.to_vec()),
    ) {
        let shape = Launch { blocks: 2, threads: 64, shared_bytes: 0, seed };
        let (mut sums, mut votes, mut same) = ([0_u32; 4], [0_u32; 4], [0_u32; 128]);
        let arguments = [Argument::read(&values), Argument::write(&mut sums), Argument::write(&mut votes)];
        // SAFETY: the kernel takes (const u32*, u32*, u32*): one value per thread, one result per warp.
        unsafe { launch("warp_sums", shape, &arguments) }.unwrap();
        // SAFETY: the kernel takes (const u32*, u32*): one value and one result per thread.
        let launched =
            unsafe { launch("warp_match", shape, &[Argument::read(&values), Argument::write(&mut same)]) };
        launched.unwrap();

        let mask = |warp: &[u32], holds: &dyn Fn(u32) -> bool| -> u32 {
            (0..32).filter(|&lane| holds(warp[lane])).map(|lane| 1 << lane).sum()
        };
        for (i, warp) in values.chunks(32).enumerate() {
            prop_assert_eq!(sums[i], warp.iter().sum::<u32>());
            prop_assert_eq!(votes[i], mask(warp, &|value| value % 2 == 1));
            for lane in 0..32 {
                prop_assert_eq!(same[i * 32 + lane], mask(warp, &|value| value == warp[lane]));
            }
        }
    }
}

/// The error of a kernel that takes (u32*) and accesses one element per thread.
fn error_of(kernel: &str, seed: u64) -> String {
    let mut values = [0_u32; 64];
    let shape = Launch { blocks: 1, threads: 64, shared_bytes: 0, seed };
    // SAFETY: callers name a kernel that takes (u32*) and accesses one element per thread.
    unsafe { launch(kernel, shape, &[Argument::write(&mut values)]) }.unwrap_err().to_string()
}

#[test]
fn broken_barriers_and_masks_are_reported_with_block_and_lane() {
    for seed in SEEDS {
        let cases = [
            ("barriers_apart", "wait at different barriers (block 0,0,0 thread"),
            (
                "barrier_against_ballot",
                "deadlock: a barrier or warp operation that some lanes never reach (block 0,0,0 warp 0: \
                 lanes ffffffff live, 0000ffff at __syncthreads, ffff0000 in a warp operation)",
            ),
            ("ballot_outside_mask", "a lane is not in its own mask (block 0,0,0 thread"),
            ("shuffle_outside_mask", "a shuffle reads a lane outside its mask (block 0,0,0 thread"),
        ];
        for (kernel, expected) in cases {
            let error = error_of(kernel, seed);
            assert!(error.contains(kernel) && error.contains(expected), "seed {seed}: {error}");
        }
    }
}

#[test]
fn an_endless_loop_is_reported() {
    assert!(error_of("spin_for_ever", 1).contains("an endless loop (block 0,0,0 thread"));
}

#[test]
fn a_launch_after_a_failed_one_works() {
    error_of("barriers_apart", 1);
    assert_eq!(counted("count_atomically", 1), 256);
}

#[test]
fn an_unknown_kernel_and_a_too_large_block_are_rejected() {
    assert!(error_of("no_such_kernel", 0).contains("no kernel of this name"));
    let shape = Launch { blocks: 1, threads: 1056, shared_bytes: 0, seed: 0 };
    // SAFETY: nothing runs.
    let error = unsafe { launch("count_plainly", shape, &[]) }.unwrap_err();
    assert!(error.to_string().contains("1 to 1024 threads"), "{error}");
}

// ---- Weak memory order. ----

const RELEASE: u32 = 1;
const ACQUIRE: u32 = 2;
const ATOMICALLY: u32 = 4;
const OTHER_LANE: u32 = 8;
const SYNC_WARP: u32 = 16;

/// Whether under some seed a thread of `pass_message` reads a flag that is set, and then the old data.
fn loses_a_message(uses: u32) -> bool {
    let lost = |seed| {
        let (mut memory, mut flags, mut data) = ([0_u64; 64], [0_u64; 32], [0_u64; 32]);
        let shape = Launch { blocks: 2, threads: 32, shared_bytes: 0, seed };
        let arguments = [
            Argument::write(&mut memory),
            Argument::write(&mut flags),
            Argument::write(&mut data),
            Argument::value(uses),
        ];
        // SAFETY: the kernel takes (u64*, u64*, u64*, u32): two words of memory and one of each result per
        // thread.
        unsafe { launch("pass_message", shape, &arguments) }.unwrap();
        flags.iter().zip(data).any(|(&flag, data)| flag == 1 && data == 0)
    };
    (1..200).any(lost)
}

#[test]
fn a_message_arrives_only_if_both_sides_fence() {
    for writes in [0, ATOMICALLY] {
        assert!(!loses_a_message(writes | RELEASE | ACQUIRE));
        assert!(loses_a_message(writes));
        assert!(loses_a_message(writes | RELEASE));
        assert!(loses_a_message(writes | ACQUIRE));
    }
}

#[test]
fn a_lane_passes_a_message_on_by_a_warp_barrier_and_not_by_a_shuffle() {
    assert!(!loses_a_message(RELEASE | ACQUIRE | OTHER_LANE | SYNC_WARP));
    assert!(loses_a_message(RELEASE | ACQUIRE | OTHER_LANE));
    assert!(loses_a_message(RELEASE | OTHER_LANE | SYNC_WARP));
}

#[test]
fn a_value_once_read_is_not_followed_by_an_older_one() {
    let mut old = false;
    for seed in 0..50 {
        let (mut counter, mut first, mut last) = ([0_u32], [0_u32; 64], [u32::MAX; 64]);
        let shape = Launch { blocks: 2, threads: 32, shared_bytes: 0, seed };
        let arguments =
            [Argument::write(&mut counter), Argument::write(&mut first), Argument::write(&mut last)];
        // SAFETY: the kernel takes (u32*, u32*, u32*): one counter, and one element of each result per
        // thread.
        unsafe { launch("read_again", shape, &arguments) }.unwrap();
        assert_eq!(counter, [256]);
        assert!(first.iter().zip(last).all(|(&first, last)| first <= last));
        old |= seed > 0 && last[32..].iter().any(|&last| last < 256);
    }
    assert!(old);
}

/// Runs a kernel in which all 8 blocks increment the counters, and the last block reads them.
fn counted_by_the_last_block(kernel: &str, seed: u64) -> [u32; 64] {
    let (mut counters, mut blocks, mut counted) = ([0_u32; 64], [0_u32], [0_u32; 64]);
    let shape = Launch { blocks: 8, threads: 64, shared_bytes: 0, seed };
    let arguments =
        [Argument::write(&mut counters), Argument::write(&mut blocks), Argument::write(&mut counted)];
    // SAFETY: the kernel takes (u32*, u32*, u32*): one counter and one result per thread of a block, and one
    // number.
    unsafe { launch(kernel, shape, &arguments) }.unwrap();
    counted
}

#[test]
fn the_last_block_sees_what_the_others_wrote_only_by_fences() {
    let all = |kernel: &'static str| (0..50).all(|seed| counted_by_the_last_block(kernel, seed) == [8; 64]);
    assert!(all("count_blocks"));
    assert!(!all("count_blocks_without_fences"));
}

// ---- Functions that kernels and host share. ----

#[test]
fn numbers_are_folded_as_on_the_host() {
    let numbers: Vec<u64> = (0..30).map(|i| (1 << (2 * i)) + i).chain([0, u64::MAX]).collect();
    for bits in 0..=64 {
        let mut folded = vec![0_u64; numbers.len()];
        let arguments = [Argument::read(&numbers), Argument::write(&mut folded), Argument::value(bits)];
        let shape = Launch { blocks: 1, threads: 32, shared_bytes: 0, seed: 0 };
        // SAFETY: the kernel takes (u64*, u64*, u32): at most 32 numbers, one per thread, and as many
        // results.
        unsafe { launch("fold_numbers", shape, &arguments).unwrap() };
        let expected: Vec<u64> = numbers.iter().map(|&number| fold(number, bits)).collect();
        assert_eq!(folded, expected, "{bits} bits");
    }
}
