//! Compares the models and the trainer with values that PyTorch computed in f64 for a tiny instance of every
//! architecture. The values are in `fixtures/models.json`; `fixtures/make_models.py` describes its layout.

use std::collections::BTreeMap;

use crate::model::{InputRows, Model, Tape, View, Weights, loss};
use crate::schema::Schema;
use crate::store::{self, Contents, DenseTensor, PlainMemory, Purpose, Table, TableRows};
use crate::trainer::optim::{Optimizer, OptimizerKind};
use crate::trainer::{self, ReferenceTrainer};
use crate::types::{Batch, Jagged};
use serde_json::Value;

/// A batch and its labels.
struct Samples {
    batch: Batch,
    labels: Vec<f32>,
}

fn fixture() -> (Value, Vec<Samples>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let batches = fixture["batches"].as_array().unwrap().iter().map(samples).collect();
    (fixture, batches)
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn integers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|x| x.as_u64().unwrap()).collect()
}

fn samples(value: &Value) -> Samples {
    let column = |feature: &Value| {
        let (ids, mut column, mut from) = (integers(&feature["ids"]), Jagged::default(), 0);
        for length in integers(&feature["lengths"]) {
            column.push(&ids[from..from + length as usize]);
            from += length as usize;
        }
        column
    };
    let features = value["features"].as_array().unwrap().iter().map(column).collect();
    let samples = value["samples"].as_u64().unwrap() as usize;
    Samples {
        batch: Batch { samples, dense: floats(&value["dense"]), features, ..Batch::default() },
        labels: floats(&value["labels"]),
    }
}

/// One model of the fixture, with its initial weights.
struct Given<'a> {
    name: &'a str,
    record: &'a Value,
    schema: Schema,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    tables: Vec<Table>,
}

fn given(record: &Value) -> Given<'_> {
    let schema = Schema::parse(record["schema"].as_str().unwrap()).unwrap();
    let tensor = |value: &Value| {
        let shape = integers(&value["shape"]).into_iter().map(|n| n as usize).collect();
        (shape, floats(&value["data"]))
    };
    let tensors = record["tensors"].as_object().unwrap();
    let tensors = tensors.iter().map(|(name, value)| (name.clone(), tensor(value))).collect();
    let tables = schema.tables.iter().map(|shape| {
        let mut table = Table::zeroed(&PlainMemory, shape.rows, shape.dim, &[]).unwrap();
        table.rows_mut().unwrap().copy_from_slice(&floats(&record["tables"][&shape.name]["data"]));
        table
    });
    let tables = tables.collect();
    Given { name: record["name"].as_str().unwrap(), record, schema, tensors, tables }
}

impl Given<'_> {
    fn weights(&self, model: &Model<f32>) -> Weights<f32> {
        let mut weights = model.read_tensors(|name| self.tensors.get(name).cloned()).unwrap();
        assert_eq!(
            model.parameters().len(),
            self.tensors.len(),
            "{}: every tensor is the model's",
            self.name
        );
        model.transpose(&mut weights);
        weights
    }

    /// The input rows of a batch, written by the code that serving and training use.
    fn inputs(&self, model: &Model<f32>, batch: &Batch) -> Tape<f32> {
        let mut tape = model.training_tape();
        tape.samples = batch.samples;
        let lookups = self.schema.lookups();
        let inputs = InputRows { dense_width: self.schema.dense_width(), lookups: &lookups, batch };
        inputs.write(0, &mut tape, |l| {
            let (table, ids) =
                (&self.tables[lookups[l].table.index()], &batch.features[lookups[l].feature].ids);
            move |i: usize| table.row(ids[i])
        });
        tape
    }

    /// A trainer that starts from these weights, as if resumed from a version.
    fn reference(&self, optimizer: Optimizer) -> ReferenceTrainer {
        let models = tempfile::tempdir().unwrap();
        let dense = self.tensors.iter().map(|(name, (shape, values))| DenseTensor {
            name: name.clone(),
            shape: shape.clone(),
            values,
        });
        let contents = Contents {
            model_toml: self.record["schema"].as_str().unwrap(),
            dense: dense.collect(),
            tables: self.tables.iter().map(TableRows::from).collect(),
            ..Contents::default()
        };
        let version = store::write(models.path(), "given", &contents).unwrap();
        let opened = store::open(models.path(), "given", version, Purpose::Serve).unwrap();
        trainer::resume(opened, optimizer).unwrap()
    }
}

#[track_caller]
fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let tolerance = (1e-5 * expected.abs()).max(1e-6);
        assert!((got - expected).abs() <= tolerance, "{what} [{i}]: expected {expected}, got {got}");
    }
}

