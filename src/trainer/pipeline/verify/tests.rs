use super::*;
use crate::trainer::pipeline::tests::{Case, schema};
use crate::trainer::pipeline::train::{RowObserver, UpdatedRows};
use crate::trainer::{Data, Progress, ScratchpadPolicy, ScratchpadSize, initialise};

const BATCH: usize = 16;

/// Verifies a pipeline that starts from other bytes than the sequential trainer. `spoil` changes the bytes.
fn verified(spoil: impl FnOnce(&mut TrainState, &WorkingFile)) -> Option<Difference> {
    let case = Case::new(ScratchpadSize::Fraction(0.3), ScratchpadPolicy::Lru);
    let (mut train_state, mut pipeline, _dir) = case.begin(None);
    spoil(&mut train_state, pipeline.store());
    let mut verifier = Verifier::new(initialise(&schema(), case.optimizer(), 7).unwrap());
    let mut samples = case.data();
    let data = Data { reader: &mut samples, batch: BATCH, steps: u64::MAX };
    pipeline.run(&mut train_state, data, &mut verifier).unwrap();
    pipeline.flush().unwrap();
    verifier.finish(pipeline.store()).unwrap()
}

/// For each row of the first table, the first step that updates it; `None` if no step does.
fn first_updates() -> Vec<Option<u64>> {
    struct Rows(Vec<Option<u64>>, u64);
    impl StepObserver for Rows {
        fn learnt(&mut self, _: &Batch, _: &Progress<'_>) -> Result<(), TrainError> {
            self.1 += 1;
            Ok(())
        }
        fn row_observer(&mut self) -> Option<&mut dyn RowObserver> {
            Some(self)
        }
    }
    impl RowObserver for Rows {
        fn rows(&mut self, tables: &[UpdatedRows<'_>]) {
            let first = tables.iter().filter(|updated| updated.table == TableId(0));
            for &row in first.flat_map(|updated| updated.rows) {
                self.0[row as usize].get_or_insert(self.1);
            }
        }
    }
    let case = Case::new(ScratchpadSize::Fraction(1.0), ScratchpadPolicy::Lru);
    let (mut train_state, mut pipeline, _dir) = case.begin(None);
    let mut rows = Rows(vec![None; schema().tables[0].rows as usize], 0);
    let mut samples = case.data();
    let data = Data { reader: &mut samples, batch: BATCH, steps: u64::MAX };
    pipeline.run(&mut train_state, data, &mut rows).unwrap();
    rows.0
}

/// Changes the optimizer state of a row of the first table. This affects only the training of that row.
fn spoil_row(store: &WorkingFile, row: u64) {
    let mut record = vec![0.0; store.tables()[0].width()];
    store.read(TableId(0), &[row], &mut record).unwrap();
    record[store.tables()[0].width() - 1] = 0.25;
    store.write(TableId(0), &[row], &record).unwrap();
}

#[test]
fn equal_bytes_have_no_difference() {
    assert_eq!(verified(|_, _| ()), None);
}

#[test]
fn a_row_with_another_state_is_reported_at_the_step_that_updates_it() {
    let updates = first_updates();
    for step in [1, 4, 9] {
        let row = updates.iter().position(|first| *first == Some(step)).unwrap() as u64;
        let found = verified(|_, store| spoil_row(store, row));
        assert_eq!(found, Some(Difference { table: Some("t".into()), row, step }));
    }
}

#[test]
fn a_row_that_no_step_updates_is_reported_at_the_end() {
    let row = first_updates().iter().position(Option::is_none).unwrap() as u64;
    let found = verified(|_, store| spoil_row(store, row));
    let steps = 300_u64.div_ceil(BATCH as u64);
    assert_eq!(found, Some(Difference { table: Some("t".into()), row, step: steps + 1 }));
}

#[test]
fn a_dense_weight_with_another_state_is_reported_after_the_first_step() {
    let found = verified(|train_state, _| train_state.dense_states[0][2] = 0.25);
    assert_eq!(found, Some(Difference { table: None, row: 2, step: 1 }));
}
