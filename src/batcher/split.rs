//! Requests that are larger than a batch: they are split, and the scores of their parts are joined.
//!
//! The parts have nearly the same size. Each is an entry of the queue, so several workers may compute them,
//! merged with other requests. The first part that fails, expires or loses its place ends the request: the
//! client gets its error, and the other parts leave the queue.
//!
//! **One answer is of one version.** The served version may change between two parts, to a higher or a lower
//! number. When all parts are computed, those of other versions than the part that was begun last are queued
//! again, at their old turns, which come before those of later requests. Each repetition needs another change
//! of the version, because it takes the version that serves then. If versions change faster than the request
//! is computed, it fails after [`REPEATS`].

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use super::{BatchError, Entry, Queue, Reply, RequestOutcome, Size, Turn, Turns};
use crate::predict::PredictError;
use crate::sync::EvenPoisoned;
use crate::types::{AbsentId, Batch, Scores, Version};

/// How often parts of a request are computed again.
const REPEATS: usize = 3;

/// What waits in the queue.
pub(crate) enum Job {
    Whole(Batch, Reply),
    Part(RequestPart),
}

impl Job {
    /// Whether the request was answered, or its client is gone.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Whole(_, reply) => reply.is_closed(),
            Self::Part(part) => part.is_over(),
        }
    }

    /// Whether this is a request or the first part of one.
    pub(crate) fn is_first(&self) -> bool {
        match self {
            Self::Whole(..) => true,
            Self::Part(part) => part.is_first(),
        }
    }

    /// The batch of the request.
    pub(crate) fn batch(&self) -> &Batch {
        match self {
            Self::Whole(batch, _) => batch,
            Self::Part(part) => part.batch(),
        }
    }

    /// A worker has taken the request, or the first part of one.
    pub(crate) fn taken(&self, now: Instant) {
        match self {
            Self::Whole(_, reply) => reply.taken(now),
            Self::Part(part) => part.of.joined().reply.iter().for_each(|reply| reply.taken(now)),
        }
    }

    /// Appends the samples to a batch.
    pub(crate) fn append_to(&self, merged: &mut Batch) {
        match self {
            Self::Whole(batch, _) => merged.append(batch),
            Self::Part(part) => merged.append_part(part.batch(), part.range()),
        }
    }
}

/// A request in parts.
pub(crate) struct Split {
    /// The request, without its batch and its reply.
    entry: Entry<()>,
    batch: Batch,
    parts: usize,
    /// Set when the parts are queued.
    turns: OnceLock<Turns>,
    joined: Mutex<Joined>,
}

/// What is known of the scores.
struct Joined {
    /// `None` when the request was answered.
    reply: Option<Reply>,
    scores: Vec<Option<Scores>>,
    /// The latest start of a part's computation, and the version of that part.
    last: Option<(Instant, Version)>,
    missing: usize,
    repeats: usize,
}

/// One part of a request.
pub(crate) struct RequestPart {
    of: Arc<Split>,
    number: usize,
}

/// What the outcome of a part means for the others.
pub(crate) enum AfterPart {
    Nothing,
    /// The request has failed, so they leave the queue.
    Remove(Turns),
    /// These must be queued again.
    Repeat(Vec<(Turn, Entry<Job>)>),
}

impl Split {
    /// Queues a request in parts of at most `most` samples.
    pub(crate) fn push(queue: &mut Queue<Job>, request: Entry<(Batch, Reply)>, most: usize) -> Turns {
        let Entry { size, queued, terms, item: (batch, reply) } = request;
        let parts = batch.samples.div_ceil(most);
        let scores = std::iter::repeat_with(|| None).take(parts).collect();
        let joined = Joined { reply: Some(reply), scores, last: None, missing: parts, repeats: 0 };
        let (turns, joined) = (OnceLock::new(), Mutex::new(joined));
        let split =
            Arc::new(Self { entry: Entry { size, queued, terms, item: () }, batch, parts, turns, joined });
        let turns: Vec<Turn> = (0..parts).map(|number| queue.push(split.part(number))).collect();
        let turns = Turns { first: turns[0], count: parts };
        // No worker can take a part before the caller releases the queue's lock.
        let _ = split.turns.set(turns);
        turns
    }

