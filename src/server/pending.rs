//! A request for scores, from its message to its response, in any protocol: find the model, queue the batch,
//! await the scores. Each request of a loaded model is counted, timed and reported once ([`Account`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ServerState;
use super::account::{Account, Sender};
use super::charge::HeldBytes;
use super::gate::Call;
use super::model::Model;
use super::serving_engine::{NotQueued, Queued};
use super::status::CallError;
use crate::batcher::{Priority, Terms};
use crate::schema::Schema;
use crate::types::Scores;

/// Most bytes of a request's own id. It is kept as long as the request, and counts in no limit of memory.
pub(crate) const MAX_ID: usize = 1024;

/// A request for scores, as a protocol has it.
pub(crate) trait ScoreRequest: Sized + Send + 'static {
    /// What the response takes from the request.
    type Form: Send + 'static;
    /// The response to a call of one request.
    type Response;
    /// The message of a stream with a response or an error.
    type Answer: Send + Unpin + 'static;

    /// The field of the request's own time, in errors.
    const TIMEOUT_FIELD: &'static str;

    /// Takes the name of the model out of the request.
    fn take_model(&mut self) -> String;

    /// The time that the request gives itself from its arrival ([`Sender::arrived`]).
    fn timeout(&self) -> Option<Duration>;

    fn priority(&self) -> Result<Priority, CallError>;

    /// Takes the client's own id out of the request, or an empty text.
    fn take_id(&mut self) -> String;

    /// Checks the request with this id, and queues its batch.
    fn queue(self, id: &str, model: &Model, terms: Terms) -> Result<(Queued, Self::Form), NotQueued>;

    fn response(form: Self::Form, scores: Scores, schema: &Schema) -> Self::Response;

    /// Writes the answer to this request.
    fn answer(
        &self,
    ) -> impl FnOnce(Result<Self::Response, CallError>) -> Self::Answer + Send + 'static + use<Self>;
}

/// A request in the queue.
pub(crate) struct Pending<R: ScoreRequest> {
    account: Account,
    queued: Queued,
    form: R::Form,
    /// When the wait for the scores ends, if that is before the deadline of the call.
    due: Option<Due>,
}

/// The time that a request gives itself.
struct OwnTime {
    end: Instant,
    field: &'static str,
    limit: Duration,
}

impl OwnTime {
    fn of<R: ScoreRequest>(request: &R, arrived: Instant) -> Option<Self> {
        let limit = request.timeout()?;
        Some(Self { end: arrived.checked_add(limit)?, field: R::TIMEOUT_FIELD, limit })
    }
}

/// The end of a wait.
struct Due {
    at: Instant,
    error: CallError,
}

impl Due {
    /// The end of the request's own time, or the most time of a request that has no deadline: if the model is
    /// stuck, its scores never come.
    fn of(own: Option<OwnTime>, deadline: Option<Instant>, model: &Model, queued: &Queued) -> Option<Self> {
        match (own, deadline) {
            (Some(OwnTime { end, field, limit }), deadline) => {
                (Some(end) == deadline).then_some(Self { at: end, error: CallError::Late { field, limit } })
            }
            (None, Some(_)) => None,
            (None, None) => {
                let limit = model.engine(queued.engine).batcher.patience();
                let at = Instant::now().checked_add(limit)?;
                Some(Self { at, error: CallError::NoScores { limit } })
            }
        }
    }
}

impl<R: ScoreRequest> Pending<R> {
    /// Queues a request. Failures are counted, if the model is loaded.
    pub(crate) fn begin(state: &Arc<ServerState>, mut request: R, call: &Call) -> Result<Self, CallError> {
        let id = request.take_id();
        let too_long = (id.len() > MAX_ID).then(|| CallError::Id { limit: MAX_ID, got: id.len() });
        let sender = Sender::new(call, if too_long.is_some() { String::new() } else { id });
        call.reported();
        let model = state.find(request.take_model()).inspect_err(|error| sender.refused(error))?;
        call.count();
        let own = OwnTime::of(&request, sender.arrived());
        let deadline = call.deadline.into_iter().chain(own.as_ref().map(|own| own.end)).min();
        let priority = too_long.map_or_else(|| request.priority(), Err);
        let terms = Terms { deadline, priority: priority.as_ref().copied().unwrap_or_default() };
        let mut account = Account::new(model, sender, terms);
        let queued = priority.map_err(NotQueued::from);
        let queued = queued.and_then(|_| request.queue(account.id(), &account.model, terms));
        let (queued, form) = match queued {
            Ok((mut queued, form)) => {
                account.queued(&mut queued);
                (queued, form)
            }
            Err(NotQueued { engine, error }) => {
                let error = state.unless_loading(account.model.name(), error);
                account.not_queued(engine, &error);
                return Err(error);
            }
        };
        let due = Due::of(own, deadline, &account.model, &queued);
        Ok(Self { account, queued, form, due })
    }

    /// Charges its call with what the answer may take, until what is returned is dropped: a client that does
    /// not read its stream lets answers wait.
    ///
    /// # Errors
    /// When all calls together would take too much.
    pub(crate) fn hold_answer(mut self, call: &Call) -> Result<(Self, HeldBytes), CallError> {
        match call.charge.hold(self.queued.answer_bytes) {
            Ok(held) => Ok((self, held)),
            Err(error) => {
                let error = error.into();
                self.account.failed(&error);
                Err(error)
            }
        }
    }

    /// Awaits the scores.
    pub(crate) async fn finish(self) -> Result<R::Response, CallError> {
        let Self { mut account, queued, form, due } = self;
        let scores = account.model.scores(queued);
        let result = match due {
            None => scores.await,
            Some(Due { at, error }) => tokio::time::timeout_at(at.into(), scores).await.unwrap_or(Err(error)),
        };
        match &result {
            Ok((scores, _)) => account.scored(scores),
            Err(error) => account.failed(error),
        }
        let (scores, inputs) = result?;
        Ok(R::response(form, scores, &inputs.schema))
    }
}
