//! Models whose workers are stuck: each is logged once, and once more when it computes again.

use std::collections::BTreeSet;

use super::model::Model;

/// The models that were stuck at the last look.
#[derive(Default)]
pub(crate) struct Stuck(BTreeSet<String>);

impl Stuck {
    pub(crate) fn look(&mut self, name: &str, model: &Model) {
        let seconds = model.stable().batcher.patience().as_secs_f64();
        match (model.stable().batcher.is_stuck(), self.0.contains(name)) {
            (true, false) => {
                self.0.insert(name.to_owned());
                tracing::error!(model = name, "a call of the model does not end for {seconds} s: not ready");
            }
            (false, true) => {
                self.0.remove(name);
                tracing::info!(model = name, "the model computes again");
            }
            _ => {}
        }
    }
}
