//! Compares gradients with finite differences, in f64, and checks that scores and gradients have the same
//! bits for any batch.

use super::tape::MAX_SCORED;
use super::*;
use crate::schema::{Arity, DenseFeature, Feature, Loss, Pooling, TableSchema, Transform};

/// A schema with 3 dense values and 4 features of dim 5.
fn schema(architecture: Architecture) -> Schema {
    let wide = matches!(architecture, Architecture::Deepfm { .. } | Architecture::WideDeep { .. });
    let names: Vec<_> = (0..4).map(|i| format!("c{i}")).collect();
    let table = |name: String, dim| TableSchema { name, rows: 10, dim, ..TableSchema::default() };
    let feature = |name: &String| Feature {
        name: name.clone(),
        table: name.clone(),
        wide_table: wide.then(|| format!("{name}_wide")),
        arity: Arity::OneHot,
        pooling: Pooling::Sum,
        hash: None,
    };
    let mut tables: Vec<_> = names.iter().map(|name| table(name.clone(), 5)).collect();
    if wide {
        tables.extend(names.iter().map(|name| table(format!("{name}_wide"), 1)));
    }
    Schema {
        architecture,
        loss: Loss::BinaryCrossEntropy,
        dense: (0..3).map(|i| DenseFeature { name: format!("d{i}"), transform: Transform::None }).collect(),
        features: names.iter().map(feature).collect(),
        tables,
    }
}

fn architectures() -> Vec<Architecture> {
    vec![
        Architecture::Dlrm { bottom: vec![7], top: vec![9, 6] },
        Architecture::Dcn { cross_layers: 3, deep: vec![8, 6] },
        Architecture::Dcn { cross_layers: 1, deep: vec![] },
        Architecture::Dcnv2 { cross_layers: 2, rank: None, deep: vec![8] },
        Architecture::Dcnv2 { cross_layers: 3, rank: Some(2), deep: vec![8, 34] },
        Architecture::Deepfm { deep: vec![8, 6] },
        Architecture::WideDeep { deep: vec![40] },
    ]
}

/// Deterministic numbers in [-1, 1).
fn number(i: usize) -> f64 {
    let bits = xxhash_rust::xxh3::xxh3_64(&i.to_le_bytes());
    f64::from((bits >> 32) as i32) / f64::from(1u32 << 31)
}

struct Run {
    model: Model<f64>,
    weights: Weights<f64>,
    tapes: Vec<Tape<f64>>,
}

/// Two chunks, the second one not full, to test sums over chunks.
const SAMPLES: [usize; 2] = [MAX_CHUNK, 3];

impl Run {
    fn new(architecture: Architecture) -> Self {
        let schema = schema(architecture);
        let model = Model::new(&schema);
        let mut weights = model.initialise(3);
        model.transpose(&mut weights);
        let mut tapes = vec![model.training_tape(), model.training_tape()];
        for (t, tape) in tapes.iter_mut().enumerate() {
            tape.samples = SAMPLES[t];
            let input = View { buffer: 0, column: 0, width: schema.input_width() };
            for s in 0..tape.samples {
                for (i, x) in tape.values[0].row_mut(s, input).iter_mut().enumerate() {
                    *x = number(t * 100_000 + s * 1000 + i);
                }
            }
        }
        Self { model, weights, tapes }
    }

    fn label(t: usize, s: usize) -> f64 {
        f64::from((t + s).is_multiple_of(3))
    }

    fn loss(&mut self) -> f64 {
        let mut sum = 0.0;
        for (t, tape) in self.tapes.iter_mut().enumerate() {
            self.model.forward(&self.weights, tape);
            for s in 0..tape.samples {
                sum += loss::binary_cross_entropy(self.model.logit(tape, s), Self::label(t, s));
            }
        }
        sum
    }

    /// Gradients of all weights. Those of the input rows are in the tapes.
    fn gradients(&mut self) -> Vec<f64> {
        self.loss();
        for (t, tape) in self.tapes.iter_mut().enumerate() {
            let slope = |s, z| loss::binary_cross_entropy_slope(z, Self::label(t, s));
            self.model.backward(&self.weights, tape, slope);
        }
        let mut all = Vec::new();
        for (i, len) in self.model.pieces().enumerate() {
            let mut out = vec![f64::NAN; len];
            self.model.gradient(i, &self.tapes, &mut out);
            all.extend(out);
        }
        all
    }
}