    fn part(self: &Arc<Self>, number: usize) -> Entry<Job> {
        let size = Size::of(&self.batch, self.range(number));
        let item = Job::Part(RequestPart { of: self.clone(), number });
        Entry { size, queued: self.entry.queued, terms: self.entry.terms, item }
    }

    /// The samples of a part.
    fn range(&self, number: usize) -> Range<usize> {
        let start = |number| self.batch.samples * number / self.parts;
        start(number)..start(number + 1)
    }

    /// The scores of all parts.
    fn join(&self, parts: Vec<Option<Scores>>) -> Option<Scores> {
        let mut parts = parts.into_iter().flatten().enumerate();
        let (_, mut whole) = parts.next()?;
        for (number, part) in parts {
            let start = self.range(number).start as u32;
            whole.probabilities.extend(part.probabilities);
            whole.logits.extend(part.logits);
            let moved = |id: AbsentId| AbsentId { sample: start + id.sample, ..id };
            whole.absent.extend(part.absent.into_iter().map(moved));
            whole.times.lookup += part.times.lookup;
            whole.times.dense += part.times.dense;
            whole.times.total += part.times.total;
        }
        Some(whole)
    }

    fn joined(&self) -> MutexGuard<'_, Joined> {
        // No code panics while it holds the lock.
        self.joined.lock().even_poisoned()
    }
}

impl RequestPart {
    /// Whether this is the first part of its request.
    pub(crate) fn is_first(&self) -> bool {
        self.number == 0
    }

    /// Whether the request was answered, or its client is gone.
    pub(crate) fn is_over(&self) -> bool {
        self.of.joined().reply.as_ref().is_none_or(Reply::is_closed)
    }

    /// The batch of the request.
    pub(crate) fn batch(&self) -> &Batch {
        &self.of.batch
    }

    /// The samples of this part.
    pub(crate) fn range(&self) -> Range<usize> {
        self.of.range(self.number)
    }

    /// Answers the request, if this was its last part or has failed.
    pub(crate) fn finish(&self, outcome: RequestOutcome) -> AfterPart {
        let mut joined = self.of.joined();
        let scores = match outcome {
            Ok(scores) => scores,
            Err(error) => return self.fail(&mut joined, error),
        };
        // The parts may finish in another order, if several workers compute them.
        let last = Instant::now().checked_sub(scores.times.total).map(|begun| (begun, scores.version));
        joined.last = joined.last.max(last);
        joined.scores[self.number] = Some(scores);
        joined.missing -= 1;
        if joined.missing > 0 {
            return AfterPart::Nothing;
        }
        let last = joined.last.map(|(_, version)| version);
        let others: Vec<usize> = (0..self.of.parts)
            .filter(|number| joined.scores[*number].as_ref().map(|scores| scores.version) != last)
            .collect();
        if others.is_empty() {
            if let Some(scores) = self.of.join(std::mem::take(&mut joined.scores)) {
                send(joined.reply.take(), Ok(scores));
            }
            return AfterPart::Nothing;
        }
        if joined.repeats == REPEATS {
            return self.fail(&mut joined, BatchError::VersionChanged { times: REPEATS + 1 });
        }
        joined.repeats += 1;
        joined.missing = others.len();
        let Some(turns) = self.of.turns.get() else { return AfterPart::Nothing };
        let again = others.into_iter().map(|number| (turns.nth(number), self.of.part(number)));
        AfterPart::Repeat(again.collect())
    }

    /// Answers the request with the error of this part.
    fn fail(&self, joined: &mut Joined, mut error: BatchError) -> AfterPart {
        if let BatchError::Predict(PredictError::NotFinite { sample }) = &mut error {
            *sample += self.range().start;
        }
        send(joined.reply.take(), Err(error));
        self.of.turns.get().map_or(AfterPart::Nothing, |turns| AfterPart::Remove(*turns))
    }
}

fn send(reply: Option<Reply>, answer: RequestOutcome) {
    if let Some(reply) = reply {
        reply.send(answer);
    }
}
