//! A worker thread: takes a batch, merges it, calls the model, splits the answer.
//!
//! A batch of one whole request is computed in place, without a copy. If a merged batch fails, its requests
//! are computed one by one, so that only the request at fault gets the error. A score that is not finite
//! fails only its request, and nothing is computed again. A panic of the model is handled like a failed
//! batch. After a panic elsewhere the requests without an answer get an error. No panic ends the worker.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::{BatchError, BatcherState, Computed, Entry, Job, Next, Taken, send_all};
use crate::predict::finite;
use crate::sync::EvenPoisoned;
use crate::types::{AbsentId, Batch, Jagged, Scores};

/// Computes batches until the queue is closed and empty.
pub(crate) fn run(state: &BatcherState) {
    let mut taken = Taken::default();
    let mut merged = Batch::default();
    let mut computed = None;
    while wait_for_batch(state, computed, &mut taken) {
        let is_counted = !taken.batch.is_empty();
        // A part that was queued again may be one of a request that has ended since.
        taken.batch.retain(|entry| !entry.item.is_over());
        let samples = taken.batch.iter().map(|entry| entry.size.samples).sum();
        let begun = Instant::now();
        let computing = state.cores.map(|cores| cores.compute(state.patience()));
        let outcome = catch_unwind(AssertUnwindSafe(|| handle(state, &mut taken, &mut merged)));
        drop(computing);
        if let Err(panic) = outcome {
            state.metrics.batches.panics.increment(1);
            tracing::error!(panic = panic_text(&*panic), "a worker panicked: its requests get an error");
            // What is dropped without an answer gets an error ([`super::Ticket`]).
            taken = Taken::default();
            merged = Batch::default();
        }
        computed = is_counted.then(|| Computed { samples, time: begun.elapsed() });
    }
}

fn handle(state: &BatcherState, taken: &mut Taken<Job>, merged: &mut Batch) {
    let now = Instant::now();
    for entry in taken.expired.drain(..) {
        expire(state, entry, now);
    }
    for entry in taken.batch.iter().filter(|entry| entry.item.is_first()) {
        let waited = now.saturating_duration_since(entry.queued);
        state.metrics.batches.queue_seconds.record(waited);
        state.metrics.statistics.queue.add(1, waited);
        entry.item.taken(now);
    }
    compute(state, &mut taken.batch, merged);
}

/// Reports the last batch as finished, if there was one, and waits for the next one. Returns `false` when the
/// queue is closed and empty.
fn wait_for_batch(state: &BatcherState, computed: Option<Computed>, taken: &mut Taken<Job>) -> bool {
    // Yields, so that on busy cores the threads that queue requests run first and make this batch larger. On
    // an idle core this costs less than a microsecond.
    std::thread::yield_now();
    let mut queue = state.lock_queue();
    if let Some(batch) = computed {
        queue.jobs.finish(batch);
    }
    loop {
        let now = Instant::now();
        match queue.jobs.take(now, taken) {
            Next::Work => break,
            Next::Stop => {
                // Wakes the workers that still sleep, so that they stop too.
                state.wake.notify_all();
                return false;
            }
            Next::Sleep => {
                queue.asleep += 1;
                queue = state.wake.wait(queue).even_poisoned();
                queue.asleep -= 1;
            }
            Next::Wait(due) => {
                queue.timed += 1;
                let rest = due.saturating_duration_since(now);
                queue = state.wake.wait_timeout(queue, rest).even_poisoned().0;
                queue.timed -= 1;
            }
        }
    }
    state.set_queue_samples(&queue);
    // The remaining entries may form another batch, and their pushes may have woken only this worker.
    let more = queue.wants_a_worker(Instant::now());
    drop(queue);
    if more {
        state.wake.notify_one();
    }
    true
}

fn expire(state: &BatcherState, entry: Entry<Job>, now: Instant) {
    let waited_us = now.saturating_duration_since(entry.queued).as_micros();
    state.answer(entry.item, Err(BatchError::Expired { waited_us }));
}

