//! Gather-pool on the CPU, in rows per second, against a plain loop that reads the same rows in the same
//! order and adds them into one vector. The loop's rate is the limit that memory sets.
//!
//! Our side runs the engine's code for a cache that is off: `InputRows::write` over the store's rows, for
//! each chunk of samples. There are 26 features with one or ten ids per sample, ids are uniform, and the
//! tables take 2 GiB in huge pages, far more than the CPU's caches hold. The plain loop has no bags, no
//! output and no bounds checks, and uses the widest vectors of the machine. For f16 and int8 rows, it reads
//! the same number of bytes and adds them as words, without decoding.
//!
//! With `--only memory`, the same code over tables of a version that are in memory (`store.memory = "ram"`),
//! against the same tables mapped. The files are in the page cache, and every page was touched.
//!
//! `--pairs N` (11), `--window-ms N` (200), `--only TEXT`, `--gib N` (2), `--json`.

mod harness;

use std::sync::{Mutex, PoisonError};

use flechette::compute::vectorise;
use flechette::config::TableMemory;
use flechette::model::{InputRows, Model, Tape};
use flechette::schema::preset::{ArchKind, SyntheticShape, synthetic};
use flechette::schema::{Lookup, Schema};
use flechette::store::{self, Contents, PlainMemory, Purpose, Table, rows_of};
use flechette::types::{Batch, Element, Version};
use harness::{Draw, Options, Report};
use rayon::prelude::*;

const TABLES: usize = 26;
/// Samples per batch: enough for many chunks per thread.
const SAMPLES: usize = 1024;
/// Bytes of rows that are read before a batch repeats: more than any CPU cache holds.
const ROUND_BYTES: usize = 512 << 20;

fn main() -> anyhow::Result<()> {
    let options = Options::read(200);
    let gib = options.number("--gib", 2);
    if options.value("--only").as_deref() == Some("memory") {
        return compare_memories(&options, gib);
    }
    let mut report = Report::new("gather_pool", "rows", "a loop that only reads the rows", &options);
    let shapes = Element::ALL.into_iter().flat_map(|element| [16, 32, 128].map(|dim| (element, dim)));
    for (element, dim) in shapes {
        let name = if element == Element::F32 { String::new() } else { format!("{element} ") };
        let settings = [(1, 1), (1, 2), (10, 1), (10, 2)]
            .map(|(hot, threads)| (format!("{name}dim {dim} ids {hot} threads {threads}"), hot, threads));
        let wanted: Vec<_> = settings.iter().filter(|(setting, ..)| options.wants(setting)).collect();
        if wanted.is_empty() {
            continue;
        }
        let rows = (gib << 30) / (element.row_bytes(dim) * TABLES);
        let tables = tables(rows as u64, dim, element)?;
        for (setting, hot, threads) in wanted {
            let shape =
                SyntheticShape { tables: TABLES, rows: rows as u64, dense: 13, multi_hot: Some(*hot as u32) };
            let schema = synthetic(ArchKind::WideDeep, dim, shape).stored_as(element);
            let bench = Bench::new(schema, &tables, *hot);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(*threads).build()?;
            let pairs = pool.install(|| bench.compare(&options));
            report.add(setting.clone(), &pairs, (element == Element::F32).then_some(0.7));
        }
    }
    report.finish();
    Ok(())
}

/// Tables in memory against mapped ones.
fn compare_memories(options: &Options, gib: usize) -> anyhow::Result<()> {
    let folder = std::env::current_dir()?.join("target/gather_pool");
    let mut report = Report::new("gather_pool", "rows", "the same tables in mapped files", options);
    for (dim, hot) in [(16, 1), (16, 10), (32, 1), (32, 10), (128, 1)] {
        let rows = ((gib << 30) / (Element::F32.row_bytes(dim) * TABLES)) as u64;
        let shape = SyntheticShape { tables: TABLES, rows, dense: 13, multi_hot: Some(hot as u32) };
        let schema = synthetic(ArchKind::Dcn, dim, shape);
        let written = tables(rows, dim, Element::F32)?;
        let tables = written.iter().map(Into::into).collect();
        let contents = Contents { model_toml: &schema.to_toml(), tables, ..Contents::default() };
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder)?;
        store::write(&folder, "m", &contents)?;
        drop(written);
        let open = |memory| store::open(&folder, "m", Version(1), Purpose::ServeFrom(memory));
        let (ram, mapped) = (open(TableMemory::Ram)?.store, open(TableMemory::Mapped)?.store);
        // As the server does, so that no batch waits for a first touch.
        let pages =
            mapped.tables().iter().filter_map(Table::as_bytes).flat_map(|bytes| bytes.iter().step_by(4096));
        std::hint::black_box(pages.map(|&byte| u64::from(byte)).sum::<u64>());
        let (ram, mapped) =
            (Bench::new(schema.clone(), ram.tables(), hot), Bench::new(schema, mapped.tables(), hot));
        for threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
            let pairs = pool.install(|| {
                let mut sides = [&ram, &mapped].map(|side| {
                    let (mut batches, tapes) = (side.batches.iter().cycle(), Mutex::default());
                    move || options.rate(|| batches.next().map_or(0, |batch| side.pool(batch, &tapes)))
                });
                let [ram, mapped] = &mut sides;
                options.compare(ram, mapped)
            });
            report.add(format!("memory dim {dim} ids {hot} threads {threads}"), &pairs, None);
        }
    }
    std::fs::remove_dir_all(&folder)?;
    report.finish();
    Ok(())
}