#[test]
fn logits_losses_and_input_gradients_are_pytorchs() {
    let (fixture, batches) = fixture();
    let records = fixture["models"].as_array().unwrap();
    assert_eq!(records.len(), 6);
    for given in records.iter().map(given) {
        let model = Model::new(&given.schema);
        let weights = given.weights(&model);
        let all = View { buffer: 0, column: 0, width: given.schema.input_width() };
        for (b, Samples { batch, labels }) in batches.iter().enumerate() {
            let what = |part: &str| format!("{}, batch {b}: {part}", given.name);
            let mut tape = given.inputs(&model, batch);
            let rows = |tape: &Tape<f32>, of: fn(&Tape<f32>) -> &crate::model::tape::Rows<f32>| -> Vec<f32> {
                (0..batch.samples).flat_map(|s| of(tape).row(s, all).to_vec()).collect()
            };
            model.forward(&weights, &mut tape);
            let logits: Vec<_> = (0..batch.samples).map(|s| model.logit(&tape, s)).collect();
            assert_close(&logits, &floats(&given.record["logits"][b]), &what("logits"));
            let losses = logits.iter().zip(labels).map(|(&z, &y)| loss::binary_cross_entropy(z, y));
            let mean = losses.sum::<f32>() / batch.samples as f32;
            assert_close(&[mean], &[given.record["loss"][b].as_f64().unwrap() as f32], &what("loss"));
            if b > 0 {
                continue;
            }
            assert_close(&rows(&tape, |t| &t.values[0]), &floats(&given.record["input"]), &what("input"));
            let share = 1.0 / batch.samples as f32;
            model
                .backward(&weights, &mut tape, |s, z| loss::binary_cross_entropy_slope(z, labels[s]) * share);
            // Training does not need the gradient of the dense inputs, and a first layer that has only them
            // as input does not compute it.
            let dense = given.schema.dense_width();
            let without_dense = |rows: Vec<f32>| -> Vec<f32> {
                rows.chunks_exact(all.width).flat_map(|row| row[dense..].to_vec()).collect()
            };
            let got = without_dense(rows(&tape, |t| &t.grads[0]));
            let expected = without_dense(floats(&given.record["input_gradient"]));
            assert_close(&got, &expected, &what("input gradient"));
        }
    }
}

fn optimizer(fixture: &Value, name: &str) -> Optimizer {
    let settings = &fixture["optimizers"][name];
    let kind: OptimizerKind = name.parse().unwrap();
    Optimizer {
        eps: settings["eps"].as_f64().unwrap_or(0.0),
        ..Optimizer::new(kind, settings["lr"].as_f64().unwrap())
    }
}

#[test]
fn every_step_of_every_optimizer_is_pytorchs_and_rows_never_touched_keep_their_bits() {
    let (fixture, batches) = fixture();
    let mut seen = 0;
    for given in fixture["models"].as_array().unwrap().iter().map(given) {
        let mut references: BTreeMap<&str, ReferenceTrainer> = BTreeMap::new();
        for step in given.record["steps"].as_array().unwrap() {
            let name = step["optimizer"].as_str().unwrap();
            let number = step["step"].as_u64().unwrap();
            let what = format!("{}, {name}, step {number}", given.name);
            let reference =
                references.entry(name).or_insert_with(|| given.reference(optimizer(&fixture, name)));
            let Samples { batch, labels } = &batches[number as usize - 1];
            let sum = reference.step(batch, labels, &mut Vec::new()).unwrap();
            assert_eq!(reference.steps(), number, "{what}");
            let mean = (sum / batch.samples as f64) as f32;
            assert_close(&[mean], &[step["loss"].as_f64().unwrap() as f32], &format!("{what}: loss"));
            for parameter in reference.model().parameters() {
                let expected = floats(&step["tensors"][&parameter.name]);
                let got = parameter.read(&reference.weights().values);
                assert_close(&got, &expected, &format!("{what}: {}", parameter.name));
            }
            for (shape, table) in given.schema.tables.iter().zip(reference.tables()) {
                let expected = floats(&step["tables"][&shape.name]);
                assert_close(table.values().unwrap(), &expected, &format!("{what}: {}", shape.name));
            }
            assert_untouched(&given, reference, &batches[..number as usize], &what);
            seen += 1;
        }
    }
    // The fixture has one step per model of SGD, and two of each other optimizer.
    assert_eq!(seen, 6 + 2 * (6 + 2 + 2));
}

/// Asserts that rows that no batch uses are unchanged to the bit.
fn assert_untouched(given: &Given<'_>, reference: &ReferenceTrainer, batches: &[Samples], what: &str) {
    for (t, (before, after)) in given.tables.iter().zip(reference.tables()).enumerate() {
        let lookups = given.schema.lookups();
        let of_table = lookups.iter().filter(|l| l.table.index() == t);
        let touched: Vec<u64> = of_table
            .flat_map(|l| batches.iter().flat_map(|b| b.batch.features[l.feature].ids.clone()))
            .collect();
        for row in (0..before.rows()).filter(|row| !touched.contains(row)) {
            let bits = |table: &Table| -> Vec<u32> {
                table.row_values(row).unwrap().iter().map(|x| x.to_bits()).collect()
            };
            assert_eq!(bits(before), bits(after), "{what}: table {t}, row {row}");
        }
    }
}
