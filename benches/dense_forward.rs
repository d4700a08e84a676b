//! The forward pass of the dense layers, against single-precision matrix products of the same shapes by the
//! `gemm` crate with its AVX-512 kernels. Both use one thread.
//!
//! Ours is `Model::forward` over the chunks of the engine: products, biases, ReLUs and the interaction.
//! All chunks use one tape, so the input rows are in the core's cache. In the engine they are too, because
//! gather-pool has just written them. The baseline is only the products of the fully connected layers, one
//! call per layer for the whole batch, into buffers that are allocated before.
//!
//! `--pairs N` (11), `--window-ms N` (100), `--only TEXT`, `--json`.

#![allow(unsafe_code)]

mod harness;

use flechette::model::{Model, Tape};
use flechette::schema::preset::{ArchKind, criteo};
use flechette::schema::{Architecture, Schema};
use harness::{Draw, Options, Report};

fn main() {
    let options = Options::read(100);
    let mut report =
        Report::new("dense_forward", "samples", "raw sgemm of the layers (gemm crate)", &options);
    let mut kaggle = criteo(ArchKind::Dlrm, 16, 10);
    kaggle.architecture = Architecture::Dlrm { bottom: vec![512, 256, 64], top: vec![512, 256] };
    let shapes = [
        ("dlrm kaggle", kaggle),
        ("dlrm init", criteo(ArchKind::Dlrm, 16, 10)),
        ("dcnv2 init", criteo(ArchKind::Dcnv2, 16, 10)),
        // Its weights do not fit the L2 cache.
        ("dcnv2 init dim 32", criteo(ArchKind::Dcnv2, 32, 10)),
    ];
    for (name, schema) in &shapes {
        for samples in [1, 16, 64, 256, 1024] {
            let setting = format!("{name} batch {samples}");
            if options.wants(&setting) {
                report.add(setting, &compare(schema, samples, &options), Some(0.8));
            }
        }
    }
    report.finish();
}

fn compare(schema: &Schema, samples: usize, options: &Options) -> harness::Pairs {
    let model = Model::<f32>::new(schema);
    let weights = model.initialise(0);
    let mut draw = Draw::new(0);
    let chunk = model.scoring_chunk(samples, 1);
    let mut tape: Tape<f32> = model.scoring_tape();
    tape.values[0].from_mut(0, 0).iter_mut().for_each(|x| *x = draw.uniform() as f32 - 0.5);
    let matrices = model.parameters().iter().filter(|p| p.shape.len() == 2);
    let mut products: Vec<Product> =
        matrices.map(|p| Product::new(samples, p.shape[1], p.shape[0], &mut draw)).collect();
    options.compare(
        || {
            options.rate(|| {
                for first in (0..samples).step_by(chunk) {
                    tape.samples = (samples - first).min(chunk);
                    model.forward(&weights, &mut tape);
                    std::hint::black_box(&mut tape);
                }
                samples as u64
            })
        },
        || {
            options.rate(|| {
                products.iter_mut().for_each(Product::run);
                std::hint::black_box(&mut products);
                samples as u64
            })
        },
    )
}

/// `y = x w^T` of row-major matrices. `w` has PyTorch's shape: (out, in).
struct Product {
    rows: usize,
    depth: usize,
    columns: usize,
    x: Vec<f32>,
    w: Vec<f32>,
    y: Vec<f32>,
}

impl Product {
    fn new(rows: usize, depth: usize, columns: usize, draw: &mut Draw) -> Self {
        let mut matrix = |len: usize| (0..len).map(|_| draw.uniform() as f32 - 0.5).collect();
        let (x, w) = (matrix(rows * depth), matrix(columns * depth));
        Self { rows, depth, columns, x, w, y: vec![0.0; rows * columns] }
    }

    fn run(&mut self) {
        let (depth, columns) = (self.depth as isize, self.columns as isize);
        // SAFETY: `x` is rows x depth, `w` columns x depth and `y` rows x columns, row-major and contiguous,
        // so the strides stay in bounds.
        unsafe {
            gemm::gemm(
                self.rows,
                self.columns,
                self.depth,
                self.y.as_mut_ptr(),
                1,
                columns,
                false,
                self.x.as_ptr(),
                1,
                depth,
                self.w.as_ptr(),
                depth,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}
