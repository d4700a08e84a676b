//! Kernels in the simulator (`kernels/cusim`): `gather_pool` is compared with the host under many schedules.
//! Small kernels, some with planted bugs, test the simulator itself.
#![allow(unsafe_code)]

mod driver;

use crate::compute::gather_pool as host;
use crate::compute::pool::{Pool, PoolLookup, pooling_code};
use crate::device::cusim::{Argument, Launch, SimError, gather_pool, launch};
use crate::mem::{SplitMix64, fold};
use crate::schema::Pooling;
use crate::types::Element;
use proptest::prelude::*;

const SEEDS: [u64; 6] = [0, 1, 2, 3, 4, 5];

// ---- `gather_pool`, compared with the host. ----

/// Pseudo-random numbers from one seed, so that the seed reproduces a case.
struct Draw(SplitMix64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        (self.0.next_u64() % limit as u64) as usize
    }

    /// A random row of an element type.
    fn row(&mut self, element: Element, dim: usize) -> Vec<u32> {
        let mut row = vec![0; element.row_bytes(dim) / 4];
        match element {
            // Any finite f16. The padding of an odd row is random too.
            Element::F16 => {
                for half in bytemuck::cast_slice_mut::<u32, u16>(&mut row) {
                    *half = self.below(1 << 16) as u16;
                    *half &= if *half & 0x7c00 == 0x7c00 { !0x0400 } else { !0 };
                }
            }
            _ => {
                let values: Vec<f32> = (0..dim).map(|_| self.value()).collect();
                element.encode(&values, bytemuck::cast_slice_mut(&mut row)).unwrap();
            }
        }
        row
    }

    /// A value of either sign and one of many magnitudes, so that sums are rounded; sometimes +0 or -0.
    fn value(&mut self) -> f32 {
        let sign = if self.below(2) == 0 { -1.0 } else { 1.0 };
        match self.below(12) {
            0 => sign * 0.0,
            1 => sign * f32::from_bits(1 + self.below(1 << 20) as u32),
            _ => sign * (self.below(1 << 24) as f32) * 2_f32.powi(self.below(40) as i32 - 30),
        }
    }
}

/// The sizes and the seed of a [`Case`].
#[derive(Clone, Copy, Debug)]
struct Shape {
    tables: usize,
    samples: usize,
    dense_width: usize,
    max_dim: usize,
    max_bag: usize,
    draw: u64,
}

/// The data that a [`Pool`] borrows.
struct Case {
    samples: usize,
    dense_width: usize,
    stride: usize,
    lookups: Vec<PoolLookup>,
    offsets: Vec<u32>,
    occurrences: Vec<u32>,
    rows: Vec<Vec<u32>>,
    dense: Vec<f32>,
}

impl Case {
    fn new(shape: Shape) -> Self {
        let mut draw = Draw(SplitMix64::new(shape.draw));
        let mut case = Self {
            samples: shape.samples,
            dense_width: shape.dense_width,
            stride: shape.dense_width,
            lookups: Vec::new(),
            offsets: Vec::new(),
            occurrences: Vec::new(),
            rows: Vec::new(),
            dense: (0..shape.samples * shape.dense_width).map(|_| draw.value()).collect(),
        };
        for _ in 0..shape.tables {
            case.push_lookup(shape, &mut draw);
        }
        case.stride += draw.below(3);
        case
    }

    /// Adds a lookup in a new table with a few distinct rows, some of them absent. Sometimes it shares the
    /// bags of the previous lookup, as the deep and the wide lookup of a feature do.
    fn push_lookup(&mut self, shape: Shape, draw: &mut Draw) {
        let dim = 1 + draw.below(shape.max_dim);
        let shared = self.lookups.last().filter(|_| draw.below(4) == 0).map(|last| last.offsets_at);
        let offsets_at = shared.unwrap_or_else(|| self.push_bags(shape, draw));
        let ids = self.offsets[offsets_at as usize + self.samples] as usize;

        let element = Element::ALL[draw.below(3)];
        let (first, uniques) = (self.rows.len(), 1 + draw.below(8));
        for _ in 0..uniques {
            let present = draw.below(5) > 0;
            self.rows.push(if present { draw.row(element, dim) } else { Vec::new() });
        }
        let occurrences_at = self.occurrences.len() as u32;
        self.occurrences.extend((0..ids).map(|_| (first + draw.below(uniques)) as u32));
        let pooling = pooling_code(if draw.below(2) == 0 { Pooling::Sum } else { Pooling::Mean });
        let gap = draw.below(2);
        let column = (self.stride + gap) as u32;
        self.stride += gap + dim;
        let (dim, element) = (dim as u32, element.code());
        self.lookups.push(PoolLookup { offsets_at, occurrences_at, dim, column, pooling, element });
    }

    fn push_bags(&mut self, shape: Shape, draw: &mut Draw) -> u32 {
        let at = self.offsets.len() as u32;
        let mut end = 0;
        self.offsets.push(end);
        for _ in 0..self.samples {
            end += draw.below(shape.max_bag + 1) as u32;
            self.offsets.push(end);
        }
        at
    }

    fn view<R>(&self, use_it: impl FnOnce(&Pool) -> R) -> R {
        let rows: Vec<&[u32]> = self.rows.iter().map(Vec::as_slice).collect();
        use_it(&Pool {
            samples: self.samples,
            dense_width: self.dense_width,
            stride: self.stride,
            lookups: &self.lookups,
            offsets: &self.offsets,
            occurrences: &self.occurrences,
            rows: &rows,
            dense: &self.dense,
        })
    }
}

