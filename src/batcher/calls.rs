//! The calls of the model that have begun and not ended, to find a model that is stuck.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use crate::sync::EvenPoisoned;

/// Open calls in the order in which they began.
#[derive(Default)]
pub(crate) struct Calls(Mutex<Open>);

#[derive(Default)]
struct Open {
    begun: BTreeMap<u64, Instant>,
    next: u64,
}

impl Calls {
    /// A call begins. It ends when the value is dropped.
    pub(crate) fn begin(&self) -> Call<'_> {
        let mut open = self.open();
        let number = open.next;
        open.next += 1;
        open.begun.insert(number, Instant::now());
        Call { calls: self, number }
    }

    /// How many have begun before this and not ended.
    pub(crate) fn open_since(&self, time: Instant) -> usize {
        self.open().begun.values().take_while(|begun| **begun < time).count()
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        // No code panics while it holds the lock.
        self.0.lock().even_poisoned()
    }
}

/// A call of the model.
pub(crate) struct Call<'c> {
    calls: &'c Calls,
    number: u64,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.calls.open().begun.remove(&self.number);
    }
}