/// Answers every entry of a batch and leaves it empty.
fn compute(state: &BatcherState, batch: &mut Vec<Entry<Job>>, merged: &mut Batch) {
    match batch.len() {
        0 => {}
        1 => compute_one_by_one(state, batch, merged),
        _ => {
            merge(batch, merged);
            let requests = batch.iter().filter(|entry| entry.item.is_first()).count();
            match predict(state, merged, requests) {
                Ok(scores) => answer_all(state, batch, &scores),
                Err(error) => {
                    tracing::debug!(%error, requests, "batch failed, computing its requests one by one");
                    compute_one_by_one(state, batch, merged);
                }
            }
        }
    }
}

fn compute_one_by_one(state: &BatcherState, batch: &mut Vec<Entry<Job>>, merged: &mut Batch) {
    for entry in batch.drain(..) {
        let now = Instant::now();
        if entry.terms.deadline.is_some_and(|deadline| deadline <= now) {
            expire(state, entry, now);
        } else if !entry.item.is_over() {
            let outcome = match &entry.item {
                Job::Whole(batch, _) => predict(state, batch, 1),
                Job::Part(part) => {
                    merge(std::slice::from_ref(&entry), merged);
                    predict(state, merged, usize::from(part.is_first()))
                }
            };
            let outcome = outcome.and_then(|scores| Ok(finite(scores)?));
            state.recycle(state.answer(entry.item, outcome).into_iter());
        }
    }
}

/// Calls the model for a batch of this many requests, records the time, catches a panic and checks the number
/// of scores.
fn predict(state: &BatcherState, batch: &Batch, requests: usize) -> Result<Scores, BatchError> {
    let started = Instant::now();
    let call = state.calls.begin();
    let outcome = catch_unwind(AssertUnwindSafe(|| state.model.predict(batch)));
    drop(call);
    let took = started.elapsed();
    state.metrics.batches.predict_seconds.record(took);
    state.metrics.batches.batch_samples.record(batch.samples as f64);
    let mut scores = match outcome {
        Ok(result) => result?,
        Err(panic) => {
            state.metrics.batches.panics.increment(1);
            return Err(BatchError::Failed(format!("panic: {}", panic_text(&*panic))));
        }
    };
    let logits = if batch.logits { batch.samples } else { 0 };
    if (scores.probabilities.len(), scores.logits.len()) != (batch.samples, logits) {
        let (got, got_logits) = (scores.probabilities.len(), scores.logits.len());
        let text = format!("{got} scores and {got_logits} logits for {} samples", batch.samples);
        return Err(BatchError::Failed(text));
    }
    state.metrics.statistics.computed(requests, batch.samples, took);
    scores.times.total = took;
    Ok(scores)
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Overwrites `merged` with the samples of all entries.
fn merge(batch: &[Entry<Job>], merged: &mut Batch) {
    let columns = batch.first().map_or(0, |entry| entry.item.batch().features.len());
    merged.features.resize_with(columns, Jagged::default);
    merged.clear();
    batch.iter().for_each(|entry| entry.item.append_to(merged));
}

/// Answers each entry with the scores and absent ids of its range of samples, or that one of its scores is
/// not finite.
fn answer_all(state: &BatcherState, batch: &mut Vec<Entry<Job>>, scores: &Scores) {
    let (mut spares, mut answers) = (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
    let mut start = 0;
    let mut absent = scores.absent.as_slice();
    for entry in batch.drain(..) {
        let end = start + entry.size.samples;
        let count = absent.partition_point(|id| (id.sample as usize) < end);
        let (own, rest) = absent.split_at(count);
        let rebased =
            |id: &AbsentId| AbsentId { sample: id.sample.saturating_sub(start as u32), feature: id.feature };
        let scores = Scores {
            version: scores.version,
            probabilities: scores.probabilities[start..end].to_vec(),
            logits: if entry.item.batch().logits { scores.logits[start..end].to_vec() } else { Vec::new() },
            absent: own.iter().map(rebased).collect(),
            times: scores.times,
        };
        let outcome = finite(scores).map_err(BatchError::from);
        match entry.item {
            Job::Part(part) => state.finish(&part, outcome),
            Job::Whole(batch, reply) => {
                spares.push(batch);
                answers.push((reply, outcome));
            }
        }
        (start, absent) = (end, rest);
    }
    state.recycle(spares.into_iter());
    send_all(state.runtime.get(), answers);
}
