//! The contract of a trainer's scratchpad on a device, for any driver: records come back unchanged, and
//! input rows are pooled and rows updated to the bit as on the host.

use std::sync::Arc;

use crate::compute::gather_pool as host;
use crate::compute::gather_pool::PoolLookup;
use crate::device::cuda::Driver;
use crate::mem::SplitMix64;
use crate::schema::Pooling;
use crate::trainer::casting::GradientSource;
use crate::trainer::optim::{Optimizer, OptimizerKind};
use crate::trainer::pipeline::gpu::scratchpad::CudaScratch;
use crate::trainer::pipeline::gpu::{
    Gather, GatherLookup, Scratch, SlotRun, SlotSize, TableSlots, Update, UpdateRows,
};
use crate::trainer::pipeline::slot_flags::NO_SLOT;
use crate::types::Element;

pub(crate) const KINDS: [OptimizerKind; 4] =
    [OptimizerKind::Sgd, OptimizerKind::Adagrad, OptimizerKind::RowwiseAdagrad, OptimizerKind::Adam];

/// Random numbers from a seed.
struct Draws(SplitMix64);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        (self.0.next_u64() >> 16) as usize % limit
    }

    /// A value of either sign and one of several magnitudes; sometimes +0 or -0.
    fn value(&mut self) -> f32 {
        let scale = [0.0, 1e-6, 1e-2, 1.0, 300.0][self.below(5)];
        let unit = self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0;
        scale * unit
    }

    fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }

    /// Takes `count` random slots from the free slots, or all if there are fewer.
    fn slots(&mut self, free: &mut Vec<u32>, count: usize) -> Vec<u32> {
        (0..count.min(free.len())).map(|_| free.swap_remove(self.below(free.len()))).collect()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Tables whose rows are in random slots of a scratchpad, and their records.
struct World {
    scratch: Box<dyn Scratch>,
    dims: Vec<usize>,
    /// The slot size of each table, and the slots of its rows.
    sizes: Vec<usize>,
    slots: Vec<Vec<u32>>,
    /// For each table: its records, concatenated.
    records: Vec<Vec<f32>>,
    words: Vec<usize>,
}

impl World {
    fn new<D: Driver>(
        driver: &Arc<D>,
        dims: &[usize],
        words: impl Fn(usize) -> usize,
        draws: &mut Draws,
    ) -> Self {
        let words: Vec<usize> = dims.iter().map(|&dim| words(dim)).collect();
        let mut sizes: Vec<SlotSize> = Vec::new();
        let of_size = |&words: &usize| {
            sizes.iter().position(|size| size.words == words).unwrap_or_else(|| {
                sizes.push(SlotSize { words, count: 60 });
                sizes.len() - 1
            })
        };
        let of_table: Vec<usize> = words.iter().map(of_size).collect();
        let mut free: Vec<Vec<u32>> = sizes.iter().map(|size| (0..size.count as u32).collect()).collect();
        let mut take = |&size: &usize| {
            let count = draws.below(30);
            draws.slots(&mut free[size], count)
        };
        let slots: Vec<Vec<u32>> = of_table.iter().map(&mut take).collect();
        let records = slots.iter().zip(&words).map(|(slots, words)| {
            // Some states are sums of squares, so values must not be negative.
            draws.values(slots.len() * words).into_iter().map(f32::abs).collect()
        });
        let records = records.collect();
        let scratch = Box::new(CudaScratch::new(driver, &sizes, 1 << 16).unwrap());
        let world = Self { scratch, dims: dims.to_vec(), sizes: of_table, slots, records, words };
        world.put_all();
        world
    }

    /// Calls `then` with the claimed slots of all tables.
    fn held<T>(&self, then: impl FnOnce(&[TableSlots<'_>]) -> T) -> T {
        let held: Vec<_> = self
            .sizes
            .iter()
            .zip(&self.slots)
            .map(|(&size, slots)| self.scratch.flags(size).claim(slots).unwrap())
            .collect();
        let tables = held.iter().zip(&self.sizes).zip(&self.dims);
        let tables: Vec<TableSlots<'_>> =
            tables.map(|((held, &size), &dim)| TableSlots { run: SlotRun { size, held }, dim }).collect();
        then(&tables)
    }

    fn put_all(&self) {
        self.held(|tables| {
            let runs: Vec<SlotRun<'_>> = tables.iter().map(|table| table.run).collect();
            let all = self.records.concat();
            let mut staging = self.scratch.staging_buffer().unwrap();
            staging.incoming(all.len()).unwrap().copy_from_slice(&all);
            staging.exchange().unwrap();
            staging.put(&runs).unwrap();
        });
    }

    fn take_all(&self) -> Vec<f32> {
        self.held(|tables| {
            let runs: Vec<SlotRun<'_>> = tables.iter().map(|table| table.run).collect();
            let mut staging = self.scratch.staging_buffer().unwrap();
            staging.take(&runs).unwrap();
            staging.exchange().unwrap();
            staging.outgoing().unwrap().to_vec()
        })
    }
}

fn dims(draws: &mut Draws) -> Vec<usize> {
    (0..1 + draws.below(6)).map(|_| [1, 2, 3, 7, 16, 32, 33, 70][draws.below(8)]).collect()
}

/// Records keep their bytes while other records move in and out.
pub(crate) fn records_come_back_unchanged<D: Driver>(driver: &Arc<D>, seed: u64) {
    let draws = &mut Draws(SplitMix64::new(seed));
    let mut world = World::new(driver, &dims(draws), |dim| dim, draws);
    assert_eq!(bits(&world.take_all()), bits(&world.records.concat()), "seed {seed}");
    // Some tables' records move out while another's move in.
    for _ in 0..3 {
        let changed = draws.below(world.slots.len());
        let records = draws.values(world.records[changed].len());
        let scratch = &world.scratch;
        let held: Vec<_> = (world.sizes.iter().zip(&world.slots))
            .map(|(&size, slots)| scratch.flags(size).claim(slots).unwrap())
            .collect();
        let run = |t: usize| SlotRun { size: world.sizes[t], held: &held[t] };
        let others: Vec<SlotRun<'_>> = (0..held.len()).filter(|&t| t != changed).map(run).collect();
        let mut staging = scratch.staging_buffer().unwrap();
        staging.take(&others).unwrap();
        staging.incoming(records.len()).unwrap().copy_from_slice(&records);
        staging.exchange().unwrap();
        let out: Vec<f32> =
            (0..held.len()).filter(|&t| t != changed).flat_map(|t| world.records[t].clone()).collect();
        assert_eq!(bits(staging.outgoing().unwrap()), bits(&out), "seed {seed}");
        staging.put(&[run(changed)]).unwrap();
        drop((staging, held));
        world.records[changed] = records;
        assert_eq!(bits(&world.take_all()), bits(&world.records.concat()), "seed {seed}");
    }
}

/// The bags of a lookup: their bounds, and for each occurrence the index of its row, or an index beyond
/// `rows` if the row is absent.
fn bags(draws: &mut Draws, samples: usize, rows: usize) -> (Vec<u32>, Vec<u32>) {
    let (mut offsets, mut places) = (vec![0], Vec::new());
    let most = [1, 2, 6][draws.below(3)];
    for _ in 0..samples {
        for _ in 0..draws.below(most + 1) {
            let place = draws.below(rows + 2);
            places.push(if place < rows { place as u32 } else { NO_SLOT - draws.below(2) as u32 });
        }
        offsets.push(places.len() as u32);
    }
    (offsets, places)
}

/// Tests sums and means, empty bags, absent rows, and several lookups of one table.
pub(crate) fn input_rows_are_pooled_as_on_the_host<D: Driver>(driver: &Arc<D>, seed: u64) {
    let draws = &mut Draws(SplitMix64::new(seed));
    let states = draws.below(3);
    let world = World::new(driver, &dims(draws), |dim| dim * (1 + states), draws);
    let mut stepper = world.scratch.stepper().unwrap();
    for samples in [1 + draws.below(50), 1, 1 + draws.below(8), 0] {
        let tables: Vec<usize> = (0..1 + draws.below(8)).map(|_| draws.below(world.dims.len())).collect();
        let lookups: Vec<_> = tables
            .iter()
            .map(|&t| (t, draws.below(2) == 1, bags(draws, samples, world.slots[t].len())))
            .collect();
        let stride: usize = tables.iter().map(|&t| world.dims[t]).sum();
        let mut expected = vec![0.0; samples * stride];
        let mut column = 0;
        for (t, mean, (offsets, places)) in &lookups {
            let (dim, words, records) = (world.dims[*t], world.words[*t], &world.records[*t]);
            let row = |place: &u32| {
                Some(bytemuck::cast_slice(&records.chunks_exact(words).nth(*place as usize)?[..dim]))
            };
            let rows: Vec<Option<&[u8]>> = places.iter().map(row).collect();
            let lookup = PoolLookup { offsets, dim, element: Element::F32, mean: *mean, column };
            host::gather_pool(&lookup, &rows, &mut expected, stride);
            column += dim;
        }
        let lookups: Vec<GatherLookup<'_>> = lookups
            .iter()
            .map(|(table, mean, (offsets, places))| GatherLookup {
                table: *table,
                pooling: if *mean { Pooling::Mean } else { Pooling::Sum },
                offsets,
                places,
            })
            .collect();
        world.held(|tables| {
            let got = stepper.gather(&Gather { samples, tables, lookups: &lookups }).unwrap();
            assert_eq!(bits(got), bits(&expected), "seed {seed}");
        });
    }
}

/// The sources of a table's rows, at least one per row, and for each row the end of its sources.
fn sources(
    draws: &mut Draws,
    rows: usize,
    (samples, columns): (usize, usize),
) -> (Vec<GradientSource>, Vec<u32>) {
    let (mut sources, mut ends) = (Vec::new(), Vec::new());
    for _ in 0..rows {
        for _ in 0..1 + draws.below(4) * draws.below(4) {
            let (sample, column) = (draws.below(samples) as u32, draws.below(columns) as u32);
            let divisor = 1.0 + if draws.below(3) == 0 { draws.below(6) as f32 } else { 0.0 };
            sources.push(GradientSource { sample, column, divisor });
        }
        ends.push(sources.len() as u32);
    }
    (sources, ends)
}

/// Updates one record on the host.
fn updated(record: &mut [f32], dim: usize, (kind, step): (OptimizerKind, u64), grad: &[f32]) {
    let step = Optimizer { eps: 1e-10, ..Optimizer::new(kind, 0.03) }.step::<f32>(step);
    let (weights, rest) = record.split_at_mut(dim);
    let width = if kind == OptimizerKind::RowwiseAdagrad { 1 } else { dim };
    let mut states: Vec<&mut [f32]> = rest.chunks_exact_mut(width).collect();
    step.update_row(weights, grad, &mut states);
}

/// Compares every record after each of several steps.
pub(crate) fn rows_are_updated_as_on_the_host<D: Driver>(driver: &Arc<D>, kind: OptimizerKind, seed: u64) {
    let draws = &mut Draws(SplitMix64::new(seed));
    let rule = |step: u64| Optimizer { eps: 1e-10, ..Optimizer::new(kind, 0.03) }.step::<f32>(step).rule();
    let mut world = World::new(driver, &dims(draws), |dim| rule(1).record_words(dim), draws);
    let mut stepper = world.scratch.stepper().unwrap();
    let (samples, first_column) = (1 + draws.below(20), draws.below(4));
    let widest = world.dims.iter().copied().max().unwrap();
    let stride = widest + draws.below(5);
    for step in 1..4 {
        let grads = draws.values(samples * stride);
        let mut of_tables = Vec::new();
        for (t, &dim) in world.dims.iter().enumerate() {
            let (mut sources, ends) = sources(draws, world.slots[t].len(), (samples, stride - dim + 1));
            sources.iter_mut().for_each(|source| source.column += first_column as u32);
            of_tables.push((sources, ends));
        }
        for (t, (sources, ends)) in of_tables.iter().enumerate() {
            let (dim, words) = (world.dims[t], world.words[t]);
            let mut first = 0;
            for (record, &end) in world.records[t].chunks_exact_mut(words).zip(ends) {
                let mut grad = vec![0.0; dim];
                for (i, source) in sources[first..end as usize].iter().enumerate() {
                    let at = source.sample as usize * stride + source.column as usize - first_column;
                    for (sum, g) in grad.iter_mut().zip(&grads[at..]) {
                        let part = g / source.divisor;
                        *sum = if i == 0 { part } else { *sum + part };
                    }
                }
                first = end as usize;
                updated(record, dim, (kind, step), &grad);
            }
        }
        world.held(|tables| {
            let rows = tables.iter().zip(&of_tables);
            let tables: Vec<UpdateRows<'_>> =
                rows.map(|(&rows, (sources, ends))| UpdateRows { rows, sources, ends, first: 0 }).collect();
            let update = Update { samples, stride, first_column, tables: &tables, rule: rule(step) };
            stepper.update(&update, &mut |out| out.copy_from_slice(&grads)).unwrap();
        });
        assert_eq!(
            bits(&world.take_all()),
            bits(&world.records.concat()),
            "{kind}, step {step}, seed {seed}"
        );
    }
}

/// Arguments that contradict each other are refused before a launch.
pub(crate) fn invalid_arguments_are_refused_with_a_message<D: Driver>(driver: &Arc<D>) {
    let sizes = [SlotSize { words: 4, count: 8 }, SlotSize { words: 2, count: 8 }];
    let scratch = CudaScratch::new(driver, &sizes, 12).unwrap();
    let flags = scratch.flags(0);
    assert_eq!(
        flags.claim(&[8]).unwrap_err().to_string(),
        "slot 8: already claimed, or out of range: there are 8 slots"
    );
    let four = flags.claim(&[0, 1, 2, 3]).unwrap();
    let none = flags.claim(&[5, NO_SLOT]).unwrap();
    let mut staging = scratch.staging_buffer().unwrap();
    assert_eq!(scratch.staging_words(), 12);
    let mut take = |size, held| staging.take(&[SlotRun { size, held }]).unwrap_err().to_string();
    assert_eq!(take(0, &four), "scratchpad words of staging: limit 12, got 16");
    assert_eq!(take(1, &four), "scratchpad slots' size: expected 2, got 1");
    assert_eq!(take(0, &none), "scratchpad rows with a slot: expected 2, got 1");
    assert_eq!(
        staging.incoming(13).unwrap_err().to_string(),
        "scratchpad words of staging: limit 12, got 13"
    );
    staging.incoming(4).unwrap();
    drop(four);
    let two = flags.claim(&[3, 1]).unwrap();
    let run = SlotRun { size: 0, held: &two };
    assert_eq!(staging.put(&[run]).unwrap_err().to_string(), "scratchpad words to put: expected 4, got 8");

    let mut stepper = scratch.stepper().unwrap();
    let tables = [TableSlots { run, dim: 2 }];
    let lookup = GatherLookup { table: 0, pooling: Pooling::Sum, offsets: &[0, 1, 2], places: &[0, 1] };
    let mut gather = |samples, lookup, dim| {
        let tables = [TableSlots { run, dim }];
        let result = stepper.gather(&Gather { samples, tables: &tables, lookups: &[lookup] });
        result.map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(gather(3, lookup, 2), "scratchpad offsets of a lookup: expected 4, got 3");
    assert!(gather(2, GatherLookup { offsets: &[0, 2, 1], ..lookup }, 2).contains("(ascending)"));
    assert!(
        gather(2, GatherLookup { places: &[0], ..lookup }, 2)
            .contains("places of a lookup: expected 2, got 1")
    );
    assert!(gather(2, GatherLookup { table: 1, ..lookup }, 2).contains("tables: expected 1, got 1"));
    assert!(gather(2, lookup, 5).contains("elements of a record: limit 4, got 5"));

    let source = GradientSource { sample: 1, column: 3, divisor: 1.0 };
    let sources = [source; 2];
    let rows = UpdateRows { rows: tables[0], sources: &sources, ends: &[1, 2], first: 0 };
    let rule = Optimizer { eps: 0.1, ..Optimizer::new(OptimizerKind::Adagrad, 0.1) }.step::<f32>(1).rule();
    let update = Update { samples: 2, stride: 2, first_column: 3, tables: &[rows], rule };
    let mut try_update =
        |update: &Update<'_>| stepper.update(update, &mut |_| ()).map_err(|error| error.to_string());
    try_update(&update).unwrap();
    let mut refused = |update: Update<'_>, words: &str| {
        assert!(try_update(&update).unwrap_err().contains(words), "{words}")
    };
    refused(Update { samples: 1, ..update }, "sources within the gradients: expected 1, got 1");
    refused(Update { first_column: 2, ..update }, "sources within the gradients");
    refused(Update { first_column: 4, ..update }, "sources within the gradients");
    let adam = Optimizer { eps: 0.1, ..Optimizer::new(OptimizerKind::Adam, 0.1) }.step::<f32>(1).rule();
    refused(Update { rule: adam, ..update }, "words of a record: expected 6, got 4");
    refused(
        Update { tables: &[UpdateRows { ends: &[1], ..rows }], ..update },
        "ends of sources: expected 2, got 1",
    );
    refused(Update { tables: &[UpdateRows { ends: &[2, 1], ..rows }], ..update }, "(ascending)");
    refused(
        Update { tables: &[UpdateRows { ends: &[1, 1], ..rows }], ..update },
        "sources of a table: expected 1, got 2",
    );
}

/// The gather takes a copy to the device, a launch and a copy back. The update takes a copy and a launch.
pub(crate) fn a_step_takes_five_operations_whatever_the_table_count<D: Driver>(driver: &Arc<D>) {
    for tables in [1, 26, 60] {
        let draws = &mut Draws(SplitMix64::new(tables as u64));
        let dims: Vec<usize> = (0..tables).map(|t| 1 + t).collect();
        let mut world = World::new(driver, &dims, |dim| dim, draws);
        world.slots.iter_mut().for_each(|slots| *slots = vec![0]);
        let mut stepper = world.scratch.stepper().unwrap();
        world.held(|tables| {
            let lookups: Vec<_> = (0..tables.len())
                .map(|table| GatherLookup { table, pooling: Pooling::Sum, offsets: &[0, 1], places: &[0] })
                .collect();
            let source = [GradientSource { sample: 0, column: 0, divisor: 1.0 }];
            let rows = tables.iter().map(|&rows| UpdateRows { rows, sources: &source, ends: &[1], first: 0 });
            let rows: Vec<_> = rows.collect();
            let stride = dims.iter().copied().max().unwrap();
            let rule = Optimizer::new(OptimizerKind::Sgd, 0.1).step::<f32>(1).rule();
            let update = Update { samples: 1, stride, first_column: 0, tables: &rows, rule };
            let before = driver.work();
            stepper.gather(&Gather { samples: 1, tables, lookups: &lookups }).unwrap();
            stepper.update(&update, &mut |out| out.fill(1.0)).unwrap();
            let (after, launches) = (driver.work(), driver.work().launches - before.launches);
            assert_eq!((after.total() - before.total(), launches), (5, 2), "{} tables", dims.len());
        });
    }
}