fn assert_close(got: f64, expected: f64, what: &str) {
    let scale = expected.abs().max(1.0);
    assert!((got - expected).abs() <= 1e-6 * scale, "{what}: expected {expected}, got {got}");
}

/// Central difference of `f` at `x`. It would be wrong if the kink of a ReLU were within the step, which does
/// not occur with these inputs and weights.
fn slope(x: f64, mut f: impl FnMut(f64) -> f64) -> f64 {
    const STEP: f64 = 1e-6;
    (f(x + STEP) - f(x - STEP)) / (2.0 * STEP)
}

#[test]
fn gradients_of_every_weight_agree_with_finite_differences() {
    for architecture in architectures() {
        let what = format!("{architecture:?}");
        let mut run = Run::new(architecture);
        let gradients = run.gradients();
        for parameter in run.model.parameters().to_vec() {
            let of_tensor = parameter.read(&gradients);
            let values = parameter.read(&run.weights.values);
            for i in 0..parameter.len() {
                let expected = slope(values[i], |x| {
                    let mut moved = values.clone();
                    moved[i] = x;
                    parameter.write(&moved, &mut run.weights.values);
                    run.loss()
                });
                parameter.write(&values, &mut run.weights.values);
                assert_close(of_tensor[i], expected, &format!("{what}: {} [{i}]", parameter.name));
            }
        }
    }
}

#[test]
fn gradients_of_input_rows_agree_with_finite_differences() {
    for architecture in architectures() {
        let what = format!("{architecture:?}");
        let width = schema(architecture.clone()).input_width();
        let mut run = Run::new(architecture);
        run.gradients();
        for (t, s) in [(0, 0), (0, MAX_CHUNK - 1), (1, 2)] {
            let input = View { buffer: 0, column: 3, width: width - 3 };
            let gradients = run.tapes[t].grads[0].row(s, input).to_vec();
            for (i, got) in gradients.into_iter().enumerate() {
                let x = run.tapes[t].values[0].row(s, input)[i];
                let expected = slope(x, |x| {
                    run.tapes[t].values[0].row_mut(s, input)[i] = x;
                    run.loss()
                });
                run.tapes[t].values[0].row_mut(s, input)[i] = x;
                assert_close(got, expected, &format!("{what}: input {i}"));
            }
        }
    }
}

#[test]
fn padding_lanes_have_zero_gradients() {
    for architecture in architectures() {
        let mut run = Run::new(architecture);
        let mut gradients = run.gradients();
        for parameter in run.model.parameters() {
            parameter.write(&vec![0.0; parameter.len()], &mut gradients);
        }
        assert!(gradients.iter().all(|g| *g == 0.0));
    }
}

#[test]
fn a_samples_logit_has_the_same_bits_in_any_chunk() {
    for architecture in architectures() {
        let schema = schema(architecture);
        let model: Model<f32> = Model::new(&schema);
        let weights = model.initialise(1);
        let input = View { buffer: 0, column: 0, width: schema.input_width() };
        let logits = |samples: &[usize]| -> Vec<u32> {
            let mut tape = model.scoring_tape();
            tape.samples = samples.len();
            for (s, sample) in samples.iter().enumerate() {
                for (i, x) in tape.values[0].row_mut(s, input).iter_mut().enumerate() {
                    *x = number(sample * 1000 + i) as f32;
                }
            }
            model.forward(&weights, &mut tape);
            (0..samples.len()).map(|s| model.logit(&tape, s).to_bits()).collect()
        };
        let whole = logits(&(0..MAX_SCORED).collect::<Vec<_>>());
        for n in [1, 2, 7, 12, 13, 63, 64, 95] {
            let last: Vec<_> = (MAX_SCORED - n..MAX_SCORED).collect();
            assert_eq!(logits(&last), whole[MAX_SCORED - n..]);
        }
    }
}