/// Computes `out` with the host's kernel, and copies the dense values.
fn oracle(pool: &Pool, out: &mut [f32]) {
    for sample in 0..pool.samples {
        let dense = &pool.dense[sample * pool.dense_width..][..pool.dense_width];
        out[sample * pool.stride..][..pool.dense_width].copy_from_slice(dense);
    }
    for lookup in pool.lookups {
        let of_host = host::PoolLookup {
            offsets: &pool.offsets[lookup.offsets_at as usize..][..=pool.samples],
            dim: lookup.dim as usize,
            element: Element::ALL[lookup.element as usize],
            mean: lookup.pooling == pooling_code(Pooling::Mean),
            column: lookup.column as usize,
        };
        let row = |occurrence: usize| {
            let unique = pool.occurrences[lookup.occurrences_at as usize + occurrence];
            Some(pool.rows[unique as usize]).filter(|row| !row.is_empty()).map(bytemuck::cast_slice)
        };
        let rows: Vec<_> = of_host.occurrences().map(row).collect();
        host::gather_pool(&of_host, &rows, out, pool.stride);
    }
}

/// The value of output elements that must not be written.
const UNTOUCHED: f32 = 7.5;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn assert_equals_oracle(shape: Shape, grid: Launch) {
    let case = Case::new(shape);
    case.view(|pool| {
        let mut expected = vec![UNTOUCHED; pool.samples * pool.stride];
        oracle(pool, &mut expected);
        let mut got = vec![UNTOUCHED; expected.len()];
        gather_pool(pool, &mut got, grid).unwrap();
        assert_eq!(bits(&got), bits(&expected), "{shape:?} {grid:?}");
    });
}

fn grid(blocks: u32, warps: u32, seed: u64) -> Launch {
    Launch { blocks, threads: warps * 32, shared_bytes: 0, seed }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn gather_pool_equals_the_host_bit_for_bit_under_any_schedule(
        tables in prop::sample::select(vec![1_usize, 2, 3, 26, 60]),
        samples in 1_usize..9,
        dense_width in 0_usize..40,
        max_dim in prop::sample::select(vec![1_usize, 4, 16, 64]),
        max_bag in 0_usize..7,
        draw in any::<u64>(),
        blocks in 1_u32..5,
        warps in 1_u32..5,
        seed in prop::sample::select(SEEDS.to_vec()),
    ) {
        let shape = Shape { tables, samples, dense_width, max_dim, max_bag, draw };
        assert_equals_oracle(shape, grid(blocks, warps, seed));
    }
}

#[test]
fn gather_pool_equals_the_host_for_many_table_counts_and_every_dim_up_to_256() {
    for (tables, seed) in [(1, 1), (26, 2), (60, 3), (200, 4)] {
        let shape =
            Shape { tables, samples: 3, dense_width: 13, max_dim: 256, max_bag: 4, draw: tables as u64 };
        assert_equals_oracle(shape, grid(3, 4, seed));
    }
    for max_dim in 1..=256 {
        let shape =
            Shape { tables: 1, samples: 2, dense_width: 1, max_dim, max_bag: 3, draw: max_dim as u64 };
        assert_equals_oracle(shape, grid(1, 2, max_dim as u64 % 3));
    }
}

#[test]
fn every_f16_is_decoded_as_on_the_host() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    let lookup = PoolLookup {
        offsets_at: 0,
        occurrences_at: 0,
        dim: 256,
        column: 0,
        pooling: pooling_code(Pooling::Sum),
        element: Element::F16.code(),
    };
    let pool = Pool {
        samples: 256,
        dense_width: 0,
        stride: 256,
        lookups: &[lookup],
        offsets: &(0..=256).collect::<Vec<_>>(),
        occurrences: &(0..256).collect::<Vec<_>>(),
        rows: &bytemuck::cast_slice(&halves).chunks_exact(128).collect::<Vec<_>>(),
        dense: &[],
    };
    let mut expected = vec![UNTOUCHED; 1 << 16];
    oracle(&pool, &mut expected);
    let mut got = vec![UNTOUCHED; expected.len()];
    gather_pool(&pool, &mut got, grid(4, 8, 1)).unwrap();
    assert!(bits(&got) == bits(&expected));
}

#[test]
fn gather_pool_works_without_samples_and_without_lookups() {
    let shape = Shape { tables: 3, samples: 0, dense_width: 4, max_dim: 8, max_bag: 2, draw: 1 };
    assert_equals_oracle(shape, grid(2, 1, 1));
    assert_equals_oracle(Shape { tables: 0, samples: 5, ..shape }, grid(2, 1, 1));
    assert_equals_oracle(Shape { tables: 0, samples: 5, dense_width: 0, ..shape }, grid(2, 1, 1));
}

#[test]
fn invalid_arguments_of_gather_pool_are_rejected_before_the_launch() {
    let case = Case::new(Shape { tables: 2, samples: 2, dense_width: 1, max_dim: 4, max_bag: 2, draw: 3 });
    case.view(|pool| {
        let mut short = vec![0.0; pool.samples * pool.stride - 1];
        let error = gather_pool(pool, &mut short, grid(1, 1, 0)).unwrap_err();
        assert!(matches!(error, SimError::Output { .. }), "{error}");

        let mut out = vec![0.0; pool.samples * pool.stride];
        let ragged = Launch { threads: 33, ..grid(1, 1, 0) };
        let error = gather_pool(pool, &mut out, ragged).unwrap_err();
        assert!(matches!(error, SimError::Shape { threads: 33, .. }), "{error}");

        let error = gather_pool(&Pool { offsets: &[], ..*pool }, &mut out, grid(1, 1, 0)).unwrap_err();
        assert!(matches!(error, SimError::Pool(_)), "{error}");
    });
}

// ---- The simulator: correct kernels, and kernels with one planted bug. ----

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
