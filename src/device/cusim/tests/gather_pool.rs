//! The kernel `gather_pool`, compared with the host under many schedules.
#![allow(unsafe_code)]

use bytemuck::Zeroable;
use proptest::prelude::*;

use super::SEEDS;
use crate::compute::gather_pool as host;
use crate::compute::pool::{KernelLookup, WARP_LANES, pooling_code};
use crate::device::cuda::pool_args::{BatchHeader, BatchState, PoolArgs};
use crate::device::cusim::{Argument, Launch, launch};
use crate::mem::SplitMix64;
use crate::schema::Pooling;
use crate::types::Element;

/// The bit that marks the place of a miss: the rest is the number of a row that the host has fetched.
const AT_MISS: u64 = 1 << 61;

/// The input of the kernel, in host memory.
struct Pool<'a> {
    samples: usize,
    /// Dense values per sample, written to columns `0..dense_width`.
    dense_width: usize,
    /// Elements from one output row to the next. Columns that belong to no lookup keep their values.
    stride: usize,
    /// The lookups. Their columns must not overlap.
    lookups: &'a [KernelLookup],
    /// Bag bounds. Lookups of one feature may share them.
    offsets: &'a [u32],
    /// The unique row of each occurrence.
    occurrences: &'a [u32],
    /// The unique rows, as words of the row's bytes (`types::element`). An empty slice is an absent row.
    rows: &'a [&'a [u32]],
    /// `samples x dense_width`, row-major.
    dense: &'a [f32],
}

impl Pool<'_> {
    /// The exclusive prefix sum of the segments' warps: one entry per lookup, one for the dense values, and
    /// the total.
    fn scan(&self) -> Vec<u32> {
        let widths = self.lookups.iter().map(|lookup| lookup.dim as usize).chain([self.dense_width]);
        let mut total = 0;
        let mut scan = vec![0];
        for width in widths {
            total += (self.samples * width).div_ceil(WARP_LANES as usize) as u32;
            scan.push(total);
        }
        scan
    }

    /// Runs the kernel on an output whose elements are [`UNTOUCHED`].
    fn run(&self, shape: Launch) -> Vec<f32> {
        let mut out = vec![UNTOUCHED; self.samples * self.stride];
        let scan = self.scan();
        let address = |row: &&[u32]| if row.is_empty() { 0 } else { row.as_ptr() as u64 };
        let rows: Vec<u64> = self.rows.iter().map(address).collect();
        // There is no cache here, so every row is a miss that the host has fetched.
        let misses = rows.len() as u32;
        let header = BatchHeader { samples: self.samples as u32, ..BatchHeader::default() };
        let state = BatchState { misses, ..BatchState::default() };
        let places: Vec<u64> = self.occurrences.iter().map(|&unique| AT_MISS | u64::from(unique)).collect();
        let args = PoolArgs {
            header: &raw const header as u64,
            state: &raw const state as u64,
            lookups: self.lookups.as_ptr() as u64,
            scan: scan.as_ptr() as u64,
            offsets: self.offsets.as_ptr() as u64,
            places: places.as_ptr() as u64,
            owners: 0,
            rows: rows.as_ptr() as u64,
            pool: 0,
            host: 0,
            copies: 0,
            dense: self.dense.as_ptr() as u64,
            out: out.as_mut_ptr() as u64,
            lookup_count: self.lookups.len() as u32,
            dense_width: self.dense_width as u32,
            stride: self.stride as u32,
            staged: misses,
        };
        let shape = Launch { shared_bytes: size_of_val(scan.as_slice()), ..shape };
        // SAFETY: `gather_pool` takes one `PoolArgs`, whose layout is the kernel's. `Case` and the tests make
        // only offsets, occurrences, rows and columns that are in range. The shared memory has room for the
        // scan. `out` is `samples x stride` and borrowed here alone. Every slice outlives the call.
        unsafe { launch("gather_pool", shape, &[Argument::value(args)]) }.unwrap();
        out
    }
}

#[test]
fn the_scan_rounds_each_segment_up_to_whole_warps() {
    let lookup = |dim, column| KernelLookup { dim, column, ..KernelLookup::zeroed() };
    let lookups = [lookup(17, 1), lookup(4, 18)];
    let pool = Pool {
        samples: 2,
        dense_width: 1,
        stride: 22,
        lookups: &lookups,
        offsets: &[],
        occurrences: &[],
        rows: &[],
        dense: &[],
    };
    assert_eq!(pool.scan(), [0, 2, 3, 4]);
}

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

/// The data of a [`Pool`].
struct Case {
    samples: usize,
    dense_width: usize,
    stride: usize,
    lookups: Vec<KernelLookup>,
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
        self.lookups.push(KernelLookup { offsets_at, occurrences_at, dim, column, pooling, element });
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

    fn view<R>(&self, use_it: impl FnOnce(&Pool<'_>) -> R) -> R {
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
fn oracle(pool: &Pool<'_>, out: &mut [f32]) {
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
        let got = pool.run(grid);
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
    let lookup = KernelLookup {
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
    let got = pool.run(grid(4, 8, 1));
    assert!(bits(&got) == bits(&expected));
}

#[test]
fn gather_pool_works_without_samples_and_without_lookups() {
    let shape = Shape { tables: 3, samples: 0, dense_width: 4, max_dim: 8, max_bag: 2, draw: 1 };
    assert_equals_oracle(shape, grid(2, 1, 1));
    assert_equals_oracle(Shape { tables: 0, samples: 5, ..shape }, grid(2, 1, 1));
    assert_equals_oracle(Shape { tables: 0, samples: 5, dense_width: 0, ..shape }, grid(2, 1, 1));
}
