//! Contents of versions, and a check that an opened version has them.

use std::collections::BTreeMap;
use std::path::Path;

use crate::rowlog::{Uniform, table_code};
use crate::schema::{self, Architecture, Schema};
use crate::store;
use crate::store::{
    Checkpoint, Contents, DenseTensor, Opened, PlainMemory, Purpose, StateShape, StoreError, Table, TableRows,
};
use crate::types::{Element, Version};

/// The contents of a version, owned.
#[derive(Debug)]
pub(crate) struct Sample {
    pub schema: Schema,
    pub dense: Vec<(String, Vec<usize>, Vec<f32>)>,
    pub tables: Vec<Table>,
    pub metadata: BTreeMap<String, String>,
}

impl Sample {
    /// Random contents from a seed: two f32 tables, an f16 and an int8 table, all with optimizer state, and
    /// two dense tensors.
    pub(crate) fn of(seed: u64) -> Self {
        let sizes =
            [(3, 4, Element::F32), (40, 2, Element::F32), (7, 5, Element::F16), (9, 6, Element::Int8)];
        let mut sample = Self::zeroed(&sizes, &[("sum", false), ("step", true)]);
        let mut next = {
            let mut row = 0;
            move |out: &mut [f32]| {
                row += 1;
                Uniform { seed, table_code: table_code("sample"), bound: 1.0 }.row(row, out);
            }
        };
        for table in &mut sample.tables {
            let (rows, states) = table.parts_mut().unwrap();
            next(rows);
            states.iter_mut().for_each(|state| next(state.rows_mut().unwrap()));
        }
        for (name, shape) in [("deep.0.weight", vec![3, 5]), ("deep.0.bias", vec![5])] {
            let mut values = vec![0.0; shape.iter().product()];
            next(&mut values);
            sample.dense.push((name.to_owned(), shape, values));
        }
        sample.metadata.insert("seed".to_owned(), seed.to_string());
        sample
    }

    pub(crate) fn zeroed(sizes: &[(u64, usize, Element)], states: &[(&str, bool)]) -> Self {
        let name = |i: usize| format!("t{i}");
        let table = |(i, &(rows, dim, element))| schema::TableSchema {
            name: name(i),
            rows,
            dim,
            element,
            ..Default::default()
        };
        let feature = |i| schema::Feature {
            name: format!("f{i}"),
            table: name(i),
            wide_table: None,
            arity: Default::default(),
            pooling: Default::default(),
            hash: None,
        };
        let schema = Schema {
            architecture: Architecture::Dcn { cross_layers: 1, deep: vec![4] },
            loss: Default::default(),
            dense: vec![schema::DenseFeature { name: "d".to_owned(), transform: Default::default() }],
            features: (0..sizes.len()).map(feature).collect(),
            tables: sizes.iter().enumerate().map(table).collect(),
        };
        let zeroed = |&(rows, dim, _): &(u64, usize, Element)| {
            let states: Vec<_> =
                states.iter().map(|&(name, one)| StateShape::new(name, if one { 1 } else { dim })).collect();
            Table::zeroed(&PlainMemory, rows, dim, &states).unwrap()
        };
        let tables = sizes.iter().map(zeroed).collect();
        Self { schema, dense: Vec::new(), tables, metadata: BTreeMap::new() }
    }

    pub(crate) fn write(&self, models: &Path, name: &str) -> Result<Version, StoreError> {
        let dense = self.dense.iter();
        let dense = dense.map(|(name, shape, values)| DenseTensor {
            name: name.clone(),
            shape: shape.clone(),
            values,
        });
        let contents = Contents {
            model_toml: &toml::to_string(&self.schema).unwrap(),
            dense: dense.collect(),
            tables: self.tables.iter().map(TableRows::from).collect(),
            checkpoint: Some(Checkpoint::default()),
            metadata: self.metadata.clone(),
            ..Contents::default()
        };
        store::write(models, name, &contents)
    }

    /// Asserts that a version has these contents, to the bit, including NaN and -0.0: opened to be served,
    /// the encoded rows and no state; opened for training, the f32 rows and their state.
    pub(crate) fn assert_is_at(&self, models: &Path, name: &str, version: Version) {
        self.assert_is(&store::open(models, name, version, Purpose::Serve).unwrap());
        let trained = store::open(models, name, version, Purpose::Train).unwrap();
        for (read, written) in trained.store.tables().iter().zip(&self.tables) {
            assert_eq!(read.element(), Element::F32);
            for row in 0..written.rows() {
                assert_eq!(bits(read.row_values(row).unwrap()), bits(written.row_values(row).unwrap()));
                for state in 0..written.states().len() {
                    assert_eq!(bits(read.state(state, row)), bits(written.state(state, row)));
                }
            }
            let shape = |table: &Table| -> Vec<(String, usize)> {
                table.states().iter().map(|state| (state.shape().name.to_owned(), state.width())).collect()
            };
            assert_eq!(shape(read), shape(written));
        }
    }

    /// Asserts that a version that was opened to be served has these contents.
    pub(crate) fn assert_is(&self, opened: &Opened) {
        assert_eq!(opened.schema, self.schema);
        assert_eq!(opened.metadata, self.metadata);
        assert_eq!(opened.dense.len(), self.dense.len());
        for (name, shape, values) in &self.dense {
            assert_eq!(opened.dense[name].shape(), shape);
            assert_eq!(bits(opened.dense[name].values()), bits(values));
        }
        assert_eq!(opened.store.tables().len(), self.tables.len());
        for ((read, written), declared) in
            opened.store.tables().iter().zip(&self.tables).zip(&self.schema.tables)
        {
            assert_eq!((read.rows(), read.dim()), (written.rows(), written.dim()));
            assert_eq!(read.element(), declared.element);
            assert!(read.states().is_empty());
            let encoded = written.encoded(declared.element, &PlainMemory).unwrap();
            for row in 0..written.rows() {
                assert_eq!(read.row(row), encoded.row(row));
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
