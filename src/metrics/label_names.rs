//! Which labels have series. Clients choose the names of labels, and a series is never removed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use crate::config::{CANARY, MAX_LABELS, STABLE};
use crate::sync::EvenPoisoned;

/// Most names of a model in the life of the process, besides `stable` and `canary`.
const MAX_NAMES: usize = 4 * MAX_LABELS;

/// The names that have series, by model.
#[derive(Default)]
pub(crate) struct LabelNames(Mutex<BTreeMap<String, BTreeSet<String>>>);

impl LabelNames {
    /// Whether a label has series. A new name gets them if there is room.
    pub(crate) fn has_room(&self, model: &str, label: &str) -> bool {
        if label == STABLE || label == CANARY {
            return true;
        }
        let mut models = self.0.lock().even_poisoned();
        let names = models.entry(model.to_owned()).or_default();
        names.contains(label) || names.len() < MAX_NAMES && names.insert(label.to_owned())
    }
}