/// Tables whose pages are all written, and so backed by memory.
fn tables(rows: u64, dim: usize, element: Element) -> anyhow::Result<Vec<Table>> {
    let table = |t: usize| {
        let mut table = Table::zeroed(&PlainMemory, rows, dim, &[])?;
        if let Some(values) = table.rows_mut() {
            values.par_chunks_mut(1 << 16).for_each(|chunk| {
                chunk.iter_mut().enumerate().for_each(|(i, x)| *x = ((i + t) % 97) as f32 * 0.01);
            });
        }
        Ok(if element == Element::F32 { table } else { table.encoded(element, &PlainMemory)? })
    };
    (0..TABLES).map(table).collect()
}

struct Bench<'a> {
    schema: Schema,
    lookups: Vec<Lookup>,
    model: Model<f32>,
    tables: &'a [Table],
    batches: Vec<Batch>,
    rows_per_batch: u64,
}

impl<'a> Bench<'a> {
    fn new(schema: Schema, tables: &'a [Table], hot: usize) -> Self {
        let mut draw = Draw::new(hot as u64);
        let (rows, row_bytes) = (schema.tables[0].rows, schema.tables[0].row_bytes());
        let batch = |_| {
            let mut batch = Batch::empty(TABLES);
            batch.samples = SAMPLES;
            batch.dense = vec![0.5; SAMPLES * schema.dense_width()];
            for column in &mut batch.features {
                for _ in 0..SAMPLES {
                    let ids: Vec<u64> = (0..hot).map(|_| draw.below(rows)).collect();
                    column.push(&ids);
                }
            }
            batch
        };
        Self {
            batches: (0..ROUND_BYTES.div_ceil(SAMPLES * TABLES * hot * row_bytes)).map(batch).collect(),
            // Leaves out the lookups of first-order weights, which the preset adds.
            lookups: schema.lookups().into_iter().take(TABLES).collect(),
            model: Model::new(&schema),
            schema,
            tables,
            rows_per_batch: (SAMPLES * TABLES * hot) as u64,
        }
    }

    fn compare(&self, options: &Options) -> harness::Pairs {
        // A pool of tapes, at most one per thread, as in the engine.
        let tapes = Mutex::new(Vec::new());
        // Both sides use the same batches. A window continues with the batch after the side's previous
        // window.
        let (mut mine, mut theirs) = (0, 0);
        options.compare(
            || {
                options.rate(|| {
                    mine += 1;
                    self.pool(&self.batches[mine % self.batches.len()], &tapes)
                })
            },
            || {
                options.rate(|| {
                    theirs += 1;
                    self.read(&self.batches[theirs % self.batches.len()])
                })
            },
        )
    }

    /// Writes the input rows of a batch, as the engine does.
    fn pool(&self, batch: &Batch, tapes: &Mutex<Vec<Tape<f32>>>) -> u64 {
        let size = self.chunk();
        let inputs = InputRows { dense_width: self.schema.dense_width(), lookups: &self.lookups, batch };
        (0..SAMPLES.div_ceil(size)).into_par_iter().for_each(|chunk| {
            let taken = tapes.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut tape = taken.unwrap_or_else(|| self.model.scoring_tape());
            tape.samples = size.min(SAMPLES - chunk * size);
            inputs.write(chunk * size, &mut tape, |l| {
                rows_of(self.tables, &self.schema, &self.lookups[l], batch)
            });
            std::hint::black_box(&mut tape);
            tapes.lock().unwrap_or_else(PoisonError::into_inner).push(tape);
        });
        self.rows_per_batch
    }

    /// Samples of a chunk of the engine.
    fn chunk(&self) -> usize {
        self.model.scoring_chunk(SAMPLES, rayon::current_num_threads())
    }

    /// Runs the plain loop on a batch, in the same chunks.
    fn read(&self, batch: &Batch) -> u64 {
        let size = self.chunk();
        (0..SAMPLES.div_ceil(size)).into_par_iter().for_each(|chunk| {
            let end = SAMPLES.min((chunk + 1) * size);
            for lookup in &self.lookups {
                let column = &batch.features[lookup.feature];
                let (first, end) = (column.offsets[chunk * size], column.offsets[end]);
                let ids = &column.ids[first as usize..end as usize];
                let Some(table) = self.tables.get(lookup.table.index()) else { continue };
                match (table.values(), lookup.dim) {
                    (Some(rows), 16) => sum::<16>(rows, ids),
                    (Some(rows), 32) => sum::<32>(rows, ids),
                    (Some(rows), _) => sum::<128>(rows, ids),
                    (None, _) => match lookup.element.row_bytes(lookup.dim) / 4 {
                        6 => sum_words::<6>(table, ids),
                        8 => sum_words::<8>(table, ids),
                        10 => sum_words::<10>(table, ids),
                        16 => sum_words::<16>(table, ids),
                        34 => sum_words::<34>(table, ids),
                        _ => sum_words::<64>(table, ids),
                    },
                }
            }
        });
        self.rows_per_batch
    }
}

fn sum<const DIM: usize>(rows: &[f32], ids: &[u64]) {
    let (rows, _) = rows.as_chunks::<DIM>();
    let sum = vectorise(|| {
        let mut sum = [0.0f32; DIM];
        for &id in ids {
            for (s, x) in sum.iter_mut().zip(&rows[id as usize]) {
                *s += *x;
            }
        }
        sum
    });
    std::hint::black_box(sum);
}

fn sum_words<const WORDS: usize>(table: &Table, ids: &[u64]) {
    let (rows, _) =
        bytemuck::cast_slice::<u8, u32>(table.as_bytes().unwrap_or_default()).as_chunks::<WORDS>();
    let sum = vectorise(|| {
        let mut sum = [0u32; WORDS];
        for &id in ids {
            for (s, x) in sum.iter_mut().zip(&rows[id as usize]) {
                *s = s.wrapping_add(*x);
            }
        }
        sum
    });
    std::hint::black_box(sum);
}