#[test]
fn a_thread_scores_its_part_of_a_batch_in_as_few_chunks_as_possible() {
    let model: Model<f32> = Model::new(&schema(architectures().remove(0)));
    assert_eq!(model.chunk(), 64);
    let of = |samples, threads| model.scoring_chunk(samples, threads);
    assert_eq!([of(1, 1), of(96, 1), of(1000, 1)], [64, 96, 96]);
    assert_eq!([of(100, 2), of(150, 2), of(1000, 2), of(1000, 16)], [64, 75, 96, 64]);
}

#[test]
fn tensors_survive_packing_and_errors_name_the_missing_or_misshapen_one() {
    for architecture in architectures() {
        let model: Model<f32> = Model::new(&schema(architecture));
        let weights = model.initialise(5);
        let find = |name: &str| model.parameters().iter().find(|p| p.name == name);
        let tensor = |name: &str| find(name).map(|p| (p.shape.clone(), p.read(&weights.values)));
        assert_eq!(model.read_tensors(tensor).unwrap(), weights);
        let first = model.parameters()[0].name.clone();
        let without = model.read_tensors(|name| tensor(name).filter(|_| name != first));
        assert!(without.unwrap_err().to_string().contains(&first));
        let wrong =
            model.read_tensors(|name| tensor(name).map(|(shape, v)| ([&shape[..], &[1]].concat(), v)));
        assert!(wrong.unwrap_err().to_string().contains("expected shape"));
    }
}

#[test]
fn gradients_of_weights_have_the_same_bits_for_any_chunks() {
    for architecture in architectures() {
        let schema = schema(architecture);
        let model: Model<f32> = Model::new(&schema);
        let mut weights = model.initialise(2);
        model.transpose(&mut weights);
        let input = View { buffer: 0, column: 0, width: schema.input_width() };
        let gradients = |cuts: &[usize]| -> Vec<u32> {
            let mut sample = 0;
            let tapes: Vec<_> = cuts
                .iter()
                .map(|&samples| {
                    let mut tape = model.training_tape();
                    tape.samples = samples;
                    for s in 0..samples {
                        for (i, x) in tape.values[0].row_mut(s, input).iter_mut().enumerate() {
                            *x = number((sample + s) * 1000 + i) as f32;
                        }
                    }
                    model.forward(&weights, &mut tape);
                    model.backward(&weights, &mut tape, |s, z| {
                        loss::binary_cross_entropy_slope(z, ((sample + s) % 2) as f32)
                    });
                    sample += samples;
                    tape
                })
                .collect();
            let mut all = Vec::new();
            for (i, len) in model.pieces().enumerate() {
                let mut out = vec![f32::NAN; len];
                model.gradient(i, &tapes, &mut out);
                all.extend(out.iter().map(|g| g.to_bits()));
            }
            all
        };
        let whole = gradients(&[64, 3]);
        assert_eq!(gradients(&[1, 13, 50, 3]), whole);
        assert_eq!(gradients(&[3, 64]), whole);
        assert!(gradients(&[]).iter().all(|g| *g == 0));
    }
}

#[test]
fn initial_weights_are_uniform_in_a_range_set_by_the_layers_inputs() {
    let model: Model<f32> = Model::new(&schema(Architecture::Dlrm { bottom: vec![200], top: vec![400] }));
    let weights = model.initialise(7);
    let mut inputs = 0;
    for parameter in model.parameters() {
        if parameter.shape.len() == 2 {
            inputs = parameter.shape[1];
        }
        let bound = 1.0 / (inputs as f32).sqrt();
        let values = parameter.read(&weights.values);
        assert!(values.iter().all(|w| w.abs() <= bound), "{}", parameter.name);
        if values.len() >= 200 {
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            let square = values.iter().map(|w| w * w).sum::<f32>() / values.len() as f32;
            assert!(mean.abs() < 0.15 * bound, "{}: mean {mean}", parameter.name);
            assert!((square / (bound * bound / 3.0) - 1.0).abs() < 0.25, "{}: {square}", parameter.name);
        }
    }
    assert_ne!(model.initialise(8), weights);
}
